"""Builds the page: HTML, style, scripts, the charting library and the runs' data, in one file that loads nothing
else."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ebbtide.errors import UserError
from ebbtide.report.page.run import PageRun, open_runs
from ebbtide.system.files import write_atomic
from ebbtide.system.json_text import json_text

SCRIPTS = (
    *("shared.js", "view.js", "csv.js", "meanings.js"),
    *("runs.js", "chooser.js", "curves.js", "phases.js", "settings.js", "rollouts.js", "main.js"),
)


def plotly_is_installed() -> bool:
    """Whether the charting library is installed."""
    return importlib.util.find_spec("plotly") is not None


def read_plotly_js() -> str:
    """The JavaScript inside the package plotly. The package itself is not imported: that takes a second, and it draws
    nothing here."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise UserError("the page needs the package `plotly`, which is not installed: pip install 'ebbtide[report]'")
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def build_data(runs: Sequence[PageRun], *, served: bool = False) -> bytes:
    """The data of the page, as JSON that is safe inside a script element: it has no `<`, whatever a model wrote."""
    shown: dict[str, Any] = {"served": served, "runs": [run.read() for run in runs]}
    text = json_text(shown, separators=(",", ":"))
    for character in "<>&\u2028\u2029":  # they occur only in strings, where an escape means the same
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode(errors="backslashreplace")  # half a surrogate pair becomes its JSON escape


def build_page(runs: Sequence[PageRun], *, served: bool = False) -> bytes:
    """The whole page as one HTML file."""
    here = files("ebbtide.report.page")
    parts = {name: (here / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *SCRIPTS)}
    scripts = [_escape_script(read_plotly_js()), _escape_script("\n".join(parts[name] for name in SCRIPTS))]
    filled = {
        "POLICY": content_security_policy(scripts, served=served).encode(),
        "TITLE": (
            ", ".join(run.name for run in runs).replace("&", "&amp;").replace("<", "&lt;").encode(errors="replace")
        ),
        "STYLE": parts["page.css"].encode(),
        "CHARTING": scripts[0].encode(),
        "SCRIPT": scripts[1].encode(),
        "DATA": build_data(runs, served=served),
    }
    made = b""
    # In one pass: what is filled in is not searched for placeholders again.
    for number, part in enumerate(parts["page.html"].split("@@")):
        made += filled[part] if number % 2 else part.encode()
    return made


def content_security_policy(scripts: Sequence[str], *, served: bool) -> str:
    """The Content-Security-Policy: only these two scripts run, nothing is loaded, and only a served page sends
    requests, to its own server. `unsafe-inline` is for the style elements that Plotly creates."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    connect = "'self'" if served else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _escape_script(script: str) -> str:
    """Escapes what would end the script element or change how it is parsed; strings and patterns keep their meaning."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def write_page(folders: Sequence[Path], out: Path) -> None:
    """Writes the page of these runs atomically."""
    if out.is_dir() or not out.name:
        raise UserError(f"the page cannot be written to {out}: it is a folder. Name a file with --out")
    made = build_page(open_runs(folders))
    try:
        write_atomic(out, [made])
    except OSError as error:
        raise UserError(
            f"the page cannot be written to {out}: {error.strerror}. Name another place with --out"
        ) from None
