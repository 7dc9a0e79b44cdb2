"""Logs of steps that will be done again: their lines go, the others stay as they were, and memory has to hold one
line."""

import json
import os
import tracemalloc

import pytest

from disk import room_for
from ebbtide.errors import UserError
from ebbtide.system.jsonl import append_lines, complete_line, drop_lines_after


def test_lines_of_later_steps_and_broken_ones_go(tmp_path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_bytes(b'{"step":1}\n{"other": 1}\n{"step": 3}\n\xff\n{"step": 2, "text": "\\r\\u2028"}\n{"step": 1}')
    drop_lines_after(file, 2)
    assert file.read_bytes() == b'{"step":1}\n{"step": 2, "text": "\\r\\u2028"}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
    drop_lines_after(tmp_path / "none.jsonl", 2)


def test_lines_that_no_run_wrote_are_dropped(tmp_path) -> None:
    file = tmp_path / "metrics.jsonl"
    foreign = ["[1, 2]", '"step"', '{"step": "one"}', '{"reward": 1}', "[" * 100_000, '{"step": 1', '{"step": 3}']
    file.write_text('{"step": 1}\n' + "".join(line + "\n" for line in foreign) + '{"step": 2}\n{"step": 2, "cut": ')
    drop_lines_after(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_pipe_in_its_place_is_refused(tmp_path) -> None:
    os.mkfifo(tmp_path / "rollouts.jsonl")
    with pytest.raises(UserError, match="is not an ordinary file: move it away"):
        drop_lines_after(tmp_path / "rollouts.jsonl", 3)


def test_memory_does_not_grow_with_the_file(tmp_path) -> None:
    file = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step, "text": "a" * 10_000}) + "\n" for step in range(400)]
    file.write_text("".join(lines))
    tracemalloc.start()
    try:
        drop_lines_after(file, 200)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert file.read_text() == "".join(lines[:201])
    assert peak < 500_000  # of 4,000,000 bytes


def test_lines_are_dropped_where_there_is_no_room_for_a_copy(tmp_path) -> None:
    """A full disk is what a run often has to go on from."""
    file = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step, "text": "a" * 100}) + "\n" for step in range(100)]
    file.write_text("".join(lines) + '{"step": 100, "cut')
    with room_for(1000):
        drop_lines_after(file, 50)
    assert file.read_text() == "".join(lines[:51])


def test_no_line_is_cut_by_a_disk_that_fills_up(tmp_path) -> None:
    file = tmp_path / "log.jsonl"
    file.touch()
    line = {"step": 1, "text": "a" * 300}
    with room_for(1000):
        append_lines(file, [line] * 2)
        with pytest.raises(
            UserError, match=r"log\.jsonl cannot be written: File too large\. Its lines so far are complete"
        ):
            append_lines(file, [line] * 2)
    assert file.read_text() == f"{json.dumps(line)}\n" * 2
    file.unlink()
    with pytest.raises(UserError, match=r"log\.jsonl was moved or removed"):
        append_lines(file, [line])
    assert not file.exists()


def test_a_step_gets_what_it_lacks(tmp_path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n')
    complete_line(file, 2, {"a": 5, "b": 3})
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 1, "a": 1},
        {"step": 2, "a": 2, "b": 3},
    ]
