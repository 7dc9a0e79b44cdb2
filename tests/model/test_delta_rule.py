"""The gated delta rule in chunks, and which function computes it."""

import pytest
import torch

import state_families  # noqa: F401 (it knows the family)
from ebbtide.model import delta_rule
from ebbtide.model.delta_rule import ChosenDeltaRule, can_use_fla, has_wrong_gradients, our_rule
from ebbtide.model.gated_delta_rule import gated_delta_rule
from ebbtide.model.state_layers import state_layers
from ebbtide.system import transformers_internals
from families import family_model

GPU = torch.device("cuda")


def _inputs(tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    sizes = ((2, tokens, 3, 8), (2, tokens, 3, 8), (2, tokens, 3, 6), (2, tokens, 3), (2, tokens, 3))
    query, key, value, g, beta = (torch.randn(size, generator=made, dtype=torch.float64) for size in sizes)
    inputs = 0.5 * query, 0.5 * key, value, -g.abs(), beta.sigmoid()
    return [one.to(dtype).requires_grad_() for one in inputs]


def _token_by_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    normalizes: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    if normalizes:
        query, key = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (query, key))
    state, outputs = query.new_zeros((2, 3, 8, 6)), []
    for at in range(query.shape[1]):
        state = state * g[:, at, :, None, None].exp()
        known = (state * key[:, at, :, :, None]).sum(-2)
        state = state + key[:, at, :, :, None] * ((value[:, at] - known) * beta[:, at, :, None])[:, :, None]
        outputs.append((state * query[:, at, :, :, None]).sum(-2) * 8**-0.5)
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_chunks_have_the_outputs_and_gradients_of_token_by_token(tokens, normalizes) -> None:
    inputs = _inputs(tokens)
    (found, last), (wanted, state) = (
        rule(*inputs, normalizes=normalizes) for rule in (gated_delta_rule, _token_by_token)
    )
    torch.testing.assert_close(found, wanted, atol=1e-13, rtol=0)
    torch.testing.assert_close(last, state, atol=1e-13, rtol=0)
    weights = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted).cos()
    gradients = (torch.autograd.grad((one * weights).sum(), inputs) for one in (found, wanted))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-9)


def test_sequences_go_on_from_their_states() -> None:
    inputs = [one.detach() for one in _inputs(100)]
    whole, last = gated_delta_rule(*inputs, normalizes=True)
    first, state = gated_delta_rule(*(one[:, :37] for one in inputs), normalizes=True)
    second, end = gated_delta_rule(*(one[:, 37:] for one in inputs), state, normalizes=True)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, atol=1e-13, rtol=0)
    torch.testing.assert_close(end, last, atol=1e-13, rtol=0)


def test_nothing_but_inputs_is_kept_and_gradients_have_their_types() -> None:
    inputs, kept = _inputs(70, torch.bfloat16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one.shape), one)[1], lambda one: one):
        output, _ = gated_delta_rule(*inputs)
    assert kept == [one.shape for one in inputs]
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert [one.grad.dtype for one in inputs] == [torch.bfloat16] * 5


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "olmo_hybrid"])
def test_layers_compute_what_transformers_does(monkeypatch, name) -> None:
    model = family_model(name).model
    ids = torch.arange(3, 12).repeat(9)[None, :70]
    with torch.no_grad():
        layers = state_layers(model).layers
        chosen = transformers_internals.state_function(layers[0].module, transformers_internals.DELTA_RULE)
        assert isinstance(chosen, ChosenDeltaRule)
        found = model(ids, use_cache=False).logits
        monkeypatch.setitem(type(layers[0].module).forward.__globals__, "torch_chunk_gated_delta_rule", chosen._own)
        torch.testing.assert_close(found, model(ids, use_cache=False).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("asked", [True, False])
def test_a_state_is_returned_where_it_is_asked_for(asked) -> None:
    query, key, value, g, beta = (one.detach() for one in _inputs(70))
    _, state = our_rule(query, key, value, g=g, beta=beta, output_final_state=asked, chunk_size=64, cu_seqlens=None)
    assert (state is not None) == asked


@pytest.mark.parametrize(
    ("triton", "capability", "wrong"),
    [("3.6.0", 9, True), ("3.7.1", 9, False), ("3.3.1", 9, False), ("3.6.0", 8, False), ("3.10.0", 9, False)],
)
def test_where_kernels_have_wrong_gradients(monkeypatch, triton, capability, wrong) -> None:
    monkeypatch.setattr(delta_rule, "version", lambda name: triton)
    monkeypatch.setattr(delta_rule, "find_spec", lambda name: None if name == "tilelang" else object())
    monkeypatch.setattr(delta_rule, "generation", lambda device: capability)
    assert has_wrong_gradients(GPU) == wrong
    assert can_use_fla.__wrapped__(GPU) == (not wrong)
    assert not can_use_fla.__wrapped__(torch.device("cpu"))
