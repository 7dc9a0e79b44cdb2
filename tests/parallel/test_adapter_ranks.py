"""Several ranks train the adapters that one trains."""

import shutil

import numpy
import pytest
from ranks import next_port, run, runs, together
from test_training import BASE, agree

from conftest import TINY, merged
from ebbtide.checkpoint.export import export, read_model
from ebbtide.checkpoint.store import list_checkpoints
from ebbtide.config.algorithms.grpo import GrpoConfig
from test_loop import EVERYTHING, MEASURED

LORA = {"model.lora": {"rank": 3}}  # two ranks have 2 and 1 of an A's rows
CASES = {
    "kl": {"loss.kl": {"coefficient": 0.1}, "train.steps": 3},
    "streamed": {"optimizer.place": "streamed", "memory.preset": "lean", "optimizer.clip_norm": 1e-3},
    "cpu": {"optimizer.place": "cpu"},
    "everything": {**EVERYTHING, "train.steps": 2, "memory.preset": "lean"},
    "activations": {"memory.activations": {"preset": "offload", "keep_last": 0, "minimum_kib": 0}},
    "some layers": {"model.lora": {"rank": 1, "targets": ["q_proj", "o_proj", "down_proj"]}},
    "layerwise": {},
}


def config_of(folder, parallel, changes=None):
    whole = {**BASE, **LORA, **(changes or {}), "parallel": parallel, "run.folder": str(folder)}
    return GrpoConfig.model_validate(merged(TINY, whole))


def trained(tmp_path, count, parallel, cases=CASES):
    """What each rank gives, case by case."""
    configs = []
    for name in cases:
        more = {"rollout_weights": "layerwise"} if parallel and name == "layerwise" else {}
        configs.append(config_of(tmp_path / f"{parallel} {name}", parallel and {**parallel, **more}, CASES[name]))
    return [dict(zip(cases, found, strict=True)) for found in together(count, runs, configs)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("alone"), 1, None)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "parallel", "cases"),
    [
        (2, {"gpus": 2}, CASES),
        (2, {"gpus": 2, "tensor": 2}, ("kl",)),
        pytest.param(2, {"gpus": 2, "tensor": 2}, ("kl", "cpu", "everything", "some layers"), marks=pytest.mark.slow),
        pytest.param(2, {"data": 2, "replicate": 2}, ("kl", "everything"), marks=pytest.mark.slow),
        pytest.param(4, {"data": 2, "tensor": 2}, ("kl", "everything", "layerwise"), marks=pytest.mark.slow),
    ],
    ids=["data", "tensor", "tensor, others", "replicas", "both"],
)
def test_ranks_train_the_adapters_that_one_trains(alone, tmp_path, count, parallel, cases) -> None:
    for rank in trained(tmp_path, count, parallel, cases):
        for name, mine in rank.items():
            agree(mine, alone[name])
            for key, weight in mine["weights"].items():
                if ".lora_" not in key:
                    numpy.testing.assert_array_equal(weight, alone[name]["weights"][key], err_msg=key)
                elif key.endswith("lora_B"):
                    assert numpy.any(weight)
        first, *_, last = (line["kl"] for line in rank["kl"]["metrics"] if line["step"])
        assert first == 0 < last


@pytest.fixture(scope="module")
def based(tmp_path_factory):
    """(the folder of a model, how a run with adapters for it is set up)."""
    from ebbtide.model.load import load_model

    place = tmp_path_factory.mktemp("based")
    loaded = load_model(config_of(place, None))
    loaded.model.save_pretrained(place / "base")
    loaded.tokenizer.save_pretrained(place / "base")
    model = {"path": str(place / "base"), "lora": {"rank": 3}}
    return place / "base", {"model": model, "checkpoint": {"every": 2, "keep": 9}, "train.steps": 4}


