"""Growth inside a user's training loop."""
