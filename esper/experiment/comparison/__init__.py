"""`esper compare`: arms on the same hosts, and what may be said about them."""
