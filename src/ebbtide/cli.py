"""The `ebbtide` command line. It parses arguments, calls what does the work, and turns errors into messages and exit
codes."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ebbtide import __version__
from ebbtide.checkpoint.initial import find_adapters, with_runs_as_models
from ebbtide.checkpoint.resume import FOLDER
from ebbtide.checkpoint.store import list_checkpoints
from ebbtide.config import load, load_serve, recipes, replace_overrides
from ebbtide.config.adapter import is_adapter
from ebbtide.config.arguments import ServerSettingsCommand, SettingsCommand
from ebbtide.config.document import to_annotated_yaml
from ebbtide.config.model import ModelConfig
from ebbtide.config.model_path import check_paths
from ebbtide.config.train import Rehearsal
from ebbtide.errors import RunStopped, UserError
from ebbtide.importing.command import import_file
from ebbtide.launch.job import Job, read_job
from ebbtide.launch.start import start_run
from ebbtide.planner import render
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.offline import Hardware, plan_offline
from ebbtide.rollout.serve.preflight import check_installed, read_api_key
from ebbtide.system.allocator import use_expandable_segments
from ebbtide.system.files import user_error_on_full_disk
from ebbtide.system.machine import KNOWN, USUAL_GPUS_PER_NODE, save_rates
from ebbtide.system.printable import printable_lines
from ebbtide.system.signals import STOPPED, interrupt_on_signal
from ebbtide.system.units import gib

app = typer.Typer(
    help=(
        "Reinforcement-learning post-training in which GPU memory is a planned resource.\n\n"
        "Start with `ebbtide train quickstart`: a tiny model learns a task in about a minute on a CPU."
    ),
    epilog="Any setting can be changed on the command line: ebbtide train quickstart train.steps=50 optimizer.lr=3e-4",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


Source = Annotated[
    str, typer.Argument(metavar="RECIPE_OR_FILE", help="The name of a recipe (see `ebbtide recipes`) or a YAML file.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, as in `train.steps=50`.", show_default=False),
]


@app.command(cls=SettingsCommand)
def train(source: Source, overrides: Overrides = None) -> None:
    """Train a policy with RL: generate, score, update, repeat. Writes to runs/NAME-001, or to run.folder if that is
    set."""
    _start(Job(source, load(source, overrides or []), None))


@app.command(cls=SettingsCommand)
def rehearse(
    source: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE_OR_FILE", help="The name of a recipe or a YAML file.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    optimizer: Annotated[
        Rehearsal,
        typer.Option(
            help="`built`: the optimizer state exists and moves as in training. `none`: no optimizer and no gradients."
        ),
    ] = "built",
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to rehearse.")] = 2,
    save_rollouts: Annotated[
        str | None,
        typer.Option(
            help=(
                "Save every completion to this new file (`rollout.save_to`). To train on them later:"
                " `ebbtide train ... rollout.replay=FILE train.steps=N`, with N the number of rehearsed steps."
            ),
            show_default=False,
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help=(
                "First measure this machine (host link, memory bandwidth, matmuls, CPU) and store the rates for"
                " `ebbtide plan`."
            ),
        ),
    ] = False,
) -> None:
    """Dry run: everything except weight updates. Generates, scores, evaluates, makes every move, and reports time and
    memory per phase. Saves no checkpoint."""
    if calibrate:
        _calibrate()
    if source is None:
        if not calibrate:
            raise UserError(
                "nothing to rehearse: name a recipe (see `ebbtide recipes`) or a YAML file, or use `--calibrate` to"
                " measure this machine"
            )
        return
    config = load(source, overrides or [])
    if config.resume is not None:
        raise UserError(
            f"`resume: {config.resume}` cannot be rehearsed, as a rehearsal starts from step 0: remove `resume`"
        )
    # The rehearsal uses these paths up: the command that it prints for the run itself must not name them again.
    used = {"run.folder": config.run.folder, "rollout.save_to": config.rollout.save_to}
    run_overrides = replace_overrides(overrides or [], {key: "null" for key, path in used.items() if path is not None})
    if save_rollouts is not None:
        config = load(source, [*(overrides or []), f"rollout.save_to={save_rollouts}"])
    changes = {
        "checkpoint": None,
        "train": config.train.model_copy(update={"steps": steps}),
        "run": config.run.model_copy(update={"name": f"{config.run.name}-rehearsal"}),
    }
    _start(Job(source, config.model_copy(update=changes), optimizer, overrides=tuple(run_overrides)))


@app.command(cls=SettingsCommand)
def plan(
    source: Source,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help=f"The GPU to plan for: {', '.join(KNOWN)}.", show_default=False)
    ] = None,
    device_gib: Annotated[
        float | None,
        typer.Option(min=0.1, max=1e6, help="GPU memory in GiB, if it is not the usual size.", show_default=False),
    ] = None,
    host_gib: Annotated[
        float | None,
        typer.Option(min=0.1, max=1e6, help="Free host RAM in GiB. Default: 128 per GPU.", show_default=False),
    ] = None,
    link: Annotated[
        float | None,
        typer.Option(min=0.1, max=1e6, help="Host link (PCIe) bandwidth of pinned copies, GB/s.", show_default=False),
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="With `parallel`: GPUs per node.")] = USUAL_GPUS_PER_NODE,
    network: Annotated[
        float | None,
        typer.Option(min=0.01, max=1e6, help="With `parallel`: network bandwidth per GPU, GB/s.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict time and memory per phase (with `parallel`: of each rank), and the settings that make the run fit. Needs
    no GPU and loads no weights."""
    config = with_runs_as_models(load(source, overrides or []), _say)
    hardware = Hardware(gpu, device_gib, host_gib, link, network, gpus_per_node)
    result, shape, machine = plan_offline(config, hardware)
    if as_json:
        typer.echo(json.dumps(render.as_json(result, config, shape, machine), indent=1, allow_nan=False))
    else:
        _echo(render.render_plan(result, config, shape, machine))
    if not result.fits:
        raise typer.Exit(1)


