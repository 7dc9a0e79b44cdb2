"""How many configs of other tools `ebbtide import` turns into configs that load and plan.

    python benchmarks/import_configs.py FOLDER[@COMMIT]... [--gpu h100]

Each folder is a checkout of NeMo RL, verl or TRL, or has its `examples` folder. Imported are NeMo RL's examples/configs
and recipes, verl's example scripts, and TRL's examples that have a GRPOConfig; nothing of them is executed or kept.
Supported are those for an algorithm that Ebbtide has, on a model of a family that it has. No hub is asked: shapes come
from src/ebbtide/model/known_models.yaml. Writes benchmarks/results/import.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from common import RESULTS, Row, save

from ebbtide.config import load
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.importing.convert import import_config
from ebbtide.model.families import FAMILIES
from ebbtide.model.known import known_models
from ebbtide.model.traced_shape import TracedShape
from ebbtide.planner import render, traced_model
from ebbtide.planner.offline import Hardware, plan_offline

SUPPORTED = ("trained", "engine only")  # outcomes in results/families.json

# Families of the models that such files name and that known_models.yaml does not have, by their hub ids.
FAMILIES_BY_NAME = {
    r"Omni-30B-A3B|nemotron-super-omni": "nemotron_omni",
    r"Qwen3-VL-\d+B-A": "qwen3_vl_moe",
    r"Qwen3-VL": "qwen3_vl",
    r"Qwen2\.5-VL": "qwen2_5_vl",
    r"Qwen2\.5-Omni|Qwen3-Omni": "qwen_omni",
    r"GLM-4\.1V": "glm4v",
    r"GLM-5": "glm_moe_dsa",
    r"MiniCPM": "minicpmo",
    r"MiMo": "mimo",
    r"Mistral-Medium-3": "ministral3",
    r"SmolVLM": "smolvlm",
    r"rnj-1": "gemma3_text",
    r"qwen3-4b": "qwen3",
}

# What stands in a file in place of a model that its reader has to convert first -> the model.
STAND_INS = {
    r"deepseek\.md|DeepSeek-V3-config|path_to_dsv3_config": "deepseek-ai/DeepSeek-V3-Base",
    r"gpt-oss-20b-bf16": "openai/gpt-oss-20b",
}


@cache
def supported_families() -> frozenset[str]:
    """The families that are planned by their description, or were trained in the survey (docs/families.md)."""
    survey = json.loads((RESULTS / "families.json").read_text())["rows"]
    found = {
        row["case"] for row in survey if row["metric"] == "outcome" and any(one in row["unit"] for one in SUPPORTED)
    }
    return frozenset(found | FAMILIES.keys())


def remember_traces() -> None:
    """Traces each model once for the same lengths: many files are alike."""
    trace, known = traced_model.trace_shape, dict[tuple[Any, ...], TracedShape]()

    def remembered(config: Config, device_type: str) -> TracedShape:
        key = (
            config.model.model_dump_json(),
            config.train.microbatch_tokens,
            config.max_sequence_tokens,
            config.generates and config.rollout.engine,
            device_type,
        )
        if key not in known:
            known[key] = trace(config, device_type)
        return known[key]

    traced_model.trace_shape = remembered


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
    named = str(imported.config.model.path)
    if meant := next((model for name, model in STAND_INS.items() if re.search(name, named)), None):
        imported = import_config(path, [f"model.path={meant}"])
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
    if odd := [family for family in families if family not in supported_families()]:
        return {**row, "outcome": "other family", "why": odd[0]}
    if odd := [str(model) for model in models if str(model) not in known_models()]:
        return {**row, "outcome": "not planned", "why": f"the sizes of {odd[0]} are in no table"}
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
    remember_traces()
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
