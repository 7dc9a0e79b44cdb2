"""An environment that hangs, crashes, floods or sends garbage costs its episode: all others have the tokens and rewards
of a run without faults."""

import pytest

from conftest import TINY, merged
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.worker import Worker
from episode_faults import check_others, play


@pytest.fixture(scope="module")
def worker():
    with Worker(GrpoConfig.model_validate(merged(TINY, {"checkpoint": None, "rollout.max_new_tokens": 24}))) as made:
        yield made


@pytest.fixture(scope="module")
def faultless(worker):
    return play(worker, "none", lockstep=True)


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("fault", ["hang", "crash", "flood", "garbage"])
def test_one_bad_environment_of_64(worker, faultless, fault, lockstep) -> None:
    check_others(play(worker, fault, lockstep=lockstep), faultless, fault)
