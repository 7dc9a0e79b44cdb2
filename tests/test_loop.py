"""The loop: same seed, same bits; every feature at once; the same numbers however the work is cut."""

import json
import sys

import pytest
import torch

from conftest import family
from ebbtide.algorithms.loop import train
from ebbtide.report.report import Report
from example_runs import MEASURED

EVERYTHING = {
    "train.minibatches": 2,
    "train.epochs": 2,
    "loss.kl": {"coefficient": 0.1, "estimator": "k3"},
    "loss.importance_sampling": {"high": 1.5},
    "loss.entropy": 0.01,
    "loss.mask_overlong": True,
    "rollout.temperature": 0.9,
    "rollout.top_p": 0.95,
    "rollout.top_k": 8,
    "rollout.stop": ["99"],
    "rollout.group_size": 8,
    "advantage.kind": "rloo",
    "optimizer.weight_decay": 0.1,
    "optimizer.schedule": "cosine",
    "evaluate": {"every": 1, "problems": 6, "samples": 4, "temperature": 1.0, "k": [1, 2, 4]},
}


SHAPED = {
    "advantage.dynamic_sampling": {"max_num_gen_batches": 3},
    "advantage.kind": "reinforce_pp",
    "advantage.whiten": "token",
    "advantage.overlong_buffer": {"length": 3, "penalty": 0.5},
    "loss.kl": {"coefficient": 0.05, "estimator": "k1", "in_reward": True},
    "loss.clip_ratio_c": 3.0,
    "train.minibatches": 2,
    "task.size": 10,  # so that prompts are drawn in several epochs
    "task.builtin.options": {"digits": 1},
}


def run(tiny, folder, changes=None):
    """(metrics without what is measured, rollouts, weights) of one run."""
    config = tiny({"run.folder": str(folder), **(changes or {})})
    with Report(config, "test") as report:
        policy = train(config, report)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in lines]
    return metrics, (folder / "rollouts.jsonl").read_text(), policy.model.state_dict()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param(EVERYTHING, id="everything"),
        pytest.param(SHAPED, id="shaped", marks=pytest.mark.slow),
        pytest.param(family("qwen3_moe"), id="moe", marks=pytest.mark.slow),
    ],
)
def test_one_seed_gives_one_run_to_the_bit(tiny, tmp_path, changes) -> None:
    first, again = (run(tiny, tmp_path / name, changes) for name in ("a", "b"))
    assert first[0] == again[0]
    assert first[1] == again[1]
    assert all(torch.equal(first[2][key], again[2][key]) for key in first[2])
    other = run(tiny, tmp_path / "c", {**changes, "seed": 1})
    assert other[0] != first[0]


