"""rollout.py beside vLLM 0.24, and grpo_step.py beside TRL 1.16 with vLLM colocated; or, with `lora`, steps with
adapters beside those of TRL and PEFT. All processes start at once, and measure one after another, each until it ends
and frees its memory.

    PYTHONPATH=src:PEERS python benchmarks/beside_peers.py [lora]

PEERS is the folder with vLLM and TRL. The tables are rows of results/rollout.json and grpo_step.json, or lora.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

from turns import Player, in_turns

HERE = Path(__file__).parent
# KV caches that hold all samples of a workload; nothing else is left to vLLM's share, which is of memory that is free.
CACHES = {"0.6B": "21", "1.7B": "58"}
ROLLOUTS = ["grpo-0.6b", "lengths-0.6b", "grpo-1.7b", "lengths-1.7b", "long-1.7b"]


def player(name: str, script: str, *given: str) -> Player:
    return Player(name, [sys.executable, str(HERE / script), *given])


def with_adapters() -> list[Player]:
    caches = {"1.7B": "6", "8B": "8"}
    trl = [
        player(f"TRL + PEFT + vLLM, {shape}", "trl_steps.py", shape, "--lora", "--kv-gib", cache, "--steps", "4")
        for shape, cache in caches.items()
    ]
    return [*trl, player("lora.py", "lora.py", "budget", "1.7B-bfloat16", "8B-bfloat16-120")]


def whole_models() -> list[Player]:
    vllm = [player(f"vLLM, {shape}", "rollout_vllm.py", shape, "--kv-gib", cache) for shape, cache in CACHES.items()]
    trl = player("TRL + vLLM", "trl_steps.py", "1.7B", "--kv-gib", "6", "--steps", "4")
    ours = [player("rollout.py", "rollout.py", *ROLLOUTS), player("grpo_step.py", "grpo_step.py", "tied", "0.6b")]
    return [*vllm, trl, *ours]


def main() -> None:
    players = with_adapters() if sys.argv[1:] == ["lora"] else whole_models()
    sys.exit(not in_turns(players, start_seconds=240))


if __name__ == "__main__":
    main()
