"""The settings of `ebbtide serve`. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ebbtide.config.tree import Count, Port, Section


class Serve(Section):
    """Given to `ebbtide serve MODEL_OR_RUN` as `KEY=VALUE`."""

    host: str = "127.0.0.1"
    """Address to listen at. Any other than this machine's own should have an API key."""

    port: Port = 8000
    """Port to listen at; 0 is any free one."""

    name: Annotated[str, Field(min_length=1)] | None = None
    """What clients call the model; `null` is the hub id, or the name of the folder or file."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is the GPU if there is one."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; `auto` is bfloat16 on a GPU and float32 on a CPU."""

    batch: Count = 64
    """Samples that are generated at once. The cache has room for so many of `max_length`, or for as many tokens as memory has room for."""

    max_length: Annotated[int, Field(ge=2)] | None = None
    """Most tokens of a prompt and its completion together; `null` is the model's context."""

    max_queue: Count = 1024
    """Samples that may wait or run; a request beyond that is refused with status 429."""

    max_body_kib: Count = 4096
    """Largest body of a request; a larger one is refused with status 413."""

    stop_seconds: Annotated[float, Field(ge=0.0)] = 30.0
    """How long requests may go on after the first Ctrl-C or SIGTERM. A second one ends them at once."""
