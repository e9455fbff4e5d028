"""Data: tasks with three disjoint splits."""
