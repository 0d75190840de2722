"""Convert between optimizers: settings in the same units, and the optimizer you train with into one of ours."""
