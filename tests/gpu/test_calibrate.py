"""On a GPU: what the machine can do is measured, and nothing is left of it."""

from __future__ import annotations

import gc
from dataclasses import asdict

import pytest
import torch

from ebbtide.calibrate import calibrate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_rates_are_measured_and_nothing_stays() -> None:
    calibrate(lambda *_: None)  # libraries keep workspaces from their first use on
    gc.collect()
    before = torch.cuda.memory_allocated()
    name, gib, rates = calibrate(lambda *_: None)
    gc.collect()
    assert (name, gib) == (torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory / 2**30)
    assert max(rates.link_out, rates.link_in) < rates.copy < rates.matmul, asdict(rates)
    assert 1e4 < rates.host_op < 1e7 < rates.cpu_adam < rates.copy, asdict(rates)
    assert torch.cuda.memory_allocated() == before
