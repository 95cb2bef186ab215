"""The engines: whose turn it is, and who has answered lately."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec

from neuron_push.router.errors import RouterError
from neuron_push.router.identity import (
    IDENTITY_TTL_S,
    AskIdentity,
    EngineIdentity,
    IdentityCache,
)
from neuron_push.router.options import PrefillAddress, RouterOptions

RECENT_S = 30.0
PROBE_INTERVAL_S = 5.0
PROBE_TIMEOUT_S = 5.0

_log = logging.getLogger("neuron_push.router")


class Engine:
    """One engine and what is known of its health."""

    role = ""

    def __init__(self, url: str) -> None:
        self.url = url
        self.error: str | None = "has not answered yet"
        self.probe_now = asyncio.Event()
        self._answered_at = float("-inf")

    @property
    def up(self) -> bool:
        """It answered recently, and nothing has failed since."""
        return self.error is None and time.monotonic() - self._answered_at < RECENT_S

    def answered(self) -> None:
        if self.error is not None:
            _log.info("%s engine %s is up", self.role, self.url)
        self.error = None
        self._answered_at = time.monotonic()

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
        }


class PrefillEngine(Engine):
    """A producer: HTTP for its leg, a side channel for its identity."""

    role = "prefill"

    def __init__(self, address: PrefillAddress, ask: AskIdentity, timeout_s: float) -> None:
        super().__init__(address.url)
        self.side = f"{address.side_host}:{address.side_port}"
        self._cache = IdentityCache(ask, address.side_host, address.side_port, timeout_s)

    async def identity(self) -> EngineIdentity:
        """Who it is now. Raises RouterError (502, 504) when it does not tell."""
        try:
            return await self._cache.get()
        except TimeoutError as err:
            self.failed(f"side channel {self.side}: time-out")
            raise RouterError(
                504, "the prefill engine's side channel did not answer in time", outcome="timeout"
            ) from err
        except Exception as err:  # whatever the injected question raises, this engine is unusable
            self.failed(f"side channel {self.side}: {err}")
            raise RouterError(
                502, f"the prefill engine cannot be used: {err}", outcome="unreachable"
            ) from err

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

    def __init__(self, url: str, wants_models: bool) -> None:
        super().__init__(url)
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


AnyEngine = TypeVar("AnyEngine", bound=Engine)


class Rotation(Generic[AnyEngine]):
    """Round robin over engines; those not up are passed over while any is up."""

    def __init__(self, engines: Sequence[AnyEngine]) -> None:
        self._engines = tuple(engines)
        self._next = 0

    def take(self, among: Sequence[AnyEngine] | None = None) -> AnyEngine:
        """The next engine of `among` (not empty; default: all of them)."""
        allowed = self._engines if among is None else among
        wanted = [engine for engine in allowed if engine.up] or allowed
        count = len(self._engines)
        for step in range(count):
            engine = self._engines[(self._next + step) % count]
            if engine in wanted:
                self._next = (self._next + step + 1) % count
                return engine
        raise AssertionError("the rotation was given engines that are not its own")


@dataclass(frozen=True)
class Pair:
    """The two engines of one attempt."""

    prefill: PrefillEngine
    decode: DecodeEngine
    identity: EngineIdentity


class EnginePool:
    """All engines, their probes, and the choice of a pair."""

    def __init__(
        self, options: RouterOptions, ask: AskIdentity, session: aiohttp.ClientSession
    ) -> None:
        timeout_s = options.connect_timeout_s
        self.prefill = [PrefillEngine(address, ask, timeout_s) for address in options.prefill]
        self.decode = [DecodeEngine(url, options.model_check) for url in options.decode]
        self._prefill_turn = Rotation(self.prefill)
        self._decode_turn = Rotation(self.decode)
        self._model_check = options.model_check
        self._session = session
        self._probes: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to probe every engine in the background."""
        engines: list[Engine] = [*self.prefill, *self.decode]
        self._probes = [asyncio.create_task(self._keep_probing(engine)) for engine in engines]

    async def close(self) -> None:
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        for engine in self.prefill:
            await engine.close()

    async def pick(self) -> Pair:
        """The next pair. Raises RouterError (502, 503, 504) when there is none."""
        prefill = self._prefill_turn.take()
        identity = await prefill.identity()
        if not self._model_check:
            return Pair(prefill, self._decode_turn.take(), identity)
        fitting = [engine for engine in self.decode if identity.model in engine.models]
        if not fitting:
            raise RouterError(
                503,
                f"model check: the prefill engine serves {identity.model!r}, "
                "which no decode engine is known to serve",
                outcome="http_5xx",
            )
        return Pair(prefill, self._decode_turn.take(fitting), identity)

    def next_decode(self) -> DecodeEngine:
        return self._decode_turn.take()

    async def _keep_probing(self, engine: Engine) -> None:
        while True:
            engine.probe_now.clear()
            try:
                await engine.probe(self._session)
            except TimeoutError:
                engine.failed("the probe timed out")
            except Exception as err:  # a probe must outlive whatever an engine answers
                engine.failed(str(err) or type(err).__name__)
            else:
                engine.answered()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.probe_now.wait(), PROBE_INTERVAL_S)
