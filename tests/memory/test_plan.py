"""The plan: presets, rows of one's own, and cells that cannot be."""

import subprocess
import sys

import pytest

from conftest import TINY, merged
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.memory import MemoryConfig
from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.errors import UserError
from ebbtide.memory.plan import HOLDINGS, MOVABLE, PHASE_NEEDS, PHASES, build_plan


def plan(**options):
    return build_plan(MemoryConfig.model_validate(options))


def test_keep_moves_nothing() -> None:
    made = plan()
    assert not any(made.offloaded_in(phase) for phase in PHASES)
    assert not any(made.is_ever_offloaded(holding) for holding in HOLDINGS)


def test_lean_sends_away_all_that_a_phase_does_not_need() -> None:
    made = plan(preset="lean")
    for phase in set(PHASES) - {"score"}:
        assert set(made.offloaded_in(phase)) == set(MOVABLE) - PHASE_NEEDS[phase]
    assert made.offloaded_in("score") == []
    assert made.to_fetch("score") == ["weights", "reference"]  # the next phase's, while scorers run


def test_own_rows_replace_the_presets() -> None:
    made = plan(preset="lean", offload={"generate": ["moments"], "logprob": []})
    assert made.offloaded_in("generate") == ["moments"]
    assert made.offloaded_in("logprob") == []
    assert "moments" in made.offloaded_in("train")


def test_the_optimizer_is_fetched_behind_the_forward() -> None:
    made = plan(offload={"generate": ["moments", "master"], "logprob": ["moments", "master"]})
    assert made.to_fetch("train") == ["weights", "grads", "master", "moments"]
    assert "moments" not in made.to_fetch("logprob")
    assert "moments" not in plan(offload={"train": ["moments"]}).to_fetch("train")


def test_no_phase_needs_what_is_away_in_it() -> None:
    for made in (plan(), plan(preset="lean")):
        for phase in PHASES:
            assert all(made.place(phase, holding) == "device" for holding in PHASE_NEEDS[phase])


@pytest.mark.parametrize(
    ("phase", "holding"), [("train", "grads"), ("step", "moments"), ("step", "master"), ("logprob", "reference")]
)
def test_a_cell_that_cannot_be_is_named(phase, holding) -> None:
    with pytest.raises(UserError) as caught:
        plan(offload={phase: [holding]})
    assert f"`memory.offload.{phase}` names `{holding}`" in str(caught.value)
    assert "This phase can offload" in str(caught.value)


@pytest.mark.parametrize("options", [{"place": "streamed"}, {"place": "cpu"}, {"cpu_fraction": 1.0}])
def test_state_on_the_host_stays_there_and_cannot_be_sent_away(options) -> None:
    made = build_plan(MemoryConfig(preset="lean"), OptimizerConfig(**options))
    for phase in PHASES:
        assert made.place(phase, "moments") == made.place(phase, "master") == "host"
    assert not made.is_ever_offloaded("moments")
    with pytest.raises(UserError, match=r"`memory.offload.generate` names `moments`.*`optimizer\..*lives on the host"):
        build_plan(MemoryConfig.model_validate({"offload": {"generate": ["moments"]}}), OptimizerConfig(**options))
    # half of it can
    build_plan(MemoryConfig.model_validate({"offload": {"generate": ["moments"]}}), OptimizerConfig(cpu_fraction=0.5))


def test_the_table_shows_every_cell() -> None:
    lines = plan(preset="lean").table_rows()
    assert len(lines) == 1 + len(PHASES)
    assert lines[1] == ["generate", "device", "away", "away", "away", "away", "device"]
    assert plan(preset="lean").moves_anything
    assert not plan().moves_anything


def test_how_ranks_gather_weights_is_a_cell_of_both_phases_that_sample() -> None:
    for gathering, place in ((None, "device"), ("gathered", "gathered"), ("layerwise", "layerwise")):
        made = build_plan(MemoryConfig(), rollout_weights=gathering)
        assert {phase: made.place(phase, "weights") for phase in ("generate", "evaluate", "train")} == {
            "generate": place,
            "evaluate": place,
            "train": "device",
        }
        assert made.gathers_weights == (gathering is not None)

    def gathering(parallel, parts):
        return GrpoConfig.model_validate(merged(TINY, {"parallel": parallel})).rollout_weights(parts)

    assert gathering({"gpus": 2}, 2) == gathering(None, 2) == "gathered"  # also of ranks that torchrun started
    assert gathering({"gpus": 2, "rollout_weights": "layerwise"}, 2) == "layerwise"
    # each rank has all of them
    assert gathering({"data": 2, "replicate": 2, "rollout_weights": "layerwise"}, 1) is None


def test_the_plan_imports_no_torch() -> None:
    code = "import sys, ebbtide.memory.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
