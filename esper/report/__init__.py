"""Reports of a run folder: an HTML page, and a short form for the terminal."""
