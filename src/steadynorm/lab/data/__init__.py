"""Data: token shards, images and their augmentation, and where to get them."""
