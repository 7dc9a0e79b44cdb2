"""Finds the checkpoint that `resume` names, and checks that it is valid and fits this config. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ebbtide.checkpoint.contents import CONFIG, read_run, read_tree
from ebbtide.checkpoint.manifest import CheckpointFiles, DamagedCheckpoint, first_problem
from ebbtide.checkpoint.store import Checkpoint, list_checkpoints, newest_valid
from ebbtide.config.parallel import ParallelConfig
from ebbtide.config.planner_keys import keep_planned_settings, with_chat_date
from ebbtide.config.root import Config
from ebbtide.config.yaml_text import read_yaml
from ebbtide.errors import UserError
from ebbtide.system.jsonl import parse_step

FOLDER = "checkpoints"
REPLACED = ".before"  # holds the run that is being replaced, until the new one has done its first step
# A run with other values of these keys is another run: it is refused.
FIXED = ("model.", "seed", "optimizer.state_dtype")
# These keys may change without a note: where a run writes, how long it is, what it shows, on how many ranks it runs,
# and what a run says at its start.
FREE = ("run.", "resume", "report.", "train.steps", "checkpoint.", "parallel", "rollout.exact")


def find_checkpoint(config: Config, say: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint to resume from, or None to start from the beginning."""
    if config.resume is None:
        return None
    if config.resume == "auto":
        if (folder := _newest(config)) is None:
            where = config.run.folder or f"runs/{config.run.name}-..."
            say(f"`resume: auto` found no run in {where}: starting a new one")
            return None
        if saved := newest_valid(partial(list_checkpoints, folder / FOLDER), say):
            return _fitting(saved, config, say)
        refuse_checkpoints(folder)
        if restart_folder(config) is not None:
            say(f"the run in {folder} has no checkpoint yet: starting it again in the same folder")
        return None
    path = Path(os.path.abspath(Path(config.resume).expanduser()))  # absolute, because its parents are needed

    def look() -> list[Checkpoint]:
        return (
            [saved for saved in list_checkpoints(path.parent) if saved.path.name == path.name]
            or list_checkpoints(path / FOLDER)
            or list_checkpoints(path)
        )

    found = look()
    if not found:
        raise UserError(
            f"`resume: {config.resume}` has no complete checkpoint:"
            " name a run folder or a checkpoint in it (`ebbtide checkpoints RUN` lists them)"
        )
    if (folder := found[0].path.parent).name != FOLDER:  # its grandparent would be mistaken for the run's folder
        raise UserError(
            f"`resume: {config.resume}` is not in a run's folder, and a run resumes in its own folder:"
            f" move the checkpoint to RUN/{FOLDER} (RUN may be new), and name that (its folder now: {folder})"
        )
    saved = newest_valid(look, say)
    if saved is None:
        raise UserError(
            f"`resume: {config.resume}`: every checkpoint there is damaged: name another, or remove `resume`"
        )
    return _fitting(saved, config, say)


def with_saved_choices(config: Config, saved: Checkpoint) -> Config:
    """The config with the values that the planner had chosen when the checkpoint was made."""
    then = read_tree(CheckpointFiles(saved.path))
    try:
        chosen = with_chat_date(keep_planned_settings(config, then), (then.get("model") or {}).get("chat_date"))
        # Values from a checkpoint are not trusted: they are validated like the rest of it.
        type(chosen).model_validate(chosen.model_dump(mode="json", warnings=False))
    except (ValidationError, TypeError) as error:
        why = first_problem(error) if isinstance(error, ValidationError) else "a section is not a mapping"
        raise DamagedCheckpoint(saved.path, f"{CONFIG} is not valid: {why}") from None
    return chosen


def refuse_checkpoints(folder: Path) -> None:
    """Raises if a run with `resume` would start from the beginning in a folder that has checkpoints, valid or not: that
    would remove them."""
    if left := sorted(path.name for pattern in ("step-*", "aside-*") for path in (folder / FOLDER).glob(pattern)):
        raise UserError(
            f"`resume`: no checkpoint in {folder / FOLDER} is valid, and what is there ({', '.join(left[-3:])})"
            " is not removed for a new run: repair it, choose another `run.folder`, or remove `resume`"
        )


def restart_folder(config: Config) -> Path | None:
    """With `resume: auto`, the folder of a run that was killed before its first checkpoint and starts again there; None
    if there is no such run."""
    folder = _newest(config) if config.resume == "auto" else None
    if folder is None or not any(folder.iterdir()) or any((folder / FOLDER).glob("step-*")):
        return None
    if not config.run.overwrite:
        _refuse_another(folder, config)
    return folder


