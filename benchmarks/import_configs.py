"""How many configs of other tools `ebbtide import` turns into configs that load and plan.

    python benchmarks/import_configs.py FOLDER[@COMMIT]... [--gpu h100]

Each folder is a checkout of NeMo RL, verl or TRL, or has its `examples` folder. Imported are NeMo RL's examples/configs
and recipes, verl's example scripts, and TRL's examples that have a GRPOConfig; nothing of them is executed or kept.
Supported are those for an algorithm that Ebbtide has, on a model of a family that it has. No hub is asked: shapes come
from src/ebbtide/model/known_models.yaml. Writes benchmarks/results/import.json.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Row, save

from ebbtide.config import load
from ebbtide.errors import UserError
from ebbtide.importing.convert import import_config
from ebbtide.model.families import FAMILIES
from ebbtide.model.known import known_models
from ebbtide.planner import render
from ebbtide.planner.offline import Hardware, plan_offline

# Families of the models that such files name and that known_models.yaml does not have, by their hub ids.
FAMILIES_BY_NAME = {
    r"Nemotron-3|Nemotron-Nano|NVIDIA-Nemotron|nemotron-super-omni": "nemotron_h",
    r"Moonlight|DeepSeek-V3|deepseek\.md": "deepseek_v3",
    r"gpt-oss": "gpt_oss",
    r"Qwen3-VL-\d+B-A|Qwen3-VL-\d+B-A22B": "qwen3_vl_moe",
    r"Qwen3-VL": "qwen3_vl",
    r"Qwen2\.5-VL": "qwen2_5_vl",
    r"Qwen2\.5-Omni|Qwen3-Omni": "qwen_omni",
    r"Qwen3\.5": "qwen3_5",
    r"Qwen1\.5-MoE": "qwen2_moe",
    r"gemma-2-": "gemma2",
    r"gemma-3-(4|12|27)b": "gemma3",
    r"gemma-4": "gemma4",
    r"GLM-4\.1V": "glm4v",
    r"GLM-": "glm4_moe",
    r"MiniMax": "minimax",
    r"MiniCPM": "minicpmo",
    r"MiMo": "mimo",
    r"Mistral-Medium-3|Ministral-3": "mistral3",
    r"SmolVLM": "smolvlm",
    r"rnj-1": "gemma3_rnj",
    r"llava": "llava",
}


def examples(folder: Path) -> tuple[str, list[Path]]:
    """The tool of a checkout, and its files to import."""
    root = folder / "examples" if (folder / "examples").is_dir() else folder
    if (root / "configs").is_dir():
        return "NeMo RL", sorted(path for path in (root / "configs").rglob("*.yaml") if "evals" not in path.parts)
    if (root / "grpo_trainer").is_dir():
        return "verl", sorted(path for path in root.rglob("*.sh") if "main_ppo" in path.read_text())
    scripts = [path for end in ("*.py", "*.ipynb") for path in root.rglob(end)]
    return "TRL", sorted(path for path in scripts if re.search(r"\b(Async)?GRPOConfig\b", path.read_text()))


def family_of(model: str) -> str:
    """The family of a model: a supported one, one that is known not to be, or `unknown`."""
    if model in known_models():
        return str(known_models()[model]["model_type"])
    return next((family for name, family in FAMILIES_BY_NAME.items() if re.search(name, model)), "unknown")


def try_one(path: Path, gpu: str) -> dict[str, Any]:
    """What becomes of one file."""
    try:
        imported = import_config(path)
    except UserError as error:
        other = any(
            said in str(error) for said in ("PPO with a value model", "is not in Ebbtide", "has none of the sections")
        )
        other = other or "another tokenizer" in str(error)
        if "names no model" in str(error):
            return {"outcome": "other family", "why": "no model is named"}
        return {"outcome": "other algorithm" if other else "refused", "why": str(error).replace(str(path), path.name)}
    models = [imported.config.model.path, *(model.path for model in imported.config.frozen_models.values())]
    families = [family_of(str(model)) for model in models]
    row: dict[str, Any] = {
        "algorithm": imported.config.algorithm,
        "model": models[0],
        "taken": len(imported.answers.taken),
        "not_needed": len(imported.answers.not_needed),
        "no_counterpart": len(imported.answers.none),
        "unknown": [key for key, said in imported.answers.none.items() if said.startswith("unknown")],
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "imported.yaml"
        file.write_text(imported.text)
        config = load(str(file))
    row["loads"] = True
    if odd := [family for family in families if family not in FAMILIES]:
        return {**row, "outcome": "other family", "why": odd[0]}
    try:
        result, shape, machine = plan_offline(config, Hardware(gpu, None, None, None, None, 8))
    except UserError as error:
        return {**row, "outcome": "not planned", "why": str(error)}
    if result.fits:
        return {**row, "outcome": "fits"}
    said = render.render_plan(result, config, shape, machine).splitlines()
    return {**row, "outcome": "does not fit", "why": next(line for line in said if line.startswith("does not fit"))}


def rows(folders: list[str], gpu: str) -> Iterator[dict[str, Any]]:
    for given in folders:
        name, _, commit = given.partition("@")
        tool, files = examples(Path(name))
        for path in files:
            yield {"tool": tool, "commit": commit or None, "file": str(path.relative_to(name)), **try_one(path, gpu)}


def counts(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one tool."""
    outcomes = Counter(row["outcome"] for row in found)
    supported = outcomes["fits"] + outcomes["does not fit"] + outcomes["not planned"] + outcomes["refused"]
    planned = outcomes["fits"] + outcomes["does not fit"]
    return {
        "files": len(found),
        "other_algorithm": outcomes["other algorithm"],
        "imported": sum("model" in row for row in found),
        "load": sum(row.get("loads", False) for row in found),
        "other_family": outcomes["other family"],
        "supported": supported,
        "planned": planned,
        "planned_share": round(planned / max(1, supported), 3),
        "fit": outcomes["fits"],
        "unknown_keys": sorted({key for row in found for key in row.get("unknown", [])}),
        "why_not": dict(Counter(row["why"] for row in found if row["outcome"] in ("refused", "not planned"))),
        "other_families": dict(Counter(row["why"] for row in found if row["outcome"] == "other family")),
    }


