"""What TRL with vLLM in its process needs of the environment, before either is imported."""

from __future__ import annotations

import os


def use_colocated_vllm(port: int) -> None:
    """Sets what vLLM and a process group of one rank read; `port`: of that group."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
