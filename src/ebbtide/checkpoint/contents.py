"""What a checkpoint holds beside its tensors: config, place in the data, random states. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, PositiveInt, ValidationError, model_validator

from ebbtide.checkpoint.index import read_index
from ebbtide.checkpoint.manifest import Listed, Record, first, shown
from ebbtide.config.tree import Config
from ebbtide.config.yaml_text import read_yaml
from ebbtide.errors import UserError

RUN, CONFIG = "run.json", "config.yaml"


def random_name(rank: int) -> str:
    return f"random-{rank:05d}.json"


Count = Annotated[int, Field(ge=0, lt=2**63)]
Word = Annotated[int, Field(ge=0, lt=2**32)]
Base64 = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]+={0,2}$")]


class RandomStates(Record):
    """Of one rank."""

    python: tuple[Literal[3], Annotated[list[Word], Field(min_length=625, max_length=625)], float | None]
    # numpy looks at its 624 words at whatever position it is given.
    numpy: tuple[
        Literal["MT19937"],
        Annotated[list[Word], Field(min_length=624, max_length=624)],
        Annotated[int, Field(ge=0, le=624)],
        Literal[0, 1],
        float,
    ]
    torch: Base64
    devices: list[Base64]


class Place(Record):
    """In the data."""

    epoch: Count
    position: Count


class Group(Record):
    """Completions of one prompt that were under way."""

    prompt: Count
    tokens: list[Count]
    step: Count
    seeds: list[Count]
    samples: list[tuple[list[Count], list[FiniteFloat], list[FiniteFloat], Literal["stop", "length"] | None]]
    """Tokens, their log-probs twice, and how it ended."""

    @model_validator(mode="after")
    def _as_many(self) -> Group:
        lengths = [{len(column) for column in sample[:3]} for sample in self.samples]
        if len(self.samples) != len(self.seeds) or any(len(found) != 1 for found in lengths):
            raise ValueError("it has more of one than of the other")
        return self


class Run(Record):
    step: Count
    world: PositiveInt = 1
    sampler: Place
    optimizer_steps: dict[str, Count]
    rollouts: list[Group] = []
    problems: str | None = None
    """A digest of those that are trained on."""
    random: RandomStates | None = None
    """Where checkpoints of one rank had it at first."""

    @model_validator(mode="after")
    def _begun_before(self) -> Run:
        if any(group.step > self.step for group in self.rollouts):
            raise ValueError("it has completions that were begun in a later step")
        return self


def read_run(files: Listed) -> Run:
    return files.record(Run, RUN)


def read_random(files: Listed, rank: int) -> RandomStates | None:
    """None of a rank that was not there."""
    if random_name(rank) in files:
        return files.record(RandomStates, random_name(rank))
    return read_run(files).random if rank == 0 else None


def read_tree(files: Listed) -> dict[str, Any]:
    """The config that the run had, as a tree: it may be one of an earlier version."""
    try:
        tree = read_yaml(files.read(CONFIG).decode(), CONFIG)
    except (UnicodeDecodeError, UserError) as error:
        raise files.damaged(f"{CONFIG} is not what a run writes: {shown(' '.join(str(error).split()))}") from None
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise files.damaged(f"{CONFIG} is not what a run writes: it holds no settings")
    return tree


def read_config(files: Listed) -> Config:
    """The same, checked."""
    try:
        return Config.model_validate(read_tree(files))
    except ValidationError as error:
        raise files.damaged(f"{CONFIG} is not valid: {first(error)}") from None


def check(files: Listed) -> None:
    """Raises what is not fit to go on from, though it may be just as it was written."""
    run = read_run(files)
    if run.step != files.manifest.step:
        raise files.damaged(f"{RUN} is of step {run.step}")
    for rank in range(run.world):
        if read_random(files, rank) is None:
            raise files.damaged(f"the manifest does not list {random_name(rank)}")
    read_tree(files)
    read_index(files)
