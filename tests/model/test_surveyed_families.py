"""The families that people use train with both engines, as tiny copies with their real patterns of layers; and the
copies are able to show what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from family_survey import CLOSE, CLOSE_GRADIENTS, examine, mismatch_in_16_bits, own_logprobs
from tiny_families import tiny_model

NAMED = (
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"),  # gated delta nets
    *("granitemoehybrid", "nemotron_h", "falcon_h1"),  # Mamba 2
    "lfm2",  # short convolutions
    *("gpt_oss", "gemma2", "llama4_text"),  # sinks; soft caps; chunks
    *("gemma3_text", "gemma3n_text", "gemma4_text"),  # windows; layers that share keys; heads that differ by layer
    *("deepseek_v3", "glm4_moe"),  # latent attention; experts after dense layers
)
OFTEN = {"qwen3_5_text"}
"""`make slow` has all."""
LONG = [3 + 7 * place % 90 for place in range(40)]


@pytest.mark.parametrize("name", [pytest.param(one, marks=[] if one in OFTEN else pytest.mark.slow) for one in NAMED])
def test_the_families_that_people_use_train_with_both_engines(name: str, tmp_path: Path) -> None:
    finding = examine(name, tmp_path)
    assert finding.trains, f"{finding.outcome}: {finding.reason}"
    means = {what: value for what, value in finding.figures.items() if what.endswith(("mean", "mismatch"))}
    assert len(means) == 6
    assert max(means.values()) <= CLOSE
    assert finding.figures["gradients"] <= CLOSE_GRADIENTS


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_they_train_in_16_bits(name: str, tmp_path: Path) -> None:
    assert mismatch_in_16_bits(name, tmp_path) < 0.1


def test_the_docs_show_the_results() -> None:
    """`benchmarks/families.py --docs` writes them."""
    results = json.loads(Path("benchmarks/results/families.json").read_text())
    outcomes = {row["case"]: row["unit"] for row in results["rows"] if row["metric"] == "outcome"}
    lines = Path("docs/families.md").read_text().partition("<!-- written by")[2].splitlines()
    shown = [line.split(" | ") for line in lines if line.startswith("| `")]
    assert {line[0].removeprefix("| ").replace("`", ""): line[1] for line in shown} == outcomes


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma3_text", {"sliding_window": 100}),
        ("llama4_text", {"attention_chunk_size": 100}),
        ("llama4_text", {"attn_temperature_tuning": False}),
        ("granite", {"attention_multiplier": 1.0}),
        ("granite", {"logits_scaling": 1.0}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
    ],
    ids=str,
)
def test_what_a_config_asks_for_shows_in_a_tiny_copy(name: str, changes: dict[str, Any]) -> None:
    with torch.no_grad():
        with_it, without = (own_logprobs(tiny_model(name, **some), LONG) for some in ({}, changes))
    assert (with_it - without).abs().mean() > 100 * CLOSE


@pytest.mark.parametrize("name", ["gpt_oss"])
def test_sinks_show_in_a_tiny_copy(name: str) -> None:
    model = tiny_model(name)
    with torch.no_grad():
        with_it = own_logprobs(model, LONG)
        for part, weight in model.named_parameters():
            if part.endswith("sinks"):
                weight.fill_(-torch.inf)
        assert (own_logprobs(model, LONG) - with_it).abs().mean() > 100 * CLOSE


@pytest.mark.parametrize("name", ["qwen3_5_text", "granitemoehybrid", "lfm2"])
def test_states_show_in_a_tiny_copy(name: str) -> None:
    """The state that the first of two sequences leaves would change the second."""
    model = tiny_model(name)
    with torch.no_grad():
        alone, after = own_logprobs(model, LONG[20:]), own_logprobs(model, LONG)[20:]
    assert (alone - after).abs().mean() > 100 * CLOSE
