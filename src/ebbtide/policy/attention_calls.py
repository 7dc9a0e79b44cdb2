"""Which layers of a model call attention, with keys and values of which sizes, and which of them share another's: what
the model really does, whatever its config says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ebbtide.model.load import decoder
from ebbtide.policy.attention import FUNCTIONS, use_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECORDED = "ebbtide_recorded"


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention by a layer."""

    layer: int | None
    query_heads: int
    heads: int
    """Key-value heads."""
    channels: tuple[int, int]
    """Channels of a key and of a value."""
    source: int | None
    """The layer that made the keys and values: another one where layers share them."""


@dataclass
class CallLog:
    """The calls of attention in a forward."""

    calls: list[AttentionCall] = field(default_factory=list)
    _made: list[tuple[Tensor, int | None]] = field(default_factory=list)  # the keys of each layer that made some

    def add(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Adds a call with states [1, heads, T, channels]. A layer that shares another's keys passes the very same
        tensor."""
        layer: int | None = getattr(module, "layer_idx", None)
        source = next((maker for made, maker in self._made if made is key), None)
        if source is None:
            self._made.append((key, layer))
            source = layer
        sizes = (key.shape[3], value.shape[3])
        self.calls.append(AttentionCall(layer, query.shape[1], key.shape[1], sizes, source))


def recorded_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, channels]
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    call_log: CallLog | None = None,
    **requested: Any,
) -> tuple[Tensor, None]:
    """Adds the call to `call_log`, and mixes nothing: [1, T, heads, value channels]."""
    if call_log is not None:
        call_log.add(module, query, key, value)
    tokens, heads = query.shape[2], query.shape[1]
    return query.new_zeros((1, tokens, heads, value.shape[3])), None


FUNCTIONS[RECORDED] = recorded_attention


@torch.no_grad()
def record_calls(model: PreTrainedModel) -> list[AttentionCall]:
    """The calls of attention in a forward of two tokens."""
    log, tokens = CallLog(), torch.zeros((1, 2), dtype=torch.long, device=model.device)
    starts = torch.tensor([0, 2], dtype=torch.int32, device="cpu" if model.device.type == "meta" else model.device)
    with use_attention(model, RECORDED):
        decoder(model)(
            input_ids=tokens,
            position_ids=torch.arange(2, device=model.device)[None],
            use_cache=False,
            cu_seq_lens_q=starts,
            cu_seq_lens_k=starts,
            max_length_q=2,
            max_length_k=2,
            call_log=log,
        )
    return log.calls
