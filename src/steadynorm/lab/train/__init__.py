"""Training loop, recipes and checkpoints."""