def _calibrate() -> None:
    use_expandable_segments()
    from ebbtide.calibrate import calibrate as measure
    from ebbtide.report.terminal import Terminal

    terminal = Terminal(0)
    terminal.start()
    try:
        with interrupt_on_signal(), terminal.show_progress("measuring this machine") as progress:
            name, device_gib, rates = measure(progress)
    finally:
        terminal.stop()
    terminal.say(f"{name}: {render.render_rates(rates)}; stored in {save_rates(name, device_gib, rates)}")


def _start(job: Job) -> None:
    try:
        code = start_run(job, _say)
    except KeyboardInterrupt:
        _say("stopped before the first step: nothing was written")
        raise typer.Exit(STOPPED) from None
    if code:
        raise typer.Exit(code)


@app.command(hidden=True)
def rank(folder: Path) -> None:
    """Run one of the ranks that `ebbtide train` launches."""
    with read_job(folder) as job:
        from ebbtide.launch.run_rank import run_rank

        try:
            run_rank(job)
        except RunStopped:
            sys.exit(STOPPED)


RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/quickstart-001.")]


@app.command()
def checkpoints(
    run: RunPath,
    verify: Annotated[bool, typer.Option(help="Read every checkpoint and compare it with its manifest.")] = False,
) -> None:
    """List the checkpoints of a run. With --verify, the exit code is 1 if one of them is damaged."""
    if not run.is_dir():
        raise UserError(f"{run} is not a folder: name a run folder, such as runs/quickstart-001")
    found, damaged = list_checkpoints(run / FOLDER), False
    if not found:
        raise UserError(f"{run} has no complete checkpoint")
    for saved in found:
        reward = f"  reward {saved.metrics['reward']:.3f}" if "reward" in saved.metrics else ""
        problem = saved.find_problem() if verify else saved.damage
        if problem is not None and not saved.path.is_dir():
            continue  # the run is still going and has removed it
        damaged |= problem is not None
        checked = f"  damaged ({problem})" if problem is not None else "  verified" if verify else ""
        _echo(f"step {saved.step:>6}  {gib(saved.bytes):.3f} GiB{reward}  {saved.path}{checked}")
    if verify and damaged:
        raise typer.Exit(1)


