"""Destinations of events: files, the terminal, dashboards."""
