"""One try of one client request: a pair of engines, a transfer_id, two legs."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable

import aiohttp

from neuron_push.router.bodies import ClientRequest, decode_body, prefill_body
from neuron_push.router.errors import RouterError
from neuron_push.router.legs import DecodeLeg, Reply, run_prefill
from neuron_push.router.metrics import RouterMetrics
from neuron_push.router.pool import Pair

# A prefill engine's answer may trail a short decode by a moment.
STRAGGLER_GRACE_S = 1.0

_log = logging.getLogger("neuron_push.router")


class Attempt:
    """Both legs of one try. `start`, then `rest` for a stream, then always `close`.

    A transfer_id is never used for two attempts: a late write of the first
    cannot be taken for one of the second.
    """

    def __init__(
        self,
        request: ClientRequest,
        pair: Pair,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
    ) -> None:
        self.transfer_id = uuid.uuid4().hex
        self._request = request
        self._pair = pair
        self._session = session
        self._metrics = metrics
        self._prefill: asyncio.Task[None] | None = None
        self._decode = DecodeLeg(session)
        self._decode_outcome = "cancelled"
        self._prefill_failed = False
        self._closed = False
        self._prefill_ticket = pair.prefill.breaker.enter()
        self._decode_ticket = pair.decode.breaker.enter()

    async def start(self, may_go_on: Callable[[RouterError], bool]) -> Reply:
        """Sends both legs at once; returns when the decode engine's first token is here.

        Raises RouterError when either leg fails before that, whichever is first;
        after a failure of the P leg alone `may_go_on` says whether the decode
        engine may still answer. What becomes of the P leg later does not
        matter: a decode engine that still misses something says so itself.
        """
        try:
            reply = await self._both_legs(may_go_on)
        except RouterError as err:
            self._blame(err)
            raise
        if not self._prefill_failed:
            self._prefill_ticket.succeeded()  # its KV has arrived, though it may not have answered
        self._decode_ticket.succeeded()
        return reply

    async def _both_legs(self, may_go_on: Callable[[RouterError], bool]) -> Reply:
        prefill = self._prefill = asyncio.create_task(self._run_prefill())
        prefill.add_done_callback(_retrieve)
        decode = asyncio.create_task(self._open_decode())
        try:
            await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
            cause = prefill.exception() if prefill.done() else None
            if isinstance(cause, RouterError) and not decode.done() and may_go_on(cause):
                await asyncio.wait({decode})
                if decode.exception() is None:
                    self._blame(cause)
            if cause is not None and (not decode.done() or decode.exception() is not None):
                raise cause  # if both failed, P's failure is the cause
            return await decode
        finally:
            if not decode.done():
                decode.cancel()
                await asyncio.gather(decode, return_exceptions=True)

    async def rest(self) -> AsyncIterator[bytes]:
        """The decode engine's stream after its first bytes. Raises RouterError."""
        try:
            async for chunk in self._decode.rest():
                yield chunk
        except RouterError as err:
            self._decode_outcome = err.outcome
            self._report("decode", self._pair.decode.url, err)
            self._decode_ticket.failed(str(err))
            raise
        self._decode_outcome = "ok"

    def close(self) -> asyncio.Task[None] | None:
        """Ends both legs. A P leg that outlives a complete answer is returned, ending."""
        if self._closed:
            return None
        self._closed = True
        self._decode.close()
        self._prefill_ticket.release()
        self._decode_ticket.release()
        self._metrics.legs.labels("decode", self._decode_outcome).inc()
        if self._prefill is None or self._prefill.done():
            return None
        grace_s = STRAGGLER_GRACE_S if self._decode.finished else 0.0
        return asyncio.create_task(_end(self._prefill, grace_s))

    async def _run_prefill(self) -> None:
        outcome = "cancelled"
        try:
            await run_prefill(
                self._session,
                self._pair.prefill.url + self._request.path,
                self._request.headers,
                prefill_body(self._request, self.transfer_id),
            )
            outcome = "ok"
        except RouterError as err:
            outcome = err.outcome
            self._report("prefill", self._pair.prefill.url, err)
            failure = _as_gateway(err)
            failure.leg = "prefill"
            self._prefill_failed = True
            raise failure from err
        finally:
            self._metrics.legs.labels("prefill", outcome).inc()

    async def _open_decode(self) -> Reply:
        try:
            reply = await self._decode.open(
                self._pair.decode.url + self._request.path,
                self._request.headers,
                decode_body(self._request, self.transfer_id, self._pair.identity),
            )
        except RouterError as err:
            self._decode_outcome = err.outcome
            self._report("decode", self._pair.decode.url, err)
            err.leg = "decode"
            raise
        if self._decode.finished:
            self._decode_outcome = "ok"
        return reply

    def _blame(self, err: RouterError) -> None:
        """Tells the breakers. A decode engine's 5xx may be a load that failed because of P."""
        if err.client_fault:
            return
        refused = err.outcome == "unreachable"
        if err.leg == "prefill" or err.outcome == "http_5xx":
            self._prefill_ticket.failed(str(err), refused=refused)
        if err.leg == "decode":
            self._decode_ticket.failed(str(err), refused=refused)

    def _report(self, role: str, url: str, err: RouterError) -> None:
        """A leg failed: says so, and has both engines looked at, at once."""
        level = logging.DEBUG if err.client_fault else logging.WARNING
        _log.log(
            level,
            "request_id=%s transfer_id=%s engine_id=%s: %s leg to %s failed (%s): %s",
            *(self._request.request_id, self.transfer_id, self._pair.identity.engine_id),
            *(role, url, err.outcome, err),
        )
        if not err.client_fault:
            self._pair.prefill.suspect()
            self._pair.decode.suspect()


def _retrieve(leg: asyncio.Task[None]) -> None:
    """A P leg may fail when nobody waits for it any more; it has been reported."""
    if not leg.cancelled():
        leg.exception()


async def _end(leg: asyncio.Task[None], grace_s: float) -> None:
    try:
        if grace_s:
            await asyncio.wait({leg}, timeout=grace_s)
    finally:
        leg.cancel()
        await asyncio.gather(leg, return_exceptions=True)


def _as_gateway(err: RouterError) -> RouterError:
    """A prefill engine's own 5xx is a bad gateway: the client never spoke to it."""
    if err.status < 500 or err.outcome != "http_5xx":
        return err
    return RouterError(
        502,
        f"the prefill engine answered {err.status}: {err}",
        outcome=err.outcome,
        retry_after=err.retry_after,
    )
