"""What ranks cannot do is said before they start, or as they do, with what to write instead."""

import pytest
import torch
from ranks import run, together

from conftest import TINY, family, merged
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.errors import UserError


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"parallel": {"gpus": 6, "data": 2, "tensor": 2}},
            "`parallel.gpus: 6` is not `parallel.data: 2` x `parallel.tensor: 2`: set it to 4",
        ),
        ({"parallel": {"gpus": 3, "tensor": 2}}, "`parallel.gpus: 3` is not a multiple of `parallel.tensor: 2`"),
        (
            {"parallel": {"data": 4, "replicate": 3}},
            "`parallel.replicate: 3` does not divide the 4 data-parallel ranks: set a divisor",
        ),
        (
            {"parallel": {"gpus": 2, "rollout_weights": "layerwise", "rollout_gpus": 1}},
            "with `parallel.rollout_gpus: 1` none does: remove one of the two",
        ),
        (
            {"parallel": {"gpus": 2}, "rollout.partial.extra_prompts": 2},
            "`parallel` and `rollout.partial.extra_prompts` cannot be combined yet",
        ),
        (
            {"parallel": {"gpus": 2}, "rollout.serve_port": 0},
            "`parallel` and `rollout.serve_port` cannot be combined yet",
        ),
        (
            {"parallel": {"gpus": 2}, "rollout.engine": "vllm"},
            "`parallel` and `rollout.engine: vllm` cannot be combined yet",
        ),
    ],
)
def test_configs_that_do_not_add_up(changes, said) -> None:
    with pytest.raises(ValueError, match="parallel") as caught:
        GrpoConfig.model_validate(merged(TINY, changes))
    assert said in str(caught.value)


def refused(rank: int, configs) -> list[str]:
    found = []
    for config in configs:
        with pytest.raises(UserError) as caught:
            run(rank, config)
        found.append(str(caught.value))
        if torch.distributed.is_initialized():  # a rank that fails leaves it as it is, and ends
            torch.distributed.destroy_process_group()
    return found


def test_models_that_cannot_be_cut(tmp_path) -> None:
    changes = [
        {"parallel": {"gpus": 2, "tensor": 2}, **family("qwen3_moe")},
        {"parallel": {"gpus": 2, "tensor": 2}, "model.scratch.kv_heads": 1},
        {"parallel": {"gpus": 2}, "model.dtype": "bfloat16", "optimizer.grad_dtype": "float32"},
        {"parallel": {"gpus": 4}},
        {"parallel": {"gpus": 2, "rollout_gpus": 1}},
        {"rollout.partial.extra_prompts": 2},  # under `torchrun`, without a section for it
    ]
    configs = [
        GrpoConfig.model_validate(merged(TINY, {**some, "run.folder": str(tmp_path / str(n))}))
        for n, some in enumerate(changes)
    ]
    for experts, heads, kind, count, beside, alone in together(2, refused, configs):
        assert "Qwen3MoeForCausalLM declares modules sharded as `moe_tp_experts`, `packed_colwise`" in experts
        assert "num_key_value_heads = 1, which is not a multiple of it" in heads
        assert "`optimizer.grad_dtype: float32` with `parallel` and weights in bfloat16" in kind
        assert "2 ranks were started, but `parallel` is for 4: start as many" in count
        assert (
            "2 ranks were started, but `parallel` is for 2 that train and 1 that only generate: start as many" in beside
        )
        assert (
            "2 ranks were started, but `rollout.partial.extra_prompts` works with one rank only so far: start one, or"
            " remove it" in alone
        )
