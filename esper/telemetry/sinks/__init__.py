"""Where events end: files, the terminal, dashboards."""
