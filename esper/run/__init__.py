"""Runs: a controller grows hosts for a number of rounds, and is then compared."""
