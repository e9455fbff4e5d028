"""Experience: how much each blueprint is worth in each slot, learned from the hosts of a run."""
