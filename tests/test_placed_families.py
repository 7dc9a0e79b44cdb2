"""Whole GRPO runs of one family of each kind, under every placement: nothing that moves or is computed again changes a
bit of metrics, rollouts or weights."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

import state_families  # noqa: F401 (its families are added to those of `families`)
from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.resume import find_checkpoint
from ebbtide.report.report import Report
from families import family_model
from test_loop import run

KINDS = {
    "soft cap": "gemma2",
    "sinks": "gpt_oss",
    "heads by layer": "gemma4_text",
    "delta net": "qwen3_5_text",
    "mamba": "nemotron_h",
    "latent": "deepseek_v3",
}
STATES = ("delta net", "mamba")
LENGTHS = {"rollout.max_prompt_tokens": 8, "rollout.max_new_tokens": 12}  # windows and chunks have 5 tokens
KEEP = {"rollout.partial": {"extra_prompts": 2, "kv_cache": "keep"}, "train.steps": 3}
RECOMPUTE = {"rollout.partial": {"extra_prompts": 2, "kv_cache": "recompute"}, "train.steps": 3}
AWAY = {"memory.offload": {"logprob": ["moments"], "train": ["kv_cache", "sequence_states", "moments", "master"]}}
OFFLOADED = {"keep_last": 0, "minimum_kib": 0}
RECOMPUTED = {"memory.activations": {"preset": "recompute"}}
INPUTS = {"memory.activations": {"preset": "offload", **OFFLOADED}}
LEAN = {"memory.preset": "lean"}
SOME = {"memory.activations": {"preset": "recompute", "recompute_blocks": 1}}
# name -> (what a run has, how it is placed)
PLACEMENTS: dict[str, tuple[dict, dict]] = {
    "lean and streamed": ({}, {**LEAN, "optimizer.place": "streamed"}),
    "inputs offloaded": ({}, INPUTS),
    "kept and moved": (KEEP, AWAY),
}
OFTEN = {
    "soft cap": "lean and streamed",
    "heads by layer": "inputs offloaded",
    "mamba": "kept and moved",
}
"""Each placement with one kind. `make slow` has all."""
MORE: dict[str, tuple[dict, dict]] = {
    "lean": ({}, LEAN),
    "streamed": ({}, {"optimizer.place": "streamed"}),
    "cpu": ({"optimizer.place": "cpu"}, {**LEAN, **RECOMPUTED}),
    "split": ({"optimizer.cpu_fraction": 0.5}, {**LEAN, **INPUTS}),
    "recomputed": ({}, RECOMPUTED),
    "some recomputed": ({}, SOME),
    "balanced": ({}, {"memory.activations": {"preset": "balanced", **OFFLOADED}}),
    "recomputed cache": (RECOMPUTE, {**LEAN, **RECOMPUTED, "optimizer.place": "streamed"}),
}


@cache
def saved(name: str) -> dict:
    """Changes to a run by which it trains a tiny model of this family from a folder."""
    folder = mkdtemp()
    loaded = family_model(name)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return {**LENGTHS, "model": {"path": folder, "dtype": "float32"}}


_plain: dict = {}


def plain(tiny, name: str, changes: dict) -> tuple:
    """The run that moves nothing, once for all tests."""
    key = name, str(changes)
    if key not in _plain:
        _plain[key] = run(tiny, Path(mkdtemp()) / "run", {**saved(name), **changes})
    return _plain[key]


def same(one: tuple, other: tuple) -> None:
    metrics = [
        [{key: value for key, value in line.items() if not key.startswith("activations_")} for line in lines]
        for lines in (one[0], other[0])
    ]
    assert metrics[0] == metrics[1]
    assert one[1] == other[1]
    assert all(torch.equal(one[2][key], other[2][key]) for key in one[2])


def check(tiny, folder: Path, kind: str, has: dict, placed: dict) -> None:
    name = KINDS[kind]
    same(run(tiny, folder, {**saved(name), **has, **placed}), plain(tiny, name, has))


@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        pytest.param(kind, placement, marks=[] if OFTEN.get(kind) == placement else pytest.mark.slow)
        for kind in KINDS
        for placement in PLACEMENTS
    ],
)
def test_no_placement_changes_a_bit(tiny, tmp_path, kind, placement) -> None:
    check(tiny, tmp_path / "run", kind, *PLACEMENTS[placement])


@pytest.mark.slow
@pytest.mark.parametrize("placement", MORE)
@pytest.mark.parametrize("kind", KINDS)
def test_no_other_placement_changes_a_bit(tiny, tmp_path, kind, placement) -> None:
    check(tiny, tmp_path / "run", kind, *MORE[placement])


@pytest.mark.parametrize("kind", [pytest.param("delta net", marks=pytest.mark.slow), "mamba"])
def test_all_that_blocks_save_can_be_offloaded(tiny, tmp_path, kind) -> None:
    """Blocks that are not alike have one name for it."""
    check(tiny, tmp_path / "run", kind, {}, {"memory.activations": {"offload": ["block"], **OFFLOADED}})


@pytest.mark.slow
@pytest.mark.parametrize("kind", STATES)
def test_a_run_resumes_with_states_under_way(tiny, tmp_path, kind) -> None:
    name, folder = KINDS[kind], tmp_path / "run"
    changes = {**saved(name), **RECOMPUTE, "run.folder": str(folder), "checkpoint": {"every": 1}}
    straight = plain(tiny, name, RECOMPUTE)
    first = tiny({**changes, "train.steps": 2})
    with Report(first, "test") as report:
        train(first, report)
    again = tiny({**changes, "resume": "auto"})
    with Report(again, "test", resumed=find_checkpoint(again, print)) as report:
        policy = train(again, report)
    assert (folder / "rollouts.jsonl").read_text() == straight[1]
    assert all(torch.equal(policy.model.state_dict()[key], straight[2][key]) for key in straight[2])
