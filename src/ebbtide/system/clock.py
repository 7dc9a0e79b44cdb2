"""The age of this process."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_seconds() -> float | None:
    """Seconds since this process was started; None where the system is not Linux."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), in ticks since the machine started
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
