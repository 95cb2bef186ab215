"""One engine: who has answered lately, and what its requests met."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import aiohttp
import msgspec

from neuron_push.router.breaker import Breaker
from neuron_push.router.errors import RouterError
from neuron_push.router.identity import (
    IDENTITY_TTL_S,
    AskIdentity,
    EngineIdentity,
    IdentityCache,
)
from neuron_push.router.options import PrefillAddress

RECENT_S = 30.0
PROBE_TIMEOUT_S = 5.0

_log = logging.getLogger("neuron_push.router")


class Engine:
    """One engine and what is known of its health."""

    role = ""

    def __init__(self, url: str, failures_to_open: int) -> None:
        self.url = url
        self.breaker = Breaker(f"{self.role} engine {url}", failures_to_open)
        self.error: str | None = "has not answered yet"
        self.probe_now = asyncio.Event()
        self._answered_at = float("-inf")

    @property
    def up(self) -> bool:
        """It answered recently, and nothing has failed since."""
        return self.error is None and time.monotonic() - self._answered_at < RECENT_S

    @property
    def usable(self) -> bool:
        """It is up, and its breaker lets the next request through."""
        return self.up and self.breaker.admits

    def answered(self) -> None:
        if self.error is not None:
            _log.info("%s engine %s is up", self.role, self.url)
        self.error = None
        self._answered_at = time.monotonic()
        self.breaker.is_reachable()

    def failed(self, error: str) -> None:
        if self.error is None:
            _log.warning("%s engine %s is down: %s", self.role, self.url, error)
        self.error = error

    async def probe(self, session: aiohttp.ClientSession) -> None:
        """Asks the engine how it is. Raises when it does not say that it is well."""
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        async with session.get(
            f"{self.url}/health", timeout=timeout, allow_redirects=False
        ) as response:
            if response.status != 200:
                raise ConnectionError(f"GET /health answered {response.status}")

    def describe(self) -> dict[str, Any]:
        known = self._answered_at != float("-inf")
        return {
            "url": self.url,
            "up": self.up,
            "answered_s_ago": round(time.monotonic() - self._answered_at, 1) if known else None,
            "error": self.error,
            "breaker": self.breaker.state,
            "failures_in_a_row": self.breaker.failures,
        }


class PrefillEngine(Engine):
    """A producer: HTTP for its leg, a side channel for its identity."""

    role = "prefill"

    def __init__(
        self, address: PrefillAddress, ask: AskIdentity, timeout_s: float, failures_to_open: int
    ) -> None:
        super().__init__(address.url, failures_to_open)
        self.side = f"{address.side_host}:{address.side_port}"
        self._cache = IdentityCache(ask, address.side_host, address.side_port, timeout_s)

    async def identity(self) -> EngineIdentity:
        """Who it is now. Raises RouterError (502, 504) when it does not tell."""
        try:
            return await self._cache.get()
        except TimeoutError:
            status, why = 504, "its side channel did not answer in time"
        except Exception as err:  # whatever the injected question raises, this engine is unusable
            status, why = 502, str(err)
        self.failed(f"side channel {self.side}: {why}")
        raise RouterError(
            status,
            f"the prefill engine cannot be used: {why}",
            outcome="unreachable",
            leg="prefill",
        )

    def suspect(self) -> None:
        """A leg failed: it may be another engine by now."""
        self._cache.expire()
        self.probe_now.set()

    async def probe(self, session: aiohttp.ClientSession) -> None:
        await super().probe(session)
        before = self._cache.latest
        if self._cache.fresh() is None or self._cache.age_s() > IDENTITY_TTL_S / 2:
            await self._cache.refresh()
        now = await self._cache.get()
        if before is None or before.incarnation != now.incarnation:
            _log.info(
                "prefill engine %s is engine_id=%s incarnation=%s tp=%d pp=%d model=%s",
                *(self.url, now.engine_id, now.incarnation, now.tp_size, now.pp_size, now.model),
            )

    async def close(self) -> None:
        await self._cache.close()

    def describe(self) -> dict[str, Any]:
        known = self._cache.latest
        names = ("engine_id", "incarnation", "model", "tp_size", "pp_size")
        return {
            **super().describe(),
            "side": self.side,
            **{name: getattr(known, name, None) for name in names},
        }


class DecodeEngine(Engine):
    """A consumer; with `wants_models`, its probe also learns which models it serves."""

    role = "decode"

    def __init__(self, url: str, wants_models: bool, failures_to_open: int) -> None:
        super().__init__(url, failures_to_open)
        self._wants_models = wants_models
        self.models: frozenset[str] = frozenset()

    async def probe(self, session: aiohttp.ClientSession) -> None:
        await super().probe(session)
        if not self._wants_models:
            return
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        async with session.get(
            f"{self.url}/v1/models", timeout=timeout, allow_redirects=False
        ) as response:
            if response.status != 200:
                raise ConnectionError(f"GET /v1/models answered {response.status}")
            listing = msgspec.json.decode(await response.read(), type=_ModelList)
        names = {name for card in listing.data for name in (card.id, card.root) if name}
        self.models = frozenset(names)

    def suspect(self) -> None:
        self.probe_now.set()


class _ModelCard(msgspec.Struct):
    id: str
    root: str | None = None


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]
