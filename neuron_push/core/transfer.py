"""TransferThread: the single owner of a rank's NIXL agent and of all its sessions.

The engine's threads talk to it through one command queue and read one results queue; both
are appended and popped without a lock held across anything slow. A watchdog notices a NIXL
call that does not return; agent and thread are then given up and replaced.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from neuron_push.core.agent import AgentAbandonedError
from neuron_push.core.commands import Command, Counters, Result
from neuron_push.core.rank import Inbox, RankLoop, RankSetup, RebuildError, Suspend
from neuron_push.core.wake import Wake

logger = logging.getLogger(__name__)

SET_UP_AGAIN_S = 1.0
SET_UP_SLOW_S = 30.0
"""Registering hundreds of GB takes seconds. A set-up that takes longer than this is worth a line:
there is no agent yet that could be given up."""

__all__ = ["RankSetup", "TransferThread"]


class TransferThread:
    """One per worker rank. Public methods may be called from the engine's thread."""

    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        self._inbox = Inbox()
        self._results: deque[Result] = deque()
        self._wake = Wake()
        self._result_ready = Wake()
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._is_up = threading.Event()
        self._loop: RankLoop | None = None
        # Loops whose NIXL call never returned: kept, because destroying what a stuck call
        # still uses would take the process down.
        self._abandoned: list[RankLoop] = []
        self._thread = self._make_thread(None)
        self._watchdog = threading.Thread(
            target=self._watch, name=f"np-watchdog-{setup.rank}", daemon=True
        )

    @property
    def counters(self) -> Counters:
        return self._inbox.counters

    @property
    def num_abandoned(self) -> int:
        """How many agents had to be given up since start."""
        return len(self._abandoned)

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    # ------------------------------------------------------------ the engine's thread

    def start(self) -> None:
        """Returns once the memory is registered; raises what went wrong."""
        self._thread.start()
        self._is_up.wait()
        if self._error is not None:
            raise self._error
        self._watchdog.start()

    def submit(self, commands: Sequence[Command]) -> None:
        if commands:
            self._inbox.commands.extend(commands)
            self._wake.set()

    def suspend(self, request_ids: tuple[str, ...], timeout_s: float) -> bool:
        """Stop writing from these requests' blocks, and wait until nothing reads them any more.

        For blocks that the engine is about to overwrite. False if that took too long.
        """
        request = Suspend(request_ids, threading.Event())
        deadline_s = time.monotonic() + timeout_s
        self._inbox.commands.append(request)
        self._wake.set()
        if not request.accepted.wait(timeout_s) or request.drained is None:
            return False
        return request.drained.wait(max(0.0, deadline_s - time.monotonic()))

    def results(self, wait_s: float = 0.0) -> list[Result]:
        """What has ended since the last call; waits up to ``wait_s`` if nothing has."""
        taken: list[Result] = []
        if not self._results:
            if wait_s <= 0:
                return taken
            # Cleared before the second look: what comes after it sets the event again.
            self._result_ready.clear()
            if not self._results:
                self._result_ready.wait(wait_s)
        while self._results:
            taken.append(self._results.popleft())
        return taken

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End the thread. False if it did not end in time (a NIXL call that does not return)."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout_s)
        if self._watchdog.is_alive():
            self._watchdog.join(timeout_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------ the transfer thread

    def _make_thread(self, old: RankLoop | None) -> threading.Thread:
        name = f"np-transfer-{self._setup.rank}"
        return threading.Thread(target=self._run, args=(old,), name=name, daemon=True)

    def _run(self, old: RankLoop | None) -> None:
        loop = self._set_up(old)
        if loop is None:
            return
        self._loop = loop
        self._is_up.set()
        try:
            while not self._stop.is_set():
                try:
                    pause_s = loop.turn()
                except RebuildError as e:
                    logger.error("rank %d: building a new NIXL agent: %s", self._setup.rank, e)
                    loop.tear_down()
                    self._replace(loop)
                    return
                except Exception:
                    # A fault of ours must not end the thread that frees the engine's blocks.
                    logger.exception("rank %d: transfer thread", self._setup.rank)
                    pause_s = 0.1
                if pause_s > 0:
                    self._wake.wait(pause_s)
            loop.tear_down()
        except AgentAbandonedError:
            logger.info("rank %d: a NIXL call that was given up has returned", self._setup.rank)
            loop.hang_up()

    def _set_up(self, old: RankLoop | None) -> RankLoop | None:
        """None if this is the first time and fails, or if we are to stop."""
        while not self._stop.is_set():
            try:
                return RankLoop(self._setup, self._inbox, self._report, old)
            except Exception as e:
                if old is None:
                    self._error = e
                    self._is_up.set()
                    return None
                # Requests wait for it: their blocks are freed by nobody else.
                self._inbox.quiet.warning(
                    logger,
                    "set up",
                    "rank %d: NIXL cannot be set up again, yet; tried every %g s: %s: %s",
                    self._setup.rank,
                    SET_UP_AGAIN_S,
                    type(e).__name__,
                    e,
                )
                self._stop.wait(SET_UP_AGAIN_S)
        return None

    def _report(self, result: Result) -> None:
        self._results.append(result)
        self._result_ready.set()

    # ------------------------------------------------------------ the watchdog

    def _watch(self) -> None:
        timeout_s = self._setup.limits.nixl_call_timeout_s
        up_s = time.monotonic()
        while not self._stop.wait(timeout_s / 10):
            loop = self._loop
            if loop is not None:
                up_s = time.monotonic()
            elif (waited_s := time.monotonic() - up_s) > SET_UP_SLOW_S:
                self._inbox.quiet.warning(
                    logger,
                    "slow",
                    "rank %d: no NIXL agent for %.0f s; no KV can be sent or received: if no line "
                    "says why, a NIXL call hangs, and the engine must be started again",
                    self._setup.rank,
                    waited_s,
                )
            call = loop.agent.abandon_if_stuck(timeout_s) if loop is not None else None
            if loop is not None and call is not None:
                logger.error(
                    "rank %d: NIXL %s has not returned for %g s; its agent is given up, open "
                    "transfers fail, and a new agent is built",
                    self._setup.rank,
                    call,
                    timeout_s,
                )
                self._replace(loop)

    def _replace(self, loop: RankLoop) -> None:
        """Go on with a new agent on a new thread."""
        self.counters.event("replaced_agent")
        self._abandoned.append(loop)
        self._loop = None
        self._thread = self._make_thread(loop)
        self._thread.start()
