"""What ranks cannot do is said before they start, or as they do, with what to write instead."""

import pytest
import torch
from ranks import run, together

from conftest import TINY, family, merged
from ebbtide.config.tree import Config
from ebbtide.errors import UserError


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cluster": {"gpus": 6, "data": 2, "tensor": 2}}, "`cluster.gpus: 6` is not `cluster.data: 2` x `cluster.tensor: 2`: set it to 4"),
        ({"cluster": {"gpus": 3, "tensor": 2}}, "`cluster.gpus: 3` is not a multiple of `cluster.tensor: 2`"),
        ({"cluster": {"data": 4, "replicate": 3}}, "`cluster.replicate: 3` copies cannot be shared out among 4 data-parallel ranks"),
        ({"cluster": {"gpus": 2, "generate": "layers", "rollout_gpus": 1}}, "with `cluster.rollout_gpus: 1` others generate: remove one"),
        ({"cluster": {"gpus": 2}, "rollout.ahead": 2}, "`cluster` and `rollout.ahead` do not go together yet"),
        ({"cluster": {"gpus": 2}, "rollout.serve_port": 0}, "`cluster` and `rollout.serve_port` do not go together yet"),
        ({"cluster": {"gpus": 2}, "rollout.engine": "vllm"}, "`cluster` and `rollout.engine: vllm` do not go together yet"),
    ],
)
def test_configs_that_do_not_add_up(changes, said) -> None:
    with pytest.raises(ValueError, match="cluster") as caught:
        Config.model_validate(merged(TINY, changes))
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
        {"cluster": {"gpus": 2, "tensor": 2}, **family("qwen3_moe")},
        {"cluster": {"gpus": 2, "tensor": 2}, "model.scratch.kv_heads": 1},
        {"cluster": {"gpus": 2}, "model.dtype": "bfloat16", "optimizer.grad_dtype": "float32"},
        {"cluster": {"gpus": 4}},
        {"cluster": {"gpus": 2, "rollout_gpus": 1}},
        {"rollout.ahead": 2},  # under `torchrun`, without a section for it
    ]
    configs = [Config.model_validate(merged(TINY, {**some, "run.folder": str(tmp_path / str(n))})) for n, some in enumerate(changes)]
    for experts, heads, kind, count, beside, alone in together(2, refused, configs):
        assert "Qwen3MoeForCausalLM wants some modules cut as `moe_tp_experts`, `packed_colwise`" in experts
        assert "num_key_value_heads = 1, which is not a multiple of it" in heads
        assert "`optimizer.grad_dtype: float32` with `cluster` and weights in bfloat16" in kind
        assert "2 ranks were started, and `cluster` is for 4: start as many" in count
        assert "2 ranks were started, and `cluster` is for 2 that train and 1 that only generate: start as many" in beside
        assert "2 ranks were started, and `rollout.ahead` goes with one only so far: start one, or remove it" in alone
