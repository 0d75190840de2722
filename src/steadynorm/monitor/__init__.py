"""The monitor: weights, updates -> records. It reads, and changes nothing."""

from steadynorm.monitor.monitor import Monitor
from steadynorm.monitor.record import Record, Writer, log_records, scalars

__all__ = ["Monitor", "Record", "Writer", "log_records", "scalars"]
