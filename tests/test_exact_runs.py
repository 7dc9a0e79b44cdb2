"""`rollout.exact` on a CPU, where there is no exact mode: what is refused, what is compared, and what is left out."""

import pytest
import torch

from ebbtide.algorithms import updates
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.planner_keys import with_changes
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.policy.exact import check_exact, decide_exact
from ebbtide.rollout.paged.engine import PagedEngine
from test_loop import run

TWO = {"train.minibatches": 2}


def test_a_cpu_has_none(tiny, tmp_path) -> None:
    with pytest.raises(UserError, match=r"`rollout.exact: true` is not possible here: it needs a GPU"):
        run(tiny, tmp_path / "run", {"rollout.exact": True})


def test_the_reason_is_named(tiny, tmp_path) -> None:
    with pytest.raises(UserError, match=r"`rollout.engine: huggingface` computes with kernels of its own"):
        run(tiny, tmp_path / "run", {"rollout.exact": True, "rollout.engine": "huggingface"})


def test_null_decides_and_says_why_not(tiny, monkeypatch) -> None:
    def decide(config: Config, device: str, ranks: int, *, fused: bool) -> tuple[Config, str]:
        return decide_exact(config, torch.device(device), ranks, is_fused=lambda: fused)

    found, why = decide(tiny(), "cpu", 1, fused=True)
    assert found.rollout.exact is False
    assert why == "it needs a GPU"
    assert (
        decide(tiny(), "cuda", 2, fused=True)[1]
        == "it needs one GPU that trains and samples, and this run has several ranks"
    )
    for chosen in (True, False):
        config = tiny({"rollout.exact": chosen})
        assert decide(config, "cpu", 1, fused=False) == (config, "")
    monkeypatch.setattr("ebbtide.policy.exact.generation", lambda device: 9)
    assert decide(tiny({"model.dtype": "bfloat16"}), "cuda", 1, fused=False)[1] == "the model's blocks are not fused"
    for lora in (None, {"rank": 4}):
        found, why = decide(tiny({"model.dtype": "bfloat16", "model.lora": lora}), "cuda", 1, fused=True)
        assert found.rollout.exact
        assert not why


def test_a_model_without_fused_blocks_runs_without_it(tiny, tmp_path, monkeypatch) -> None:
    def decide(config: Config, *_: object, **__: object) -> tuple[Config, str]:
        return with_changes(config, {"rollout.exact": True}), ""

    monkeypatch.setattr("ebbtide.worker.decide_exact", decide)
    monkeypatch.setattr("ebbtide.worker.why_not_exact", lambda *_: "its blocks are not fused")
    lines, *_ = run(tiny, tmp_path / "run")
    assert any("loss" in line for line in lines)
    assert "exact: false" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_difference_stops_the_run() -> None:
    check_exact({"mismatch_max": 0.0})
    with pytest.raises(UserError, match=r"0.001 nats from the sampler's.*`rollout.exact: false`"):
        check_exact({"mismatch_max": 0.001})


def test_the_first_update_is_compared(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("ebbtide.worker.why_not_exact", lambda *_: "")
    monkeypatch.setattr(PagedEngine, "is_fused", True)
    monkeypatch.setattr("ebbtide.rollout.paged.verify._trainer_distance", lambda *_: 0.0)
    seen: list[float] = []
    monkeypatch.setattr(updates, "check_exact", lambda figures: seen.append(figures["mismatch_max"]))
    lines, *_ = run(tiny, tmp_path / "run", {"rollout.exact": True, **TWO})
    assert len(seen) == sum("loss" in line for line in lines)
    assert any(seen)  # a CPU's sampler and trainer differ by float noise: the forward was compared, not the recorded


def test_a_sampler_that_differs_on_a_probe_is_not_exact(tiny, tmp_path, monkeypatch) -> None:
    """A CPU's differs by float noise."""
    monkeypatch.setattr("ebbtide.worker.why_not_exact", lambda *_: "")
    monkeypatch.setattr(PagedEngine, "is_fused", True)
    with pytest.raises(
        UserError, match=r"the trainer's log-probs of a probe are up to .*e-0\d nats from the sampler's"
    ):
        run(tiny, tmp_path / "run", {"rollout.exact": True})


def test_recorded_logprobs_are_the_old_ones(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("ebbtide.worker.why_not_exact", lambda *_: "")
    monkeypatch.setattr(PagedEngine, "is_fused", True)
    monkeypatch.setattr("ebbtide.rollout.paged.verify._trainer_distance", lambda *_: 0.0)
    monkeypatch.setattr(updates, "check_exact", lambda figures: None)
    recorded, *_ = run(tiny, tmp_path / "recorded", {"rollout.exact": True, **TWO})
    computed, *_ = run(tiny, tmp_path / "computed", TWO)
    for ours, theirs in zip(recorded, computed, strict=True):
        for name in ("loss", "grad_norm", "clip_fraction"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


def test_older_weights_samples_need_a_forward(tiny) -> None:
    def needs(**rollout: object) -> bool:
        config = tiny({"train.minibatches": 2, **{f"rollout.{key}": value for key, value in rollout.items()}})
        assert isinstance(config, GrpoConfig)
        return config.needs_old_logprobs

    assert needs()
    assert not needs(exact=True)
    assert needs(exact=True, **{"partial.extra_prompts": 2})


def test_numbers_that_are_none_are_not_taken_for_a_difference() -> None:
    check_exact({"mismatch_max": float("nan")})
    check_exact({})
