"""The page: its HTML, style and scripts, the charting library, and the runs' data, in one file that asks for nothing else."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ebbtide.errors import UserError
from ebbtide.files import write_whole
from ebbtide.json_text import json_text
from ebbtide.report.page.run import Run, named

SCRIPTS = (
    *("shared.js", "view.js", "csv.js", "meanings.js"),
    *("runs.js", "chooser.js", "curves.js", "phases.js", "settings.js", "rollouts.js", "main.js"),
)


def installed() -> bool:
    return importlib.util.find_spec("plotly") is not None


def charting() -> str:
    """The JavaScript that the package plotly carries. The package itself is not imported: it takes a second, and draws nothing here."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise UserError("the page needs the package `plotly`, which is not installed: pip install 'ebbtide[report]'")
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def data(runs: Sequence[Run], *, served: bool = False) -> bytes:
    """What the page shows, as JSON that is also safe inside a script element: it has no `<`, whatever a model wrote."""
    shown: dict[str, Any] = {"served": served, "runs": [run.read() for run in runs]}
    text = json_text(shown, separators=(",", ":"))
    for character in "<>&\u2028\u2029":  # only strings can hold them, and there an escape says the same
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode(errors="backslashreplace")  # half a surrogate pair becomes its JSON escape


def page(runs: Sequence[Run], *, served: bool = False) -> bytes:
    here = files("ebbtide.report.page")
    parts = {name: (here / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *SCRIPTS)}
    scripts = [_inside_a_script(charting()), _inside_a_script("\n".join(parts[name] for name in SCRIPTS))]
    filled = {
        "POLICY": policy(scripts, served=served).encode(),
        "TITLE": ", ".join(run.name for run in runs).replace("&", "&amp;").replace("<", "&lt;").encode(errors="replace"),
        "STYLE": parts["page.css"].encode(),
        "CHARTING": scripts[0].encode(),
        "SCRIPT": scripts[1].encode(),
        "DATA": data(runs, served=served),
    }
    made = b""
    for number, part in enumerate(parts["page.html"].split("@@")):  # at once: what is filled in is never looked at again
        made += filled[part] if number % 2 else part.encode()
    return made


def policy(scripts: Sequence[str], *, served: bool) -> str:
    """Only these two scripts run, nothing is loaded, and only a served page asks, and only where it came from. Plotly makes its style elements itself."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)
    asks = "'self'" if served else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; connect-src {asks}; "
        "base-uri 'none'; form-action 'none'"
    )


def _inside_a_script(script: str) -> str:
    """These would end the element or change how it is read; in strings and patterns the escape means the same."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def write(folders: Sequence[Path], out: Path) -> None:
    """The page of these runs, whole or not at all."""
    if out.is_dir() or not out.name:
        raise UserError(f"the page cannot be written to {out}: it is a folder. Name a file with --out")
    made = page(named(folders))
    try:
        write_whole(out, [made])
    except OSError as error:
        raise UserError(f"the page cannot be written to {out}: {error.strerror}. Name another place with --out") from None
