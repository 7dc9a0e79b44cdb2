"""The `ebbtide` command, thin: it reads the config, runs, and turns errors into messages and exit codes."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ebbtide import __version__
from ebbtide.checkpoint.resume import FOLDER, find
from ebbtide.checkpoint.store import listed
from ebbtide.cluster.launch import launch, to_start
from ebbtide.cluster.leash import Job, told
from ebbtide.cluster.on_ray import launch_on_ray
from ebbtide.config import load, load_serve, recipes
from ebbtide.config.document import explained
from ebbtide.config.tree import Config, Rehearsal
from ebbtide.errors import UserError
from ebbtide.memory.plan import build_plan
from ebbtide.rollout.serve.checks import api_key, check_installed
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


@app.command()
def train(source: Source, overrides: Overrides = None) -> None:
    """Train a policy: generate, score, update, over and over. Writes to runs/NAME-001 unless run.folder says otherwise."""
    _go(source, load(source, overrides or []))


@app.command()
def rehearse(
    source: Source,
    overrides: Overrides = None,
    optimizer: Annotated[
        Rehearsal,
        typer.Option(help="`built`: there, and moved as in training. `none`: no optimizer and no gradients are made."),
    ] = "built",
    steps: Annotated[int, typer.Option(min=1, help="How many steps.")] = 2,
    save_rollouts: Annotated[
        str | None,
        typer.Option(help="A file for every completion, with which `ebbtide train ... rollout.replay=FILE` trains.", show_default=False),
    ] = None,
) -> None:
    """Do all that a run does but its updates: generate, score, evaluate, and every move. No weight changes, and nothing is saved."""
    config = load(source, overrides or [])
    if config.resume is not None:
        raise UserError("a rehearsal begins anew: remove `resume`")
    if save_rollouts is not None:
        config = load(source, [*(overrides or []), f"rollout.save_to={save_rollouts}"])
    changes = {
        "checkpoint": None,
        "train": config.train.model_copy(update={"steps": steps}),
        "run": config.run.model_copy(update={"name": f"{config.run.name}-rehearsal"}),
    }
    _go(source, config.model_copy(update=changes), rehearsal=optimizer)


def _go(source: str, config: Config, rehearsal: Rehearsal | None = None) -> None:
    try:
        _run(source, config, rehearsal)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped before the first step: nothing was written")
        raise typer.Exit(130) from None


def _run(source: str, config: Config, rehearsal: Rehearsal | None) -> None:
    sys.path.append(os.getcwd())  # where `task.python.object` of a user's own is looked for
    build_plan(config.memory, config.optimizer)  # what can be found wrong without torch is found now, not ten seconds later
    build_task(config.task, config.seed, evaluated=config.evaluate is not None)
    if config.rollout.serve_port is not None:
        check_installed()
    say = Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print
    job = Job(source, config, rehearsal)
    if os.environ.get("RANK", "0") == "0":  # others that `torchrun` started are told by the first
        job = replace(job, resumed=find(config, say))
        say("starting (torch and transformers take a few seconds to load)", style="dim")
    if (count := to_start(config)) > 0:
        raise typer.Exit(launch_on_ray(job, count, say) if config.cluster and config.cluster.ray else launch(job, count, say))
    from ebbtide.rank import Stopped, run_rank

    try:
        run_rank(job)
    except Stopped:
        raise typer.Exit(130) from None


@app.command(hidden=True)
def rank(folder: Path) -> None:
    """One of the ranks that `ebbtide train` starts."""
    with told(folder) as job:
        from ebbtide.rank import Stopped, run_rank

        try:
            run_rank(job)
        except Stopped:
            sys.exit(130)


Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/quickstart-001.")]


@app.command()
def checkpoints(
    run: Run, verify: Annotated[bool, typer.Option(help="Read each one whole and compare it with its manifest.")] = False
) -> None:
    """List the checkpoints of a run."""
    found = listed(run / FOLDER)
    if not found:
        raise UserError(f"{run} has no complete checkpoint")
    for saved in found:
        reward = f"  reward {saved.metrics['reward']:.3f}" if "reward" in saved.metrics else ""
        checked = f"  {saved.problem() or 'verified'}" if verify else ""
        typer.echo(f"step {saved.step:>6}  {saved.bytes / 2**30:.3f} GiB{reward}  {saved.path}{checked}")


@app.command()
def export(
    run: Run,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    step: Annotated[int | None, typer.Option(help="Of this step; the newest without it.")] = None,
) -> None:
    """Write a checkpoint's model, tokenizer and chat template as an ordinary Hugging Face folder."""
    from ebbtide.checkpoint.export import export as write_folder
    from ebbtide.checkpoint.export import pick

    saved = pick(run, step)
    write_folder(saved, out)
    typer.echo(f"the weights of step {saved.step} are in {out}: transformers loads them from there")


@app.command()
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
    err = Console(stderr=True, highlight=False)
    err.print("starting (torch and transformers take a few seconds to load)", style="dim")
    try:
        from ebbtide.rollout.serve.run import serve as run_server

        run_server(source, config, key, typer.echo)
    except KeyboardInterrupt:
        err.print("stopped before it served")
        raise typer.Exit(130) from None


@app.command(name="recipes")
def list_recipes() -> None:
    """List the recipes that ship with Ebbtide."""
    known = recipes()
    width = max(map(len, known))
    for name, description in known.items():
        typer.echo(f"{name:<{width}}  {description}")


@app.command(name="config")
def show_config(source: Source, overrides: Overrides = None) -> None:
    """Print the resolved config of a recipe or file, with the meaning of each field. It is valid YAML: save it and edit it."""
    config = load(source, overrides or [])
    build_plan(config.memory, config.optimizer)
    typer.echo(explained(config), nl=False)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None:
    pass


def main() -> None:
    """Errors that a user can mend: one paragraph, exit code 2, no traceback."""
    try:
        app()
    except UserError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), str(error)))
        sys.exit(2)


if __name__ == "__main__":
    main()
