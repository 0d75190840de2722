"""A run's records: JSON lines, the configuration first, then one line per step. Written safely, read thinned.

    {"schema": "steadynorm-run", "version": 1, "name": ..., "created": ISO time, "config": {...}, "crc": 3735928559}
    {"step": 0, "loss": 10.8, "layers": {"blocks.0.qkv": {"norm": 1.1, "forecast": 1.1}}, "crc": 48879}

A value is a number or null; values that are not finite are written as null, so that every line is valid JSON. A line ends
with the CRC-32 of what precedes it; files of earlier versions have none and are still read.
"""

from steadynorm.records.advice import advise
from steadynorm.records.reader import last_step, read, thin
from steadynorm.records.recorder import LAYERS, Recorder
from steadynorm.records.role_norms import ROLE_LABELS, SPLIT, layer_order, split_norms
from steadynorm.records.schema import (
    FILE,
    LAYER_QUANTITIES,
    QUANTITIES,
    SCHEMA,
    VERSION,
    Quantity,
    RecordError,
    Run,
    flatten,
)

__all__ = [
    "FILE",
    "LAYERS",
    "LAYER_QUANTITIES",
    "QUANTITIES",
    "ROLE_LABELS",
    "SCHEMA",
    "SPLIT",
    "VERSION",
    "Quantity",
    "RecordError",
    "Recorder",
    "Run",
    "advise",
    "flatten",
    "last_step",
    "layer_order",
    "read",
    "split_norms",
    "thin",
]
