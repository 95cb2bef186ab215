"""The cache of a prefill engine's identity."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from neuron_push.router import identity
from neuron_push.router.identity import IdentityCache
from tests.unit.router_fakes import Identity

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(10)]


class Ask:
    def __init__(self) -> None:
        self.count = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, host: str, port: int, timeout_s: float) -> Identity:
        self.count += 1
        incarnation = str(self.count)
        await self.gate.wait()
        return Identity(incarnation=incarnation)


async def test_it_is_asked_again_when_it_is_old_or_expired(monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    monkeypatch.setattr(identity, "time", SimpleNamespace(monotonic=lambda: now))
    ask = Ask()
    cache = IdentityCache(ask, "h", 1, timeout_s=5)
    seen = []
    for later_s in (0, 29, 2):
        now += later_s
        seen.append((await cache.get()).incarnation)
    now += 1
    cache.expire()
    now += 1
    seen.append((await cache.get()).incarnation)
    assert seen == ["1", "1", "2", "3"]


async def test_one_question_serves_all_who_wait_even_if_one_gives_up():
    ask = Ask()
    ask.gate.clear()
    cache = IdentityCache(ask, "h", 1, timeout_s=5)
    waiting = [asyncio.create_task(cache.get()) for _ in range(3)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    ask.gate.set()
    assert [(await task).incarnation for task in waiting[1:]] == ["1", "1"]
    assert ask.count == 1


async def test_a_question_without_answer_times_out():
    ask = Ask()
    ask.gate.clear()
    cache = IdentityCache(ask, "h", 1, timeout_s=-0.9)  # 0.1 s with the cache's own margin
    with pytest.raises(TimeoutError):
        await cache.get()
    ask.gate.set()
    assert (await cache.get()).incarnation == "2"
