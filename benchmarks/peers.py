"""What vLLM, and TRL with it, need: settings of the environment before either is imported, and a model on disk."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

SHAPES = {
    "0.6B": {"num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 3072},
    "1.7B": {"num_hidden_layers": 28, "hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 6144},
    "8B": {"num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 12288},
}


def use_colocated_vllm() -> None:
    """Sets what vLLM and a process group of one rank read."""
    with socket.socket() as free:  # a port of the group's own, as several may start at once
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def random_model(name: str, folder: Path) -> str:
    """The folder of a random model of a Qwen3 shape, with a tokenizer of bytes."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from ebbtide.model.tokenizer import scratch_tokenizer

    config = Qwen3Config(
        **SHAPES[name],
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=name != "8B",
        dtype="bfloat16",
        eos_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        made = Qwen3ForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    made.save_pretrained(folder / "model")
    tokenizer = scratch_tokenizer(None)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder / "model")
    del made
    torch.cuda.empty_cache()
    return str(folder / "model")


def saved_model(name: str) -> str:
    """The same in a folder that stays: a later start finds it, and vLLM what it compiled for it."""
    folder = Path("/dev/shm/ebbtide-models") / name
    if not folder.exists():
        new = folder.with_name(f"{name}-{os.getpid()}")
        random_model(name, new)
        try:
            new.rename(folder)
        except OSError:  # Another process, which started at the same time, was faster.
            shutil.rmtree(new)
    return str(folder / "model")
