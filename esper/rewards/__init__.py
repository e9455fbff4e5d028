"""Rewards: terms as pure functions of the measured transition, and the modes that combine them."""
