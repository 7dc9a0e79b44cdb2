"""The command `ebbtide`, which also writes to a file how old its process is when the first tokens of a run are known.

FIRST_TOKEN=FILE python benchmarks/first_token.py train CONFIG [KEY=VALUE ...]
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def main() -> None:
    from ebbtide.__main__ import main as command
    from ebbtide.report.report import Report
    from ebbtide.rollout.paged.session import Session
    from ebbtide.system.clock import process_seconds

    begin, step = Report.begin, Session.step

    def begun(*given: Any) -> None:
        """Sessions before this were probes."""
        begin(*given)
        Session.step = watched  # type: ignore[assignment, method-assign]

    def watched(session: Session) -> Any:
        found = step(session)
        if found:
            Path(os.environ["FIRST_TOKEN"]).write_text(f"{process_seconds():.3f}")
            Session.step = step  # type: ignore[method-assign]
        return found

    Report.begin = begun  # type: ignore[assignment, method-assign]
    command()


if __name__ == "__main__":
    main()
