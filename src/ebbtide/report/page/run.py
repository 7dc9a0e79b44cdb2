"""A run's folder as the data of its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ebbtide.config.yaml_text import read_yaml
from ebbtide.errors import UserError
from ebbtide.report.page.lines import JSON, Followed, foreign, opened, some_of
from ebbtide.report.page.metrics import looked_at, middle, number, tables
from ebbtide.report.page.settings import flat

ROLLOUT_BYTES = 4_000_000
"""Of rollouts.jsonl in a page: some thousand samples, which a browser filters at once."""
SPREAD = 100
"""Prompts from before those, each with all its samples, spread over the whole run."""
VERSIONS = ("ebbtide", "commit", "torch", "transformers", "python", "cuda", "device")
KEPT = ("step", "group", "sample", "prompt", "answer", "completion", "reward", "parts", "advantage", "finish", "tokens")
PER_TOKEN = ("token_chars", "logprobs")
KEPT_IF_ANY = ("failure", "failure_message", *PER_TOKEN)
MOST_TEXT = 200_000
"""Characters of a text in a page; rollouts.jsonl has all of it."""


class Run:
    """One run's folder, read again and again while the run goes on."""

    def __init__(self, folder: Path, name: str | None = None, share: int = 1) -> None:
        """`share`: how many runs are on the page."""
        if not (folder / "metrics.jsonl").is_file():
            raise UserError(f"{folder} is no run folder, as it has no metrics.jsonl: name one such as runs/quickstart-001")
        if (number := foreign(folder / "metrics.jsonl")) is not None:
            raise UserError(
                f'{folder / "metrics.jsonl"}, line {number}: not the figures of a step, which begin with `{{"step": `. Remove that line'
            )
        self._folder, self.name, self._share = folder, name or folder.resolve().name, share
        self._metrics, self._starts = Followed(folder / "metrics.jsonl"), Followed(folder / "versions.jsonl")

    @property
    def version(self) -> tuple[int, ...]:
        """Other when a file is other than it was."""
        found: list[int] = []
        for name in ("metrics.jsonl", "rollouts.jsonl", "plan.json", "config.yaml", "versions.jsonl"):
            try:
                known = (self._folder / name).stat()
                found += [known.st_ino, known.st_size, known.st_mtime_ns]
            except FileNotFoundError:
                found.append(0)
        return tuple(found)

    def read(self) -> dict[str, Any]:
        lines = self._metrics.read()
        newest = ROLLOUT_BYTES // self._share
        samples, whole = some_of(self._folder / "rollouts.jsonl", newest, SPREAD // self._share, newest // 4)
        config = _mapping(self._folder / "config.yaml")
        made = sum(int(number(line.get("samples")) or 0) for line in lines)
        return {
            "name": self.name,
            "about": _about(config),
            "steps": _at(config, "train", "steps"),
            "group": _at(config, "rollout", "samples"),
            "config": flat(config),
            "starts": in_effect(self._starts.read()),
            "tables": tables(lines),
            "phases": looked_at(lines),
            "middle": middle(lines),
            "rollouts": [_sample(line) for line in samples],
            "samples": len(samples) if whole else max(made, len(samples)),
            "plan": _plan(self._folder / "plan.json"),
        }


def named(folders: Sequence[Path]) -> list[Run]:
    """Runs of one page, by the names of their folders; where two have one name, by their paths."""
    names = [folder.resolve().name for folder in folders]
    unique = len(set(names)) == len(names)
    return [Run(folder, None if unique else str(folder), len(folders)) for folder in folders]


def in_effect(starts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Which versions made which steps: a process that resumed after a step took the place of all that went on there."""
    kept: list[dict[str, Any]] = []
    for line in starts:
        shown = {key: str(line[key]) for key in VERSIONS if line.get(key) is not None}
        kept = [before for before in kept if before["step"] < line["step"]]
        kept.append({"step": line["step"], "time": str(line.get("time", "")), "versions": shown})
    return kept


def _sample(line: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of a sample. Log-probs are of the text's characters: those of one that is cut are left out."""
    found: dict[str, Any] = {key: line.get(key) for key in KEPT} | {key: line[key] for key in KEPT_IF_ANY if line.get(key)}
    long = [key for key, value in found.items() if isinstance(value, str) and len(value) > MOST_TEXT]
    whole = "completion" not in long and all(isinstance(line.get(key) or [], list) for key in PER_TOKEN)
    cut = {key: f"{found[key][:MOST_TEXT]} … ({len(found[key]):,} characters)" for key in long}
    return {key: value for key, value in (found | cut).items() if whole or key not in PER_TOKEN}


def _plan(path: Path) -> Any:
    """What plan.json says; None where there is none, or where it is being written."""
    try:
        with opened(path) as file:
            plan = JSON.decode(file.read().decode())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return plan if isinstance(plan, dict) else None


def _mapping(path: Path) -> dict[str, Any]:
    """config.yaml as it is: it may be of another version, whose keys this one does not know."""
    try:
        with opened(path) as file:
            found = read_yaml(file.read().decode(), str(path))
    except (FileNotFoundError, UnicodeDecodeError, UserError):
        return {}
    return found if isinstance(found, dict) else {}


def _at(config: Any, *keys: str) -> Any:
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _about(config: dict[str, Any]) -> dict[str, str]:
    """What a run is, in a few words."""
    model = _at(config, "model", "path") or f"{_at(config, 'model', 'scratch', 'architecture') or '?'} from scratch"
    kind = next((name for name in ("builtin", "gym", "file", "python") if _at(config, "task", name)), "")
    task = next((found for key in ("name", "dataset", "train", "object") if (found := _at(config, "task", kind, key))), kind)
    shown = {
        "model": model,
        "task": task,
        "loss": _at(config, "loss", "kind"),
        "samples a step": f"{_at(config, 'rollout', 'prompts')} x {_at(config, 'rollout', 'samples')}",
        "lr": _at(config, "optimizer", "lr"),
        "seed": _at(config, "seed"),
    }
    return {key: str(value) for key, value in shown.items() if value is not None} if config else {}
