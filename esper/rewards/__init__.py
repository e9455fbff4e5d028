"""Rewards: terms that are pure functions of the measured transition, and modes that combine them."""