@app.command()
def export(
    run: RunPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to create.")],
    step: Annotated[int | None, typer.Option(help="The step to export. Default: the newest checkpoint.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Add adapters to the weights, and write the model.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Write the whole of a multimodal model.")] = False,
) -> None:
    """Write the model, tokenizer and chat template of a checkpoint as an ordinary Hugging Face folder. Of a run with
    `model.lora` it is the adapter, in PEFT's format; of a multimodal model it is the language part."""
    from ebbtide.checkpoint.export import export as write_folder

    with interrupt_on_signal():
        saved = write_folder(run, out, step, _echo, merge=merge, full=full)
    what = "as an adapter that PEFT loads" if is_adapter(out) else "as a folder that transformers loads"
    _echo(f"exported the weights of step {saved.step} to {out}, {what}")


@app.command(cls=ServerSettingsCommand)
def serve(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN",
            help="A Hugging Face folder, a hub id, a GGUF file, or a run folder (its newest checkpoint).",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Settings to change, as in `port=8001` (docs/serve.md).", show_default=False
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with the API key that clients must send. Default: the variable EBBTIDE_API_KEY.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve a model, or the newest checkpoint of a run, with an OpenAI-compatible HTTP API."""
    config = load_serve(overrides or [])
    check_installed()
    key = read_api_key(api_key_file)
    find_adapters(config.lora, lambda said: None)  # a mistyped folder is refused before torch is loaded
    if not (Path(os.path.expanduser(source)) / FOLDER).is_dir():
        check_paths(ModelConfig(path=source))
    _say("starting (torch and transformers take a few seconds to load)", "dim")
    try:
        from ebbtide.launch.serve import serve as run_server

        run_server(source, config, key, _echo)
    except KeyboardInterrupt:
        _say("stopped before the server was up")
        raise typer.Exit(STOPPED) from None


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Run folders, such as runs/quickstart-001; several are shown side by side."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write. Default: report.html in the run folder, or in the current one for several runs.",
            show_default=False,
        ),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve a live page at 127.0.0.1 instead of writing a file.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port of --serve; 0 picks a free one.")] = 8642,
) -> None:
    """Write a run as one HTML page: curves, time and memory per phase beside the plan, and completions."""
    if serve and out is not None:
        raise UserError(f"`--serve` writes no file, so `--out {out}` has no effect: remove one of the two")
    if serve:
        from ebbtide.report.page.serve import serve as serve_page

        with interrupt_on_signal():
            serve_page(runs, port, _echo)
        return
    from ebbtide.report.page.build import write_page
    from ebbtide.report.page.lines import GrowingFile

    path = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    with interrupt_on_signal():
        write_page(runs, path)
    _echo(str(path))
    for run in runs:
        if not GrowingFile(run / "metrics.jsonl").read():
            _say(f"{run} has no steps yet")


@app.command(name="recipes")
def list_recipes() -> None:
    """List the recipes that ship with Ebbtide."""
    known = recipes()
    width = max(map(len, known))
    for name, description in known.items():
        typer.echo(f"{name:<{width}}  {description}")


@app.command(name="config", cls=SettingsCommand)
def show_config(source: Source, overrides: Overrides = None) -> None:
    """Print the resolved config of a recipe or file, with the meaning of each key. The output is valid YAML: save it
    and edit it."""
    config = load(source, overrides or [])
    plan_holdings(config)
    _echo(to_annotated_yaml(config).removesuffix("\n"))


app.command(name="import", cls=SettingsCommand)(import_file)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Runs the command. An error that a user can fix is printed as one paragraph, without a traceback; exit code 2."""
    faulthandler.enable(2)  # a crash inside a library then prints the Python stack to stderr
    try:
        with user_error_on_full_disk():
            app()
    except UserError as error:
        with suppress(OSError):  # stderr may be a file on the disk that is full
            _say(str(error), before="error: ")
        sys.exit(2)


def _echo(text: str) -> None:
    """Prints the result of a command to stdout. Control characters in names and foreign texts are escaped."""
    typer.echo(printable_lines(text))


def _say(text: str, style: str = "", before: str = "") -> None:
    """Prints a note to stderr, with control characters escaped."""
    line = Text.assemble((before, "bold red"), (printable_lines(text), style))
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)


if __name__ == "__main__":
    main()
