"""Servers are started so that they can be ended whole, and compared fairly."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from neuron_push.launch import Server


def test_a_server_has_its_own_group_in_our_session(tmp_path: Path) -> None:
    """A session of its own would be a group for Linux's scheduler: engines then starve others."""
    argv = [sys.executable, "-c", "import time; time.sleep(60)"]
    server = Server("sleeper", argv, {}, tmp_path / "log")
    try:
        assert os.getpgid(server.pid) == server.pid
        assert os.getsid(server.pid) == os.getsid(0)
    finally:
        server.stop(2)
    assert not server.is_running
