"""The `ebbtide` command, thin: it reads the config, runs, and turns errors into messages and exit codes."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ebbtide import __version__
from ebbtide.checkpoint.resume import FOLDER, find
from ebbtide.checkpoint.store import listed
from ebbtide.cluster.launch import launch, to_start
from ebbtide.cluster.leash import Job, leave, told
from ebbtide.cluster.on_ray import launch_on_ray
from ebbtide.config import Config, changed, load, load_serve, recipes
from ebbtide.config.arguments import TakesServerSettings, TakesSettings
from ebbtide.config.document import explained
from ebbtide.config.model_path import check_paths
from ebbtide.config.tree import Model, Rehearsal
from ebbtide.errors import Stopped, UserError
from ebbtide.files import disk_full
from ebbtide.memory.plan import build_plan, check_budget
from ebbtide.planner import show
from ebbtide.planner.choose import Chooser, Chosen
from ebbtide.planner.fewer import said_of_fewer
from ebbtide.planner.machine import KNOWN, USUAL_NODE, Machine, keep_rates, machine_for
from ebbtide.planner.predict import Predictor
from ebbtide.planner.ranks import sharing
from ebbtide.planner.shape import find_shape
from ebbtide.planner.work import most_work
from ebbtide.printable import printable_lines
from ebbtide.rollout.serve.checks import api_key, check_installed
from ebbtide.stop import STOPPED, in_order
from ebbtide.tasks.build import build_task

app = typer.Typer(
    help="Reinforcement-learning post-training in which GPU memory is a planned resource.\n\n"
    "Start with `ebbtide train quickstart`: a tiny model learns a task in about a minute on a CPU.",
    epilog="Any setting can be changed on the command line: ebbtide train quickstart train.steps=50 optimizer.lr=3e-4",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


Source = Annotated[str, typer.Argument(metavar="RECIPE_OR_FILE", help="A recipe's name (see `ebbtide recipes`) or a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, as in `train.steps=50`.", show_default=False)
]


@app.command(cls=TakesSettings)
def train(source: Source, overrides: Overrides = None) -> None:
    """Train a policy: generate, score, update, over and over. Writes to runs/NAME-001 unless run.folder says otherwise."""
    _go(Job(source, load(source, overrides or []), None))


@app.command(cls=TakesSettings)
def rehearse(
    source: Annotated[
        str | None, typer.Argument(metavar="RECIPE_OR_FILE", help="A recipe's name or a YAML file.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    optimizer: Annotated[
        Rehearsal,
        typer.Option(help="`built`: there, and moved as in training. `none`: no optimizer and no gradients are made."),
    ] = "built",
    steps: Annotated[int, typer.Option(min=1, help="How many steps.")] = 2,
    save_rollouts: Annotated[
        str | None,
        typer.Option(
            help="A new file for every completion (`rollout.save_to`). `ebbtide train ... rollout.replay=FILE train.steps=2` trains on those, for as many steps as were rehearsed.",
            show_default=False,
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="First measure this machine's link, memory, products and CPU, and keep them for `ebbtide plan`."),
    ] = False,
) -> None:
    """Do all that a run does but its updates: generate, score, evaluate, and every move. No weight changes, and nothing is saved."""
    if calibrate:
        _calibrate()
    if source is None:
        if not calibrate:
            raise UserError(
                "name what to rehearse: a recipe (see `ebbtide recipes`) or a YAML file; or measure this machine with `--calibrate`"
            )
        return
    config = load(source, overrides or [])
    if config.resume is not None:
        raise UserError("a rehearsal begins anew: remove `resume`")
    taken = {"run.folder": config.run.folder, "rollout.save_to": config.rollout.save_to}  # by the rehearsal, and not for the run after it
    of_run = changed(overrides or [], {key: "null" for key, place in taken.items() if place is not None})
    if save_rollouts is not None:
        config = load(source, [*(overrides or []), f"rollout.save_to={save_rollouts}"])
    changes = {
        "checkpoint": None,
        "train": config.train.model_copy(update={"steps": steps}),
        "run": config.run.model_copy(update={"name": f"{config.run.name}-rehearsal"}),
    }
    _go(Job(source, config.model_copy(update=changes), optimizer, overrides=tuple(of_run)))


@app.command(cls=TakesSettings)
def plan(
    source: Source,
    overrides: Overrides = None,
    gpu: Annotated[str | None, typer.Option(help=f"The GPU to plan for: {', '.join(KNOWN)}.", show_default=False)] = None,
    device_gib: Annotated[float | None, typer.Option(min=0.1, max=1e6, help="Its memory, if it has another.", show_default=False)] = None,
    host_gib: Annotated[
        float | None, typer.Option(min=0.1, max=1e6, help="The host's free memory; 128 for each GPU without it.", show_default=False)
    ] = None,
    link: Annotated[float | None, typer.Option(min=0.1, max=1e6, help="GB/s of a pinned copy between the two.", show_default=False)] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="With `cluster`: GPUs of a node.")] = USUAL_NODE,
    network: Annotated[
        float | None, typer.Option(min=0.01, max=1e6, help="With `cluster`: GB/s that each GPU has to other nodes.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say what a run would take, phase by phase, and what would make it fit; with `cluster`, each rank of it. Needs no GPU and loads no weights."""
    config = load(source, overrides or [])
    build_plan(config.memory, config.optimizer)
    ranks_of = partial(sharing, size=None, node=gpus_per_node)

    def machine_of(one: Config) -> Machine:
        return machine_for(gpu, device_gib, host_gib, link, network, ranks_of(one.cluster).here)

    machine = machine_of(config)
    check_budget(config.memory.budget_gib, machine.device_gib)
    shape = find_shape(config.model)
    config.check_context(shape.context)

    def chosen_for(one: Config) -> Chosen:
        there = machine_of(one)
        predictor = Predictor(shape, there, each=4 if one.model.dtype == "float32" else 2, sharing=ranks_of(one.cluster))
        return Chooser(predictor, most_work(one), one.memory.budget_gib or there.device_gib, there.host_gib).choose(one)

    chosen = chosen_for(config)
    chosen = replace(chosen, notes=said_of_fewer(config, chosen, chosen_for))
    if as_json:
        typer.echo(json.dumps(show.as_json(chosen, config, shape, machine), indent=1, allow_nan=False))
    else:
        _echo(show.text(chosen, config, shape, machine))
    if not chosen.fits:
        raise typer.Exit(1)