PLANS = {
    "lean": {"memory.preset": "lean"},
    "optimizer away": {
        "memory.offload": {"generate": ["moments", "master", "grads"], "logprob": ["moments", "master"]}
    },
    "reference in and out": {
        "memory.offload": {"generate": ["reference"], "train": ["reference", "moments"], "evaluate": ["master"]}
    },
}


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        pytest.param(plan, dtype, marks=[] if (dtype == "float32") == (plan != "lean") else pytest.mark.slow)
        for plan in PLANS
        for dtype in ("float32", "bfloat16")
    ],
)
def test_no_plan_changes_a_bit(tiny, tmp_path, plan, dtype) -> None:
    """Moving never changes a result: weights, metrics and rollouts of any plan are those of moving nothing."""
    changes = {**EVERYTHING, "model.dtype": dtype, "train.steps": 3}
    kept = run(tiny, tmp_path / "keep", changes)
    moved = run(tiny, tmp_path / "moved", {**changes, **PLANS[plan]})
    assert moved[0] == kept[0]
    assert moved[1] == kept[1]
    assert all(torch.equal(kept[2][key], moved[2][key]) for key in kept[2])
    figures = [json.loads(line) for line in (tmp_path / "moved" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["moved_gib"] > 0 for line in figures[1:])
    assert all(
        json.loads(line)["moved_gib"] == 0 for line in (tmp_path / "keep" / "metrics.jsonl").read_text().splitlines()
    )


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_every_optimizer_mode_trains_the_same_policy(tiny, tmp_path, dtype) -> None:
    """Streamed to the bit; on the CPU, whole or in part, to rounding."""
    changes = {**EVERYTHING, "model.dtype": dtype, "train.steps": 2, "memory.preset": "lean"}
    device = run(tiny, tmp_path / "device", changes)
    streamed = run(tiny, tmp_path / "streamed", {**changes, "optimizer.place": "streamed"})
    assert streamed[:2] == device[:2]
    assert all(torch.equal(device[2][key], streamed[2][key]) for key in device[2])
    for name, options in (("cpu", {"optimizer.place": "cpu"}), ("split", {"optimizer.cpu_fraction": 0.3})):
        other = run(tiny, tmp_path / name, {**changes, **options})
        again = run(tiny, tmp_path / f"{name} again", {**changes, **options, "optimizer.overlap": False})
        assert again[:2] == other[:2]
        assert all(torch.equal(again[2][key], other[2][key]) for key in other[2])
        first, wanted = other[0][1], device[0][1]
        assert first["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        for key in device[2]:
            # a step is 1e-3, eight of them
            torch.testing.assert_close(other[2][key], device[2][key], rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    "activations",
    [
        {"preset": "recompute"},
        {"preset": "offload", "keep_last": 0, "minimum_kib": 0},
        {"preset": "balanced", "minimum_kib": 0},
        {"recompute": ["attn_norm", "mlp_fc2"], "offload": ["mlp_act"], "keep_last": 0, "minimum_kib": 0},
    ],
    ids=str,
)
def test_no_choice_of_activations_changes_a_bit(tiny, tmp_path, activations) -> None:
    """A whole GRPO run, with packing, several micro-batches, KL and the optimizer away between steps."""
    changes = {**EVERYTHING, "memory.preset": "lean"}
    kept = run(tiny, tmp_path / "keep", changes)
    other = run(tiny, tmp_path / "other", {**changes, "memory.activations": activations})
    for mine, theirs in zip(kept[0], other[0], strict=True):
        assert mine == {key: value for key, value in theirs.items() if not key.startswith("activations_")}
    assert other[1] == kept[1]
    assert all(torch.equal(kept[2][key], other[2][key]) for key in kept[2])
    offloads = "offload" in (activations.get("preset"), *activations)
    assert any(line.get("activations_offloaded_gib", 0) > 0 for line in other[0]) == offloads
    assert not any(line.get("activations_without_room_gib", 0) for line in other[0])


def test_metrics_hold_what_the_step_line_shows(tiny, tmp_path) -> None:
    (before, first, second), rollouts, _ = run(tiny, tmp_path / "a", EVERYTHING)
    assert before["step"] == 0
    figures = ("reward", "completion_tokens", "finished", "pass@1", "pass@2", "pass@4")
    assert set(before) == {"step", *(f"evaluate/{name}" for name in figures)}
    assert before["evaluate/pass@1"] <= before["evaluate/pass@2"] <= before["evaluate/pass@4"]
    for line in (first, second):
        assert {"reward", "loss", "entropy", "kl", "mismatch", "grad_norm", "lr", "clip_fraction", "updates"} <= set(
            line
        )
    assert first["updates"] == 4
    assert second["lr"] < first["lr"]
    samples = [json.loads(line) for line in rollouts.splitlines()]
    assert len(samples) == 2 * 4 * 8
    assert {"step", "prompt", "answer", "completion", "reward", "parts", "advantage"} <= set(samples[0])
    assert [(line["group"], line["sample"]) for line in samples[:9]] == [(0, i) for i in range(8)] + [(1, 0)]


@pytest.mark.skipif(sys.platform != "linux", reason="the age of a process is read from /proc")
def test_the_first_step_of_a_process_has_the_seconds_until_it_began(tiny, tmp_path) -> None:
    run(tiny, tmp_path / "a", EVERYTHING)
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "seconds_startup" in line] == [1]
    assert lines[1]["seconds_startup"] > 0


def test_on_policy_needs_no_logprob_forward_and_sees_no_mismatch(tiny, tmp_path, monkeypatch) -> None:
    from ebbtide.policy.policy import Policy

    def forbidden(*_: object) -> None:
        raise AssertionError("an on-policy update asked for old log-probs")

    monkeypatch.setattr(Policy, "compute_logprobs", forbidden)
    metrics, _, _ = run(tiny, tmp_path / "a", {"advantage.drop_zero_std_groups": False})
    assert all(line["mismatch_max"] < 1e-4 for line in metrics)
    assert all(line["clip_fraction"] == 0 for line in metrics)
    several = {"advantage.drop_zero_std_groups": False, "train.minibatches": 2, "loss.old_logprobs": "rollout"}
    metrics, _, _ = run(tiny, tmp_path / "b", several)
    assert all(line["mismatch_max"] > 1e-4 for line in metrics)  # after the first update the trainer has moved


def test_micro_batches_and_head_chunks_change_nothing_but_rounding(tiny, tmp_path) -> None:
    every = {"advantage.drop_zero_std_groups": False}
    whole = run(tiny, tmp_path / "a", {**every, "train.microbatch_tokens": 4096, "train.head_chunk_tokens": 4096})
    cut = run(tiny, tmp_path / "b", {**every, "train.microbatch_tokens": 16, "train.head_chunk_tokens": 3})
    for one, other in zip(whole[0], cut[0], strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)


def test_kl_pulls_towards_the_start(tiny, tmp_path) -> None:
    """An entropy bonus drives the policy away from where it started; a strong KL holds it there."""
    changes = {
        "train.steps": 12,
        "advantage.drop_zero_std_groups": False,
        "loss.kl": {"coefficient": 1e-6, "estimator": "k2"},
        "loss.entropy": 1.0,
    }
    free = run(tiny, tmp_path / "a", changes)[0]
    held = run(tiny, tmp_path / "b", {**changes, "loss.kl": {"coefficient": 1000.0, "estimator": "k2"}})[0]
    assert free[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert held[-1]["kl"] < free[-1]["kl"] / 2


def test_a_step_without_signal_changes_no_weight(tiny, tmp_path) -> None:

    changes = {"task.extract": "(never)", "train.steps": 1}
    metrics, _, after = run(tiny, tmp_path / "a", changes)
    from ebbtide.model.load import load_model

    before = load_model(tiny(changes)).model.state_dict()
    assert metrics[0]["samples_trained"] == 0
    assert metrics[0]["zero_std_groups"] == 4
    assert "loss" not in metrics[0]
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_scorer_that_fails_says_why(tiny, tmp_path, capsys) -> None:
    changes = {"task": {"python": {"object": "failing_task:Failing"}, "scoring": {"workers": 1}}, "train.steps": 2}
    metrics, _, _ = run(tiny, tmp_path / "a", changes)
    assert metrics[0]["score_failures/error"] == 16
    out = capsys.readouterr().out
    assert "16 samples could not be scored" in out
    assert out.count("not scored: NameError: what is this") == 1


def test_tensorboard_is_written(tiny, tmp_path) -> None:
    run(tiny, tmp_path / "a")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "a" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward")] == [1, 2]


def test_rollouts_hold_the_log_probs_of_the_first_tokens_of_a_step(tiny, tmp_path) -> None:
    """Whole completions, as many as there is room for; and what is there is as long as the completion."""
    room = 40
    _, rollouts, _ = run(
        tiny, tmp_path / "run", {"train.steps": 1, "report.token_logprobs": room, "rollout.stop": ["99"]}
    )
    lines = [json.loads(line) for line in rollouts.splitlines()]
    for number, line in enumerate(lines):
        fits = sum(earlier["tokens"] for earlier in lines[: number + 1]) <= room
        assert ("logprobs" in line) == ("token_chars" in line) == fits
        if fits:
            assert len(line["logprobs"]) == len(line["token_chars"]) == line["tokens"]
            assert sum(line["token_chars"]) == len(line["completion"])
            assert all(value <= 0 for value in line["logprobs"])
    assert not fits  # of the last one: there were some of both
