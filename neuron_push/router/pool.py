"""All engines: whose turn it is, and which pair may try again what another could not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import aiohttp

from neuron_push.router.breaker import CLOSED
from neuron_push.router.engines import DecodeEngine, Engine, PrefillEngine
from neuron_push.router.errors import RouterError
from neuron_push.router.identity import AskIdentity, EngineIdentity
from neuron_push.router.options import RouterOptions

PROBE_INTERVAL_S = 5.0

AnyEngine = TypeVar("AnyEngine", bound=Engine)


class Rotation(Generic[AnyEngine]):
    """Round robin over engines; those not usable are passed over while any other is."""

    def __init__(self, engines: Sequence[AnyEngine]) -> None:
        self._engines = tuple(engines)
        self._next = 0

    def take(self, among: Sequence[AnyEngine] | None = None, *, turn: bool = True) -> AnyEngine:
        """The next engine of `among` (not empty; default: all of them).

        With `turn` false it is still the next one's turn afterwards.
        """
        allowed = self._engines if among is None else among
        wanted = (
            [engine for engine in allowed if engine.usable]
            or [engine for engine in allowed if engine.up]
            or allowed
        )
        count = len(self._engines)
        for step in range(count):
            engine = self._engines[(self._next + step) % count]
            if engine in wanted:
                if turn:
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
        timeout_s, failures = options.connect_timeout_s, options.breaker_failures
        self.prefill = [
            PrefillEngine(address, ask, timeout_s, failures) for address in options.prefill
        ]
        self.decode = [DecodeEngine(url, options.model_check, failures) for url in options.decode]
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

    def next_prefill(self) -> PrefillEngine:
        return self._prefill_turn.take()

    def next_decode(self) -> DecodeEngine:
        return self._decode_turn.take()

    def other_prefill(self, engine: PrefillEngine) -> PrefillEngine | None:
        """A usable prefill engine that is not this one."""
        others = _others(self.prefill, engine)
        return self._prefill_turn.take(others) if others else None

    def has_other_prefill(self, engine: PrefillEngine) -> bool:
        return bool(_others(self.prefill, engine))

    async def pair(self, prefill: PrefillEngine) -> Pair:
        """This engine and the decode engine whose turn it is.

        Raises RouterError: 502 or 504 when it does not tell who it is, 503
        when no decode engine fits it.
        """
        ticket = prefill.breaker.enter()
        try:
            identity = await prefill.identity()
        except RouterError as err:
            ticket.failed(str(err))
            raise
        finally:
            ticket.release()
        fitting = self._fitting(identity)
        if not fitting:
            raise RouterError(
                503,
                f"model check: the prefill engine serves {identity.model!r}, "
                "which no decode engine is known to serve",
                outcome="http_5xx",
            )
        return Pair(prefill, self._decode_turn.take(fitting), identity)

    async def second_pair(self, first: Pair, error: RouterError) -> Pair | None:
        """The pair that may try again what `first` failed with `error`; None if there is none.

        The failed role needs another engine. A decode engine's 5xx may as well
        mean that its load failed because of P, so both are changed where they
        can be. A decode engine that was lost leaves P in place, which has the
        prompt in its prefix cache. Without another engine the same pair gets
        the request again if it is not what it was: its connection broke (the
        next one shows whether it is there), or P restarted meanwhile.
        """
        prefill = first.prefill
        if error.leg == "prefill" or error.outcome == "http_5xx":
            prefill = self.other_prefill(prefill) or prefill
        identity = await prefill.identity()
        decode = first.decode
        if error.leg == "decode" or decode not in self._fitting(identity):
            others = _others(self._fitting(identity), first.decode)
            # It stays its turn: with as many engines of both roles, always the same
            # ones would meet, and a good one look as bad as the other half of its pair.
            decode = self._decode_turn.take(others, turn=False) if others else first.decode
        if decode not in self._fitting(identity):
            return None
        second = Pair(prefill, decode, identity)
        return second if _is_other(first, second, error) or error.outcome == "broken" else None

    def _fitting(self, identity: EngineIdentity) -> list[DecodeEngine]:
        if not self._model_check:
            return self.decode
        return [engine for engine in self.decode if identity.model in engine.models]

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


def _others(engines: Sequence[AnyEngine], engine: AnyEngine) -> list[AnyEngine]:
    """The usable ones but this; a second try is no trial where that can be helped."""
    others = [other for other in engines if other is not engine and other.usable]
    return [other for other in others if other.breaker.state == CLOSED] or others


def _is_other(first: Pair, second: Pair, error: RouterError) -> bool:
    """Whether what failed has been changed. A restarted engine is another one."""
    other_prefill = (
        second.prefill is not first.prefill
        or second.identity.incarnation != first.identity.incarnation
    )
    other_decode = second.decode is not first.decode
    if error.leg == "prefill":
        return other_prefill
    return other_decode or (error.outcome == "http_5xx" and other_prefill)
