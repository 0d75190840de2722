"""The monitor: weights, updates -> records. It reads, and changes nothing."""

from steadynorm.monitor.monitor import Monitor
from steadynorm.monitor.record import Record, Records, Writer, log_records, scalars

__all__ = ["Monitor", "Record", "Records", "Writer", "log_records", "scalars"]
