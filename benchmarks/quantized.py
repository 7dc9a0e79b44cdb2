"""How far a quantized base (`model.base`) is from the weights in bfloat16: log-probs of given texts, beside those of
torchao at the same bits, where torchao is installed.

    python benchmarks/quantized.py MODEL TEXTS [COUNT]

MODEL: as `model.path`. TEXTS: JSON lines with `question` and `answer`, such as GSM8K's test problems; the tokens of the
first COUNT answers are compared. The weights are rounded to bfloat16 first, and everything is computed in float32, so
that nothing but the quantization differs: row-wise float8, and 4.25 bits a number in 4: ours has a byte for each 32
numbers (and 32 bits for each row), torchao's a scale and an offset of 16 bits each for each 128. In 4 bits the layers
that make keys and values have 8 on both sides; "alike" are figures of all layers in 4.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from common import Row, beginning, kept, save
from torch import Tensor

from ebbtide.config.model import ModelConfig
from ebbtide.model.families import family_of
from ebbtide.model.load import LoadedModel, layers_of, load_pretrained
from ebbtide.model.quantize import dequantize, quantize
from ebbtide.model.quantized_sizes import group_size, layer_kind

Way = Callable[[Tensor], Tensor]


def ways() -> dict[str, Way]:
    """Name -> the numbers of a matrix after quantization."""
    found: dict[str, Way] = {
        "float8, Ebbtide": lambda weight: dequantize(quantize(weight, "float8"), torch.float32),
        "int4, Ebbtide": lambda weight: dequantize(quantize(weight, "int4"), torch.float32),
    }
    try:
        from torchao.quantization import PerRow, quant_primitives
        from torchao.quantization.quantize_.workflows import Float8Tensor
    except ImportError:
        print("torchao is not installed: no figures of it")
        return found

    def float8(weight: Tensor) -> Tensor:
        found: Tensor = Float8Tensor.from_hp(weight.bfloat16(), granularity=PerRow()).dequantize().float()
        return found

    def int4(weight: Tensor) -> Tensor:
        block = (1, 4 * group_size(weight.shape[1]))
        kind, least, most = torch.int32, 0, 15
        numbers = weight.bfloat16()
        scale, zero = quant_primitives._choose_qparams_affine_tinygemm(
            numbers,
            quant_primitives.MappingType.ASYMMETRIC,
            block,
            kind,
            least,
            most,
            1e-6,
            torch.bfloat16,
            torch.bfloat16,
        )
        codes = quant_primitives._quantize_affine_tinygemm(numbers, block, scale, zero, kind, least, most)
        found: Tensor = quant_primitives._dequantize_affine_tinygemm(
            codes, block, scale, zero, kind, least, most, output_dtype=torch.bfloat16
        ).float()
        return found

    return {**found, "float8, torchao": float8, "int4, torchao": int4}


@torch.no_grad()
def logprobs(loaded: LoadedModel, texts: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """(log-probs of the answers' tokens, those of the whole vocabulary before them)."""
    found = []
    for question, answer in texts:
        tokens = torch.tensor([question + answer], device=loaded.model.device)
        logits = loaded.model(tokens, logits_to_keep=len(answer) + 1).logits[0, :-1]
        found.append(logits.float().log_softmax(-1))
    whole = torch.cat(found)
    answers = torch.tensor([token for _, answer in texts for token in answer], device=whole.device)
    return whole.gather(1, answers[:, None])[:, 0], whole


@torch.no_grad()
def main() -> None:
    path, file, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 20
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_pretrained(ModelConfig(path=path), device, torch.float32)
    encode = loaded.tokenizer.encode
    problems = [json.loads(line) for line in file.read_text().splitlines()[:count]]
    texts = [(encode(one["question"] + "\n"), encode(one["answer"], add_special_tokens=False)) for one in problems]
    blocks = layers_of(loaded.model)
    assert blocks is not None
    family = family_of(loaded.model)
    inside = [pair for block in blocks for pair in block.named_modules() if isinstance(pair[1], torch.nn.Linear)]
    layers = [module for _, module in inside]
    is_wide = [layer_kind(path, "int4", family) == "float8" for path, _ in inside]
    for layer in layers:
        layer.weight.copy_(layer.weight.bfloat16())
    before = [layer.weight.cpu().clone() for layer in layers]
    wanted, all_wanted = logprobs(loaded, texts)
    name = Path(path).stem
    rows = [Row(name, "tokens compared", len(wanted), "")]
    given = ways()
    for way in [*given, *(f"{one}, alike" for one in given if one.startswith("int4"))]:
        error = total = 0.0
        for layer, weight, wide in zip(layers, before, is_wide, strict=True):
            own = way.removesuffix(", alike")
            mixes = wide and own == way
            numbers = given[own.replace("int4", "float8") if mixes else own](weight.to(device))
            error += float((numbers.cpu() - weight).square().sum())
            total += float(weight.square().sum())
            layer.weight.copy_(numbers)
        found, whole = logprobs(loaded, texts)
        divergence = (all_wanted.exp() * (all_wanted - whole)).sum(-1)
        rows += [
            Row(f"{name}: {way}", "weights, off by", 100 * (error / total) ** 0.5, "%"),
            Row(f"{name}: {way}", "log-probs, mean distance", float((found - wanted).abs().mean()), "nats"),
            Row(f"{name}: {way}", "divergence from bfloat16", float(divergence.mean()), "nats"),
        ]
        print(rows[-3:], flush=True)
    save("quantized", [*kept("quantized", beginning(name)), *rows])


if __name__ == "__main__":
    main()
