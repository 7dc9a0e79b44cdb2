"""The gated delta rule with little kept for the backward pass."""

import pytest
import torch

import state_families  # noqa: F401 (it knows the family)
from ebbtide.model import delta_rule
from ebbtide.model.delta_rule import LeanDeltaRule, has_wrong_gradients
from ebbtide.model.state_layers import state_layers
from ebbtide.system import transformers_internals
from families import family_model


def _rule() -> LeanDeltaRule:
    loaded = family_model("qwen3_next")
    layer = state_layers(loaded.model).layers[0].module
    found = transformers_internals.delta_rule(layer)
    assert found is not None
    assert isinstance(found.function, LeanDeltaRule)
    return found.function


def _inputs() -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn((2, 70, 3, 8), generator=made) for _ in range(3))
    g, beta = -torch.rand((2, 70, 3), generator=made), torch.rand((2, 70, 3), generator=made)
    return [one.requires_grad_() for one in (query, key, value, g, beta)]


def test_gradients_are_the_plain_rules_and_nothing_but_inputs_is_kept() -> None:
    rule, found = _rule(), []
    kept: list[torch.Size] = []

    def keep(one: torch.Tensor) -> torch.Tensor:
        kept.append(one.shape)
        return one

    for function in (rule._plain, rule):
        inputs = _inputs()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            output, state = function(*inputs[:3], g=inputs[3], beta=inputs[4], use_qk_l2norm_in_kernel=True)
        assert state is None
        output.square().sum().backward()
        found.append([output, *(one.grad for one in inputs)])
    assert kept == [one.shape for one in _inputs()]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_state_is_returned_where_it_is_asked_for() -> None:
    inputs = _inputs()
    _, state = _rule()(*inputs[:3], g=inputs[3], beta=inputs[4], output_final_state=True)
    assert state is not None
    assert state.shape == (2, 3, 8, 8)


@pytest.mark.parametrize(
    ("triton", "capability", "wrong"),
    [("3.6.0", 9, True), ("3.7.1", 9, False), ("3.3.1", 9, False), ("3.6.0", 8, False), ("3.10.0", 9, False)],
)
def test_where_kernels_have_wrong_gradients(monkeypatch, triton, capability, wrong) -> None:
    monkeypatch.setattr(delta_rule, "version", lambda name: triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    assert has_wrong_gradients.__wrapped__(torch.device("cuda")) == wrong  # What is kept is the machine's.
    assert not has_wrong_gradients.__wrapped__(torch.device("cpu"))
