"""Whole runs with fused blocks, on a CPU: what transformers' own blocks train, and the same bits whatever moves."""

import pytest
import torch

from conftest import family
from test_loop import EVERYTHING, run

pytestmark = pytest.mark.usefixtures("fused_on_cpu")
CHOICES = {
    "recompute": {"preset": "recompute"},
    "offload": {"preset": "offload", "keep_last": 0, "minimum_kib": 0},
    "by name": {"recompute": ["core_attn"], "offload": ["mlp_norm"], "recompute_blocks": 1, "minimum_kib": 0},
}


@pytest.mark.parametrize(
    ("changes", "choice"),
    [
        pytest.param(changes, choice, id=f"{kind}-{choice}", marks=[] if choice in often else pytest.mark.slow)
        for kind, changes, often in (("dense", {}, CHOICES), ("moe", family("qwen3_moe"), ["by name"]))
        for choice in CHOICES
    ],
)
def test_activations_that_move_change_no_bit(tiny, tmp_path, changes, choice) -> None:
    kept = run(tiny, tmp_path / "kept", changes)
    moved = run(tiny, tmp_path / "moved", {**changes, "memory.activations": CHOICES[choice]})
    ours, theirs = (
        [{key: line[key] for key in line if "activations" not in key} for line in one[0]] for one in (moved, kept)
    )
    assert ours == theirs
    assert all(torch.equal(moved[2][key], kept[2][key]) for key in kept[2])


@pytest.mark.parametrize("changes", [{}, EVERYTHING], ids=["plain", "everything"])
def test_a_run_trains_what_the_models_own_blocks_train(tiny, tmp_path, changes, monkeypatch) -> None:
    from ebbtide.policy import fuse

    fused = run(tiny, tmp_path / "fused", changes)
    monkeypatch.setattr(fuse, "DEVICES", ())
    own = run(tiny, tmp_path / "own", changes)
    for ours, theirs in zip(fused[0], own[0], strict=True):
        for name in ("loss", "grad_norm", "entropy", "kl", "reward"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-2, abs=1e-4), (theirs["step"], name)
