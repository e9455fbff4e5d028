"""The lifecycle of seeds, in arrays over envs E and slots S: stages, ramps of alpha, transitions, gates, legality."""
