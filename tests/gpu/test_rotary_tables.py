"""What a pass reads before its first layer: the angles out of tables, with the bits of the model's own module, and the
tokens and positions of a decode pass."""

import os
from collections import Counter

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ebbtide.model.families import family_of, part_of
from ebbtide.model.load import decoder
from ebbtide.policy.fuse import build_blocks
from ebbtide.rollout.paged import rotary_tables
from ebbtide.rollout.paged.rotary_tables import RotaryTables, kind_of
from families import DYNAMIC, LONGROPE, MIXED, SHAPE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter runs them on a CPU
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU")]

LENGTH = 9000  # positions: several pieces
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS = {
    "llama": ("llama", {}, 1),
    "with odd channels": ("qwen3", {"head_dim": 24}, 1),
    "scaled": ("llama", {"rope_parameters": YARN}, 1),
    "two embeddings": ("gemma3_text", MIXED, 2),
    "in some layers": ("smollm3", {"no_rope_layers": [1, 0]}, 2),
    "some channels, interleaved": ("glm4", {}, 1),
}


class Counted(torch.nn.Module):
    """A model's rotary module that counts its calls."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module, self.calls = module, Counter[int]()

    def forward(self, x: torch.Tensor, positions: torch.Tensor, *kind: str) -> object:
        self.calls[positions.numel()] += 1
        return self.module(x, positions, *kind)


def tables_of(family: str, changes: dict[str, object], dtype: torch.dtype) -> tuple[RotaryTables, Counted]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SHAPE, **changes}), dtype=dtype)
    model = model.to(DEVICE)
    rotary = Counted(part_of(decoder(model), family_of(model).rotary))
    return RotaryTables(rotary, build_blocks(model), model.config), rotary


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_have_the_bits_of_the_models_own_module(name, dtype) -> None:
    family, changes, kinds = VARIANTS[name]
    tables, rotary = tables_of(family, changes, dtype)
    like = torch.empty(1, 1, dtype=dtype, device=DEVICE)
    positions = torch.tensor([0, LENGTH - 1, 5, 4095, 4096, 5, 777], device=DEVICE)
    computed = tables.at(positions, like)
    tables.fill(LENGTH, like)
    rotary.calls.clear()
    found = tables.at(positions, like)
    assert not rotary.calls  # they are read
    assert len(found) == len(computed) == kinds
    for kind, wanted in computed.items():
        for ours, theirs in zip(found[kind], wanted, strict=True):
            assert ours.is_contiguous()
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
    if kinds == 2:
        first, second = (cos for cos, _ in computed.values())
        assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 16}),
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    ],
)
def test_angles_that_depend_on_the_longest_sequence_are_computed(family, changes) -> None:
    tables, rotary = tables_of(family, changes, torch.float32)
    like, short = torch.empty(1, 1, device=DEVICE), torch.arange(9, device=DEVICE)
    tables.fill(64, like)
    before = rotary.calls[9]
    ((alone, _),) = tables.at(short, like).values()
    ((among, _),) = tables.at(torch.cat([short, short.new_tensor([60])]), like).values()
    assert rotary.calls[9] > before
    assert not torch.equal(alone, among[:9])


def test_tables_that_would_be_too_large_are_not_made(monkeypatch) -> None:
    tables, rotary = tables_of("llama", {}, torch.float32)
    like, channels = torch.empty(1, 1, device=DEVICE), SHAPE["head_dim"]
    monkeypatch.setattr(rotary_tables, "MOST_BYTES", 100 * 2 * channels * 4)
    for positions, reads in ((100, True), (101, False), (50, True)):
        tables.fill(positions, like)
        rotary.calls.clear()
        tables.at(torch.arange(7, device=DEVICE), like)
        assert (not rotary.calls) == reads


def test_blocks_find_their_angles() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3_text", **{**SHAPE, **MIXED}))
    assert [kind_of(block) for block in build_blocks(model)] == [
        (("sliding_attention",), True),
        (("full_attention",), True),
    ]


@pytest.mark.parametrize("count", [1, 128, 300])
def test_a_decode_pass_begins_with_the_newest_tokens(count) -> None:
    from ebbtide.rollout.paged.input_kernels import begin_decode

    torch.manual_seed(0)
    last = torch.randint(10**6, (count + 1,), device=DEVICE)
    rows = torch.randperm(count, device=DEVICE).int()
    given = torch.randint(-1, 2, (count,), device=DEVICE).int()
    starts, lengths = (torch.randint(1, 5000, (count,), device=DEVICE).int() for _ in range(2))
    starts[-1], lengths[-1], rows[-1] = 0, 0, count  # padding
    tokens, positions = torch.full((2, count), -7, device=DEVICE)
    begin_decode(given, rows, starts, lengths, last, tokens, positions)
    assert torch.equal(tokens, torch.where(given >= 0, given.long(), last[rows.long()]))
    assert torch.equal(positions, (starts + lengths - 1).clamp(min=0).long())
