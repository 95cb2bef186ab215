"""A knock tells a dead process from one that only does not answer."""

from __future__ import annotations

import socket
import time

import pytest

from neuron_push.core.knock import Knock
from tests.integration.engines import free_port


def ask(host: str, port: int) -> bool:
    knock = Knock(host, port)
    try:
        while True:
            answer = knock.is_refused(time.monotonic())
            if answer is not None:
                return answer
            time.sleep(0.01)
    finally:
        knock.socket.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_nobody_listens(host: str) -> None:
    assert ask(host, free_port())


def test_a_listener_that_never_accepts_is_no_dead_process() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as server:
        assert not ask("127.0.0.1", server.getsockname()[1])


def test_names_are_not_looked_up() -> None:
    began_s = time.monotonic()
    assert not ask("no-such-host.invalid", 5600)
    assert time.monotonic() - began_s < 0.2
