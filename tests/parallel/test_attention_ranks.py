"""Families with attention of their own, on two ranks: they train the same policy as one, but for float noise."""

import pytest
from ranks import runs, together
from test_training import agree

from conftest import TINY, merged
from ebbtide.config.algorithms.grpo import GrpoConfig
from test_attention_runs import saved

pytestmark = pytest.mark.slow

FAMILIES = ("gemma2", "gpt_oss", "gemma4_text", "deepseek_v3", "qwen3_5_text", "nemotron_h")  # one of each kind
BASE = {"train.steps": 2, "checkpoint": None, "advantage.drop_zero_std_groups": False, "report.samples_every": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Family -> what one rank alone and the first of two give."""
    folder = tmp_path_factory.mktemp("families")
    models = {name: saved(folder / name, name) for name in FAMILIES}

    def on(count: int):
        parallel = {"gpus": count} if count > 1 else None
        configs = [
            GrpoConfig.model_validate(
                merged(
                    TINY, {**models[name], **BASE, "parallel": parallel, "run.folder": str(folder / f"{name} {count}")}
                )
            )
            for name in FAMILIES
        ]
        return together(count, runs, configs)[0]

    return dict(zip(FAMILIES, zip(on(1), on(2), strict=True), strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_train_the_policy_of_one(trained, name) -> None:
    alone, both = trained[name]
    agree(both, alone)
