"""`neuron-push router`. Imports nothing heavy until the command runs."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from neuron_push.extras import import_extra
from neuron_push.router.options import OptionError, check_options


def router(
    *,
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[,side=HOST:PORT]",
            help="A prefill engine; repeat for more. Its side channel is the URL's host, "
            "port 5600, unless side= says otherwise.",
        ),
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A decode engine; repeat for more.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        str, typer.Option(metavar="N", help="Port to listen on; 0 takes any free one.")
    ] = "8000",
    model_check: Annotated[
        bool,
        typer.Option(
            "--model-check", help="Pair a prefill engine only with decode engines of its model."
        ),
    ] = False,
    max_body_mib: Annotated[
        str, typer.Option(metavar="MIB", help="Largest request body in MiB; a larger one gets 413.")
    ] = "32",
    connect_timeout_s: Annotated[
        str,
        typer.Option(metavar="S", help="Longest wait for a connection to an engine, in seconds."),
    ] = "5",
    idle_timeout_s: Annotated[
        str, typer.Option(metavar="S", help="Longest wait for the next byte of anyone, in seconds.")
    ] = "300",
    receive_timeout_s: Annotated[
        str,
        typer.Option(
            metavar="S", help="Longest time a whole request may take to arrive, in seconds."
        ),
    ] = "60",
    drain_s: Annotated[
        str,
        typer.Option(
            metavar="S", help="How long running streams may last after SIGTERM, in seconds."
        ),
    ] = "30",
    breaker_failures: Annotated[
        str,
        typer.Option(
            metavar="N",
            help="Failures in a row after which requests stay away from an engine for a while.",
        ),
    ] = "5",
    decode_recomputes: Annotated[
        bool,
        typer.Option(
            "--decode-recomputes",
            help="The decode engines have kv_load_failure_policy=recompute: without another "
            "prefill engine, let them answer when the prefill leg fails.",
        ),
    ] = False,
    key_file: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="The engines' keys, made by `neuron-push keygen`, if they have any.",
        ),
    ] = "",
) -> None:
    """Serve prefill and decode engines as one OpenAI-compatible endpoint."""
    try:
        options = check_options(
            prefill or [],
            decode or [],
            host=host,
            port=port,
            model_check=model_check,
            max_body_mib=max_body_mib,
            connect_timeout_s=connect_timeout_s,
            idle_timeout_s=idle_timeout_s,
            receive_timeout_s=receive_timeout_s,
            drain_s=drain_s,
            breaker_failures=breaker_failures,
            decode_recomputes=decode_recomputes,
            key_file=key_file,
        )
        server = import_extra("neuron_push.router.server", extra="router")
        from neuron_push.core.asking import ask_identity
        from neuron_push.core.keys import KeyFileError, load_keys

        try:
            keys = load_keys(Path(key_file)) if key_file else None
        except KeyFileError as err:
            raise OptionError("--key-file", key_file, str(err)) from None
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
        )
        server.run_router(options, partial(ask_identity, keys=keys))
    except OptionError as err:
        typer.echo(f"error: {err}", err=True)
        raise typer.Exit(2) from None
