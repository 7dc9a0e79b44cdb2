"""The blocks of a frozen base that are streamed from the host: the same bits as with all of them on the device."""

from __future__ import annotations

import shutil

import pytest
import torch

from ebbtide.errors import UserError
from ebbtide.memory.block_stream import BlockStream
from ebbtide.memory.holding import Holding
from ebbtide.memory.mover import Mover
from ebbtide.memory.residency import Residency
from ebbtide.model.quantized_sizes import base_bytes, root_bytes
from ebbtide.model.shape import find_shape
from ebbtide.parallel.rank_model import RankModel
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.host_memory import host_bytes
from ebbtide.policy.model_costs import BASE
from ebbtide.policy.stream_costs import BLOCKS, block_bytes
from ebbtide.system.machine import this_machine
from ebbtide.system.torch_internals import storage_id
from ebbtide.worker import Worker
from test_lora_runs import CPU, lines, run, save_base, settings
from test_quantized_runs import same_bits

pytestmark = pytest.mark.slow

STREAMED = {"memory.stream_base": True}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("model"))


def based_on(folder, base: str | None = None) -> dict:
    return {"model": {"path": str(folder), "lora": {"rank": 4}, "base": base}}


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize(
    ("base", "more"),
    [
        (None, {}),
        ("int4", {"loss.kl.coefficient": 0.1, "train.minibatches": 2}),
        ("float8", {"memory.preset": "lean"}),
    ],
    ids=["float32", "int4", "float8"],
)
def test_a_run_has_the_same_bits(model_folder, tmp_path, base, more) -> None:
    given = {**based_on(model_folder, base), **more}
    whole = run(tmp_path / "whole", given).state_dict()
    streamed = run(tmp_path / "streamed", {**given, **STREAMED}).state_dict()
    # Blocks that are away are on the host: what is compared is what was trained.
    trained = [{name: one for name, one in some.items() if ".lora_" in name} for some in (whole, streamed)]
    assert same_bits(*trained)
    moved = [[line["moved_gib"] for line in lines(tmp_path / name)[1:]] for name in ("whole", "streamed")]
    assert all(more > less for less, more in zip(*moved, strict=True))
    assert all("device_gib/train/base_blocks" in line for line in lines(tmp_path / "streamed")[1:])
    assert not any(line.get("device_gib/step/base_blocks") for line in lines(tmp_path / "streamed"))


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("base", [None, "float8"])
def test_nothing_holds_the_memory_that_blocks_had_before(model_folder, tmp_path, base) -> None:
    with Worker(settings(tmp_path / "run", {**based_on(model_folder, base), **STREAMED})) as worker:
        fused = worker.policy.fused
        assert fused is not None
        storages = [{storage_id(one) for one in block.module.parameters()} for block in fused.blocks]
        matrices = [[some._whole for one in block._projections for some in one._own] for block in fused.blocks]
        held = [{storage_id(one) for one in some if one is not None} for some in matrices]
    assert any(held)  # Blocks have computed: they are checked when a run starts.
    assert all(some <= own for some, own in zip(held, storages, strict=True))


@pytest.mark.usefixtures("fused_on_cpu")
def test_all_adapters_are_one_storage_and_each_block_another(model_folder, tmp_path) -> None:
    with Worker(settings(tmp_path / "run", {**based_on(model_folder, "int4"), **STREAMED})) as worker:
        fused = worker.policy.fused
        assert fused is not None
        trained = {storage_id(one) for one in worker.policy.model.parameters() if one.requires_grad}
        frozen = [
            {storage_id(one) for one in block.module.parameters() if not one.requires_grad} for block in fused.blocks
        ]
    assert len(trained) == 1
    assert [len(one) for one in frozen] == [1] * len(frozen)
    assert len(trained.union(*frozen)) == 1 + len(frozen)


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize(("base", "embeddings"), [(None, False), ("float8", False), ("int4", True)])
def test_its_bytes_are_those_that_are_counted_before_it_is_loaded(model_folder, tmp_path, base, embeddings) -> None:
    changes = {**based_on(model_folder, base), **STREAMED, "train.steps": 1}
    changes["model"]["base_embeddings"] = embeddings
    config = settings(tmp_path / "run", changes)
    foretold = host_bytes(config, plan_holdings(config))[BLOCKS]
    with Worker(config) as worker:
        assert worker.residency.holdings()[BLOCKS].device == foretold
        held = worker.residency.holdings()[BASE].device
    machine = this_machine("cpu", 2**30, 1.0)
    rank = RankModel(find_shape(config.model), machine, itemsize=4, on_cpu=True)
    assert block_bytes(rank) == foretold
    assert root_bytes(rank.shape, 4) == held
    assert base_bytes(rank.shape, 4) == foretold + held


