"""Run a step over many processes."""
