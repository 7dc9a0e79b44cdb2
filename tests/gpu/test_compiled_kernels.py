"""What Triton makes of matmuls on Hopper, read from the compiled code. This needs Triton, but no GPU."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

TILES = [
    *((rows, 64, 4, stages) for rows in (16, 32, 64, 128) for stages in (3, 5)),
    (128, 128, 8, 3),
]  # rows, columns, warps, stages: those of `tile_of`, and one that a benchmark tries
TYPES = {
    **dict.fromkeys(("x", "bias", "out", "scale", "query", "key", "value", "sinks"), "*bf16"), "codes": "*u8",
    **dict.fromkeys(("words", "tiles", "sequences", "prompt_tables", "own_tables"), "*i32"), "addresses": "*i64",
    **dict.fromkeys(("rows", "width", "stride", "layer", "prompt_width", "own_width", "span"), "i32"), "sums": "*fp32",
    **dict.fromkeys(("key_step", "value_step", "tokens", "per_sequence"), "i32"),
}  # fmt: skip


class Instruction(NamedTuple):
    is_conditional: bool
    text: str


def overwritten_too_early(code: str) -> list[str]:
    """The asynchronous matmuls (HGMMA) that read numbers from registers, of which one is written again before the
    matmul was waited for. `code`: as nvdisasm prints it."""
    labels, instructions = dict[str, int](), list[Instruction]()
    for line in map(str.strip, code.splitlines()):
        if found := re.match(r"(\.L_x_\d+):", line):
            labels[found[1]] = len(instructions)
        elif found := re.match(r"/\*[0-9a-f]{4,}\*/ +(@!?U?P\w+ +)?(.*?) ?;", line):
            instructions.append(Instruction(found[1] is not None, found[2]))
    found = []
    for place, (_, text) in enumerate(instructions):
        read = re.match(r"HGMMA\S* R\d+, R(\d+), gdesc", text)
        if read and (problem := _overwriter(instructions, labels, place, int(read[1]))):
            found.append(f"{text}: {problem}")
    return found


def _overwriter(instructions: list[Instruction], labels: dict[str, int], place: int, first: int) -> str:
    """The instruction that writes to the four registers of a matmul before it was waited for, on any way through the
    code; empty if there is none."""
    registers = set(range(first, first + 4))
    # (place, groups of matmuls that ended after its own, or -1 while its own has not)
    ahead, seen = [(place, -1)], set[tuple[int, int]]()
    while ahead:
        at, after = state = ahead.pop()
        if state in seen or at >= len(instructions):
            continue
        seen.add(state)
        is_conditional, text = instructions[at]
        if text.startswith("HGMMA"):
            after = min(after + ("gsb0" in text), 16)
        elif waited := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", text):
            if after >= int(waited[1], 16):
                continue
        elif registers & set(_written(text)):
            return text
        jump = re.match(r"BRA.*\((\.L_x_\d+)\)", text)
        if jump:
            ahead.append((labels[jump[1]], after))
        if is_conditional or not (jump or text.startswith("EXIT")):
            ahead.append((at + 1, after))
    return ""


def _written(text: str) -> Iterator[int]:
    """The registers that an instruction writes."""
    name = text.split()[0]
    if name.startswith(("ST", "LDGSTS", "BAR", "BRA", "R2UR", "WARPGROUP", "ISETP", "FSETP", "HSETP", "PLOP")):
        return
    if found := re.match(r"\S+ +(?:U?P\w+, *)*R(\d+)", text):
        is_pair = re.search(r"\.64|\.WIDE|88\.2$", name) or (name.startswith("CS2R") and ".32" not in name)
        count = 4 if re.search(r"\.128|88\.4$", name) else 2 if is_pair else 1
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
@pytest.mark.parametrize(("group", "depth"), [(None, 4096), (None, 1216), (32, 4096), (16, 1216), (16, 192)])
def test_no_matmul_of_codes_reads_registers_that_were_written_again(group, depth, tile, tmp_path) -> None:
    """`group`: of codes of 4 bits; None for 8."""
    from ebbtide.model import quantized_kernels

    rows, columns, warps, stages = tile
    values: dict[str, object] = {"tile": rows, "columns": columns, "biased": depth != 4096}
    if group is None:
        kernel = quantized_kernels._linear_float8
        values |= {"depth": depth, "at_once": quantized_kernels.DEPTH, "native": True}
    else:
        kernel = quantized_kernels._linear_int4
        values |= {"blocks": depth // (4 * group), "group": group}
    code = compiled(kernel, values, tmp_path, num_warps=warps, num_stages=stages)
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


MATMUL = "HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0"


def numbered(*lines: str) -> str:
    return "\n".join(line if line.endswith(":") else f"/*{place:04x}*/ {line} ;" for place, line in enumerate(lines))


@pytest.mark.parametrize("load", ["LDS.U16 R8, [R1]", "LDS.128 R8, [R1]", "LDSM.16.MT88.4 R8, [R1]", "CS2R R10, SRZ"])
def test_registers_that_are_written_again_are_found(load) -> None:
    wait, other = "WARPGROUP.DEPBAR.LE gsb0, 0x0", MATMUL.replace("R8", "R4")
    loop = [".L_x_0:", load, other, wait, MATMUL, "@P0 BRA `(.L_x_0)", "EXIT"]
    for lines in (
        loop,
        [MATMUL, load],
        [".L_x_0:", MATMUL, "@P0 BRA `(.L_x_0)", load, wait],
        [".L_x_0:", load, ".L_x_1:", MATMUL, "@P0 BRA `(.L_x_1)", "@P1 BRA `(.L_x_0)", wait],
        [MATMUL, other, "WARPGROUP.DEPBAR.LE gsb0, 0x2", load],
    ):
        assert [one.startswith(f"{MATMUL}: {load}") for one in overwritten_too_early(numbered(*lines))] == [True]
    for lines in (
        [*loop[:5], wait, *loop[5:]],
        [MATMUL, wait, load],
        [MATMUL, other, "WARPGROUP.DEPBAR.LE gsb0, 0x1", load],
        [MATMUL, load.replace("R8", "R2").replace("R10", "R20")],
        [MATMUL, "BRA `(.L_x_0)", load, ".L_x_0:", "EXIT"],
        ["ISETP.GE.AND P0, PT, R8, R9, PT", MATMUL, "ISETP.GE.AND P0, PT, R8, R9, PT"],
    ):
        assert not overwritten_too_early(numbered(*lines))
