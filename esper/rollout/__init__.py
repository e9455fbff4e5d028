"""Rollouts: a controller plays episodes in every env."""