def _no_holes() -> None:
    """Before torch first uses a GPU: phases of different sizes then leave no holes behind in its memory."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def _calibrate() -> None:
    _no_holes()
    from ebbtide.calibrate import calibrate as measure
    from ebbtide.report.terminal import Terminal

    terminal = Terminal(0)
    terminal.start()
    try:
        with in_order(), terminal.doing("measuring this machine") as progress:
            name, device_gib, rates = measure(progress)
    finally:
        terminal.stop()
    terminal.say(f"{name}: {show.rates_text(rates)}; kept in {keep_rates(name, device_gib, rates)}")


def _go(job: Job) -> None:
    try:
        _run(job)
    except KeyboardInterrupt:
        _say("stopped before the first step: nothing was written")
        raise typer.Exit(STOPPED) from None


def _run(job: Job) -> None:
    config = job.config
    sys.path.append(os.getcwd())  # where `task.python.object` of a user's own is looked for
    build_plan(config.memory, config.optimizer)  # what can be found wrong without torch is found now, not ten seconds later
    check_paths(config.model)
    build_task(config.task, config.seed, evaluated=config.evaluate is not None)
    if config.rollout.serve_port is not None:
        check_installed()
    if config.rollout.engine != "vllm":  # whose own allocator cannot live with it
        _no_holes()
    if os.environ.get("RANK", "0") == "0":  # others that `torchrun` started are told by the first
        job = replace(job, resumed=find(config, _say))
        _say("starting (torch and transformers take a few seconds to load)", "dim")
    if (count := to_start(config)) > 0:
        start = launch_on_ray if config.cluster and config.cluster.ray else launch
        raise typer.Exit(start(job, count, _say))
    from ebbtide.rank import run_rank

    try:
        run_rank(job)
    except Stopped:
        raise typer.Exit(STOPPED) from None
    except Exception as error:
        if isinstance(error, UserError) or os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        traceback.print_exc()
        leave()


@app.command(hidden=True)
def rank(folder: Path) -> None:
    """One of the ranks that `ebbtide train` starts."""
    with told(folder) as job:
        from ebbtide.rank import run_rank

        try:
            run_rank(job)
        except Stopped:
            sys.exit(STOPPED)


Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/quickstart-001.")]


@app.command()
def checkpoints(
    run: Run, verify: Annotated[bool, typer.Option(help="Read each one whole and compare it with its manifest.")] = False
) -> None:
    """List the checkpoints of a run. With --verify, the exit code is 1 where one of them is damaged."""
    if not run.is_dir():
        raise UserError(f"there is no folder {run}: name a run's folder, such as runs/quickstart-001")
    found, damaged = listed(run / FOLDER), False
    if not found:
        raise UserError(f"{run} has no complete checkpoint")
    for saved in found:
        reward = f"  reward {saved.metrics['reward']:.3f}" if "reward" in saved.metrics else ""
        problem = saved.problem() if verify else saved.damage
        if problem is not None and not saved.path.is_dir():
            continue  # the run goes on, and removed it
        damaged |= problem is not None
        checked = f"  damaged ({problem})" if problem is not None else "  verified" if verify else ""
        _echo(f"step {saved.step:>6}  {saved.bytes / 2**30:.3f} GiB{reward}  {saved.path}{checked}")
    if verify and damaged:
        raise typer.Exit(1)


@app.command()
def export(
    run: Run,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    step: Annotated[int | None, typer.Option(help="Of this step; the newest without it.")] = None,
) -> None:
    """Write a checkpoint's model, tokenizer and chat template as an ordinary Hugging Face folder."""
    from ebbtide.checkpoint.export import export as write_folder

    with in_order():
        saved = write_folder(run, out, step, _echo)
    _echo(f"the weights of step {saved.step} are in {out}: transformers loads them from there")


