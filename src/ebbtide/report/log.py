"""log.txt: the log of Ebbtide and of torch.distributed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path


class LogFile(logging.FileHandler):
    """A log file that is created with its first record. If it cannot be written, one message says so and the run
    continues."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        super().__init__(path, delay=True)
        self._say = say
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError as error:  # the file is opened at the first record
            self._give_up(error)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._give_up(error)
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:  # closing flushes what was still in memory
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if self.level <= logging.CRITICAL:
            self.setLevel(logging.CRITICAL + 1)  # no more records come here
            self._say(f"log.txt cannot be written ({error.strerror}): the run continues without it")
