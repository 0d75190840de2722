"""One training loop for both recipes."""
