"""Whole GRPO runs of families with attention or layers of their own: moving, partial rollouts and recomputation change
no bit."""

import pytest
import torch

from families import family_model
from state_families import KINDS
from test_loop import run

pytestmark = pytest.mark.slow

LENGTHS = {"rollout.max_prompt_tokens": 8, "rollout.max_new_tokens": 12}  # windows and chunks have 5 tokens
ATTENTION = ("gemma2", "gpt_oss", "llama4_text", "deepseek_v3", "gemma3n_text", "gemma4_text")
FAMILIES = (*ATTENTION, *KINDS)
PLANS = {
    "lean": {"memory.preset": "lean"},
    "streamed": {"memory.preset": "lean", "optimizer.place": "streamed"},
}


def saved(folder, name: str) -> dict:
    """Changes to a run by which it trains a tiny model of this family from a folder."""
    loaded = family_model(name)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return {**LENGTHS, "model": {"path": str(folder), "dtype": "float32"}}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_plan_changes_a_bit(tiny, tmp_path, name, plan) -> None:
    changes = saved(tmp_path / "model", name)
    kept = run(tiny, tmp_path / "keep", changes)
    moved = run(tiny, tmp_path / "moved", {**changes, **PLANS[plan]})
    assert moved[:2] == kept[:2]
    assert all(torch.equal(kept[2][key], moved[2][key]) for key in kept[2])
    assert all(line["mismatch"] < 1e-5 for line in kept[0] if "mismatch" in line)


@pytest.mark.parametrize("name", [*FAMILIES, "mimo_v2_flash"])
def test_a_kv_cache_that_is_kept_and_moved_changes_no_bit(tiny, tmp_path, name) -> None:
    """Its tensors have the sizes of each layer, on the host as well."""
    changes = saved(tmp_path / "model", name)
    partial = {"rollout.partial": {"extra_prompts": 2, "kv_cache": "keep"}, "train.steps": 3}
    kept = run(tiny, tmp_path / "keep", {**changes, **partial})
    moved = run(tiny, tmp_path / "moved", {**changes, **partial, "memory.offload": {"train": ["kv_cache", "moments"]}})
    assert moved[:2] == kept[:2]
    assert all(torch.equal(kept[2][key], moved[2][key]) for key in kept[2])


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_recomputed_and_offloaded_activations_change_no_bit(tiny, tmp_path, name) -> None:
    changes = saved(tmp_path / "model", name)
    kept = run(tiny, tmp_path / "keep", changes)
    for number, preset in enumerate(({"preset": "recompute"}, {"preset": "offload", "keep_last": 0, "minimum_kib": 0})):
        other = run(tiny, tmp_path / str(number), {**changes, "memory.activations": preset})
        assert other[1] == kept[1]
        assert all(torch.equal(kept[2][key], other[2][key]) for key in kept[2])
