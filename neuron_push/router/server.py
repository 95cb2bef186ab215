"""Serves the router until SIGTERM or SIGINT, then lets running streams end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Iterator

import uvicorn

from neuron_push.router.app import create_app
from neuron_push.router.http1 import MAX_HEAD_BYTES, bounded_protocol
from neuron_push.router.identity import AskIdentity
from neuron_push.router.options import OptionError, RouterOptions

_log = logging.getLogger("neuron_push.router")


def run_router(options: RouterOptions, ask_identity: AskIdentity) -> None:
    """Serves; returns when a signal asked for the end and the streams are done.

    Raises OptionError when it cannot listen where it is told to.
    """
    listener = listen(options.host, options.port)
    config = server_config(options, ask_identity)
    host, port = listener.getsockname()[:2]
    _log.info(
        "router listens on http://%s:%d: %d prefill, %d decode engines",
        *(f"[{host}]" if ":" in host else host, port, len(options.prefill), len(options.decode)),
    )
    asyncio.run(_Server(config).serve(sockets=[listener]))
    _log.info("router has ended")


def server_config(options: RouterOptions, ask_identity: AskIdentity) -> uvicorn.Config:
    """The application and the limits of what clients may send it, for uvicorn."""
    return uvicorn.Config(
        create_app(options, ask_identity),
        http=bounded_protocol(options.receive_timeout_s),
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        lifespan="on",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(options.drain_s),
    )


class _Server(uvicorn.Server):
    """uvicorn raises a signal again once it has shut down; an asked-for end is exit code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._asked_to_end, signum)
        yield

    def _asked_to_end(self, signum: int) -> None:
        _log.info("router ends on %s once its streams have", signal.Signals(signum).name)
        self.handle_exit(signum, None)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OptionError when the address cannot be had.

    Its protocol is named because asyncio sets TCP_NODELAY only on sockets that
    name it; without, Nagle and delayed ACKs hold a response back for 40 ms.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as err:
        raise OptionError(
            "--host and --port", f"{host}:{port}", f"an address free to listen on ({err})"
        ) from err
    return listener
