"""One rank that is asked to stop is enough: all give the evaluation up, save together, and make up for it when they
go on."""

import signal

import pytest
from ranks import next_port, run, together

from conftest import TINY, merged
from ebbtide.checkpoint.store import list_checkpoints
from ebbtide.config.algorithms.grpo import GrpoConfig

CHANGES = {
    "train.steps": 3,
    "evaluate": {"every": 2, "problems": 4},
    "checkpoint": {"every": None, "keep": 9, "async_save": False},
    "advantage.drop_zero_std_groups": False,
}


def stopped(rank, config, asked) -> bool:
    """One rank is asked in the evaluation after step 2; whether this one has stopped in order."""
    import ebbtide.algorithms.task
    import ebbtide.rollout.weights.channel
    from ebbtide.errors import RunStopped
    from ebbtide.launch.job import Job
    from ebbtide.launch.run_rank import run_rank

    evaluate, calls = ebbtide.algorithms.task.evaluate, 0

    def evaluated(*args, **options):
        nonlocal calls
        calls += 1
        if (calls, rank) == (2, asked):
            signal.raise_signal(signal.SIGTERM)
        found = evaluate(*args, **options)
        assert calls == 1
        return found

    ebbtide.algorithms.task.evaluate = evaluated
    ebbtide.rollout.weights.channel.PROGRESS_EVERY = 0.0  # seconds between looks, of an evaluation that takes less
    next_port()
    try:
        run_rank(Job("test", config, None))
    except RunStopped:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "asked", "ended"),
    [
        ({"gpus": 2, "rollout_weights": "layerwise"}, 1, [True, True]),
        ({"gpus": 1, "rollout_gpus": 1}, 0, [True, False]),
    ],
    ids=["by layer", "apart"],
)
def test_an_evaluation_that_one_rank_has_no_time_for_is_given_up_by_all(tmp_path, parallel, asked, ended) -> None:
    folder = tmp_path / "run"
    config = GrpoConfig.model_validate(merged(TINY, {**CHANGES, "parallel": parallel, "run.folder": str(folder)}))
    assert together(2, stopped, config, asked) == ended
    (saved,) = list_checkpoints(folder / "checkpoints")
    assert saved.step == 2
    assert "evaluate/reward" not in saved.metrics
    lines = together(2, run, config, str(folder))[0]["metrics"]
    assert [(line["step"], "evaluate/reward" in line) for line in lines] == [
        (0, True),
        (1, False),
        (2, True),
        (3, True),
    ]
