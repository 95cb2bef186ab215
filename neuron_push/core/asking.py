"""Questions that routers and the doctor put to an engine's side channel, one answer each."""

from __future__ import annotations

import zmq
import zmq.asyncio

from neuron_push.core.keys import SideKeys
from neuron_push.core.messages import (
    MAX_RAILS_BYTES,
    IAm,
    Identity,
    MessageError,
    NotReady,
    Refuse,
    SideMessage,
    TheseRails,
    WhichRails,
    WhoAreYou,
    decode_side,
    encode_side,
)

MAX_IDENTITY_BYTES = 1 << 20
MAX_ALL_RAILS_BYTES = 1024 * MAX_RAILS_BYTES


class SideChannelError(Exception):
    """Nobody there, or somebody else. The text is a sentence for an operator."""


class NotReadyError(SideChannelError):
    """The engine is there and still starting."""


class UnknownQuestionError(SideChannelError):
    """The engine speaks our wire, but its release does not know this question."""


async def ask_identity(
    host: str, port: int, timeout_s: float, keys: SideKeys | None = None
) -> Identity:
    """Who is the engine at this side channel? Raises SideChannelError with a sentence."""
    answer = await _ask(host, port, WhoAreYou(), timeout_s, keys, MAX_IDENTITY_BYTES)
    if not isinstance(answer, IAm):
        raise SideChannelError(f"{host}:{port} answered {type(answer).__name__}, not IAm")
    return answer.identity


async def ask_rails(
    host: str, port: int, timeout_s: float, keys: SideKeys | None = None
) -> TheseRails:
    """What do the engine's ranks say of their rails? Raises SideChannelError with a sentence."""
    answer = await _ask(host, port, WhichRails(), timeout_s, keys, MAX_ALL_RAILS_BYTES)
    if isinstance(answer, NotReady):
        raise NotReadyError(answer.sentence)
    if isinstance(answer, Refuse):
        raise UnknownQuestionError(answer.sentence)
    if not isinstance(answer, TheseRails):
        raise SideChannelError(f"{host}:{port} answered {type(answer).__name__}, not TheseRails")
    return answer


async def _ask(
    host: str,
    port: int,
    question: SideMessage,
    timeout_s: float,
    keys: SideKeys | None,
    max_bytes: int,
) -> SideMessage:
    context = zmq.asyncio.Context.instance()
    socket = context.socket(zmq.DEALER)
    if keys is not None:
        keys.protect_client(socket)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    try:
        try:
            socket.connect(f"tcp://{host}:{port}")
        except zmq.ZMQError as e:
            raise SideChannelError(f"side channel address {host}:{port} cannot be used: {e}") from e
        await socket.send(encode_side(question))
        if not await socket.poll(int(timeout_s * 1000)):
            raise SideChannelError(
                f"no neuron_push engine answers on side channel {host}:{port} within "
                f"{timeout_s:g} s: is it up, does it run NeuronPushConnector, and has it the same "
                "key file?"
            )
        frames = await socket.recv_multipart()
        try:
            return decode_side(frames[-1])
        except MessageError as e:
            raise SideChannelError(f"{host}:{port} is no neuron_push side channel: {e}") from e
    finally:
        socket.close()
