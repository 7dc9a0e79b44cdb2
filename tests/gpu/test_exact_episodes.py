"""Episodes in exact mode on a GPU: what a sequence kept while it waited, and what followed, give training's bits."""

import json

import pytest
import torch

from ebbtide.algorithms.loop import train
from ebbtide.config.load import load
from ebbtide.report.report import Report
from ebbtide.system.gpu import HOPPER, generation
from ebbtide.worker import Worker
from episode_faults import BAD, check_others, play

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

EXACT = [
    "device=cuda",
    "model.dtype=bfloat16",
    "model.scratch.hidden=256",
    "model.scratch.head_dim=64",
    "rollout.exact=true",
    "train.steps=4",
    "evaluate=null",
    "checkpoint=null",
]


@pytest.mark.parametrize("concurrent", [16, 256])
def test_recorded_logprobs_of_episodes_are_the_trainers(tmp_path, concurrent) -> None:
    if generation(torch.device("cuda")) != HOPPER:
        pytest.skip("exact mode is for GPUs of the Hopper generation")
    overrides = [*EXACT, f"task.environment.max_concurrent={concurrent}", f"run.folder={tmp_path / 'run'}"]
    config = load("calculator", overrides)
    with Report(config, "test") as report:
        train(config, report)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["mismatch_max"] for line in lines] == [0.0] * 4
    assert lines[-1]["turns"] > 1


@pytest.fixture(scope="module")
def worker():
    if generation(torch.device("cuda")) != HOPPER:
        pytest.skip("exact mode is for GPUs of the Hopper generation")
    with Worker(load("calculator", [*EXACT, "rollout.max_new_tokens=48"])) as made:
        yield made


@pytest.fixture(scope="module")
def faultless(worker):
    return play(worker, "none", lockstep=True)


@pytest.mark.parametrize("fault", ["hang", "crash", "flood", "garbage"])
def test_one_bad_environment_of_64_changes_no_bit_of_the_others(worker, faultless, fault) -> None:
    found = play(worker, fault, lockstep=False)
    check_others(found, faultless, fault)
    good = [pair for number, pair in enumerate(zip(found, faultless, strict=True)) if number != BAD]
    for one, other in good:
        assert [turn.completion.logprobs for turn in one.turns] == [turn.completion.logprobs for turn in other.turns]
