"""Quantized matrices on a GPU: the numbers are those of the CPU, and products have the bits of the numbers' own."""

import pytest
import torch
from test_paged_kernels import DEVICE, INTERPRETED

from ebbtide.model.linear import linear
from ebbtide.model.quantize import Quantized, dequantize, linear_in_slices, quantize, quantized_linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU")]

KINDS = ["float8", "int4"]
SHAPES = [(64, 128), (70, 192)] if INTERPRETED else [(64, 128), (200, 896), (96, 192), (2048, 512)]


@pytest.fixture(autouse=True)
def numbers_in_float32(monkeypatch) -> None:
    """Gives the interpreter, which adds and multiplies bfloat16 as integers, another way to the same numbers."""
    import triton.language as tl

    from ebbtide.model import quantized_kernels

    def numbers(codes, of_group):
        factor = (of_group >> 4 & 15) + 1
        return ((codes.to(tl.int32) - (of_group & 15)) * factor).to(tl.float32).to(tl.bfloat16)

    if INTERPRETED:
        monkeypatch.setattr(quantized_kernels, "_numbers", numbers)


def on_cpu(matrix: Quantized) -> Quantized:
    return Quantized(*(one.cpu() for one in matrix))


def random_matrix(width: int, depth: int) -> torch.Tensor:
    torch.manual_seed(width + depth)
    return (torch.randn(width, depth, device=DEVICE) * torch.rand(width, 1, device=DEVICE)).bfloat16()


def numbers_of(matrix: Quantized) -> torch.Tensor:
    """By the kernel."""
    from ebbtide.model import quantized_kernels

    found = torch.empty((len(matrix.codes), matrix.columns), dtype=torch.bfloat16, device=DEVICE)
    quantized_kernels.dequantize(*matrix, found)
    return found


def product_of(x: torch.Tensor, matrix: Quantized, bias: torch.Tensor | None) -> torch.Tensor:
    """By the kernel, into some columns of a wider tensor."""
    from ebbtide.model import quantized_kernels

    wide = torch.full((len(x), len(matrix.codes) + 8), 7, dtype=x.dtype, device=DEVICE)
    quantized_kernels.linear(x, *matrix, bias=bias, out=wide[:, 4:-4])
    assert (wide[:, :4] == 7).all()
    assert (wide[:, -4:] == 7).all()
    return wide[:, 4:-4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "depth"), [*SHAPES, (70, 96)])
def test_codes_and_numbers_are_those_of_the_cpu(kind, width, depth) -> None:
    weight = random_matrix(width, depth)
    weight[0, :2] = torch.tensor([-104, 76])  # A 15th of the range is 12, and a little more if it is multiplied.
    weight[0, 2:] = 0.5
    matrix = quantize(weight, kind)
    wanted = quantize(weight.cpu(), kind)
    for ours, theirs in zip(matrix, wanted, strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))
    numbers = numbers_of(matrix)
    assert torch.equal(numbers.cpu(), dequantize(on_cpu(matrix), torch.bfloat16))


@pytest.mark.parametrize("native", [False, True])
def test_all_codes_of_8_bits_are_numbers_on_every_gpu(native, monkeypatch) -> None:
    """Those before Ada have no instruction for it."""
    from ebbtide.model import quantized_kernels

    if native and not INTERPRETED and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that converts from float8")
    monkeypatch.setattr(quantized_kernels, "_has_float8", lambda device: native)
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    codes = torch.where((codes & 127) == 127, 0, codes)  # Those are no numbers.
    matrix = Quantized(codes.view(torch.float8_e4m3fn), torch.tensor([[0.5], [4.0]], dtype=torch.bfloat16))
    there = Quantized(matrix.codes.to(DEVICE), matrix.scale.to(DEVICE))
    wanted = dequantize(matrix, torch.bfloat16)
    assert torch.equal(numbers_of(there).cpu(), wanted)
    x = torch.eye(128, device=DEVICE, dtype=torch.float32 if INTERPRETED else torch.bfloat16)
    assert torch.equal(product_of(x, there, None).cpu().to(wanted.dtype), wanted.t())


