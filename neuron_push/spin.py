"""Engine and workers of one vLLM sleep, instead of spinning, while all they do is wait for KV.

They speak through shared memory, and each reader spins for a second after every message
(``SpinCondition`` in vllm/distributed/device_communicators/shm_broadcast.py, 0.24 to 0.32), so as
to see the next one a little sooner. An engine whose requests all wait for KV steps on with empty
batches, some hundred a second, and would burn a core with that; on a host that also prefills, it
takes it from those it waits for. In such steps the readers go to sleep at once: the message
that ends the sleep is vLLM's own, and costs about 0.1 ms.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)


class _Process:
    """This one."""

    waits_only = False


def note_step(waits_only: bool) -> None:
    """The step that begins in this process computes nothing, or something."""
    _Process.waits_only = waits_only


def let_readers_sleep() -> None:
    """Once a process; again is harmless. Without effect where vLLM has no such spinning."""
    try:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    except ImportError:
        logger.debug("this vLLM has no SpinCondition")
        return
    spin = SpinCondition.wait
    if getattr(spin, "sleeps_while_waiting", False):
        return

    @functools.wraps(spin)
    def wait(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _Process.waits_only:
            return spin(self, *args, **kwargs)
        spin_s, self.busy_loop_s = self.busy_loop_s, 0
        try:
            return spin(self, *args, **kwargs)
        finally:
            self.busy_loop_s = spin_s

    wait.sleeps_while_waiting = True  # type: ignore[attr-defined]
    SpinCondition.wait = wait  # type: ignore[method-assign]
