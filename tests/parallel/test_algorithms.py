"""Two ranks train what one trains, by every algorithm on examples; and go on to the bit."""

import numpy
import pytest
from ranks import run, together

from conftest import TINY
from example_runs import DATA, MEASURED, SAVES, config_of, digits, preferences, write_rows

SETTINGS = {
    "train.steps": 4,
    "evaluate": {"every": 1, "problems": 4},
    "optimizer.weight_decay": 0.1,
    "report.samples_every": 0,
}
TEACHER = {"hidden": 48, "mlp": 64, "layers": 3, "tied": False}
SAMPLED = {"task": TINY["task"], "rollout": TINY["rollout"]}
# Batches of one pair or example leave a rank without work.
CASES = {
    "sft": ("sft", {}),
    "sft, with a task": ("sft", {**SAMPLED, "train.steps": 2}),
    "sft, one example": ("sft", {"data.batch_size": 1}),
    "dpo": ("dpo", {}),
    "dpo, one pair each step": ("dpo", {"data.batch_size": 1, "loss.reference": "each_step", "loss.kind": "ipo"}),
    "dpo, adapters, one pair": (
        "dpo",
        {"model.lora": {"rank": 3}, "data.batch_size": 1, "loss.reference": "each_step"},
    ),
    "distill, adapters": ("distill", {"model.lora": {"rank": 3}}),
    "distill, a file": ("distill", {"loss.beta": 0.3}),
    "distill, minibatches": ("distill", {"train.minibatches": 2, "train.epochs": 2, "train.steps": 2}),
    "distill, one example": ("distill", {"data.batch_size": 1, "memory.preset": "lean"}),
    "distill, samples": ("distill", {"data": None, **SAMPLED, "train.steps": 2}),
}


def config_for(folder, case, parallel, changes=None):
    algorithm, own = CASES[case]
    folder.mkdir(parents=True, exist_ok=True)
    file = write_rows(folder / "data.jsonl", preferences() if algorithm == "dpo" else digits())
    teacher = {"teacher.scratch": {**TINY["model"]["scratch"], **TEACHER}} if algorithm == "distill" else {}
    whole = {"data": {"train": file, **DATA}, **SETTINGS, **teacher, **own, **(changes or {})}
    return config_of(algorithm, {**whole, "parallel": parallel, "run.folder": str(folder / "run")})


def runs(rank, configs):
    return [run(rank, config) for config in configs]


def figures(line):
    return {
        key: value
        for key, value in line.items()
        if not key.startswith((*MEASURED, "host", "updates", "grad_norm", "mismatch"))
    }


def agree(mine, theirs) -> None:
    """Figures and weights; a step of the optimizer is 1e-3."""
    assert len(mine["metrics"]) == len(theirs["metrics"])
    for line, other in zip(mine["metrics"], theirs["metrics"], strict=True):
        assert line.get("grad_norm", 0) == pytest.approx(other.get("grad_norm", 0), rel=1e-3)
        assert figures(line) == pytest.approx(figures(other), rel=1e-3, abs=1e-5), line["step"]
    for name, weight in mine["weights"].items():
        numpy.testing.assert_allclose(weight, theirs["weights"][name], rtol=0, atol=1e-4, err_msg=name)


def ranks_agree(tmp_path, cases, parallel) -> None:
    (alone,) = together(1, runs, [config_for(tmp_path / f"one {case}", case, None) for case in cases])
    two = together(2, runs, [config_for(tmp_path / f"two {case}", case, parallel) for case in cases])
    for rank in two:
        for mine, theirs in zip(rank, alone, strict=True):
            agree(mine, theirs)


PLAIN = ("sft", "dpo", "distill, a file", "dpo, adapters, one pair")


@pytest.mark.slow
def test_two_ranks_train_what_one_trains(tmp_path) -> None:
    ranks_agree(tmp_path, PLAIN, {"gpus": 2})


@pytest.mark.slow
def test_two_ranks_sample_and_idle_as_one_does_not(tmp_path) -> None:
    ranks_agree(tmp_path, [case for case in CASES if case not in PLAIN], {"gpus": 2})


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"data": 2, "replicate": 2}, {"tensor": 2, "gpus": 2}], ids=str)
def test_other_arrangements_of_two_ranks_do_as_well(tmp_path, parallel) -> None:
    ranks_agree(tmp_path, PLAIN, parallel)


def hidden_states(rank, configs):
    """What this rank has of the teacher's hidden states, and the rows of a step."""
    from ranks import next_port

    from ebbtide.algorithms.data import read_data
    from ebbtide.algorithms.distill import Run
    from ebbtide.launch.join import join
    from ebbtide.worker import Worker

    found = []
    for config in configs:
        next_port()
        with join(config) as (comm, _), Worker(config, comm=comm) as worker:
            algorithm = Run(worker, read_data(config))
            data = algorithm._examples.held_out
            worker.hidden(data, "teacher_hidden", model="teacher")
            shapes = [(len(datum.targets), *datum.values["teacher_hidden"].shape) for datum in data]
            algorithm.step(1)
            found.append((shapes, worker.residency.meter.drain()))
    return found


@pytest.mark.slow
def test_a_rank_has_its_own_share_of_hidden_states_alone(tmp_path) -> None:
    configs = [
        config_for(tmp_path / f"{count}", "distill, a file", {"gpus": 2}, {"train.minibatches": count})
        for count in (1, 2)
    ]
    ranks = together(2, hidden_states, configs)
    for mixed, ((mine, figures), (theirs, _)) in enumerate(zip(*ranks, strict=True)):
        for (targets, one, width), (_, other, _) in zip(mine, theirs, strict=True):
            assert width == TEACHER["hidden"]
            assert sorted({one, other}) == ([targets] if mixed else [0, targets])
        # What FSDP gathers is a row: the weights outside the blocks and two blocks, which are here most of the model.
        assert figures["device_gib/train/gathered"] > figures["device_gib/train/weights"]
        assert figures["device_gib/logprob/gathered"] > figures["device_gib/logprob/teacher"]


def stop_and_go_on(rank, config, again, folder):
    return [run(rank, config), run(rank, again, folder)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sft", "dpo", "distill, a file"])
def test_two_ranks_go_on_to_the_bit(tmp_path, case) -> None:
    saves = {"checkpoint": SAVES}
    straight = config_for(tmp_path / "a", case, {"gpus": 2}, saves)
    short = config_for(tmp_path / "b", case, {"gpus": 2}, {**saves, "train.steps": 2})
    longer = config_for(tmp_path / "b", case, {"gpus": 2}, {**saves, "train.steps": 4})
    (wanted, *_) = together(2, run, straight)
    ((_, found), *_) = together(2, stop_and_go_on, short, longer, str(tmp_path / "b" / "run"))
    assert list(map(figures, found["metrics"])) == list(map(figures, wanted["metrics"]))
    assert all((weight == wanted["weights"][name]).all() for name, weight in found["weights"].items())
