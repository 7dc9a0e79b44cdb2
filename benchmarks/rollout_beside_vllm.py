"""rollout.py beside vLLM 0.24 in one call: all processes start at once, and measure one after another, each until it
ends and frees its memory.

    PYTHONPATH=src:PEERS python benchmarks/rollout_beside_vllm.py [--quick]

PEERS is the folder with vLLM. `--quick` leaves out the completions of 4,096 tokens. The tables are rows of
results/rollout.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from turns import Player, in_turns

HERE = Path(__file__).parent
# Of 139 GiB: KV caches that hold all samples of a workload, weights, graphs and what a pass needs. Ours is measured
# last, when the others have ended.
CACHES = {"0.6B": ("0.3", "33"), "1.7B": ("0.5", "58")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = ["--quick"] if parser.parse_args().quick else []
    vllm = str(HERE / "rollout_vllm.py")
    players = [
        Player(f"vLLM, {shape}", [sys.executable, vllm, shape, "--share", share, "--kv-gib", cache, *quick])
        for shape, (share, cache) in CACHES.items()
    ]
    stages = ["grpo-0.6b", "lengths-0.6b", "grpo-1.7b", "lengths-1.7b", *([] if quick else ["long-1.7b"])]
    players.append(Player("ours", [sys.executable, str(HERE / "rollout.py"), *stages]))
    sys.exit(not in_turns(players, start_seconds=240))


if __name__ == "__main__":
    main()
