"""Models that are broken on purpose, each so little that it looks like rounding, are refused before the first step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import windowed_model
from ebbtide.errors import UserError
from ebbtide.model.families import FAMILIES
from ebbtide.model.load import LoadedModel, load_model
from ebbtide.policy import attention, packed_check
from ebbtide.policy.attention import PACKED
from ebbtide.policy.packed_check import neighbour_packs, widened_logprobs
from ebbtide.policy.policy import Policy
from ebbtide.policy.probe import own_logprobs, probes
from ebbtide.policy.widened import in_float32
from ebbtide.rollout.build import build_engine
from families import EXPERTS, OF, family_model

TYPES = ("float32", "bfloat16")
LONGER = {"rollout.max_prompt_tokens": 24, "rollout.max_new_tokens": 16}


def made(config: Any) -> LoadedModel:
    """A model whose weights are large enough that what its parts do matters."""
    loaded = load_model(config)
    torch.manual_seed(0)
    for parameter in loaded.model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return loaded


@pytest.mark.parametrize("name", FAMILIES)
def test_families_pass_in_both_types_and_in_the_engine(tiny, name: str, monkeypatch) -> None:
    monkeypatch.setitem(OF, name, EXPERTS if FAMILIES[name].sparse else {})
    for dtype in TYPES:
        config = tiny({**LONGER, "model.dtype": dtype})
        loaded = family_model(name, getattr(torch, dtype))
        Policy(loaded, config).verify()
        build_engine(loaded, config, lambda size: None)


def convolution(module: nn.Module, given: tuple[Tensor], out: Tensor) -> Tensor:
    return out + 0.01 * nn.functional.pad(given[0], (0, 0, 1, 0))[:, :-1]


def state(module: nn.Module, given: tuple[Tensor], out: Tensor) -> Tensor:
    return out + 1e-4 * given[0].cumsum(1)


def hidden_state(module: nn.Module, given: tuple[Tensor], out: Tensor) -> Tensor:
    """A state that passes no gradient on."""
    return out + 0.01 * given[0].detach().cumsum(1)


def capacity(module: nn.Module, given: tuple[Tensor], out: Tensor) -> Tensor:
    """Two experts with room for half of the tokens each; tokens that come too late get nothing."""
    chosen = nn.functional.one_hot((given[0][..., 0] > given[0][..., 1]).long(), 2)  # [1, T, 2]
    place = (chosen.cumsum(1) * chosen).sum(-1)
    return out * (place <= (out.shape[1] + 1) // 2)[..., None]


def statistic(module: nn.Module, given: tuple[Tensor], out: Tensor) -> Tensor:
    return out - 0.01 * out.mean(1, keepdim=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("part", "broken", "said"),
    [
        ("layers.1.mlp", convolution, "in layer 1, a .*, tokens see those of other sequences"),
        ("layers.1.mlp", state, "in layer 1, a .*, tokens see those of other sequences"),
        ("layers.1.mlp", hidden_state, "log-probs of a sequence move by .* when the tokens of another"),
        ("layers.1.mlp", capacity, "log-probs of a sequence move by .* when the tokens of another"),
        ("norm", statistic, "log-probs of a sequence move by .* when the tokens of another"),
    ],
)
def test_sequences_that_mix_are_seen(tiny, dtype: str, part: str, broken: Callable[..., Tensor], said: str) -> None:
    config = tiny({**LONGER, "model.dtype": dtype})
    loaded = made(config)
    policy = Policy(loaded, config)
    policy.verify()
    loaded.model.base_model.get_submodule(part).register_forward_hook(broken)
    with pytest.raises(UserError, match=said):
        policy.verify()


@pytest.mark.parametrize("dtype", TYPES)
def test_a_window_that_is_one_token_too_wide_is_seen(tiny, dtype: str, monkeypatch) -> None:
    config = tiny({**LONGER, "model.dtype": dtype})
    loaded = windowed_model("cpu")
    loaded.model.to(getattr(torch, dtype))
    policy = Policy(loaded, config)
    policy.verify()
    right = attention.packed_attention

    def wide(*given: Any, sliding_window: int, **named: Any) -> Any:
        return right(*given, sliding_window=sliding_window + 1, **named)

    monkeypatch.setitem(attention.FUNCTIONS, PACKED, wide)
    with pytest.raises(UserError, match="log-probs of packed sequences differ from the model's own"):
        policy.verify()


def test_float32_shows_the_function_and_leaves_the_weights(tiny) -> None:
    """Of a model of 16 bits: its log-probs are those of the same numbers in a model of float32, to the bit."""
    config = tiny({**LONGER, "model.dtype": "bfloat16"})
    narrow, wide = made(config).model, made(config).model.float()
    before = {name: (weight.data_ptr(), weight.clone()) for name, weight in narrow.named_parameters()}
    pack = neighbour_packs(probes(narrow.config, 40, 14))[0]
    with in_float32(narrow):
        found = [own_logprobs(narrow, "sdpa", one) for one in pack]
        packed = widened_logprobs(narrow, pack)
    for one, ours, mixed in zip(pack, found, packed, strict=True):
        right = own_logprobs(wide, "sdpa", one)
        assert torch.equal(ours, right)
        assert not torch.equal(own_logprobs(narrow, "sdpa", one), right)
        torch.testing.assert_close(mixed, right, atol=2e-6, rtol=0)
    for name, weight in narrow.named_parameters():
        address, numbers = before[name]
        assert weight.data_ptr() == address
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, numbers)


def test_float32_ends_where_a_model_fails(tiny) -> None:
    model = made(tiny({"model.dtype": "bfloat16"})).model

    def fail(*_: object) -> None:
        raise IndexError

    model.base_model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(IndexError), in_float32(model):
        model(torch.tensor([[1, 2]]))
    assert all(weight.dtype == torch.bfloat16 for weight in model.parameters())


def test_a_sequence_too_long_for_float32_is_shortened(tiny, monkeypatch) -> None:
    monkeypatch.setattr(packed_check, "LONGEST_WIDE", 12)
    monkeypatch.setattr(packed_check, "SHORT", 3)
    config = tiny({**LONGER, "model.dtype": "bfloat16"})
    lengths = []
    right = packed_check.widened_logprobs
    monkeypatch.setattr(
        packed_check,
        "widened_logprobs",
        lambda model, pack: lengths.append([len(one.tokens) for one in pack]) or right(model, pack),
    )
    Policy(made(config), config).verify()
    assert lengths == [[5, 11, 5]]
