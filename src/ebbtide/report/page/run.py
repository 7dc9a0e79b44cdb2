"""Reads a run folder into the data of its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ebbtide.config.renamed import METRICS
from ebbtide.config.yaml_text import read_yaml
from ebbtide.errors import UserError
from ebbtide.report.page.lines import JSON, GrowingFile, find_foreign_line, open_regular_file, read_selection
from ebbtide.report.page.metrics import build_tables, median_step, select_steps, to_number
from ebbtide.report.page.settings import flatten_settings

ROLLOUT_BYTES = 4_000_000
"""The part of rollouts.jsonl on a page: some thousand samples, which a browser filters instantly."""
SPREAD = 100
"""The prompts from before those, each with all its samples, spread over the whole run."""
VERSIONS = ("ebbtide", "commit", "torch", "transformers", "python", "cuda", "device")
KEPT = ("step", "group", "sample", "prompt", "answer", "completion", "reward", "parts", "advantage", "finish", "tokens")
PER_TOKEN = ("token_chars", "logprobs")
KEPT_IF_ANY = ("failure", "failure_message", *PER_TOKEN)
KEPT_OF_TURNS = ("completion", "answer", "reward", "tokens", "failed_calls")
MOST_TEXT = 200_000
"""The most characters of a text on a page; rollouts.jsonl has all of it."""


class PageRun:
    """The folder of one run, which may be read repeatedly while the run is going."""

    def __init__(self, folder: Path, name: str | None = None, share: int = 1) -> None:
        """`share`: the number of runs on the page, which share its space."""
        if not (folder / "metrics.jsonl").is_file():
            raise UserError(
                f"{folder} is no run folder, as it has no metrics.jsonl: name a run folder, such as runs/quickstart-001"
            )
        if (number := find_foreign_line(folder / "metrics.jsonl")) is not None:
            raise UserError(
                f'{folder / "metrics.jsonl"}, line {number}: not the figures of a step, which begin with `{{"step": `.'
                " Remove that line"
            )
        self._folder, self.name, self._share = folder, name or folder.resolve().name, share
        self._metrics, self._starts = GrowingFile(folder / "metrics.jsonl"), GrowingFile(folder / "versions.jsonl")

    @property
    def version(self) -> tuple[int, ...]:
        """A value that changes whenever one of the files does."""
        found: list[int] = []
        for name in ("metrics.jsonl", "rollouts.jsonl", "plan.json", "config.yaml", "versions.jsonl"):
            try:
                status = (self._folder / name).stat()
                found += [status.st_ino, status.st_size, status.st_mtime_ns]
            except FileNotFoundError:
                found.append(0)
        return tuple(found)

    def read(self) -> dict[str, Any]:
        lines = [{METRICS.get(key, key): value for key, value in line.items()} for line in self._metrics.read()]
        newest = ROLLOUT_BYTES // self._share
        samples, whole = read_selection(self._folder / "rollouts.jsonl", newest, SPREAD // self._share, newest // 4)
        config = _mapping(self._folder / "config.yaml")
        made = sum(int(to_number(line.get("samples")) or 0) for line in lines)
        return {
            "name": self.name,
            "about": _about(config),
            "steps": _at(config, "train", "steps"),
            "group": _group_size(config),
            "config": flatten_settings(config),
            "starts": effective_starts(self._starts.read()),
            "tables": build_tables(lines),
            "phases": select_steps(lines),
            "middle": median_step(lines),
            "rollouts": [_sample(line) for line in samples],
            "samples": len(samples) if whole else max(made, len(samples)),
            "plan": _plan(self._folder / "plan.json"),
        }


def open_runs(folders: Sequence[Path]) -> list[PageRun]:
    """The runs of one page, named by their folders, or by their paths if two folders have the same name."""
    names = [folder.resolve().name for folder in folders]
    unique = len(set(names)) == len(names)
    return [PageRun(folder, None if unique else str(folder), len(folders)) for folder in folders]


def effective_starts(starts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Which versions made which steps: a process that resumed after a step replaces all that continued from there."""
    kept: list[dict[str, Any]] = []
    for line in starts:
        shown = {key: str(line[key]) for key in VERSIONS if line.get(key) is not None}
        kept = [before for before in kept if before["step"] < line["step"]]
        kept.append({"step": line["step"], "time": str(line.get("time", "")), "versions": shown})
    return kept


def _sample(line: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of a sample, and of the turns of an episode."""
    found = _shown(line, KEPT)
    if isinstance(turns := line.get("turns"), list):
        found["turns"] = [
            _shown(turn, KEPT_OF_TURNS) | {"calls": [str(call) for call in turn.get("calls") or []]}
            for turn in turns
            if isinstance(turn, dict) and isinstance(turn.get("calls") or [], list)
        ]
    return found


def _shown(line: dict[str, Any], kept: Sequence[str]) -> dict[str, Any]:
    """What the page shows of a line. Log-probs belong to the characters of the text: where the text is cut, there are
    none."""
    found: dict[str, Any] = {key: line.get(key) for key in kept} | {
        key: line[key] for key in KEPT_IF_ANY if line.get(key)
    }
    long = [key for key, value in found.items() if isinstance(value, str) and len(value) > MOST_TEXT]
    whole = "completion" not in long and all(isinstance(line.get(key) or [], list) for key in PER_TOKEN)
    cut = {key: f"{found[key][:MOST_TEXT]} … ({len(found[key]):,} characters)" for key in long}
    return {key: value for key, value in (found | cut).items() if whole or key not in PER_TOKEN}


def _plan(path: Path) -> Any:
    """The contents of plan.json; None if there is none or it is being written."""
    try:
        with open_regular_file(path) as file:
            plan = JSON.decode(file.read().decode())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return plan if isinstance(plan, dict) else None


def _mapping(path: Path) -> dict[str, Any]:
    """The contents of config.yaml, not validated: another version with other keys may have written it."""
    try:
        with open_regular_file(path) as file:
            found = read_yaml(file.read().decode(), str(path))
    except (FileNotFoundError, UnicodeDecodeError, UserError):
        return {}
    return found if isinstance(found, dict) else {}


def _at(config: Any, *keys: str) -> Any:
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _prompts_per_step(config: dict[str, Any]) -> Any:
    return _at(config, "rollout", "prompts_per_step") or _at(config, "rollout", "prompts")  # the key of earlier runs


def _group_size(config: dict[str, Any]) -> Any:
    return _at(config, "rollout", "group_size") or _at(config, "rollout", "samples")  # the key of earlier runs


def _about(config: dict[str, Any]) -> dict[str, str]:
    """A run in a few words."""
    model = _at(config, "model", "path") or f"{_at(config, 'model', 'scratch', 'architecture') or '?'} from scratch"
    kind = next((name for name in ("builtin", "gym", "file", "python") if _at(config, "task", name)), "")
    task = next(
        (found for key in ("name", "dataset", "train", "object") if (found := _at(config, "task", kind, key))), kind
    )
    shown = {
        "model": model,
        "task": task,
        "loss": _at(config, "loss", "kind"),
        "samples per step": f"{_prompts_per_step(config)} x {_group_size(config)}",
        "lr": _at(config, "optimizer", "lr"),
        "seed": _at(config, "seed"),
    }
    return {key: str(value) for key, value in shown.items() if value is not None} if config else {}
