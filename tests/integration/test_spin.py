"""vLLM's own readers of shared memory, with and without our word that a step waits only."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

import zmq
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from neuron_push.spin import let_readers_sleep, note_step

WAIT_S = 0.5


class Reader:
    """As MessageQueue.acquire_read: looks, waits, looks again."""

    def __init__(self, condition: SpinCondition) -> None:
        self._condition = condition
        self.is_there = threading.Event()
        self.num_looks = 0
        self.seen_s = 0.0

    def run(self) -> None:
        self._condition.record_read()  # a message was just read: spinning begins
        while not self.is_there.is_set():
            self._condition.wait(timeout_ms=5000)
            self.num_looks += 1
        self.seen_s = time.monotonic()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SpinCondition, SpinCondition]]:
    monkeypatch.setattr(SpinCondition, "wait", SpinCondition.wait)  # as it was, afterwards
    let_readers_sleep()
    context = zmq.Context()
    address = "inproc://spin"
    writer = SpinCondition(False, context, address)
    reader = SpinCondition(True, context, address)
    time.sleep(0.05)  # the subscription
    yield reader, writer
    note_step(waits_only=False)
    context.destroy(linger=0)


def read_one(reader: SpinCondition, writer: SpinCondition) -> tuple[int, float]:
    """How often the reader looked, and seconds from the message until it was seen."""
    one = Reader(reader)
    thread = threading.Thread(target=one.run)
    thread.start()
    time.sleep(WAIT_S)
    one.is_there.set()
    written_s = time.monotonic()
    writer.notify()
    thread.join(10)
    assert not thread.is_alive()
    return one.num_looks, one.seen_s - written_s


def test_a_reader_sleeps_while_its_engine_waits_and_is_woken_by_the_message(
    ends: tuple[SpinCondition, SpinCondition],
) -> None:
    note_step(waits_only=True)
    num_looks, late_s = read_one(*ends)
    assert num_looks == 1
    assert late_s < 0.1
    assert ends[0].busy_loop_s == 1  # vLLM's, untouched


def test_a_reader_spins_as_ever_while_its_engine_computes(
    ends: tuple[SpinCondition, SpinCondition],
) -> None:
    note_step(waits_only=False)
    num_looks, late_s = read_one(*ends)
    assert num_looks > 100
    assert late_s < 0.1


def test_twice_is_once(ends: tuple[SpinCondition, SpinCondition]) -> None:
    patched = SpinCondition.wait
    let_readers_sleep()
    assert SpinCondition.wait is patched
