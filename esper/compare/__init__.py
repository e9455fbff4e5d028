"""Evaluation: compares controllers and controls on the same held-out hosts."""
