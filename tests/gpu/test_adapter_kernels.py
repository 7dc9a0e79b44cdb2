"""The kernels of adapters (LoRA): what they add, and that a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import pytest
import torch
from test_paged_kernels import DEVICE, INTERPRETED

from ebbtide.system.gpu import HOPPER, generation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU")]
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter multiplies no bfloat16 matrices
CASES = [  # inner dimension, rank, (width of the layer, whether it has an adapter) of each
    (64, 1, [(40, True)]),
    (700, 8, [(96, True), (32, False), (33, True)]),
    (1100, 20, [(130, False), (70, True)]),
    (2048, 32, [(256, True), (128, True), (128, True)]),
    (4864, 16, [(896, True)]),
    (6144, 128, [(64, True), (64, True)]),
    (1024, 256, [(48, True), (80, True)]),
]
ROWS = [1, 2, 16, 63, 65, 128, 1000, 1024, 1025, 3000]


def needs_hopper() -> None:
    if not INTERPRETED and generation(torch.device("cuda")) != HOPPER:
        pytest.skip("only Hopper GPUs load so")


class Group:
    """Linear layers with the same input, and their adapters."""

    def __init__(self, depth: int, rank: int, layers: list[tuple[int, bool]], rows: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE, DTYPE)

        self.rank, adapters = rank, [width for width, has_one in layers if has_one]
        self.x, self.products = normal(rows, depth), normal(rows, sum(width for width, _ in layers))
        self.first = normal(rank * len(adapters), depth) / depth**0.5
        self.seconds = [normal(width, rank) / rank**0.5 for width in adapters]
        ends = torch.tensor([width for width, _ in layers]).cumsum(0).tolist()
        self.columns = [end - width for end, (width, has_one) in zip(ends, layers, strict=True) if has_one]

    def added(self, rows: slice = slice(None)) -> torch.Tensor:
        from ebbtide.model import adapter_kernels

        products = self.products[rows].clone()
        low = adapter_kernels.shrink(self.x[rows], self.first)
        adapter_kernels.expand(products, low, self.seconds, self.columns, 0.7)
        return products

    def wanted(self, rounded: torch.dtype) -> torch.Tensor:
        """The same in float64, with x A.T rounded as the kernels round it."""
        low = (self.x.double() @ self.first.double().t()).to(rounded).double()
        products = self.products.double()
        for number, (second, column) in enumerate(zip(self.seconds, self.columns, strict=True)):
            part = low[:, number * self.rank : (number + 1) * self.rank]
            products[:, column : column + len(second)] += 0.7 * (part @ second.double().t())
        return products


@pytest.mark.parametrize(("depth", "rank", "layers"), CASES)
def test_the_products_with_what_adapters_add(depth: int, rank: int, layers: list[tuple[int, bool]]) -> None:
    for rows in (3, 70) if INTERPRETED else (1, 70, 2000):
        group = Group(depth, rank, layers, rows)
        found, wanted = group.added().double(), group.wanted(DTYPE)
        assert float((found - wanted).norm()) <= (1e-3 if INTERPRETED else 5e-3) * float(wanted.norm())
        worst = float((found - wanted).abs().max())
        assert worst <= (0.01 if INTERPRETED else 0.08)
        without = found.clone()
        for second, column in zip(group.seconds, group.columns, strict=True):
            without[:, column : column + len(second)] = group.products[:, column : column + len(second)].double()
        assert torch.equal(without, group.products.double())  # layers without an adapter


@pytest.mark.parametrize(("depth", "rank", "layers"), CASES[1:4] if INTERPRETED else CASES)
def test_a_row_has_the_same_bits_among_any_others(depth: int, rank: int, layers: list[tuple[int, bool]]) -> None:
    counts = [1, 65, 1025] if INTERPRETED else ROWS
    group = Group(depth, rank, layers, counts[-1])
    many = group.added()
    for rows in counts:
        assert torch.equal(group.added(slice(rows)), many[:rows]), rows
        assert torch.equal(group.added(slice(counts[-1] - rows, None)), many[-rows:]), rows


@pytest.mark.parametrize(
    ("depth", "channels"), [(264, 1), (1096, 20), (2048, 96), (4096, 96), (4096, 64), (12288, 32), (1280, 300)]
)
def test_few_rows_that_are_loaded_by_descriptors_have_the_same_bits(depth, channels, monkeypatch) -> None:
    from ebbtide.model import adapter_kernels

    needs_hopper()
    ways = []
    by_descriptors = adapter_kernels._shrink_by_descriptors

    def counted(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        ways.append(len(x))
        return by_descriptors(x, first)

    monkeypatch.setattr(adapter_kernels, "_shrink_by_descriptors", counted)
    counts = [3, 128] if INTERPRETED else [1, 3, 16, 63, 64, 65, 127, 128]
    for rows in counts:
        group = Group(depth, channels, [(16, True)], rows)
        monkeypatch.setattr(adapter_kernels, "_is_hopper", lambda x: False)
        wanted = adapter_kernels.shrink(group.x, group.first)
        monkeypatch.setattr(adapter_kernels, "_is_hopper", lambda x: True)
        for _ in range(2):  # The first leaves the counts as they were.
            assert _same(adapter_kernels.shrink(group.x, group.first), wanted), rows
    assert ways == [rows for rows in counts for _ in range(2)]
    assert not adapter_kernels._ended(group.x.device).any()


def test_adapters_that_add_nothing_change_no_bit() -> None:
    group = Group(1100, 8, [(96, True), (40, True)], 20)
    group.seconds = [torch.zeros_like(second) for second in group.seconds]
    assert torch.equal(group.added(), group.products)


LARGE = 1.0 if INTERPRETED else 20.0  # a scale with which a bit that is off in x A.T is seen
LAYERS = [  # inner dimension, widths of the layers
    (64, [64]),
    (1280, [128, 64, 64]),
]
ON_A_GPU = [
    *[(640, [256, 128, 128]), (1216, [640]), (256, [640])],
    *[(2048, [2048, 1024, 1024]), (6144, [2048]), (4096, [4096]), (1024, [3072])],
]


@pytest.mark.parametrize(("depth", "widths"), LAYERS if INTERPRETED else LAYERS + ON_A_GPU)
@pytest.mark.parametrize("rank", [1, 8, 32, 64])
@pytest.mark.parametrize("rows", [3] if INTERPRETED else [1, 16, 20, 32, 64, 128])
@pytest.mark.parametrize("biased", [False, True])
def test_matmuls_that_add_them_have_the_same_bits(depth, widths, rank, rows, biased, monkeypatch) -> None:
    from ebbtide.model import adapted_linear_kernels, adapter_kernels, linear_kernels

    needs_hopper()
    for module in (linear_kernels, adapted_linear_kernels):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    group = Group(depth, rank, [(width, True) for width in widths], rows)
    weight = torch.randn(sum(widths), depth, device=DEVICE).to(DTYPE) / depth**0.5
    bias = torch.randn(sum(widths), device=DEVICE).to(DTYPE) if biased else None
    adapters = adapter_kernels.Adapters(group.first, group.seconds, group.columns, LARGE)
    with torch.no_grad():
        assert adapted_linear_kernels.takes(group.x, weight, adapters)
        found = adapted_linear_kernels.linear(group.x, weight, bias, adapters)
        wanted = linear_kernels.linear(group.x, weight, bias)
    low = adapter_kernels.shrink(group.x, group.first)
    adapter_kernels.expand(wanted, low, group.seconds, group.columns, LARGE)
    assert _same(found, wanted)


@pytest.mark.parametrize(
    ("depth", "width"), [(64, 64), (1280, 96)] if INTERPRETED else [(2048, 6144), (1024, 3072), (640, 1216)]
)
@pytest.mark.parametrize(("rank", "kind"), [(1, "silu"), (8, "silu"), (8, "gelu_tanh"), (32, "silu")])
@pytest.mark.parametrize("rows", [3] if INTERPRETED else [1, 3, 16, 32, 64, 128])
def test_gated_matmuls_that_add_them_have_the_same_bits(depth, width, rank, kind, rows, monkeypatch) -> None:
    from ebbtide.model import adapted_linear_kernels, adapter_kernels, block_kernels, linear_kernels

    needs_hopper()
    for module in (linear_kernels, adapted_linear_kernels):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    group = Group(depth, rank, [(width, True), (width, True)], rows)
    weight = torch.randn(2 * width, depth, device=DEVICE).to(DTYPE) / depth**0.5
    adapters = adapter_kernels.Adapters(group.first, group.seconds, group.columns, LARGE)
    with torch.no_grad():
        assert adapted_linear_kernels.takes_gated(group.x, weight, adapters)
        found = adapted_linear_kernels.gated_linear(group.x, weight, kind, adapters)
        halves = linear_kernels.linear(group.x, weight, None)
    adapter_kernels.expand(halves, adapter_kernels.shrink(group.x, group.first), group.seconds, group.columns, LARGE)
    assert _same(found, block_kernels.activate(halves, kind))


def _same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """The interpreter multiplies matrices of other sizes in another order."""
    return torch.allclose(found, wanted, atol=2e-2) if INTERPRETED else torch.equal(found, wanted)


@pytest.mark.skipif(INTERPRETED, reason="there are no graphs")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("depth", [640, 2048, 12288])
def test_in_a_graph_what_is_added_waits_for_its_branch(depth, gated) -> None:
    """The branch takes longer than the kernel beside it, and has other numbers in each replay."""
    from ebbtide.model import adapter_kernels
    from ebbtide.system.side_stream import begin_beside, capture_stream

    group = Group(depth, 32, [(64, True)] * 2, 128)
    before = group.products.clone()

    def work() -> torch.Tensor:
        low, join = begin_beside(lambda: adapter_kernels.shrink(group.x, group.first), group.x.device)
        products = before + 1
        join()
        if gated:
            return adapter_kernels.expand_gated(products, low, group.seconds, 0.7, "silu")
        adapter_kernels.expand(products, low, group.seconds, group.columns, 0.7)
        return products

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capture_stream(group.x.device)):
        result = work()
    for _ in range(30):
        group.x.normal_()
        graph.replay()
        wanted = work()
        assert torch.equal(result, wanted)


@pytest.mark.skipif(INTERPRETED, reason="there are no graphs")
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_matmuls_that_add_them_follow_each_other_in_a_graph(rows) -> None:
    """Each starts early, and waits for what the one before it computes, in replays with other numbers."""
    from ebbtide.model import adapted_linear_kernels, adapter_kernels, block_kernels, linear_kernels

    needs_hopper()
    hidden, width, rank, scale = 1024, 3072, 32, 0.5
    inner = Group(hidden, rank, [(hidden, True)], rows)
    gated = Group(hidden, rank, [(width, True)] * 2, rows)
    outer = Group(width, rank, [(hidden, True)], rows)
    weights = [
        torch.randn(outside, inside, device=DEVICE).to(DTYPE) / inside**0.5
        for outside, inside in ((hidden, hidden), (2 * width, hidden), (hidden, width))
    ]
    given = [adapter_kernels.Adapters(one.first, one.seconds, one.columns, scale) for one in (inner, gated, outer)]
    start = inner.x.clone()

    def together() -> torch.Tensor:
        x = start
        for _ in range(6):
            x = adapted_linear_kernels.linear(x, weights[0], None, given[0])
            x = adapted_linear_kernels.gated_linear(x, weights[1], "silu", given[1])
            x = adapted_linear_kernels.linear(x, weights[2], None, given[2])
        return x

    def apart() -> torch.Tensor:
        x = start
        for _ in range(6):
            for number, (weight, adapters) in enumerate(zip(weights, given, strict=True)):
                products = linear_kernels.linear(x, weight, None)
                low = adapter_kernels.shrink(x, adapters.first)
                adapter_kernels.expand(products, low, adapters.seconds, adapters.columns, scale)
                x = block_kernels.activate(products, "silu") if number == 1 else products
        return x

    with torch.no_grad():
        assert torch.equal(together(), apart())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = together()
        for _ in range(20):
            start.normal_()
            graph.replay()
            assert torch.equal(result, apart())


@pytest.mark.parametrize("rows", [3, 65])
def test_the_activation_of_products_with_adapters_is_that_after_both(rows) -> None:
    from ebbtide.model import adapter_kernels, block_kernels

    group = Group(640, 20, [(96, True)] * 2, rows)
    low = adapter_kernels.shrink(group.x, group.first)
    found = adapter_kernels.expand_gated(group.products.clone(), low, group.seconds, 0.7, "silu")
    assert torch.equal(found, block_kernels.activate(group.added(), "silu"))
