"""From `resume` to a checkpoint that is whole and fits this config; imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ebbtide.checkpoint.contents import CONFIG, read_run, read_tree
from ebbtide.checkpoint.manifest import Damaged, Listed, first
from ebbtide.checkpoint.store import Saved, listed, newest_sound
from ebbtide.config.decided import as_before, with_chat_date
from ebbtide.config.tree import Cluster, Config
from ebbtide.config.yaml_text import read_yaml
from ebbtide.errors import UserError
from ebbtide.steplog import step_of

FOLDER = "checkpoints"
# Another value of these is another run.
FIXED = ("model.", "seed", "optimizer.state_dtype")
# Where a run writes, how long it is and what it shows may change at will.
FREE = ("run.", "resume", "report.", "train.steps", "checkpoint.", "cluster")


def find(config: Config, say: Callable[[str], None]) -> Saved | None:
    """The checkpoint to go on from, or None to start anew."""
    if config.resume is None:
        return None
    if config.resume == "auto":
        if (folder := _newest(config)) is None:
            where = config.run.folder or f"runs/{config.run.name}-..."
            say(f"`resume: auto` finds no run in {where}: a new one begins")
            return None
        if saved := newest_sound(partial(listed, folder / FOLDER), say):
            return _fitting(saved, config, say)
        refuse_checkpoints(folder)
        if anew_in(config) is not None:
            say(f"the run in {folder} has no checkpoint yet: it begins anew, in place")
        return None
    path = Path(os.path.abspath(Path(config.resume).expanduser()))  # its parents are looked at

    def look() -> list[Saved]:
        return [saved for saved in listed(path.parent) if saved.path.name == path.name] or listed(path / FOLDER) or listed(path)

    found = look()
    if not found:
        raise UserError(
            f"`resume: {config.resume}` has no complete checkpoint: name a run folder or a checkpoint in it (`ebbtide checkpoints RUN` lists them)"
        )
    if (folder := found[0].path.parent).name != FOLDER:  # its grandparent would be taken for the run's folder
        raise UserError(
            f"`resume: {config.resume}` is not in a run's folder, and a run goes on in its own: put the checkpoint into RUN/{FOLDER}, also of a new RUN, "
            f"and name that (its folder now: {folder})"
        )
    saved = newest_sound(look, say)
    if saved is None:
        raise UserError(f"`resume: {config.resume}`: no checkpoint there is whole")
    return _fitting(saved, config, say)


def going_on(config: Config, saved: Saved) -> Config:
    """The config with what a plan had chosen when the checkpoint was made."""
    then = read_tree(Listed(saved.path))
    try:
        chosen = with_chat_date(as_before(config, then), (then.get("model") or {}).get("chat_date"))
        # What the checkpoint had is as foreign as the rest of it.
        Config.model_validate(chosen.model_dump(mode="json", warnings=False))
    except (ValidationError, TypeError) as error:
        why = first(error) if isinstance(error, ValidationError) else "a section is none"
        raise Damaged(saved.path, f"{CONFIG} is not valid: {why}") from None
    return chosen


def refuse_checkpoints(folder: Path) -> None:
    """A run that is to go on never begins anew where there are checkpoints, sound or not: that would remove them."""
    if left := sorted(path.name for pattern in ("step-*", "aside-*") for path in (folder / FOLDER).glob(pattern)):
        raise UserError(
            f"`resume`: no checkpoint in {folder / FOLDER} is whole, and what is there ({', '.join(left[-3:])}) "
            "is not removed for a new run: mend it, or begin another one in another `run.folder`, or without `resume`"
        )


def anew_in(config: Config) -> Path | None:
    """With `resume: auto`, where a run was killed before its first checkpoint, and begins anew; None without one."""
    folder = _newest(config) if config.resume == "auto" else None
    if folder is None or not any(folder.iterdir()) or any((folder / FOLDER).glob("step-*")):
        return None
    if not config.run.overwrite:
        _refuse_another(folder, config)
    return folder


def _refuse_another(folder: Path, config: Config) -> None:
    """What is of another run, or of one that has ended and kept no checkpoint, is not this run's to replace."""
    then, now = _written(folder / "config.yaml"), dict(_flat(config.model_dump(mode="json")))
    done, of = _last_step(folder / "metrics.jsonl"), then.get("train.steps")
    others = [key for key in now if key.startswith(FIXED) and key in then and then[key] != now[key]]
    why = [f"`{key}` was {then[key]!r} and is {now[key]!r}" for key in others]
    if done and not (isinstance(of, int) and done < of):
        why.append(f"it has done its {done} steps and kept no checkpoint")
    if why:
        raise UserError(
            f"`resume: auto` cannot go on from the run in {folder} ({'; '.join(why)}): choose another `run.folder`, "
            "replace what is there with `run.folder` and `run.overwrite=true`, or begin another run without `resume`"
        )


