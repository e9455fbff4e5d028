"""What a run folder says, for people: one page of HTML, and a short form for the terminal."""
