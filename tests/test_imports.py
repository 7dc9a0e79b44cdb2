"""What a start with one process does not wait for: it is imported with the feature that needs it."""

import subprocess
import sys

LATER = (
    "torch.distributed.tensor",  # several ranks
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",  # a save
    "torch._dynamo",  # what compiles
    "triton",
    "transformers.modeling_utils",  # a model; it brings all of the above along, whether they are needed or not
    "accelerate",
    "sympy",
    "plotly",  # the page
    "tensorboard",
    "starlette",  # the server
    "vllm",
    "ray",
)


def test_a_run_starts_without_what_one_process_does_not_need() -> None:
    code = "import sys, ebbtide.launch.run_rank, ebbtide.algorithms.grpo; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ebbtide.algorithms.grpo" in done.stdout.split()
    assert [name for name in LATER if name in done.stdout.split()] == []
