"""Reports of a run folder: one page of HTML, and a short form for the terminal."""
