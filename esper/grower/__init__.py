"""Growth inside a training loop that someone else owns."""
