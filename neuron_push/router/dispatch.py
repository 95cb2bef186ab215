"""From a client's request to a decode engine that answers it, in one try or two."""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from neuron_push.router.attempt import Attempt
from neuron_push.router.bodies import ClientRequest
from neuron_push.router.errors import RouterError
from neuron_push.router.legs import Reply
from neuron_push.router.metrics import RouterMetrics
from neuron_push.router.pool import EnginePool, Pair

# The longest that the failure of a first try is kept from the client to find a second pair.
SECOND_PAIR_S = 1.0

# Not "timeout": that client has waited once already. Not "http_4xx": the request is at fault.
_RETRIED = frozenset({"unreachable", "broken", "http_5xx"})

_log = logging.getLogger("neuron_push.router")


class Dispatcher:
    """Makes attempts, at most two for a request, and sees to it that none leaves a leg behind."""

    def __init__(
        self,
        pool: EnginePool,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
        *,
        decode_recomputes: bool = False,
    ) -> None:
        self._pool = pool
        self._session = session
        self._metrics = metrics
        self._decode_recomputes = decode_recomputes
        self._ending: set[asyncio.Task[None]] = set()

    async def dispatch(self, request: ClientRequest) -> tuple[Attempt, Reply]:
        """An attempt whose decode engine has begun to answer; the caller hands it to `end`.

        Until this returns nothing has been sent to the client, so what one pair
        failed another may try, once. Raises RouterError, or ends with its task
        when the client hangs up.
        """
        prefill = self._pool.next_prefill()
        first: Pair | None = None
        try:
            first = await self._pool.pair(prefill)
            return await self._try(request, first)
        except RouterError as err:
            if not err.leg or err.outcome not in _RETRIED:
                raise
            failure = err
        try:
            async with asyncio.timeout(SECOND_PAIR_S):
                if first is not None:
                    second = await self._pool.second_pair(first, failure)
                else:
                    other = self._pool.other_prefill(prefill)
                    second = None if other is None else await self._pool.pair(other)
        except (RouterError, TimeoutError):
            second = None
        if second is None:
            raise failure
        return await self._try_again(request, second, failure)

    async def _try_again(
        self, request: ClientRequest, pair: Pair, failure: RouterError
    ) -> tuple[Attempt, Reply]:
        _log.info(
            "request_id=%s: %s leg failed (%s), second try with %s and %s",
            *(request.request_id, failure.leg, failure.outcome),
            *(pair.prefill.url, pair.decode.url),
        )
        result = "cancelled"
        try:
            begun = await self._try(request, pair)
            result = "ok"
            return begun
        except RouterError:
            result = "failed"
            raise
        finally:
            self._metrics.retries.labels(failure.leg, failure.outcome, result).inc()

    async def _try(self, request: ClientRequest, pair: Pair) -> tuple[Attempt, Reply]:
        attempt = Attempt(request, pair, self._session, self._metrics)

        def may_go_on(error: RouterError) -> bool:
            """Whether a decode engine should answer without P, for want of another P."""
            alone = not self._pool.has_other_prefill(pair.prefill)
            return self._decode_recomputes and alone and not error.client_fault

        try:
            return attempt, await attempt.start(may_go_on)
        except BaseException:
            self.end(attempt)
            raise

    def end(self, attempt: Attempt) -> None:
        ending = attempt.close()
        if ending is not None:
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
