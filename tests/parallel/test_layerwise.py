"""Weights gathered layer by layer give what weights gathered whole give, bit for bit, in the room of three layers,
however much the ranks' shares differ."""

import json
import os
from dataclasses import replace
from functools import partial

import numpy
import pytest
import torch
from ranks import runs, together
from test_training import BASE

from conftest import TINY, family, merged
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.huggingface import HuggingFaceEngine
from ebbtide.rollout.paged.engine import PagedEngine

ENGINES = {
    "paged": partial(PagedEngine, batch=100, block=2, chunk=4, blocks=14),  # prompts in pieces, samples that give way
    "paged, ahead": partial(PagedEngine, batch=3, ahead=True),
    "huggingface": partial(HuggingFaceEngine, batch=2),
}
ASKED = [
    Request([3, 4, 5], [1, 2, 3, 4, 5]),
    Request([6], [6]),
    Request([7, 8, 9, 10, 11, 3, 4], [7, 8]),
    Request([4, 4], [9]),
]
# four channels of a norm are 2, 2 and none of three ranks
ODD = {"model.scratch.head_dim": 4, "model.scratch.layers": 3}
OTHER = {**family("qwen3_moe"), "model.scratch.tied": True, "model.scratch.layers": 1, "model.dtype": "bfloat16"}


def sampled(rank: int, config: GrpoConfig) -> dict[str, list]:
    """What either way gives: all completions of all engines, for all, one and none of the prompts; how many gave
    way; bytes of whole weights meanwhile, and of gathered ones after."""
    from ebbtide.launch.join import join
    from ebbtide.model.load import load_model
    from ebbtide.policy.policy import Policy
    from ebbtide.rollout.weights.build import shard_policy
    from ebbtide.rollout.weights.gathered import GatheredWeights

    os.environ["MASTER_PORT"] = str(json.loads(os.environ["PORTS"])[0])
    cpu = torch.device("cpu")
    found: dict[str, list] = {}
    with join(config) as (comm, _):
        for place in ("gathered", "layerwise"):
            loaded = load_model(config, comm.load_device(cpu))
            policy = Policy(loaded, config, comm)
            whole = shard_policy(policy, comm, None, cpu, place)
            assert isinstance(whole, GatheredWeights)
            with whole.materialized() as model:
                policy.verify(model)
                held = {twin.untyped_storage()._cdata: twin.untyped_storage().nbytes() for twin in model.parameters()}
                layers = [
                    {twin.untyped_storage()._cdata for twin in block.mlp.parameters()} for block in model.model.layers
                ]
            built = {
                name: whole.engine(
                    lambda model, engine=engine, loaded=loaded: engine(replace(loaded, model=model)), dict
                )
                for name, engine in ENGINES.items()
            }
            assert all(layers[n] == layers[n % 2] for n in range(len(layers))) == (
                place == "layerwise" or len(layers) < 3
            )
            memory = whole._layers._memory if whole._layers is not None else []
            gone = sum(
                tensor.untyped_storage().nbytes() for tensor in (*memory, *(twin for twin, _ in whole._gathered))
            )
            groups, preempted = [], {}
            for name, engine in built.items():
                for prompts in (ASKED, ASKED[:1], []):
                    groups.append(engine.generate(prompts, SamplingParams(6, ignore_eos=True), lambda *_: None))
                    preempted[name] = preempted.get(name, 0) + engine.preempted
            found[place] = [groups, preempted, sum(held.values()), gone]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "parallel", "changes"),
    [
        (3, {"gpus": 3}, ODD),
        (2, {"gpus": 2, "tensor": 2}, ODD),
        (4, {"data": 2, "tensor": 2}, {**ODD, "model.scratch.mlp": 54}),
        (4, {"data": 4, "replicate": 2}, OTHER),
    ],
    ids=["three", "tensor", "both", "copies"],
)
def test_samples_are_those_of_whole_weights_to_the_bit(count, parallel, changes) -> None:
    config = GrpoConfig.model_validate(merged(TINY, {"parallel": parallel, **changes}))
    everyone = together(count, sampled, config)
    wanted = everyone[0]["gathered"][0]
    assert [len(groups) for groups in wanted] == [4, 1, 0] * len(ENGINES)
    for rank in everyone:
        assert rank["gathered"][0] == rank["layerwise"][0] == wanted
        assert rank["gathered"][1] == rank["layerwise"][1]
        assert rank["layerwise"][1]["paged"] > 0
        if config.model.scratch.layers > 2:
            assert rank["layerwise"][2] < rank["gathered"][2]
        assert rank["gathered"][3] == rank["layerwise"][3] == 0


@pytest.mark.slow
def test_a_run_is_the_same_either_way(tmp_path) -> None:
    """Also with evaluation, and with one prompt for three ranks."""

    def config(generate):
        more = {
            "rollout.prompts_per_step": 1,
            "evaluate": {"every": 1, "problems": 4},
            "parallel": {"gpus": 3, "rollout_weights": generate},
        }
        return GrpoConfig.model_validate(merged(TINY, {**BASE, **ODD, **more, "run.folder": str(tmp_path / generate)}))

    everyone = together(3, runs, [config("gathered"), config("layerwise")])
    for whole, layers in everyone:
        assert json.loads(whole["rollouts"].splitlines()[0])["logprobs"]
        assert whole["rollouts"] == layers["rollouts"]
        for line, other in zip(whole["metrics"], layers["metrics"], strict=True):
            for key in ("loss", "reward", "grad_norm", "evaluate/reward", "mismatch_max"):
                assert line.get(key) == other.get(key), key
        for name, weight in whole["weights"].items():
            numpy.testing.assert_array_equal(weight, layers["weights"][name], err_msg=name)
