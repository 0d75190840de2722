"""Reproduce the paper: models, data, training, simulations and the experiments. The library does not import it."""
