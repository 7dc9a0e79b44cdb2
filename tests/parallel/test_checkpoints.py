"""A checkpoint of any number of ranks is taken up by any other: nothing in it depends on who wrote it."""

import pytest
import torch
from ranks import run, together
from test_training import BASE, agree

from conftest import TINY, merged
from ebbtide.checkpoint.entries import TensorEntry, WriteShare
from ebbtide.checkpoint.manifest import CheckpointFiles
from ebbtide.checkpoint.store import begin_checkpoint, finish_checkpoint, list_checkpoints
from ebbtide.checkpoint.tensors import TensorReader, finish_tensors, write_tensors
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.parallel.dtensor import Region

# parts of all sizes: 54 rows are 14, 13, 14 and 13 of two times two ranks
ODD = {"model.scratch.head_dim": 4, "model.scratch.mlp": 54}

# Ranks, their parallel, and the optimizer's mode, step by step.
STAGES = [
    (1, None, {"optimizer.place": "streamed"}),
    (2, {"gpus": 2}, {"optimizer.place": "cpu"}),
    (3, {"gpus": 3}, {"optimizer.cpu_fraction": 0.4, "checkpoint.async_save": False}),
    (2, {"gpus": 2, "tensor": 2}, {}),
    (4, {"data": 2, "tensor": 2}, {"optimizer.place": "cpu"}),
    (1, None, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {"model.lora": {"rank": 3}}], ids=["all weights", "adapters"])
def test_a_run_goes_on_with_other_ranks(tmp_path, lora) -> None:
    def config(steps, parallel, more, name):
        changes = {**BASE, **ODD, **lora, "checkpoint": {"every": None, **more.pop("checkpoint", {})}, **more}
        return GrpoConfig.model_validate(
            merged(TINY, {**changes, "train.steps": steps, "parallel": parallel, "run.folder": str(tmp_path / name)})
        )

    wanted = together(1, run, config(len(STAGES), None, {}, "alone"))[0]
    for step, (count, parallel, more) in enumerate(STAGES, start=1):
        found = together(
            count, run, config(step, parallel, dict(more), "moving"), str(tmp_path / "moving") if step > 1 else None
        )[0]
    agree(found, wanted)
    assert list_checkpoints(tmp_path / "moving" / "checkpoints")[-1].step == len(STAGES)


def test_parts_are_read_from_other_parts_and_from_the_flat_form(tmp_path) -> None:
    """Written by rows of two ranks, the second with fewer; read by columns, and from a form that was flat."""
    whole = torch.arange(35.0).view(7, 5)
    rows = [(slice(0, 4), 0), (slice(4, 7), 4)]
    everyone = [
        [
            TensorEntry(
                "model.x",
                whole[cut].size(),
                whole.dtype,
                Region(whole.size(), (start, 0), whole[cut].size(), is_shard=True),
            ),
            TensorEntry("optimizer.y", torch.Size([35]), whole.dtype),
        ]
        for cut, start in rows
    ]
    results, making = [], begin_checkpoint(tmp_path, 1)
    for rank, (cut, _) in enumerate(rows):
        known = {"model.x": whole[cut].clone(), "optimizer.y": whole.flatten() + 100}
        results.append(write_tensors(making, everyone, known.__getitem__, WriteShare(rank, 2)))
    finish_tensors(making, everyone, results, WriteShare(0, 2))
    finish_checkpoint(making, {}, {})
    box = Region(whole.size(), (1, 2), torch.Size([5, 2]), is_shard=True)
    into = {"model.x": torch.zeros(5, 2), "optimizer.y": torch.zeros(5, 2)}
    TensorReader(CheckpointFiles(tmp_path / "step-000001")).read_parts(into, dict.fromkeys(into, box))
    assert torch.equal(into["model.x"], whole[1:6, 2:4])
    assert torch.equal(into["optimizer.y"], whole[1:6, 2:4] + 100)
