"""log.txt: Ebbtide's own log and that of torch.distributed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path


class LogFile(logging.FileHandler):
    """There when there is something to say. Where it cannot be written, that is said once, and the run goes on."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        super().__init__(path, delay=True)
        self._say = say
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError as error:  # of the file as it is opened
            self._lose(error)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._lose(error)
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:  # what it still had in memory
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if self.level <= logging.CRITICAL:
            self.setLevel(logging.CRITICAL + 1)  # nothing comes here any more
            self._say(f"log.txt cannot be written ({error.strerror}): the run goes on without it")
