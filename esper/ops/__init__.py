"""Compiled operators, one per file."""
