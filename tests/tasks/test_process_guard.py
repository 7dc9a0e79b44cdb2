"""What the guard kills, seen with made-up processes."""

import signal

import pytest

from ebbtide.tasks import process_guard

HOST, EPISODE, LEFT, OTHER, TOOL = 10, 20, 30, 40, 50


def _kill(monkeypatch: pytest.MonkeyPatch, scans: list[dict[int, list[int]]], keep: set[int]) -> set[int]:
    """The processes that are killed, where these are the children of each in one look after the other. A process that
    was killed is dead from then on, and so is the episode's from the second look on."""
    killed = set[int]()

    def processes() -> tuple[dict[int, list[int]], set[int]]:
        children = scans.pop(0) if len(scans) > 1 else scans[0]
        return children, killed | (set() if len(scans) > 1 else {EPISODE})

    def kill(process: int, number: int) -> None:
        if number == signal.SIGKILL:
            killed.add(process)

    monkeypatch.setattr(process_guard, "_processes", processes)
    monkeypatch.setattr(process_guard.os, "kill", kill)
    process_guard.kill_descendants(HOST, keep)
    return killed


def test_what_gets_another_parent_between_two_looks_is_killed(monkeypatch) -> None:
    scans = [{HOST: [EPISODE], EPISODE: [LEFT]}, {HOST: [EPISODE, LEFT]}]
    assert _kill(monkeypatch, scans, set()) == {LEFT}


def test_what_is_seen_below_a_dead_parent_is_killed(monkeypatch) -> None:
    assert _kill(monkeypatch, [{HOST: [EPISODE], EPISODE: [LEFT]}], set()) == {LEFT}


def test_other_episodes_and_what_they_started_are_kept(monkeypatch) -> None:
    assert _kill(monkeypatch, [{HOST: [EPISODE, LEFT, OTHER], OTHER: [TOOL]}], {OTHER}) == {LEFT}
