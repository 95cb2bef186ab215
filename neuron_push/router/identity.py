"""Who a prefill engine is, asked from its side channel and kept for a while."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

IDENTITY_TTL_S = 30.0


class EngineIdentity(Protocol):
    """What the router needs to know of a prefill engine."""

    @property
    def engine_id(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def ready(self) -> bool: ...


class AskIdentity(Protocol):
    """Asks the side channel at host:port; raises with a sentence when it cannot."""

    async def __call__(self, host: str, port: int, timeout_s: float) -> EngineIdentity: ...


class NotUsableError(Exception):
    """The side channel answered, but no request can be prefilled there (now)."""


class IdentityCache:
    """The identity of one prefill engine, at most IDENTITY_TTL_S old.

    However many requests wait for it, it is asked for once at a time.
    """

    def __init__(self, ask: AskIdentity, host: str, port: int, timeout_s: float) -> None:
        self._ask = ask
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._asking: asyncio.Task[EngineIdentity] | None = None
        self._asked_at = float("-inf")
        self._expired_at = float("-inf")
        self.latest: EngineIdentity | None = None

    def fresh(self) -> EngineIdentity | None:
        """The identity if it is known and young enough to dispatch with."""
        trusted = self._asked_at > self._expired_at and self.age_s() < IDENTITY_TTL_S
        return self.latest if trusted else None

    def age_s(self) -> float:
        return time.monotonic() - self._asked_at

    def expire(self) -> None:
        """The engine may have restarted: ask again before the next dispatch."""
        self._expired_at = time.monotonic()

    async def get(self) -> EngineIdentity:
        """The identity, asked for if need be. Raises what `ask` raises, or NotUsableError."""
        return self.fresh() or await self.refresh()

    async def refresh(self) -> EngineIdentity:
        """Asks now, or joins the question that is already out."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_once())
            # A caller may be gone (its client hung up) when the answer comes.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._asking)

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask_once(self) -> EngineIdentity:
        asked_at = time.monotonic()
        async with asyncio.timeout(self._timeout_s + 1.0):
            identity = await self._ask(self._host, self._port, self._timeout_s)
        if "consumer" in identity.role:
            raise NotUsableError(f"{identity.engine_id} is a decode engine ({identity.role})")
        if not identity.ready:
            raise NotUsableError(f"{identity.engine_id} is still starting")
        self.latest, self._asked_at = identity, asked_at
        return identity
