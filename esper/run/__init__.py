"""Runs: a controller grows hosts for a number of rounds, then the result is compared on paired hosts."""
