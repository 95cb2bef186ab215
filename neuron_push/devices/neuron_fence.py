"""When a Neuron core has finished what was submitted to it.

The forward pass is one compiled graph that is only queued when vLLM leaves the forward context:
there are no streams, no events and no hooks per layer. Two ways to know that it has ended:

- **Reading one element** of the last layer's KV tensor to the host. The tensor is an output of
  the graph, so the copy waits for it. The copy blocks, so it must not run on the engine's thread
  (it would stop segmented prefill from running ahead), nor on the transfer thread (nothing of
  the chunks before would move meanwhile, because NIXL moves bytes only while it is polled): a
  thread of its own makes it. One copy answers for all marks made before it began.
- **Sequence numbers** of the runtime's asynchronous interface, where it has them: a mark is the
  number of the last execution submitted, and asking whether it has ended costs a microsecond.
  Whether they tell the truth for the way torch submits its work is not documented, so they are
  used only after they have agreed with the copy several times in a row in this very process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from neuron_push.devices.nrt import Nrt, NrtError

logger = logging.getLogger(__name__)

MAX_QUEUED = 64
"""Executions that may be queued on a core; vllm-neuron raises the runtime's limit to 32."""

NUM_TRIALS = 8
RETRY_S = 1.0
POLL_S = 200e-6
_SEQUENCE_BITS = 48


class Ticket:
    """A mark that the reading thread honours."""

    __slots__ = ("_ended", "sequence")

    def __init__(self, sequence: int | None = None) -> None:
        self._ended = threading.Event()
        self.sequence = sequence

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)

    def end(self) -> None:
        self._ended.set()


class SequenceMark:
    """A mark that the runtime itself answers."""

    __slots__ = ("_nrt", "_sequence")

    def __init__(self, nrt: Nrt, sequence: int) -> None:
        self._nrt = nrt
        self._sequence = sequence

    def done(self) -> bool:
        try:
            return self._nrt.is_completed(self._sequence) is True
        except NrtError as e:
            logger.error("asking for the end of an execution: %s", e)
            return False

    def wait(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() >= end_s:
                return False
            time.sleep(POLL_S)
        return True


class Sequences:
    """The runtime's sequence numbers of one core, and whether they can be trusted."""

    def __init__(self, nrt: Nrt, core: int = 0) -> None:
        self.nrt = nrt
        self._core = core
        self._agreed = 0
        self._highest = -1
        self._usable = nrt.has("nrta_is_completed") and nrt.has("nrta_get_sequence")

    @property
    def usable(self) -> bool:
        return self._usable

    @property
    def trusted(self) -> bool:
        return self._usable and self._agreed >= NUM_TRIALS

    def last_submitted(self) -> int | None:
        """Number of the newest execution on the core; None where the runtime cannot tell.

        The runtime tells the last that ended, and calls numbers that were never given out
        invalid: the newest is the one before the first of these.
        """
        if not self._usable:
            return None
        try:
            sequence = self.nrt.last_completed(self._core)
            unit = sequence >> _SEQUENCE_BITS
            for following in range(sequence + 1, sequence + 2 + MAX_QUEUED):
                if following >> _SEQUENCE_BITS != unit:
                    break
                if self.nrt.is_completed(following) is None:
                    return following - 1
        except NrtError as e:
            self.distrust(f"the runtime does not answer: {e}")
            return None
        self.distrust(f"more than {MAX_QUEUED} executions seem to be queued")
        return None

    def compare(self, sequence: int) -> None:
        """A copy that began after `sequence` was the newest has ended: so must `sequence` have."""
        try:
            ended = self.nrt.is_completed(sequence)
        except NrtError as e:
            self.distrust(f"the runtime does not answer: {e}")
            return
        if ended is not True:
            self.distrust("an execution counts as running after a tensor that it makes was read")
        elif sequence > self._highest:  # a mark without new work proves nothing
            self._highest = sequence
            self._agreed += 1
            if self._agreed == NUM_TRIALS:
                logger.info("Neuron: the ends of steps are now asked of the runtime itself")

    def distrust(self, why: str) -> None:
        if self._usable:
            logger.info("Neuron: the ends of steps are found by reading a KV element: %s", why)
        self._usable = False


class Fence:
    """Makes marks. `read` copies one element of the last layer's KV tensor to the host."""

    def __init__(self, read: Callable[[], object], sequences: Sequences | None = None) -> None:
        self._read = read
        self._sequences = sequences
        self._waiting: deque[Ticket] = deque()
        self._work = threading.Event()
        self._thread: threading.Thread | None = None

    def mark(self) -> Ticket | SequenceMark:
        """On the engine's thread: no copy is made here."""
        sequences = self._sequences
        newest = sequences.last_submitted() if sequences is not None else None
        if sequences is not None and newest is not None and sequences.trusted:
            return SequenceMark(sequences.nrt, newest)
        ticket = Ticket(newest)
        self._waiting.append(ticket)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="np-neuron-fence", daemon=True)
            self._thread.start()
        self._work.set()
        return ticket

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            # Only what was marked before the copy begins is answered by it.
            tickets = [self._waiting.popleft() for _ in range(len(self._waiting))]
            while tickets:
                try:
                    self._read()
                    break
                except Exception:
                    # Never say 'done' for what is not known to be: the lease ends the request.
                    logger.exception("reading a KV element; trying again in %g s", RETRY_S)
                    time.sleep(RETRY_S)
            for ticket in tickets:
                if self._sequences is not None and ticket.sequence is not None:
                    self._sequences.compare(ticket.sequence)
                ticket.end()
