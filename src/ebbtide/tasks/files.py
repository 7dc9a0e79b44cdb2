"""Problems from JSONL and Parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ebbtide.config.task import FileTaskConfig
from ebbtide.errors import UserError
from ebbtide.system.json_text import DEEPEST, is_too_deep
from ebbtide.tasks.scorers import check_answer, find_scorer
from ebbtide.tasks.task import Message, Problem, Problems, Score, ask, find_message_problem

HUB = "hf://datasets/"


class Row(dict[str, Any]):
    """A row of a file. `a.b` is the field `b` of the field `a`, unless a field has that whole name."""

    def __missing__(self, name: str) -> Any:
        found: Any = self
        for part in name.split("."):
            # `get`, as the row itself would ask for this name again.
            if not isinstance(found, dict) or (found := found.get(part, _MISSING)) is _MISSING:
                raise KeyError(name)
        return found

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        try:
            return isinstance(name, str) and self[name] is not _MISSING
        except KeyError:
            return False


_MISSING = object()


class FileTask:
    """A task whose problems are the rows of a file, scored by the configured scorer."""

    def __init__(
        self,
        config: FileTaskConfig,
        *,
        held_out: int,
        keeps_rows: bool = False,
        checked: Sequence[str] | None = None,
    ) -> None:
        """`keeps_rows`: the metadata of a problem is its whole row. `checked`: the scorers that answers must be usable
        for; None is the configured one."""
        self.config, self.held_out, self._keeps_rows = config, held_out, keeps_rows
        self._scorer_name = config.scorer or "exact"
        self._scorer = find_scorer(self._scorer_name)
        self._checked = [self._scorer_name] if checked is None else checked

    def problems(self) -> Problems:
        rows = self._problems(self.config.train)
        if self.config.held_out is not None:
            return Problems(train=rows, held_out=self._problems(self.config.held_out))
        if self.held_out >= len(rows):
            raise UserError(
                f"`task.held_out: {self.held_out}` sets all {len(rows)} problems of {self.config.train} aside: lower"
                " it, or name a file in `task.file.held_out`"
            )
        cut = len(rows) - self.held_out
        return Problems(train=rows[:cut], held_out=rows[cut:])

    def score(self, problem: Problem, completion: str) -> Score:
        value = self._scorer(completion, problem.answer)
        return Score(value, {self._scorer_name: value})

    def _problems(self, path: str) -> list[Problem]:
        problems = [self._problem(row, where) for row, where in read_rows(path)]
        if not problems:
            raise UserError(f"the dataset {path} is empty: write one row per problem")
        return problems

    def _problem(self, row: Row, where: str) -> Problem:
        if is_too_deep(row):
            raise UserError(f"{where} has lists or objects nested more than {DEEPEST} deep: flatten them")
        fields = {"prompt_field": self.config.prompt_field, "answer_field": self.config.answer_field}
        for key, name in fields.items():
            if name is not None and name not in row:
                raise UserError(
                    f"{where} has no field `{name}` (`task.file.{key}`); its fields are:"
                    f" {', '.join(map(str, row)) or 'none'}"
                )
        answer = None
        if self.config.answer_field is not None:
            answer = row[self.config.answer_field]
        for scorer in self._checked if self.config.answer_field is not None else ():
            try:
                check_answer(scorer, answer)
            except ValueError as error:
                raise UserError(
                    f"{where} has an answer that `task.file.scorer: {scorer}` cannot use,"
                    f" {str(answer)[:60]!r}: {error}. Fix the row, or choose another scorer"
                ) from None
        rest = {key: value for key, value in row.items() if key not in fields.values()}
        rest = row if self._keeps_rows else rest
        return Problem(
            read_messages(row[self.config.prompt_field], f"{where} field `{self.config.prompt_field}`,"), answer, rest
        )


def read_rows(path: str, section: str = "task.file") -> Iterator[tuple[Row, str]]:
    """Each row of the file, with its place in the file for error messages. `section`: the section of the config that
    names it."""
    file = _from_hub(path) if path.startswith(HUB) else Path(path).expanduser()
    if not file.is_file():
        found = "is a folder" if file.is_dir() else "is not a regular file" if file.exists() else "does not exist"
        raise UserError(
            f"the dataset {path} {found} (looked for {file.absolute()}): name a .jsonl or .parquet file in `{section}`"
        )
    if file.suffix == ".parquet":
        yield from _parquet(file)
    elif file.suffix in (".jsonl", ".ndjson"):
        yield from _jsonl(file)
    else:
        raise UserError(f"the dataset {path} must end in .jsonl or .parquet")


def _from_hub(path: str) -> Path:
    """The local copy of `hf://datasets/OWNER/NAME/FILE`."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    parts = path.removeprefix(HUB).split("/", 2)
    if len(parts) < 3 or not all(parts):
        raise UserError(f"the dataset {path} should be `{HUB}OWNER/NAME/FILE`, with the file's path in the repository")
    owner, name, file = parts
    try:
        return Path(hf_hub_download(f"{owner}/{name}", file, repo_type="dataset"))
    except LocalEntryNotFoundError:
        why = "the hub cannot be reached, and there is no copy in its cache"
    except (HfHubHTTPError, HFValidationError) as error:
        why = str(error).strip().splitlines()[0]
    raise UserError(
        f"the dataset {path} could not be downloaded: {why}. Name a .jsonl or .parquet file on this machine instead"
    )


def _jsonl(file: Path) -> Iterator[tuple[Row, str]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number},"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # Also for numbers of thousands of digits, and deep nesting.
                raise UserError(f"{where} is not JSON in UTF-8: {error}") from None
            if not isinstance(row, dict):
                raise UserError(f"{where} must be a JSON object with fields, but is a {type(row).__name__}")
            yield Row(row), where


def _parquet(file: Path) -> Iterator[tuple[Row, str]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"reading {file} needs the package pyarrow: pip install 'ebbtide[parquet]'") from None
    try:
        rows = parquet.read_table(file).to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{file} is not a readable Parquet file: {error}") from None
    for number, row in enumerate(rows):
        yield Row(row), f"{file}, row {number},"


def read_messages(prompt: Any, where: str) -> list[Message]:
    """The messages of a field; a text is one user message."""
    messages = ask(prompt) if isinstance(prompt, str) else prompt
    if (why := find_message_problem(messages)) is not None:
        raise UserError(
            f"{where} must be a text or a list of messages with `role` and `content`, but has messages that {why}"
        )
    found: list[Message] = []
    for message in messages:
        found.append({"role": message["role"], "content": message["content"]})
        if isinstance(thought := message.get("reasoning_content"), str) and thought:
            found[-1]["reasoning_content"] = thought
    return found