def test_all_codes_of_4_bits_are_numbers() -> None:
    """With every code for 0, every factor, and the least and large scales."""
    of_groups = torch.arange(256).repeat(4).view(-1, 8).byte()  # [rows, groups]
    scales = 2.0 ** torch.tensor([-126, -9, 0, 100]).repeat_interleave(256 // 8)[:, None]
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).expand(len(of_groups), 4, 32)
    matrix = Quantized((codes | codes << 4).flatten(1), torch.cat([of_groups, scales.float().view(torch.uint8)], 1))
    numbers = numbers_of(Quantized(*(one.to(DEVICE) for one in matrix))).cpu()
    exact = (codes.repeat(1, 2, 1).double() - (of_groups & 15)[..., None]) * ((of_groups >> 4) + 1)[..., None]
    assert torch.equal(numbers.double(), (exact * scales[..., None]).flatten(1))
    assert torch.equal(numbers, dequantize(matrix, torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [3, 130] if INTERPRETED else [1, 2, 3, 16, 33, 64, 100, 128, 130, 256])
@pytest.mark.parametrize(("width", "depth"), SHAPES)
def test_products_of_few_rows_are_those_of_the_numbers(kind, biased, rows, width, depth) -> None:
    from ebbtide.model import quantized_kernels

    matrix = quantize(random_matrix(width, depth), kind)
    dtype = torch.float32 if INTERPRETED else torch.bfloat16  # The interpreter cannot multiply matrices of bfloat16.
    x = torch.randn(rows, depth, device=DEVICE).to(dtype)
    bias = torch.randn(width, device=DEVICE).to(dtype) if biased else None
    assert INTERPRETED or quantized_kernels.takes(x, *matrix)
    ours = product_of(x, matrix, bias)
    wanted = x.double() @ numbers_of(matrix).double().t() + (0 if bias is None else bias.double())
    # What is rounded to bfloat16 is off by a float32 sum's error at most.
    assert torch.allclose(ours.double(), wanted, rtol=2**-8, atol=1e-3)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies matrices of other sizes in another order")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(128, 64, 4, 3), (64, 64, 4, 5), (64, 128, 8, 3), (16, 64, 4, 2)])
def test_a_tile_changes_no_bit(kind, shape) -> None:
    from ebbtide.model import quantized_kernels

    matrix = quantize(random_matrix(1152, 896), kind)
    x = torch.randn((100, 896), device=DEVICE).bfloat16()
    out = torch.empty((100, 1152), device=DEVICE, dtype=x.dtype)
    quantized_kernels.linear(x, *matrix, bias=None, out=out, tile=quantized_kernels.Tile(*shape))
    assert torch.equal(out, product_of(x, matrix, None))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies matrices of other sizes in another order")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "depth"), [(2048, 2048), (4096, 1024), (6144, 4096), (1152, 896), (896, 4864)])
def test_a_row_has_the_same_bits_among_few_as_among_many(kind, width, depth) -> None:
    from ebbtide.system.torch_internals import without_split_k

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("matmuls of few and many rows have the same bits only on GPUs of the Hopper generation")
    matrix = quantize(random_matrix(width, depth), kind)
    x, bias = (torch.randn(size, device=DEVICE).bfloat16() for size in ((1000, depth), (width,)))
    with torch.no_grad(), without_split_k():
        for given in (None, bias):
            many = quantized_linear(x, [matrix], given)
            for rows in (1, 2, 16, 40, 64, 128, 256):
                assert torch.equal(quantized_linear(x[:rows], [matrix], given), many[:rows]), rows


@pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies matrices of other sizes in another order")
@pytest.mark.parametrize(("queries", "keys", "depth"), [(4096, 1024, 4096), (896, 128, 896), (5120, 1024, 5120)])
def test_queries_in_4_bits_beside_keys_and_values_in_8_have_the_same_bits(queries, keys, depth) -> None:
    from ebbtide.system.torch_internals import without_split_k

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("matmuls of few and many rows have the same bits only on GPUs of the Hopper generation")
    both = [quantize(random_matrix(queries, depth), "int4"), quantize(random_matrix(2 * keys, depth), "float8")]
    x, bias = (torch.randn(size, device=DEVICE).bfloat16() for size in ((1000, depth), (queries + 2 * keys,)))
    with torch.no_grad(), without_split_k():
        for given in (None, bias):
            many = quantized_linear(x, both, given)
            numbers = torch.cat([dequantize(one, torch.bfloat16) for one in both])
            assert torch.equal(many, linear(x, numbers, given))
            for rows in (1, 2, 16, 40, 64, 128, 256):
                assert torch.equal(quantized_linear(x[:rows], both, given), many[:rows]), rows


@pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies matrices of other sizes in another order")
@pytest.mark.parametrize(
    ("vocabulary", "hidden", "biased"),
    [
        (151_936, 2048, False),
        (151_936, 2048, True),
        (151_936, 5120, False),
        (131_072, 5120, False),
        (32_003, 2560, False),
    ],
)
def test_a_head_in_slices_has_the_same_bits_among_few_rows(vocabulary, hidden, biased) -> None:
    """As a training's head, and a sampler's, whose vocabulary ends in the middle of a slice."""
    from ebbtide.system.torch_internals import without_split_k

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("matmuls of few and many rows have the same bits only on GPUs of the Hopper generation")
    matrix = quantize(random_matrix(vocabulary, hidden), "float8")
    x = torch.randn((1100, hidden), device=DEVICE).bfloat16()
    bias = torch.randn(vocabulary, device=DEVICE).bfloat16() if biased else None
    with without_split_k(), torch.no_grad():
        many = linear_in_slices(x, matrix, bias)
        assert torch.equal(many, linear(x, dequantize(matrix, torch.bfloat16), bias))
        for rows in (1, 16, 100, 256, 300):
            assert torch.equal(linear_in_slices(x[:rows], matrix, bias), many[:rows]), rows
