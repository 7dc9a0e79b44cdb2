"""The answers to the keys of a config: what was taken, what is not needed, and what has no counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ebbtide.config.keys import all_keys
from ebbtide.config.roots import roots
from ebbtide.importing.source import Found, Source, Unread
from ebbtide.importing.table import Entry, Table

TODO = "to do:"
"""Begins what a person has to do before the run."""

OFF = (None, False, "", "null", "none", "None", "disabled")


@dataclass(frozen=True)
class Taken:
    """A setting of Ebbtide, and where it comes from."""

    value: Any
    origin: str
    """The keys that it was made of, with their places."""
    how: str = ""
    """The arithmetic, or what a person should know about it."""


@dataclass(frozen=True)
class MixPart:
    """One of several datasets that are mixed."""

    name: str
    key: str
    """Their key that names it."""
    files: Mapping[str, tuple[str, str]]
    """`train`, and `held_out` if it has one -> the file, and what has to be done for it to be there."""
    scorer: str | None
    """Its own scorer; None: it is scored as all are."""


@dataclass
class Answers:
    """The answers to all keys of a source."""

    source: Source
    table: Table
    taken: dict[str, Taken] = field(default_factory=dict)
    not_needed: dict[str, str] = field(default_factory=dict)
    none: dict[str, str] = field(default_factory=dict)
    arithmetic: list[str] = field(default_factory=list)
    """Lines that show how batches were computed."""
    mix: list[MixPart] = field(default_factory=list)
    """Where the problems are of several datasets: all of them. What was taken for one holds for each."""

    @cached_property
    def _our_keys(self) -> set[str]:
        return set(all_keys(roots()[self.source.algorithm]))

    _used: set[str] = field(default_factory=set)

    def knows(self, key: str) -> bool:
        """Whether Ebbtide has this key, for this algorithm."""
        return key in self._our_keys

    def is_answered(self, key: str) -> bool:
        return key in self.not_needed or key in self.none or key in self._used

    def take(self, key: str, value: Any, *theirs: str, how: str = "", read: bool = False) -> None:
        """Sets a key of ours, made of these keys of theirs. `read`: the value is right although one of them could not
        be read."""
        self._used.update(theirs)
        unread = [one for one in theirs if one in self.source.keys and not self.source.keys[one].is_read]
        if unread and not read and TODO not in how:
            text = self.source.keys[unread[0]].value
            how = f"{how}; {TODO} `{text}` is only known where it runs".removeprefix("; ")
        origin = "; ".join(self._origin(one) for one in theirs if one in self.source.keys)
        self.taken[key] = Taken(value, origin, how if origin or how else f"{self.table.name}'s default")

    def drop(self, why: str, *theirs: str) -> None:
        """These keys need nothing here."""
        self.not_needed.update({key: why for key in theirs if key in self.source.keys and key not in self._used})

    def lack(self, key: str, nearest: str) -> None:
        """A key has no counterpart, or none that is exactly the same."""
        if key in self.source.keys:
            self.none[key] = nearest

    def _origin(self, key: str) -> str:
        found = self.source.keys[key]
        return f"{key} ({found.place})" if found.place else key

    # The table

    def complete(self) -> None:
        """Answers all keys that no function has answered, by the table."""
        switched = self._switched_off()
        for key, found in self.source.keys.items():
            if self.is_answered(key):
                continue
            section = next((one for one in switched if key.startswith(f"{one}.")), None)
            entry = self.table.find(key)
            if section is not None:
                self.not_needed[key] = f"`{section}` is off ({switched[section]})"
            elif entry is None:
                self._unknown(key, found)
            else:
                self._by_table(key, found, entry)
        # What nobody set needs no answer, unless it is taken or missing here.
        self.not_needed = {key: why for key, why in self.not_needed.items() if not self.source.keys[key].is_default}
        for ours, (value, why) in self.table.implied.items():
            if ours not in self.taken:
                self.taken[ours] = Taken(value, "", why)

    def _switched_off(self) -> dict[str, str]:
        """Section -> the key that switches it off."""
        return {
            key.rpartition(".")[0]: f"{key}: {found.value}".replace("False", "false")
            for key, found in self.source.keys.items()
            if key.rpartition(".")[2] in ("enabled", "enable") and found.value is False
            if key not in self.table.not_switches
        }

    def _by_table(self, key: str, found: Found, entry: Entry) -> None:
        value = found.value
        if entry.not_needed is not None:
            self.not_needed[key] = entry.not_needed
        elif entry.none is not None:
            if value in OFF or value in ([], {}) or value in entry.idle:
                self.not_needed[key] = "it is off, or at a value that changes nothing"
            else:
                self.none[key] = entry.none
        elif entry.by is not None:
            self.not_needed[key] = f"it changes nothing for {entry.by} here"
        elif entry.to is None or not self.knows(entry.to):
            self.not_needed[key] = f"it has no meaning for {self.source.algorithm.upper()}"
        elif isinstance(value, Unread):
            self.none[key] = f"its value, `{value}`, is only known where it runs: set `{entry.to}`"
        elif entry.values and str(value) not in entry.values:
            self.none[key] = f"`{entry.to}` has no value for it"
        elif entry.to is not None and entry.to in self.taken:
            self.not_needed[key] = f"`{entry.to}` is set by another key"
        elif value is None and not entry.values:
            self.not_needed[key] = f"it is not set: `{entry.to}` has its default"
        elif entry.to is not None:
            self.take(entry.to, entry.values[str(value)] if entry.values else value, key)

    def _unknown(self, key: str, found: Found) -> None:
        value = found.value
        if key in self.source.ours:
            return
        self.none[key] = "unknown: it is in no table of Ebbtide's" + (" (and is not set)" if value in OFF else "")


def with_defaults(source: Source, defaults: Mapping[str, Any], tool: str) -> None:
    """Adds the keys that the source does not set, with the values that they have in its tool."""
    for key, value in defaults.items():
        if key not in source.keys:
            source.keys[key] = Found(value, f"{tool}'s default", is_default=True)