def _written(path: Path) -> dict[str, Any]:
    """The config that a run wrote, by dotted key; nothing where it is not there, or not whole."""
    try:
        found = read_yaml(path.read_text(), str(path))
    except (OSError, ValueError, UserError):
        return {}
    return dict(_flat(found)) if isinstance(found, dict) else {}


def _last_step(metrics: Path) -> int:
    """That a file has figures of; 0 where it has none."""
    if not metrics.is_file():
        return 0
    with metrics.open("rb") as lines:
        return max((step for line in lines if (step := step_of(line)) is not None), default=0)


def _newest(config: Config) -> Path | None:
    """The run that `resume: auto` looks at: older ones of its name are others."""
    if config.run.folder is not None:
        folder = Path(config.run.folder).expanduser()
        return folder if folder.is_dir() else None
    mine = numbered(config.run.name)
    return max(mine, key=mine.__getitem__, default=None)


def numbered(name: str) -> dict[Path, int]:
    """The folders of the runs of a name, and their numbers."""
    parted = [(folder.name.rpartition("-"), folder) for folder in Path("runs").glob("*") if folder.is_dir()]
    return {folder: int(number) for (of, _, number), folder in parted if of == name and number.isdecimal()}


def _fitting(saved: Saved, config: Config, say: Callable[[str], None]) -> Saved:
    """Says what differs from the config that the checkpoint was made with; refuses what would make it another run."""
    files = Listed(saved.path)
    then = dict(_flat(read_tree(files)))
    now = dict(_flat(going_on(config, saved).model_dump(mode="json")))
    changed = [key for key in sorted(then.keys() | now.keys()) if then.get(key) != now.get(key) and not key.startswith(FREE)]
    told = [f"`{key}` was {then.get(key)!r} and is {now.get(key)!r}" for key in changed]
    if refused := [text for key, text in zip(changed, told, strict=True) if key.startswith(FIXED)]:
        raise UserError(
            f"the checkpoint {saved.path} is of another run: {'; '.join(refused)}. Resume with the values it was made with, or start anew"
        )
    if saved.step > config.train.steps:
        raise UserError(
            f"the checkpoint {saved.path} is of step {saved.step}, and `train.steps` is {config.train.steps}: raise it to go on"
        )
    if saved.step == config.train.steps:
        say(f"the checkpoint {saved.path} is of the last step: nothing is left to train (raise `train.steps` to go on)")
    world = (read_run(files).world, _ranks(config))
    if world[0] != world[1]:
        told.append(f"the number of ranks was {world[0]} and is {world[1]}")
    for text in told:
        say(f"since the checkpoint, {text}")
    return saved


def _ranks(config: Config) -> int:
    """Those that train."""
    cluster = config.cluster or Cluster()
    started = os.environ.get("WORLD_SIZE")
    return int(started) - cluster.rollout_gpus if started is not None else cluster.ranks or 1


def _flat(tree: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
