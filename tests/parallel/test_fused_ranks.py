"""Two ranks with fused blocks under FSDP train what one does."""

from typing import Any

import pytest
from ranks import runs, together
from test_training import BASE, agree

from conftest import TINY, merged
from ebbtide.config.algorithms.grpo import GrpoConfig

CASES = {
    "kept": {},
    "placed": {
        "memory.activations": {"recompute": ["core_attn"], "offload": ["mlp_act"], "keep_last": 0, "minimum_kib": 0}
    },
    "experts": {
        "model.scratch.architecture": "qwen3_moe",
        "model.scratch.experts": 4,
        "model.scratch.experts_per_token": 2,
    },
    "adapters": {"model.lora": {"rank": 3, "exclude": ["k_proj"]}, "loss.kl": {"coefficient": 0.1}},
    "biases": {"model.scratch.architecture": "qwen2", "optimizer.place": "cpu"},
}


def fused_runs(rank: int, configs: list[Any]) -> list[dict[str, Any]]:
    """One run after the other, with blocks that are fused on a CPU as well."""
    from ebbtide.policy import fuse

    fuse.DEVICES = ("cuda", "cpu")
    fuse.has_flash = lambda *_: True  # type: ignore[assignment]
    return runs(rank, configs)


@pytest.mark.slow
def test_two_ranks_train_what_one_trains(tmp_path) -> None:
    def trained(count: int) -> list[list[dict[str, Any]]]:
        configs = [
            GrpoConfig.model_validate(
                merged(
                    TINY,
                    {
                        **BASE,
                        **case,
                        "parallel": {"gpus": count} if count > 1 else None,
                        "run.folder": str(tmp_path / f"{count} {name}"),
                    },
                )
            )
            for name, case in CASES.items()
        ]
        return together(count, fused_runs, configs)

    (alone,) = trained(1)
    for rank in trained(2):
        for mine, theirs in zip(rank, alone, strict=True):
            agree(mine, theirs)
