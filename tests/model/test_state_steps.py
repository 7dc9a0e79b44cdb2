"""One more token with states in their slots: layers hand the slots to the functions that take transformers' place."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu as activate

import state_families  # noqa: F401 (it knows the families)
from ebbtide.model.gated_delta_rule import gated_delta_rule
from ebbtide.model.state_layers import StatePass, StateRows, TensorSlots, state_layers
from families import family_model


@dataclass
class PlainRows:
    """A kind of state in slots, in plain torch."""

    slots: Tensor
    read: Tensor
    write: Tensor

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
        window = torch.cat([self.slots[self.read], inputs], -1)
        self.slots[self.write] = window[..., 1:]
        found = (window[..., -weight.shape[1] :] * weight).sum(-1, keepdim=True)
        found = found if bias is None else found + bias[:, None]
        return activate(found) if silu else found

    def apply_delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, normalizes: bool
    ) -> Tensor:
        state = self.slots[self.read]
        found, self.slots[self.write] = gated_delta_rule(query, key, value, g, beta, state, normalizes=normalizes)
        return found


class PlainSlots(TensorSlots):
    def in_place(self, layer: int, read: Tensor, write: Tensor):
        return {name: PlainRows(state, read, write) for name, state in self.layers[layer].items()}


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        ("qwen3_next", True),
        ("qwen3_5_text", True),
        ("qwen3_5_moe_text", True),
        ("olmo_hybrid", True),
        ("lfm2", True),
        ("bamba", False),
        ("jamba", False),
        ("minimax", False),
    ],
)
@torch.no_grad()
def test_one_more_token_leaves_states_in_their_slots(name, stays) -> None:
    layers = state_layers(family_model(name).model).layers
    layer = layers[0]
    assert layer._steps_in_slots == stays
    if not stays:
        return
    states = [{key: torch.randn_like(one) for key, one in layer.new_slots(5).items()}]
    rows = StateRows(torch.arange(3)[:, None], torch.tensor([0, 0, 3]), torch.tensor([1, 2, 3]))
    tokens, found = torch.randn(1, 3, layer.owner.hidden_size), []
    for kind in (TensorSlots, PlainSlots):
        own = [{key: one.clone() for key, one in states[0].items()}]
        found.append((layer._continue(tokens, dict(layer._empty), StatePass([rows], None, kind(own))), own[0]))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)
