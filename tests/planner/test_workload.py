"""What a step has to do: samples that end early leave the longest one to decode on."""

from dataclasses import replace

import pytest

from ebbtide.model.shape import Shape
from ebbtide.model.workload import Workload
from ebbtide.parallel.rank_model import RankModel
from ebbtide.rollout.generation_costs import GenerationCosts
from ebbtide.system.machine import machine_for

QWEN3 = Shape("qwen3", 28, 2048, 16, 8, 128, 6144, 151936, tied=True)
ALIKE = Workload(prompts=64, samples=8, prompt_tokens=100, new_tokens=200, longest=200, max_new_tokens=400)


@pytest.mark.parametrize(("rows", "passes"), [(512, 200), (256, 400), (128, 800)])
def test_samples_of_one_length_fill_every_pass(rows: int, passes: int) -> None:
    assert ALIKE.decode_passes(rows) == passes


def test_the_longest_sample_sets_the_passes_where_all_run_at_once() -> None:
    assert replace(ALIKE, longest=384).decode_passes(512) == 384


def test_a_tail_takes_longer_and_costs_only_its_passes() -> None:
    costs = GenerationCosts(RankModel(QWEN3, machine_for("h200", None, 128, None)))
    alike, tailed = (costs.seconds(work, 512) for work in (ALIKE, replace(ALIKE, longest=400)))
    assert alike < tailed < 2 * alike
