"""The plan: presets, rows of one's own, and cells that cannot be."""

import subprocess
import sys

import pytest

from conftest import TINY, merged
from ebbtide.config.tree import Config, Memory, Optimizer
from ebbtide.errors import UserError
from ebbtide.memory.plan import HOLDINGS, MOVABLE, NEEDS, PHASES, build_plan


def plan(**options):
    return build_plan(Memory.model_validate(options))


def test_keep_moves_nothing() -> None:
    made = plan()
    assert not any(made.away(phase) for phase in PHASES)
    assert not any(made.ever_away(holding) for holding in HOLDINGS)


def test_lean_sends_away_all_that_a_phase_does_not_need() -> None:
    made = plan(preset="lean")
    for phase in set(PHASES) - {"score"}:
        assert set(made.away(phase)) == set(MOVABLE) - NEEDS[phase]
    assert made.away("score") == []
    assert made.fetched("score") == ["weights", "reference"]  # the next phase's, while scorers run


def test_own_rows_replace_the_presets() -> None:
    made = plan(preset="lean", away={"generate": ["moments"], "logprob": []})
    assert made.away("generate") == ["moments"]
    assert made.away("logprob") == []
    assert "moments" in made.away("train")


def test_the_optimizer_is_fetched_behind_the_forward() -> None:
    made = plan(away={"generate": ["moments", "master"], "logprob": ["moments", "master"]})
    assert made.fetched("train") == ["weights", "grads", "master", "moments"]
    assert "moments" not in made.fetched("logprob")
    assert "moments" not in plan(away={"train": ["moments"]}).fetched("train")


def test_no_phase_needs_what_is_away_in_it() -> None:
    for made in (plan(), plan(preset="lean")):
        for phase in PHASES:
            assert all(made.place(phase, holding) == "device" for holding in NEEDS[phase])


@pytest.mark.parametrize(("phase", "holding"), [("train", "grads"), ("step", "moments"), ("step", "master"), ("logprob", "reference")])
def test_a_cell_that_cannot_be_is_named(phase, holding) -> None:
    with pytest.raises(UserError) as caught:
        plan(away={phase: [holding]})
    assert f"`memory.away.{phase}` names `{holding}`" in str(caught.value)
    assert "can send away" in str(caught.value)


@pytest.mark.parametrize("options", [{"place": "streamed"}, {"place": "cpu"}, {"cpu_fraction": 1.0}])
def test_state_on_the_host_stays_there_and_cannot_be_sent_away(options) -> None:
    made = build_plan(Memory(preset="lean"), Optimizer(**options))
    for phase in PHASES:
        assert made.place(phase, "moments") == made.place(phase, "master") == "host"
    assert not made.ever_away("moments")
    with pytest.raises(UserError, match=r"`memory.away.generate` names `moments`.*`optimizer\..*lives on the host"):
        build_plan(Memory.model_validate({"away": {"generate": ["moments"]}}), Optimizer(**options))
    build_plan(Memory.model_validate({"away": {"generate": ["moments"]}}), Optimizer(cpu_fraction=0.5))  # half of it can


def test_the_table_shows_every_cell() -> None:
    lines = plan(preset="lean").rows()
    assert len(lines) == 1 + len(PHASES)
    assert lines[1] == ["generate", "device", "away", "away", "away", "away", "device"]
    assert plan(preset="lean").moves
    assert not plan().moves


def test_how_ranks_gather_weights_is_a_cell_of_both_phases_that_sample() -> None:
    for gathering, place in ((None, "device"), ("whole", "whole"), ("layers", "by layer")):
        made = build_plan(Memory(), gathering=gathering)
        assert {phase: made.place(phase, "weights") for phase in ("generate", "evaluate", "train")} == {
            "generate": place,
            "evaluate": place,
            "train": "device",
        }
        assert made.gathers == (gathering is not None)

    def gathering(cluster, parts):
        return Config.model_validate(merged(TINY, {"cluster": cluster})).gathering(parts)

    assert gathering({"gpus": 2}, 2) == gathering(None, 2) == "whole"  # also of ranks that torchrun started
    assert gathering({"gpus": 2, "generate": "layers"}, 2) == "layers"
    assert gathering({"data": 2, "replicate": 2, "generate": "layers"}, 1) is None  # each rank has all of them


def test_the_plan_imports_no_torch() -> None:
    code = "import sys, ebbtide.memory.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
