"""Data: tasks with disjoint training, validation and test splits."""
