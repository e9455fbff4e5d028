"""What a run has learned about its seeds: how much each blueprint is worth in each slot."""
