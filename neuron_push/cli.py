"""The command `neuron-push`: every command group is added here.

Starts fast and on the base install alone: a group's module imports at its top
only typer and what that needs; the rest when its command runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from neuron_push import __version__
from neuron_push.bench.cli import bench
from neuron_push.devices.cli import devices
from neuron_push.extras import MissingExtraError
from neuron_push.rails.cli import doctor, rails_app
from neuron_push.router.cli import router

app = typer.Typer(
    name="neuron-push",
    help="Push-based KV-cache transfer for disaggregated vLLM serving.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("router")(router)
app.add_typer(bench, name="bench")
app.command("devices")(devices)
app.add_typer(rails_app, name="rails")
app.command("doctor")(doctor)


@app.command("keygen")
def keygen(
    path: Annotated[Path, typer.Argument(help="The key file to write (mode 0600).")],
) -> None:
    """Make the keys of a deployment's side channels.

    One file for all engines and routers that belong together: copy it to each, and name it in
    key_file (engines) and --key-file (router).
    """
    from neuron_push.core.keys import KeyFileError, make_keys

    try:
        keys = make_keys(path)
    except KeyFileError as err:
        typer.echo(f"error: {err}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{path}: public key {keys.public.decode()}")


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
