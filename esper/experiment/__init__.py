"""Runs: training with a controller, comparing controllers, and what is kept of both."""