def result_rows(found: list[dict[str, Any]], figures_of: dict[str, dict[str, Any]]) -> list[Row]:
    """The figures of each tool, then what became of each file and why. The commit of a file's row is the tool's."""
    figures = [
        Row(tool, name, value, "share" if name == "planned_share" else "files")
        for tool, figures in figures_of.items()
        for name, value in figures.items()
        if isinstance(value, int | float)
    ]
    files = [
        Row(f"{row['tool']}: {row['file']}", "outcome", 1, row["outcome"], row["commit"], row.get("why", ""))
        for row in found
    ]
    return figures + files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER[@COMMIT]")
    parser.add_argument("--gpu", default="h100")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    found = list(rows(options.folders, options.gpu))
    tools = {
        tool: counts([row for row in found if row["tool"] == tool]) for tool in dict.fromkeys(r["tool"] for r in found)
    }
    figures_of = {**tools, "all": counts(found)}
    save("import", result_rows(found, figures_of), prints=False, gpu=options.gpu)
    for tool, figures in figures_of.items():
        print(
            f"{tool}: {figures['files']} files, {figures['other_algorithm']} for other algorithms;"
            f" {figures['imported']} imported, {figures['load']} load; {figures['other_family']} on other families; of"
            f" {figures['supported']}"
            f" supported ones {figures['planned']} planned ({figures['planned_share']:.1%}), {figures['fit']} fit"
        )
        for why, count in figures["why_not"].items():
            print(f"  {count} not: {why[:200]}")


if __name__ == "__main__":
    main()