def _refuse_another(folder: Path, config: Config) -> None:
    """Raises if the folder belongs to another run, or to one that has ended and kept no checkpoint: this run must not
    replace it."""
    # A start that was killed before it wrote its config has left the run that it replaces in REPLACED.
    kept = folder if (folder / "config.yaml").exists() else folder / REPLACED
    then, now = _written(kept / "config.yaml"), dict(_flat(config.model_dump(mode="json")))
    done, of = _last_step(kept / "metrics.jsonl"), then.get("train.steps")
    others = [key for key in now if key.startswith(FIXED) and key in then and then[key] != now[key]]
    why = [f"`{key}` was {_shown(then[key])} and is {_shown(now[key])}" for key in others]
    if done and not (isinstance(of, int) and done < of):
        why.append(f"it has done its {done} steps and kept no checkpoint")
    if why:
        raise UserError(
            f"`resume: auto` cannot continue the run in {folder} ({'; '.join(why)}): choose another `run.folder`,"
            " replace the run there with `run.folder` and `run.overwrite=true`, or remove `resume` to start a new run"
        )


def _written(path: Path) -> dict[str, Any]:
    """The config that a run wrote, by dotted key; empty if it is missing or malformed."""
    try:
        found = read_yaml(path.read_text(), str(path))
    except (OSError, ValueError, UserError):
        return {}
    return dict(_flat(found)) if isinstance(found, dict) else {}


def _last_step(metrics: Path) -> int:
    """The last step in a metrics file; 0 if it has none."""
    if not metrics.is_file():
        return 0
    with metrics.open("rb") as lines:
        return max((step for line in lines if (step := parse_step(line)) is not None), default=0)


def _newest(config: Config) -> Path | None:
    """The folder of the run that `resume: auto` means: the newest of its name."""
    if config.run.folder is not None:
        folder = Path(config.run.folder).expanduser()
        return folder if folder.is_dir() else None
    mine = numbered_runs(config.run.name)
    return max(mine, key=mine.__getitem__, default=None)


def numbered_runs(name: str) -> dict[Path, int]:
    """The folders of all runs of a name, and their numbers."""
    named = [(folder.name.rpartition("-"), folder) for folder in Path("runs").glob("*") if folder.is_dir()]
    return {folder: int(number) for (run, _, number), folder in named if run == name and number.isdecimal()}


def _fitting(saved: Checkpoint, config: Config, say: Callable[[str], None]) -> Checkpoint:
    """Prints the keys that differ from the checkpoint's config, and raises for those that would make it another run."""
    files = CheckpointFiles(saved.path)
    then = dict(_flat(read_tree(files)))
    now = dict(_flat(with_saved_choices(config, saved).model_dump(mode="json")))
    changed = [
        key for key in sorted(then.keys() | now.keys()) if then.get(key) != now.get(key) and not key.startswith(FREE)
    ]
    notes = [f"`{key}` was {_shown(then.get(key))} and is {_shown(now.get(key))}" for key in changed]
    if refused := [text for key, text in zip(changed, notes, strict=True) if key.startswith(FIXED)]:
        raise UserError(
            f"the checkpoint {saved.path} is of another run: {'; '.join(refused)}."
            " Resume with the values it was made with, or start a new run without `resume`"
        )
    if saved.step > config.train.steps:
        raise UserError(
            f"the checkpoint {saved.path} is of step {saved.step}, but `train.steps` is {config.train.steps}:"
            " raise it to continue"
        )
    if saved.step == config.train.steps:
        say(
            f"the checkpoint {saved.path} is of the last step: nothing is left to train"
            " (raise `train.steps` to continue)"
        )
    world = (read_run(files).world, _ranks(config))
    if world[0] != world[1]:
        notes.append(f"the number of ranks was {world[0]} and is {world[1]}")
    for text in notes:
        say(f"since the checkpoint, {text}")
    return saved


def _ranks(config: Config) -> int:
    """The number of ranks that train."""
    parallel = config.parallel or ParallelConfig()
    started = os.environ.get("WORLD_SIZE")
    return int(started) - parallel.rollout_gpus if started is not None else parallel.ranks or 1


def _flat(tree: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _shown(value: object) -> str:
    """A value as a config has it."""
    return "null" if value is None else repr(value)
