"""The decode step of one batch size as a CUDA graph: its inputs at fixed addresses, its warm-up, capture and replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ebbtide.model.state_layers import StatePass, StateRows, StateSlots
from ebbtide.rollout.paged.attention import CacheLayout
from ebbtide.rollout.paged.attn_metadata import DecodeMetadata, PassMetadata
from ebbtide.rollout.paged.cuda_graphs import garbage_collection_off
from ebbtide.rollout.paged.input_kernels import begin_decode
from ebbtide.system.side_stream import capture_stream
from ebbtide.system.units import ceil_div


class DecodeInputs:
    """The inputs of a decode step, as named fields of one int32 tensor: filled on the host, sent in one copy, and read
    by a CUDA graph."""

    def __init__(self, whole: Tensor, rows: int, widths: tuple[int, int]) -> None:
        """The fields are views of `whole`, for `rows` samples and block tables of `widths` blocks for prompts and own
        tokens."""
        self.rows = rows
        self._tensors: dict[str, Tensor] = {}
        start = 0
        for name, count in _field_sizes(rows, widths).items():
            self._tensors[name] = whole[start : start + count]
            start += _aligned(count)
        self.data = whole[:start]

    @staticmethod
    def length(rows: int, widths: tuple[int, int]) -> int:
        """Returns the length of the tensor that the fields need."""
        return sum(_aligned(count) for count in _field_sizes(rows, widths).values())

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def numpy(self, padding_state: int) -> dict[str, Any]:
        """Returns the fields of a host tensor as arrays, filled as padding rows, which read and write no KV cache, and
        the state slot `padding_state`."""
        arrays = {name: tensor.numpy() for name, tensor in self._tensors.items()}
        for name, value in (
            ("tokens", 0),
            ("slots", -1),
            ("adapters", 0),
            ("own_lengths", 0),
            ("own_starts", 0),
            ("prompt_lengths", 0),
            ("read_states", padding_state),
            ("write_states", padding_state),
            ("temperature", 0),
            ("scale", 0),
        ):
            arrays[name].fill(value)
        return arrays

    def metadata(
        self, addresses: Tensor, layout: CacheLayout, block: int, samples: int, slots: StateSlots | None
    ) -> DecodeMetadata:
        """Returns the attention metadata that reads these fields, for groups of at most `samples` samples. Its
        positions are written in each pass. `slots`: of the layers with states, if there are some."""
        states = None
        if slots is not None:
            places = torch.arange(self.rows, device=self.data.device)[:, None]
            states = StatePass([StateRows(places, self["read_states"], self["write_states"])], None, slots)
        return DecodeMetadata(
            addresses,
            layout,
            block,
            self["slots"],
            self["adapters"],
            torch.zeros(self.rows, dtype=torch.long, device=self.data.device),
            self["firsts"],
            self["groups"],
            self["prompt_tables"].view(self.rows, -1),
            self["prompt_lengths"],
            self["own_tables"].view(self.rows, -1),
            self["own_lengths"],
            self["own_starts"],
            samples,
            states=states,
        )


class DecodeGraph:
    """The decode step of one batch size: it reads its inputs and writes its result at fixed addresses."""

    def __init__(
        self,
        inputs: DecodeInputs,
        metadata: DecodeMetadata,
        last_tokens: Tensor,
        compute_logits: Callable[[Tensor, Tensor, PassMetadata], Tensor],
        sample: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None] | None,
    ) -> None:
        """`last_tokens` has the newest token of each row. `compute_logits` computes the logits of tokens at positions.
        `sample` samples from logits by temperatures, scales, uniform numbers and rows into a result; None: the caller
        samples from `logits`, outside of the graph."""
        self.inputs, self._metadata, self._last_tokens = inputs, metadata, last_tokens
        self._compute_logits, self._sample = compute_logits, sample
        self._graph = torch.cuda.CUDAGraph()
        self._tokens = torch.zeros(inputs.rows, dtype=torch.long, device=inputs.data.device)
        self.result = torch.zeros((3, inputs.rows), device=inputs.data.device)
        self.temperature, self.scale = (inputs[name].view(torch.float32) for name in ("temperature", "scale"))
        self.uniform = inputs["uniform"].view(torch.float32).view(2, inputs.rows)
        self.logits: Tensor

    def warm_up(self, padding: DecodeInputs) -> None:
        """Runs the step on padding rows, which compiles its kernels."""
        self.inputs.data.copy_(padding.data)
        self.run()

    def capture(self, pool: Any) -> None:
        """Captures the step, with memory of a graph pool that all graphs share."""
        device = self.inputs.data.device
        torch.cuda.current_stream(device).synchronize()
        with garbage_collection_off(), torch.cuda.graph(self._graph, pool=pool, stream=capture_stream(device)):
            self.run()

    def replay(self) -> None:
        """Runs the captured step."""
        self._graph.replay()

    def run(self) -> None:
        """Runs the step without a graph, kernel by kernel."""
        inputs = self.inputs
        positions = self._metadata.positions()
        begin_decode(
            inputs["tokens"],
            inputs["rows"],
            inputs["own_starts"],
            inputs["own_lengths"],
            self._last_tokens,
            self._tokens,
            positions,
        )
        logits = self._compute_logits(self._tokens, positions, self._metadata)
        if self._sample is None:
            self.logits = logits
        else:
            self._sample(logits, self.temperature, self.scale, self.uniform, inputs["rows"], self.result)


def _field_sizes(rows: int, widths: tuple[int, int]) -> dict[str, int]:
    """Returns the fields of `DecodeInputs` and their sizes."""
    once = (
        *("rows", "tokens", "slots", "adapters", "groups", "own_lengths", "own_starts", "prompt_lengths"),
        *("temperature", "scale", "read_states", "write_states"),
    )
    tables = {"prompt_tables": rows * widths[0], "own_tables": rows * widths[1]}
    return {**dict.fromkeys(once, rows), "uniform": 2 * rows, "firsts": rows + 1, **tables}


def _aligned(count: int) -> int:
    """Rounds a number of int32 up, so that the next field is aligned to 16 bytes."""
    return ceil_div(count, 4) * 4
