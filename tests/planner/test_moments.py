"""The most that is alive in a forward and backward, predicted from the shape, against what is alive in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conftest import TINY, merged
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.loss import LossConfig
from ebbtide.memory.residency import Residency
from ebbtide.model.load import load_model
from ebbtide.model.shape import find_shape
from ebbtide.model.workload import max_workload
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.predict import Predictor
from ebbtide.policy import fused_costs
from ebbtide.policy.datum import trajectory
from ebbtide.policy.losses import build_loss
from ebbtide.policy.policy import Policy
from ebbtide.progress import no_progress
from ebbtide.system.machine import machine_for


class Alive(TorchDispatchMode):
    """Bytes of what operations have made, and has not been freed."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (storage := leaf.untyped_storage())._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._made.values()))
        return result


@pytest.mark.parametrize("preset", ["keep", "recompute"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_later_micro_batch_takes_what_was_predicted(tied: bool, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of transformers' own blocks; tests/gpu/test_fused_blocks.py has the same for fused ones, whose kernels on a CPU
    need more."""
    monkeypatch.setattr(fused_costs, "can_fuse", lambda *_: False)
    scratch = {"hidden": 128, "heads": 1, "kv_heads": 1, "mlp": 384, "layers": 2, "vocabulary": 1000, "tied": tied}
    settings = {
        "model.dtype": "bfloat16",
        "rollout.max_new_tokens": 56,
        "train.microbatch_tokens": 128,
        "train.head_chunk_tokens": 8,
        "memory.activations.preset": preset,
    }
    config = GrpoConfig.model_validate(
        merged(TINY, {f"model.scratch.{key}": value for key, value in scratch.items()} | settings)
    )
    policy = Policy(load_model(config), config)
    sequences = [trajectory([1] * 8, [2] * 56, [-1.0] * 56, advantage=1.0, weight=1e-3) for _ in range(4)]
    with Residency(plan_holdings(config), torch.device("cpu")) as residency:
        policy.place_activations(residency, {})
        policy.model.zero_grad()
        with Alive() as alive:
            policy.forward_backward(sequences, build_loss(LossConfig()), no_progress)
    predictor = Predictor(find_shape(config.model), machine_for("h200", None, 125, None))
    device = predictor.predict(config, max_workload(config), 2**40).phases["train"].device
    assert alive.most == pytest.approx(sum(device[name] for name in ("grads", "activations", "logits")), rel=0.06)
