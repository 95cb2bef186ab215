"""The command `neuron-push`: every command group is added here.

Starts fast and on the base install alone: a group's module imports at its top
only typer and what that needs, the rest when its command runs; and where the
command line names a group, only that group is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuron_push import __version__
from neuron_push.extras import MissingExtraError

if TYPE_CHECKING:
    from neuron_push.rails.doctor_base import PeerRails


def _router(app: typer.Typer) -> None:
    from neuron_push.router.cli import router

    app.command("router")(router)


def _bench(app: typer.Typer) -> None:
    from neuron_push.bench.cli import bench

    app.add_typer(bench, name="bench")


def _devices(app: typer.Typer) -> None:
    from neuron_push.devices.cli import devices

    app.command("devices")(devices)


def _rails(app: typer.Typer) -> None:
    from neuron_push.rails.cli import rails_app

    app.add_typer(rails_app, name="rails")


def _doctor(app: typer.Typer) -> None:
    from neuron_push.rails import commands
    from neuron_push.rails.cli import doctor

    commands.peer_rails_fetcher = _fetch_peer_rails
    app.command("doctor")(doctor)


def _fetch_peer_rails(address: str, key_file: Path | None) -> PeerRails:
    from neuron_push.peer_rails import fetch_peer_rails

    return fetch_peer_rails(address, key_file)


def _keygen(app: typer.Typer) -> None:
    app.command("keygen")(keygen)


GROUPS: dict[str, Callable[[typer.Typer], None]] = {
    "router": _router,
    "bench": _bench,
    "devices": _devices,
    "rails": _rails,
    "doctor": _doctor,
    "keygen": _keygen,
}


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


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Push-based KV-cache transfer for disaggregated vLLM serving."""


def make_app(only: str | None = None) -> typer.Typer:
    """The command with all its groups, or with the one that is called."""
    app = typer.Typer(
        name="neuron-push",
        help="Push-based KV-cache transfer for disaggregated vLLM serving.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for name, add in GROUPS.items():
        if only in (None, name):
            add(app)
    return app


def main() -> None:
    """The console script."""
    called = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] in GROUPS else None
    try:
        make_app(called)()
    except MissingExtraError as err:
        typer.echo(f"error: {err}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
