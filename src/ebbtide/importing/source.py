"""What a reader finds in a config of another tool: each key with its value, and where it is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any


@dataclass(frozen=True)
class Unread:
    """A value that only running the file would give, such as `$(nproc)` or a call of a function."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Found:
    """A value, and the place where it is written."""

    value: Any
    place: str
    is_default: bool = False
    """Whether nobody set it: the tool has it by default."""

    @property
    def is_read(self) -> bool:
        return not isinstance(self.value, Unread)


@dataclass
class Source:
    """All that a file of another tool sets."""

    tool: str
    """`nemo_rl`, `verl` or `trl`."""
    algorithm: str
    """`grpo`, `sft`, `dpo` or `distill`."""
    keys: dict[str, Found]
    """Dotted key -> what was found, in the order of the file."""
    notes: list[str] = field(default_factory=list)
    """What a person should know about how the file was read."""
    advice: dict[str, str] = field(default_factory=dict)
    """Reward function -> what has to be done before it can be imported from where it is."""
    ours: dict[str, Found] = field(default_factory=dict)
    """Keys of Ebbtide that the command line sets."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; `default` where it is not set, is null or could not be read."""
        found = self.keys.get(key)
        return default if found is None or not found.is_read or found.value is None else found.value

    def number(self, key: str, default: float) -> float:
        """The value of a key that is a number, also where it is written as a text; `default` where it is none."""
        value = self.get(key, default)
        try:
            return default if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            return default

    def count(self, key: str, default: int) -> int:
        value = self.number(key, default)
        return int(value) if isfinite(value) else default

    def size(self, key: str, default: int) -> int:
        """The value of a key that counts things of which there is at least one."""
        return max(1, self.count(key, default))

    def texts(self, key: str) -> list[str]:
        """The value of a key that is a list of texts, or one text."""
        value = self.get(key, [])
        return [value] if isinstance(value, str) else [str(one) for one in value] if isinstance(value, list) else []

    def under(self, section: str) -> list[str]:
        """The keys of a section."""
        return [key for key in self.keys if key.startswith(f"{section}.")]


def flatten(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a tree under their dotted keys. Lists and empty mappings are values."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
