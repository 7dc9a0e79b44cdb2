"""Files with an object of a step in each line."""

from ebbtide.steplog import forget_after


def test_lines_that_no_run_wrote_are_dropped(tmp_path) -> None:
    file = tmp_path / "metrics.jsonl"
    foreign = ["[1, 2]", '"step"', '{"step": "one"}', '{"reward": 1}', "[" * 100_000, '{"step": 1', '{"step": 3}']
    file.write_text('{"step": 1}\n' + "".join(line + "\n" for line in foreign) + '{"step": 2}\n{"step": 2, "cut": ')
    forget_after(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
