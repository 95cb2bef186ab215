"""The command `neuron-push`: every command group is added here.

Starts fast and on the base install alone: a group's module imports at its top
only typer and what that needs; the rest when its command runs.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from neuron_push import __version__
from neuron_push.bench.cli import bench
from neuron_push.extras import MissingExtraError
from neuron_push.router.cli import router

app = typer.Typer(
    name="neuron-push",
    help="Push-based KV-cache transfer for disaggregated vLLM serving.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("router")(router)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"neuron-push {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Push-based KV-cache transfer for disaggregated vLLM serving."""


def main() -> None:
    """The console script."""
    try:
        app()
    except MissingExtraError as err:
        typer.echo(f"error: {err}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
