"""The monitor: weights and updates -> records. It reads, and changes nothing."""

from steadynorm.monitor.monitor import Monitor
from steadynorm.records.schema import Record, Records
from steadynorm.records.sinks import Writer, log_records, scalars

__all__ = ["Monitor", "Record", "Records", "Writer", "log_records", "scalars"]
