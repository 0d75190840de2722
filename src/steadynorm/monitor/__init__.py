"""The monitor: weights, updates -> records. It reads, and changes nothing."""

from steadynorm.monitor.monitor import Monitor
from steadynorm.monitor.record import log_records

__all__ = ["Monitor", "log_records"]
