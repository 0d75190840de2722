"""Data sets: token shards, images and their augmentation, downloads."""