@pytest.mark.usefixtures("fused_on_cpu")
def test_it_resumes_to_the_bit(model_folder, tmp_path) -> None:
    given = {**based_on(model_folder), **STREAMED}
    whole = run(tmp_path / "run", given).state_dict()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    resumed = run(tmp_path / "run", {**given, "resume": str(tmp_path / "run")}).state_dict()
    assert all(torch.equal(one, resumed[name]) for name, one in whole.items() if ".lora_" in name)


def test_blocks_that_are_not_fused_cannot_be_streamed(model_folder, tmp_path) -> None:
    with pytest.raises(UserError, match="needs fused blocks"):
        run(tmp_path / "run", {**based_on(model_folder), **STREAMED})


def test_it_is_for_a_frozen_base_that_is_read_by_nothing_else() -> None:
    for changes, why in (({"model.lora": None}, "frozen weights beside adapters"), ({}, "needs `checkpoint=null`")):
        with pytest.raises(ValueError, match=why):
            settings("run", {**changes, **STREAMED})


def holding_of(parts: list[list[torch.Tensor]]) -> tuple[Residency, BlockStream]:
    config = settings("run", {**STREAMED, "checkpoint": None})
    residency = Residency(plan_holdings(config), CPU)
    residency.register(BLOCKS, [one for part in parts for one in part], frozen=True)
    stream = residency.stream(BLOCKS, parts)
    residency.pin()
    return residency, stream


def test_two_parts_are_on_the_device_at_once() -> None:
    parts = [[torch.full((8,), 2.0 * n), torch.full((3,), 2.0 * n + 1)] for n in range(5)]
    wanted = [[one.clone() for one in part] for part in parts]
    with (residency := holding_of(parts)[0]):
        stream = residency._streams[0]

        def here() -> list[int]:
            return [n for n, part in enumerate(parts) if part[0].untyped_storage().nbytes()]

        stream.need(3, 1)
        assert here() == [0, 1, 2, 3, 4]  # All of it is there.
        with residency.phase("train"):
            assert here() == []
            for _ in range(2):
                for number in range(5):
                    stream.need(number, 1)
                    assert here() == [one for one in (number, number + 1) if one < 5]
                    assert residency.holdings()[BLOCKS].device == 44 * len(here())
                    assert all(torch.equal(*pair) for pair in zip(parts[number], wanted[number], strict=True))
                for number in reversed(range(5)):
                    stream.need(number, -1)
                    assert here() == [one for one in (number - 1, number) if one >= 0]
                    assert all(torch.equal(*pair) for pair in zip(parts[number], wanted[number], strict=True))
        assert here() == []
        with residency.phase("generate"):
            assert here() == [0, 1, 2, 3, 4]
            assert all(
                torch.equal(one, other)
                for a, b in zip(parts, wanted, strict=True)
                for one, other in zip(a, b, strict=True)
            )


def test_a_holding_that_is_not_streamed_has_no_part_on_the_device() -> None:
    holding = Holding("some", tensors=lambda: [torch.zeros(4)], away=True)
    assert holding.bytes.device == 0
    BlockStream(holding, Mover(CPU), [])
    assert holding.bytes.device == 0


def test_compute_waits_for_all_parts_before_a_phase_that_uses_them_as_a_whole(monkeypatch) -> None:
    """They are on their way since the phase before, which computes meanwhile."""
    parts = [[torch.full((8,), float(number))] for number in range(3)]
    with (residency := holding_of(parts)[0]):
        waited: list[object] = []
        monkeypatch.setattr(residency.mover, "compute_waits", waited.append)
        with residency.phase("train"):
            pass
        with residency.phase("step"):
            move = residency._holdings[BLOCKS].last
            assert move is not None
            assert not waited
        with residency.phase("generate"):
            assert waited == [move]
