"""The paged engine's Triton kernels, each against plain torch."""

import os
import random

import pytest
import torch

from ebbtide.model.attention_kind import AttentionKind, attend
from ebbtide.rollout.engine import SamplingParams
from ebbtide.rollout.sampling import sample_tokens

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter runs them on a CPU
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU")]

NEAR = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2}}


DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]  # it multiplies no bfloat16 matrices


@pytest.fixture
def tanh(monkeypatch) -> None:
    """Gives the interpreter what a GPU has."""
    import triton.language as tl
    from triton.language.extra import libdevice

    if INTERPRETED:
        monkeypatch.setattr(libdevice, "tanh", lambda x: 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x)))


class Paged:
    """A cache of two layers in which sequences lie in blocks at random places."""

    def __init__(
        self, kv_heads: int, channels: int, block: int, dtype: torch.dtype, value_channels: int | None = None
    ) -> None:
        self.block, self.count = block, 300
        shapes = [(self.count, kv_heads, block, count) for count in (channels, value_channels or channels)]
        self.layers = [[torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes] for _ in range(2)]
        self.addresses = torch.tensor(
            [[keys.data_ptr(), values.data_ptr()] for keys, values in self.layers], device=DEVICE
        )
        self._free = random.Random(1).sample(range(self.count), self.count)

    def at(self, layer: int, which: int, slots: list[int]) -> torch.Tensor:
        """Keys (0) or values (1) of tokens: [tokens, kv heads, channels]."""
        return torch.stack([self.layers[layer][which][slot // self.block, :, slot % self.block] for slot in slots])

    def take(self, tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-tokens // self.block))]

    def give(self, *lists: list[int]) -> None:
        self._free += [block for blocks in lists for block in blocks]

    def slots(self, blocks: list[int], tokens: int) -> list[int]:
        return [blocks[place // self.block] * self.block + place % self.block for place in range(tokens)]


def table(rows: list[list[int]], height: int, width: int) -> torch.Tensor:
    return integers([[*row, *[0] * (width - len(row))] for row in [*rows, *[[]] * (height - len(rows))]])


def integers(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, first: int, kind: AttentionKind
) -> torch.Tensor:
    """Queries [T, heads, C] at positions from `first` on, of a context [L, kv heads, C]."""
    position, token = first + torch.arange(len(query), device=DEVICE)[:, None], torch.arange(len(keys), device=DEVICE)
    q, k, v = (states.transpose(0, 1).double()[None] for states in (query, keys, values))
    mixed = attend(q, k, v, kind.sees(position, token), scale, kind)
    return mixed[0].transpose(0, 1).to(query.dtype)


def kinds(heads: int) -> dict[str, AttentionKind]:
    sinks = torch.linspace(-2, 3, heads, device=DEVICE)
    return {
        "plain": AttentionKind(),
        "window": AttentionKind(window=40),
        "chunk": AttentionKind(chunk=150),
        "softcap": AttentionKind(softcap=1.5),
        "sinks": AttentionKind(sinks=sinks),
        "sinks and window": AttentionKind(window=40, sinks=sinks),
    }


# heads, key-value heads, channels of keys and of values, block, kind
SHAPES = [
    (4, 2, 32, 32, 16, "plain"),
    (16, 8, 128, 128, 64, "plain"),
    (14, 2, 64, 64, 64, "window"),
    (4, 1, 80, 80, 16, "plain"),
    (6, 2, 48, 48, 16, "window"),
    (4, 2, 32, 32, 16, "chunk"),
    (4, 2, 32, 32, 16, "softcap"),
    (8, 2, 64, 64, 16, "sinks"),
    (8, 2, 32, 32, 64, "sinks and window"),
    (4, 4, 48, 32, 16, "plain"),
    (4, 2, 24, 40, 16, "softcap"),
    (4, 1, 512, 512, 16, "plain"),
]


@pytest.mark.parametrize(("heads", "kv_heads", "channels", "value_channels", "block", "name"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_attends_to_the_prompt_and_to_own_tokens(
    heads, kv_heads, channels, value_channels, block, name, dtype
) -> None:
    from ebbtide.rollout.paged.decode_kernels import decode

    if dtype == torch.float32 and channels > 256 and not INTERPRETED:
        pytest.skip("float32 with 512 channels takes more shared memory than most GPUs have")
    torch.manual_seed(0)
    cache, kind = Paged(kv_heads, channels, block, dtype, value_channels), kinds(heads)[name]
    groups = [(5, [1]), (300, [1, 17, 70, 33, 2, 9]), (64, [290, 64]), (1, [3]), (700, [400, 1]), (512, [9])]
    longest = 700
    group_of = [number for number, (_, many) in enumerate(groups) for _ in many]
    prompts = [cache.take(length) for length, _ in groups]
    own = [cache.take(length) for _, lengths in groups for length in lengths]
    lengths = [length for _, lengths in groups for length in lengths]
    starts = [length for length, lengths in groups for _ in lengths]
    rows, size = len(lengths), len(lengths) + 3  # three of padding
    firsts = [0]
    for _, lengths_of in groups:
        firsts.append(firsts[-1] + len(lengths_of))
    query = torch.randn(size, heads, channels, device=DEVICE).to(dtype)
    found = decode(
        query,
        cache.addresses,
        1,
        kv_heads,
        block,
        integers(firsts + [rows] * (size + 1 - len(firsts))),
        integers(group_of + [0] * 3),
        table(prompts, size, -(-longest // block)),
        integers([length for length, _ in groups] + [0] * (size - len(groups))),
        table(own, size, -(-400 // block)),
        integers(lengths + [0] * 3),
        integers(starts + [0] * 3),
        4,
        channels**-0.5,
        kind,
        value_channels,
    )
    for row in range(rows):
        slots = cache.slots(prompts[group_of[row]], starts[row]) + cache.slots(own[row], lengths[row])
        wanted = reference(
            query[row : row + 1], cache.at(1, 0, slots), cache.at(1, 1, slots), channels**-0.5, len(slots) - 1, kind
        )
        torch.testing.assert_close(found[row : row + 1], wanted, **NEAR[dtype])
    assert not found[rows:].any()


@pytest.mark.parametrize(("heads", "kv_heads", "channels", "value_channels", "block", "name"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reading_is_causal_attention_over_the_whole_sequence(
    heads, kv_heads, channels, value_channels, block, name, dtype
) -> None:
    from ebbtide.model.attention_kernels import TILE, attend_to_cache
    from ebbtide.rollout.paged.cache_kernels import write_cache

    if dtype == torch.float32 and channels > 256 and not INTERPRETED:
        pytest.skip("float32 with 512 channels takes more shared memory than most GPUs have")
    torch.manual_seed(0)
    cache, kind = Paged(kv_heads, channels, block, dtype, value_channels), kinds(heads)[name]
    # first, last, prompt, own tokens before it
    chunks = [(0, 70, 70, 0), (100, 150, 250, 0), (7, 90, 30, 90), (0, 1, 1, 0)]
    prompts = [cache.take(prompt) for _, _, prompt, _ in chunks]
    own = [cache.take(last) if start else [] for _, last, _, start in chunks]
    sequences, tiles, slots, total = [], [], [], 0
    for number, (first, last, prompt, start) in enumerate(chunks):
        sequences.append([total, last - first, first + (prompt if start else 0), prompt])
        tiles += [[number, begin] for begin in range(0, last - first, TILE)]
        slots += cache.slots(own[number] if start else prompts[number], last)[first:]
        total += last - first
    query = torch.randn(total, heads, channels, device=DEVICE).to(dtype)
    key, value = (
        torch.randn(kv_heads, total, count, device=DEVICE).to(dtype).transpose(0, 1)
        for count in (channels, value_channels)
    )
    write_cache(key, value, cache.addresses, 0, integers([*slots[:-1], -1]), block)
    assert torch.equal(cache.at(0, 0, slots[:-1]), key[:-1])
    assert torch.equal(cache.at(0, 1, slots[:-1]), value[:-1])
    found = attend_to_cache(
        query,
        cache.addresses,
        0,
        kv_heads,
        block,
        integers(tiles),
        integers(sequences),
        table(prompts, 4, max(map(len, prompts))),
        table(own, 4, max(map(len, own))),
        channels**-0.5,
        kind,
        value_channels,
    )
    for number, (_, last, prompt, start) in enumerate(chunks):
        context = cache.slots(prompts[number], prompt if start else last) + (
            cache.slots(own[number], last) if start else []
        )
        begin, count, position, _ = sequences[number]
        wanted = reference(
            query[begin : begin + count],
            cache.at(0, 0, context),
            cache.at(0, 1, context),
            channels**-0.5,
            position,
            kind,
        )
        torch.testing.assert_close(found[begin : begin + count], wanted, **NEAR[dtype])


@pytest.mark.usefixtures("tanh")
@pytest.mark.parametrize("vocabulary", [11, 9000])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1),
        SamplingParams(1, 0.7),
        SamplingParams(1, 0.0),
        SamplingParams(1, 1.3, top_k=4),
        SamplingParams(1, 0.8, top_p=0.7, min_p=0.02),
    ],
)
def test_drawing_is_that_of_plain_torch(vocabulary, softcap, sampling) -> None:
    from ebbtide.rollout.paged import sample_kernels

    torch.manual_seed(0)
    rows = 64
    logits = (torch.randn(rows, vocabulary, device=DEVICE) * 3).bfloat16()
    uniform = torch.rand(rows, dtype=torch.float64, device=DEVICE)
    coarse = uniform.float()
    temperatures = torch.full((rows,), sampling.temperature, device=DEVICE)
    last, result = torch.zeros(rows + 1, dtype=torch.long, device=DEVICE), torch.zeros(3, rows, device=DEVICE)
    places = torch.randperm(rows, device=DEVICE)
    least = None
    if sampling.top_k or sampling.top_p < 1:
        cuts = (torch.full((rows,), value, device=DEVICE) for value in (sampling.top_k, sampling.top_p, sampling.min_p))
        least = sample_kernels.logit_thresholds(logits, temperatures, *cuts, 0.5, softcap)
    sample_kernels.sample_tokens(
        logits,
        temperatures,
        0.5 / temperatures.where(temperatures > 0, 1.0),
        least,
        torch.stack([coarse, (uniform - coarse).float()]),
        places.int(),
        last,
        result,
        0.5,
        softcap,
    )
    shaped = (logits.float() if softcap is None else (logits.float() / softcap).tanh() * softcap) * 0.5
    tokens, logprobs, plain = sample_tokens(shaped, uniform, sampling)
    found = result[0].view(torch.int32).long()
    same = found == tokens  # a number on the edge between two tokens may go to either
    assert same.float().mean() > 0.95
    assert torch.equal(last[places], found)
    torch.testing.assert_close(result[1][same], logprobs[same], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(result[2][same], plain[same], atol=2e-4, rtol=2e-4)
