"""The recipe `smollm2` on a CPU: held-out accuracy before, within and after its 8 steps, with all weights trained, with
adapters (LoRA), and with adapters beside a base in 4 bits.

    python benchmarks/smollm2.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from common import Row, save

ADAPTERS = ["model.lora.rank=16", "optimizer.lr=2e-4"]
CASES = {
    "all weights": [],
    "adapters of rank 16": ADAPTERS,
    "adapters of rank 16, int4 with embeddings": [*ADAPTERS, "model.base=int4", "model.base_embeddings=true"],
}


def measured(case: str, folder: Path) -> list[Row]:
    command = ["train", "smollm2", "device=cpu", f"run.folder={folder}", *CASES[case]]
    subprocess.run([sys.executable, "-m", "ebbtide", *command], check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = {line["step"]: line["evaluate/pass@1"] for line in lines if "evaluate/pass@1" in line}
    rows = [Row(case, f"held-out accuracy, step {step}", 100 * found, "%") for step, found in accuracies.items()]
    return [*rows, Row(case, "seconds of all steps", sum(line["seconds"] for line in lines if "seconds" in line), "s")]


def main() -> None:
    with TemporaryDirectory() as folder:
        rows = [row for number, case in enumerate(CASES) for row in measured(case, Path(folder) / str(number))]
    save("smollm2", rows)


if __name__ == "__main__":
    main()