@app.command(cls=TakesServerSettings)
def serve(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN", help="A Hugging Face folder, a hub id, a GGUF file, or a run folder (its newest checkpoint)."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, as in `port=8001` (docs/serve.md).", show_default=False),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="A file with the key that clients must send; without it, EBBTIDE_API_KEY is looked at.", show_default=False),
    ] = None,
) -> None:
    """Serve a model, or what a run has learnt, with an OpenAI-compatible HTTP API."""
    config = load_serve(overrides or [])
    check_installed()
    key = api_key(api_key_file)
    if not (Path(os.path.expanduser(source)) / FOLDER).is_dir():
        check_paths(Model(path=source))
    _say("starting (torch and transformers take a few seconds to load)", "dim")
    try:
        from ebbtide.rollout.serve.run import serve as run_server

        run_server(source, config, key, _echo)
    except KeyboardInterrupt:
        _say("stopped before it served")
        raise typer.Exit(STOPPED) from None


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, such as runs/quickstart-001; several are shown together.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write; without it report.html in the run folder, or here where there are several runs.", show_default=False
        ),
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Show it live, at an address of this machine only, and write no file.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="For --serve; 0 takes a free one.")] = 8642,
) -> None:
    """Write a run as one page: curves, memory and seconds of each phase beside the plan, and every kind of completion."""
    if serve and out is not None:
        raise UserError("`--serve` writes no file, and `--out` names one: choose one of them")
    if serve:
        from ebbtide.report.page.serve import serve as serve_page

        with in_order():
            serve_page(runs, port, _echo)
        return
    from ebbtide.report.page.build import write
    from ebbtide.report.page.lines import Followed

    place = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    with in_order():
        write(runs, place)
    _echo(str(place))
    for run in runs:
        if not Followed(run / "metrics.jsonl").read():
            _say(f"{run} has no steps yet")


@app.command(name="recipes")
def list_recipes() -> None:
    """List the recipes that ship with Ebbtide."""
    known = recipes()
    width = max(map(len, known))
    for name, description in known.items():
        typer.echo(f"{name:<{width}}  {description}")


@app.command(name="config", cls=TakesSettings)
def show_config(source: Source, overrides: Overrides = None) -> None:
    """Print the resolved config of a recipe or file, with the meaning of each field. It is valid YAML: save it and edit it."""
    config = load(source, overrides or [])
    build_plan(config.memory, config.optimizer)
    _echo(explained(config).removesuffix("\n"))


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None:
    pass


def main() -> None:
    """Errors that a user can mend: one paragraph, exit code 2, no traceback."""
    faulthandler.enable(2)  # what dies in a library says on stderr which line was in it
    try:
        with disk_full():
            app()
    except UserError as error:
        with suppress(OSError):  # stderr may be a file on the disk that is full
            _say(str(error), before="error: ")
        sys.exit(2)


def _echo(text: str) -> None:
    """To standard output: what a command was asked for. Names and texts of others in it are shown, not obeyed."""
    typer.echo(printable_lines(text))


def _say(text: str, style: str = "", before: str = "") -> None:
    """To standard error: what else a person should know, likewise."""
    shown = Text.assemble((before, "bold red"), (printable_lines(text), style))
    Console(stderr=True, highlight=False, soft_wrap=True).print(shown)


if __name__ == "__main__":
    main()
