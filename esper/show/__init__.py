"""A run as people see it: the view of its state, lines and a live picture in the terminal, and the HTML report."""