@pytest.mark.slow
def test_ranks_go_on_to_the_bit_and_others_take_it_up(based, tmp_path) -> None:
    """A checkpoint has the adapters alone, and a digest of the base that each number of ranks finds."""
    straight = config_of(tmp_path / "a", {"gpus": 2}, based[1])
    (wanted, _) = together(2, run, straight)
    for name in "bc":
        shutil.copytree(tmp_path / "a", tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-000004")
    again, alone = (
        config_of(tmp_path / name, parallel, based[1]) for name, parallel in (("b", {"gpus": 2}), ("c", None))
    )
    found, _ = together(2, run, again, str(tmp_path / "b"))
    for line, other in zip(found["metrics"], wanted["metrics"], strict=True):
        figures = [{key: one[key] for key in one if not key.startswith(MEASURED)} for one in (line, other)]
        assert figures[0] == figures[1]
    assert all((weight == wanted["weights"][name]).all() for name, weight in found["weights"].items())
    agree(together(1, run, alone, str(tmp_path / "c"))[0], wanted)

    saved = list_checkpoints(tmp_path / "a" / "checkpoints")[-1]
    assert {key.rpartition(".")[2] for key in read_names(saved)} == {"lora_A", "lora_B"}
    read = read_model(saved)[0].state_dict()  # it checks the digest on one rank
    assert all((read[name].numpy() == weight).all() for name, weight in wanted["weights"].items())
    export(tmp_path / "a", tmp_path / "adapter", say=print)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def read_names(saved):
    from ebbtide.checkpoint.index import read_index
    from ebbtide.checkpoint.manifest import CheckpointFiles

    return [key for key in read_index(CheckpointFiles(saved.path)) if key.startswith("model.")]


def digests(rank, configs):
    """Of the whole model, and of this rank's shards with those of the others."""
    from datetime import timedelta

    import torch

    from ebbtide.checkpoint.initial_model import load_initial
    from ebbtide.launch.join import join
    from ebbtide.model.lora import base_digest
    from ebbtide.parallel.base_digest import digest_of_ranks
    from ebbtide.parallel.dtensor import local
    from ebbtide.parallel.group import Group
    from ebbtide.policy.policy import Policy

    found, cpu = [], torch.device("cpu")
    for config in configs:
        next_port()
        with join(config) as (comm, _):
            policy, ranks = Policy(load_initial(config, cpu), config, comm), Group(timedelta(minutes=1))
            whole = base_digest(policy.model)
            policy.shard(comm.mesh, cpu)
            mine = digest_of_ranks(policy.model, ranks)
            if comm.is_main:  # the last weight of a shard, which the sum alone has
                local(policy.model.get_parameter("model.layers.1.mlp.down_proj.weight")).view(-1)[-1].mul_(2)
            found.append((whole, mine, digest_of_ranks(policy.model, ranks)))
    return found


# Tensors with more numbers than a digest has of each, and shards of unequal sizes.
ODD = {"model.scratch.hidden": 100, "model.scratch.mlp": 102, "model.scratch.head_dim": 6}


WORLDS = {"gpus": 2}, {"data": 2, "replicate": 2}, {"gpus": 2, "tensor": 2}


@pytest.mark.slow
def test_ranks_find_the_digest_of_the_whole_base(tmp_path) -> None:
    configs = [config_of(tmp_path, parallel, ODD) for parallel in WORLDS]
    mine, theirs = together(2, digests, configs)
    assert mine == theirs
    for whole, sharded, other in mine:
        assert whole == sharded != other
    assert len({whole for whole, *_ in mine}) == 1
    (uneven,) = together(3, digests, [config_of(tmp_path, {"gpus": 3}, ODD)])[0]
    assert uneven[:2] == mine[0][:2]


def refused(rank, config, folder):
    from ebbtide.errors import UserError

    with pytest.raises(UserError) as caught:
        run(rank, config, folder)
    return str(caught.value)


@pytest.mark.slow
def test_ranks_refuse_another_base(based, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(based[0], tmp_path / "base")
    changes = {**based[1], "model.path": str(tmp_path / "base"), "checkpoint": {"every": 1}, "train.steps": 1}
    together(2, run, config_of(tmp_path / "run", {"gpus": 2}, changes))
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][-1] += 0.5  # the second rank has it
    save_file(weights, file, metadata={"format": "pt"})
    longer = config_of(tmp_path / "run", {"gpus": 2}, {**changes, "train.steps": 2})
    for said in together(2, refused, longer, str(tmp_path / "run")):
        assert "were trained on another model than the one here" in said


@pytest.mark.slow
def test_the_reference_of_ranks_is_the_adapter_that_they_started_from(based, tmp_path) -> None:
    """It is a copy, of which each rank has a part."""
    together(1, run, config_of(tmp_path / "first", None, based[1]))
    changes = {"model": {"path": str(tmp_path / "first")}, "loss.kl": {"coefficient": 0.1}, "train.steps": 3}
    (wanted,) = together(1, run, config_of(tmp_path / "one", None, changes))
    for rank in together(2, run, config_of(tmp_path / "two", {"gpus": 2}, changes)):
        agree(rank, wanted)
    first, *_, last = (line["kl"] for line in wanted["metrics"] if line["step"])
    assert first == 0 < last
