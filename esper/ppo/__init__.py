"""Recurrent PPO: the controller that learns."""
