"""SFT, DPO and distillation on a real GPU, in bf16: what moves and what is recomputed changes no bit."""

import pytest
import torch

from conftest import TINY
from example_runs import BASE, DATA, Run, config_of, digits, preferences, run, same, write_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GPU = {"device": "cuda", "deterministic": True, "model.dtype": "bfloat16", "optimizer.lr": 1e-3, "train.steps": 3}
LEAN = {"memory": {"plan": "manual", "preset": "lean"}}
TEACHER = {
    "scratch": {
        **BASE["model"]["scratch"],
        "hidden": 64,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 32,
        "mlp": 64,
        "layers": 3,
    }
}
SAMPLED = {"task": TINY["task"], "rollout": TINY["rollout"]}
CASES = {
    "sft": ("sft", {}),
    "dpo, once": ("dpo", {}),
    "dpo, each step": ("dpo", {"loss.reference": "each_step"}),
    "distill from a file": ("distill", {"teacher": TEACHER}),
    "distill in minibatches": ("distill", {"teacher": TEACHER, "train.minibatches": 2, "train.epochs": 2}),
    "distill on policy": ("distill", {"teacher": TEACHER, **SAMPLED}),
    "distill on sampled tokens": ("distill", {"teacher": TEACHER, "loss.over": "sampled", **SAMPLED}),
}


@pytest.mark.parametrize("case", CASES)
def test_holdings_that_move_change_no_bit(tmp_path, case) -> None:
    algorithm, changes = CASES[case]
    rows = preferences() if algorithm == "dpo" else digits()
    file = write_rows(tmp_path / "data.jsonl", rows)
    own = {} if "task" in changes else {"data": {"train": file, **DATA}, "evaluate": {"every": 2, "problems": 4}}

    def made(name: str, **more: object) -> Run:
        return run(config_of(algorithm, {**GPU, **own, **changes, **more, "run.folder": str(tmp_path / name)}))

    kept = made("kept", memory={"plan": "manual"})
    assert same(made("lean", **LEAN), kept)
    assert same(made("streamed", **{**LEAN, "optimizer.place": "streamed"}), kept)
