"""What Triton makes of matmuls on Hopper, read from the compiled code. This needs Triton, but no GPU."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

TILES = [(16, 64, 4, 3), (32, 64, 4, 5), (64, 64, 4, 5), (128, 64, 4, 3), (128, 64, 4, 5), (128, 128, 8, 3)]
TYPES = {
    **dict.fromkeys(("x", "bias", "out", "scale", "query", "key", "value", "sinks"), "*bf16"), "codes": "*u8",
    **dict.fromkeys(("words", "tiles", "sequences", "prompt_tables", "own_tables"), "*i32"), "addresses": "*i64",
    **dict.fromkeys(("rows", "width", "stride", "layer", "prompt_width", "own_width", "span"), "i32"), "sums": "*fp32",
    **dict.fromkeys(("key_step", "value_step", "tokens", "per_sequence"), "i32"),
}  # fmt: skip


def overwritten_too_early(code: str) -> list[str]:
    """The asynchronous matmuls (HGMMA) that read numbers from registers, of which one is written again before the
    matmul was waited for. `code`: as nvdisasm prints it."""
    lines = [line.strip() for line in code.splitlines()]
    labels, instructions = dict[str, int](), list[str]()
    for line in lines:
        if found := re.match(r"(\.L_x_\d+):", line):
            labels[found[1]] = len(instructions)
        elif found := re.match(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\d+ +)?(.*?) ?;", line):
            instructions.append(found[1])
    loops = {
        place: labels[found[1]]
        for place, text in enumerate(instructions)
        if (found := re.match(r"BRA.*\((\.L_x_\d+)\)", text)) and labels[found[1]] < place
    }
    found = []
    for place, text in enumerate(instructions):
        read = re.match(r"HGMMA\S* R\d+, R(\d+), gdesc", text)
        if read and (problem := _overwriter(instructions, loops, place, int(read[1]))):
            found.append(f"{text}: {problem}")
    return found


def _overwriter(instructions: list[str], loops: dict[int, int], place: int, first: int) -> str:
    """The instruction that writes to the four registers of a matmul before it was waited for; empty if there is none.
    Only in the loop around it: behind that all are waited for."""
    ends = [end for end, start in loops.items() if start <= place < end]
    if not ends:
        return ""
    after, closed = 0, False  # groups of matmuls that were closed since, and whether the matmul's own is
    end = min(ends)
    order = [*range(place, end + 1), *range(loops[end], place)]
    for at in order:
        text = instructions[at]
        if text.startswith("HGMMA") and "gsb0" in text:
            after, closed = (after + 1, True) if closed else (0, True)
        elif waited := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", text):
            if closed and after >= int(waited[1], 16):
                return ""
        elif set(_written(text)) & set(range(first, first + 4)):
            return text
    return ""


def _written(text: str) -> Iterator[int]:
    """The registers that an instruction writes."""
    name = text.split()[0]
    if name.startswith(("HGMMA", "ST", "LDGSTS", "BAR", "BRA", "R2UR", "WARPGROUP")):
        return
    if found := re.match(r"\S+ +(?:U?P\w+, *)*R(\d+)", text):
        count = 4 if ".128" in name or ".M88.4" in name else 2 if ".64" in name or ".WIDE" in name else 1
        yield from range(int(found[1]), int(found[1]) + count)


def compiled(kernel, values: dict[str, object], folder: Path, **options: object) -> str:
    """The code of a kernel for Hopper, with `values` of its constants; of parameters that are numbers as well."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {name: "constexpr" if name in values else TYPES[name] for name in names}
    constants = {(names.index(name),): value for name, value in values.items()}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if types[name][0] == "*"}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    file = folder / "kernel.cubin"
    file.write_bytes(found.asm["cubin"])
    program = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    return subprocess.run([program, "-c", file], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("group", [None, 64, 32])
def test_no_matmul_of_codes_reads_registers_that_were_written_again(group, tile, tmp_path) -> None:
    """`group`: of codes of 4 bits; None for 8."""
    from ebbtide.model import quantized_kernels

    rows, columns, warps, stages = tile
    values: dict[str, object] = {"tile": rows, "columns": columns, "biased": False}
    if group is None:
        kernel, more = (
            quantized_kernels._linear_float8,
            {"depth": 4096, "at_once": quantized_kernels.DEPTH, "native": True},
        )
    else:
        kernel, more = quantized_kernels._linear_int4, {"pairs": 2048 // group, "group": group}
    code = compiled(kernel, values | more, tmp_path, num_warps=warps, num_stages=stages)
    assert "HGMMA" in code
    assert not overwritten_too_early(code)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("channels", [64, 128])
def test_no_matmul_of_attention_reads_registers_that_were_written_again(channels, paged, tmp_path) -> None:
    from ebbtide.model import attention_kernels as kernels
    from ebbtide.model.block_kernels import UNFUSED

    sizes = dict.fromkeys(("channels", "padded", "value_channels", "padded_values"), channels)
    tiles = {"split": kernels.SPLIT, "strip": kernels.STRIP, "tile": kernels.TILE, "parts": 1}
    kind = {"mask": 0, "softcap": 0.0, "has_sinks": False, "paged": paged, "precision": "tf32"}
    values = {"heads": 32, "kv_heads": 8, "block": 64, "scale": 0.125, **sizes, **tiles, **kind}
    options = {"num_warps": kernels.WARPS, "num_stages": kernels.STAGES, **UNFUSED}
    code = compiled(kernels._attend, values, tmp_path, **options)
    assert "HGMMA" in code
    assert not overwritten_too_early(code)


def test_registers_that_are_written_again_are_found() -> None:
    loop = """
        .L_x_0:
        /*0000*/ LDS.U16 R8, [R1] ;
        /*0010*/ HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR4], R24, gsb0 ;
        /*0020*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0030*/ HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0 ;
        /*0040*/ @P0 BRA `(.L_x_0) ;
    """
    assert [one.split(":")[0] for one in overwritten_too_early(loop)] == [
        "HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0"
    ]
    assert not overwritten_too_early(loop.replace("LDS.U16 R8", "LDS.U16 R2"))
    waits = loop.replace("/*0040*/", "/*0038*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n        /*0040*/")
    assert not overwritten_too_early(waits)
    assert overwritten_too_early(waits.replace("0x0 ;\n        /*0040*/", "0x1 ;\n        /*0040*/"))
