"""The age of a process."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from ebbtide.system.clock import process_seconds


@pytest.mark.skipif(sys.platform != "linux", reason="the age is read from /proc")
def test_a_process_is_as_old_as_its_caller_has_waited() -> None:
    code = "from ebbtide.system.clock import process_seconds; print(process_seconds())"
    began = time.perf_counter()
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0 <= age <= time.perf_counter() - began + 0.02  # the kernel counts in ticks of a hundredth of a second
    own = process_seconds()
    assert own is not None
    assert own > age
