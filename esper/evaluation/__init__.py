"""Evaluation: controllers and controls compared on the same held-out hosts."""
