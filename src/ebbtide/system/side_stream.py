"""A branch of a CUDA graph: kernels that run beside those that are launched after them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

Result = TypeVar("Result")


def begin_beside(work: Callable[[], Result], device: torch.device) -> tuple[Result, Callable[[], None]]:
    """Launches `work`. While a CUDA graph is captured it becomes a branch of the graph, which runs beside what is
    launched next. Returns what it returned, and a function that is to be called before that is read.

    Outside of a graph the work is launched in order: there the host is what small kernels wait for, and streams of
    their own would take it longer."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return work(), lambda: None
    main, side = torch.cuda.current_stream(device), _side(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        found = work()
    return found, lambda: main.wait_stream(side)


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream to capture graphs in. What is in the graph's branches gives way to what is not."""
    return torch.cuda.Stream(device, priority=-1)


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
