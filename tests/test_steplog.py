"""Logs of steps that will be done again: their lines go, the others stay as they were, and memory has to hold one line."""

import json
import tracemalloc

from ebbtide.steplog import forget_after


def test_lines_of_later_steps_and_broken_ones_go(tmp_path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_bytes(b'{"step":1}\n{"other": 1}\n{"step": 3}\n\xff\n{"step": 2, "text": "\\r\\u2028"}\n{"step": 1}')
    forget_after(file, 2)
    assert file.read_bytes() == b'{"step":1}\n{"step": 2, "text": "\\r\\u2028"}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
    forget_after(tmp_path / "none.jsonl", 2)


def test_memory_does_not_grow_with_the_file(tmp_path) -> None:
    file = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step, "text": "a" * 10_000}) + "\n" for step in range(400)]
    file.write_text("".join(lines))
    tracemalloc.start()
    try:
        forget_after(file, 200)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert file.read_text() == "".join(lines[:201])
    assert peak < 500_000  # of 4,000,000 bytes
