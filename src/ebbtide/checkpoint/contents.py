"""The contents of a checkpoint other than its tensors: config, position in the data, random states. Imports no
torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, PositiveInt, ValidationError, model_validator

from ebbtide.checkpoint.index import read_index
from ebbtide.checkpoint.manifest import CheckpointFiles, Record, first_problem, safe_excerpt
from ebbtide.config.renamed import upgrade
from ebbtide.config.root import Config
from ebbtide.config.roots import validate_config
from ebbtide.config.yaml_text import read_yaml
from ebbtide.errors import UserError

RUN, CONFIG = "run.json", "config.yaml"


def random_name(rank: int) -> str:
    return f"random-{rank:05d}.json"


Count = Annotated[int, Field(ge=0, lt=2**63)]
Word = Annotated[int, Field(ge=0, lt=2**32)]
Base64 = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]+={0,2}$")]


class RandomStates(Record):
    """The random states of one rank."""

    python: tuple[Literal[3], Annotated[list[Word], Field(min_length=625, max_length=625)], float | None]
    # The bounds matter: numpy reads its 624 words at whatever position it is given.
    numpy: tuple[
        Literal["MT19937"],
        Annotated[list[Word], Field(min_length=624, max_length=624)],
        Annotated[int, Field(ge=0, le=624)],
        Literal[0, 1],
        float,
    ]
    torch: Base64
    devices: list[Base64]


class DataPosition(Record):
    """The position in the training data."""

    epoch: Count
    position: Count


class UnfinishedGroup(Record):
    """The unfinished completions of one prompt (partial rollouts)."""

    prompt: Count
    tokens: list[Count]
    step: Count
    seeds: list[Count]
    samples: list[tuple[list[Count], list[FiniteFloat], list[FiniteFloat], Literal["stop", "length"] | None]]
    """Per sample: its tokens, two lists of their log-probs, and how it ended (None: it has not)."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> UnfinishedGroup:
        lengths = [{len(column) for column in sample[:3]} for sample in self.samples]
        if len(self.samples) != len(self.seeds) or any(len(found) != 1 for found in lengths):
            raise ValueError("its tokens, log-probs and seeds differ in number")
        return self


class CurriculumState(Record):
    """Where the curriculum of a task is."""

    level: Count
    rewards: list[FiniteFloat]
    """The mean rewards of prompts since the level was reached."""
    drawn: dict[str, tuple[Count, Count]]
    """Level -> the epoch and the position in its problems."""

    @model_validator(mode="after")
    def _the_level_is_one_of_them(self) -> CurriculumState:
        if str(self.level) not in self.drawn:
            raise ValueError(f"level {self.level} has no problems")
        return self


class RunRecord(Record):
    """The contents of run.json."""

    step: Count
    world: PositiveInt = 1
    sampler: DataPosition
    optimizer_steps: dict[str, Count]
    rollouts: list[UnfinishedGroup] = []
    curricula: dict[str, CurriculumState] = {}
    """By the names of their tasks."""
    problems: str | None = None
    """A digest of the problems that are trained on."""
    reward_models: str | None = None
    """A digest of the reward models."""
    base: str | None = None
    """A digest of the frozen weights, where only adapters are saved."""
    random: RandomStates | None = None
    """The random states of rank 0, in checkpoints of early versions."""

    @model_validator(mode="after")
    def _rollouts_are_not_later(self) -> RunRecord:
        if any(group.step > self.step for group in self.rollouts):
            raise ValueError("it has completions that were begun in a later step")
        return self


def read_run(files: CheckpointFiles) -> RunRecord:
    return files.record(RunRecord, RUN)


def read_random(files: CheckpointFiles, rank: int) -> RandomStates | None:
    """The random states of a rank, or None if the checkpoint's run had no such rank."""
    if random_name(rank) in files:
        return files.record(RandomStates, random_name(rank))
    return read_run(files).random if rank == 0 else None


def read_tree(files: CheckpointFiles) -> dict[str, Any]:
    """The run's config as a tree, with the keys of earlier versions renamed."""
    try:
        tree = read_yaml(files.read(CONFIG).decode(), CONFIG)
    except (UnicodeDecodeError, UserError) as error:
        raise files.damage_error(
            f"{CONFIG} is not what a run writes: {safe_excerpt(' '.join(str(error).split()))}"
        ) from None
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise files.damage_error(f"{CONFIG} is not what a run writes: it has no settings")
    return upgrade(tree)


def read_config(files: CheckpointFiles) -> Config:
    """The run's config, validated."""
    try:
        return validate_config(read_tree(files))
    except ValidationError as error:
        raise files.damage_error(f"{CONFIG} is not valid: {first_problem(error)}") from None
    except UserError as error:
        raise files.damage_error(f"{CONFIG} is not valid: {error}") from None


def check_resumable(files: CheckpointFiles) -> None:
    """Raises if a run cannot resume from this checkpoint, even if its files are as they were written."""
    run = read_run(files)
    if run.step != files.manifest.step:
        raise files.damage_error(f"{RUN} is of step {run.step}")
    for rank in range(run.world):
        if read_random(files, rank) is None:
            raise files.damage_error(f"the manifest does not list {random_name(rank)}")
    read_tree(files)
    read_index(files)
