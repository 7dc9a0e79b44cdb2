"""The command `ebbtide import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbtide.errors import UserError
from ebbtide.importing.convert import Imported, import_config
from ebbtide.importing.write import render_lists
from ebbtide.planner import render
from ebbtide.planner.offline import Hardware, plan_offline
from ebbtide.system.machine import KNOWN, USUAL_GPUS_PER_NODE
from ebbtide.system.printable import printable_lines


def import_file(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A YAML, shell script, Python script or notebook of NeMo RL, verl or TRL.",
            show_default=False,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Settings to change: keys of the file's own tool, or of Ebbtide.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The YAML file to write. Default: it is printed.", show_default=False)
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(metavar="GPU", help=f"Also plan it, for this GPU: {', '.join(KNOWN)}.", show_default=False),
    ] = None,
) -> None:
    """Turn a config of NeMo RL, verl or TRL into one of Ebbtide, and say what became of each of its keys. Nothing of
    the file is executed."""
    imported = import_config(file, overrides or [])
    if out is None:
        typer.echo(printable_lines(imported.text.removesuffix("\n")))
    else:
        _write(out, imported.text)
    # With the YAML on stdout, all else is on stderr: `ebbtide import run.sh > mine.yaml` gives a valid file.
    on_stderr = out is None
    typer.echo(printable_lines(render_lists(imported.answers)), err=on_stderr)
    if plan is not None and not _plan(imported, plan, on_stderr=on_stderr):
        raise typer.Exit(1)


def _write(out: Path, text: str) -> None:
    if out.exists():
        raise UserError(f"{out} exists already: name another file, or remove it")
    try:
        out.write_text(text)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error}") from None


def _plan(imported: Imported, gpu: str, *, on_stderr: bool) -> bool:
    config = imported.config
    result, shape, machine = plan_offline(config, Hardware(gpu, None, None, None, None, USUAL_GPUS_PER_NODE))
    typer.echo(err=on_stderr)
    typer.echo(printable_lines(render.render_plan(result, config, shape, machine)), err=on_stderr)
    return result.fits
