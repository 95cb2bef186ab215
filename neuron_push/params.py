"""``kv_transfer_params``: what a router, or any client, wrote into a request.

Everything here comes out of an HTTP body and is read inside the scheduler, where an exception
ends the engine: parsing never raises, it returns what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from neuron_push.core.commands import Target

_ID = re.compile(r"[A-Za-z0-9._:\-]{1,160}")
_HOST = re.compile(r"[A-Za-z0-9._\-:\[\]%]{1,255}")
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_CHILD = re.compile(r"^(\d{1,6})_(?=cmpl-|chatcmpl-|resp_)")
_ENGINE_ID = re.compile(r"(\d{1,6}_)?(cmpl-|chatcmpl-|resp_)")
_PROMPT = re.compile(r"-(\d{1,6})$")
_LAST_NUMBER = re.compile(r"-(\d{1,6})(?:-[0-9a-f]{8})?$")


@dataclass(frozen=True)
class ProducerParams:
    """This engine computes the prompt's KV for somebody else. ``key`` names the transfer."""

    key: str


@dataclass(frozen=True)
class ConsumerParams:
    """This engine receives the prompt's KV from ``target``."""

    key: str
    target: Target


@dataclass(frozen=True)
class BadParams:
    """The request asks for a transfer that cannot be; the sentence is for its sender."""

    sentence: str
    is_consumer: bool


def parse_params(
    params: object, request_id: str
) -> ProducerParams | ConsumerParams | BadParams | None:
    """None when the request has nothing to do with KV transfer."""
    if params is None:
        return None
    if type(params) is not dict and not isinstance(params, Mapping):
        return BadParams(
            f"kv_transfer_params is a {type(params).__name__}, expected an object", False
        )
    consume, produce = params.get("do_remote_prefill"), params.get("do_remote_decode")
    is_consumer = consume is True
    for name, value in (("do_remote_prefill", consume), ("do_remote_decode", produce)):
        if value is not None and not isinstance(value, bool):  # 1 is no true
            return BadParams(_wrong(name, value, "true or false"), is_consumer)
    if not consume and not produce:
        return None
    if consume and produce:
        return BadParams("kv_transfer_params has both do_remote_prefill and do_remote_decode", True)
    name, transfer_id = _transfer_id(params, request_id)
    if not isinstance(transfer_id, str) or not _ID.fullmatch(transfer_id):
        return BadParams(
            _wrong(name, transfer_id, "1 to 160 letters, digits, '.', '_', ':' or '-'"), is_consumer
        )
    key = f"{transfer_id}/{sub_request(request_id)}"
    if produce:
        return ProducerParams(key)
    host, port, engine_id = (
        params.get("remote_host"),
        params.get("remote_port"),
        params.get("remote_engine_id"),
    )
    if not isinstance(host, str) or not _HOST.fullmatch(host):
        return BadParams(_wrong("remote_host", host, "a host name or address"), True)
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65_535:
        return BadParams(_wrong("remote_port", port, "a port number"), True)
    if not isinstance(engine_id, str) or not _ID.fullmatch(engine_id):
        return BadParams(_wrong("remote_engine_id", engine_id, "the producer's engine id"), True)
    return ConsumerParams(key, Target(host, port, engine_id))


def sub_request(request_id: str) -> str:
    """``<prompt>.<choice>`` of a vLLM request id.

    Several prompts or choices in one HTTP request share their ``kv_transfer_params``, and become
    engine requests of their own: ``[<choice>_]cmpl-<id>-<prompt>-<random>`` and
    ``[<choice>_]chatcmpl-<id>-<random>``. The random suffix differs between producer and
    consumer, so it is left out.
    """
    choice = prompt = 0
    if request_id[:1].isdigit():
        child = _CHILD.match(request_id)
        if child is not None:
            choice = int(child.group(1))
            request_id = request_id[child.end() :]
    if request_id.startswith("cmpl-"):
        found = _LAST_NUMBER.search(request_id, max(0, len(request_id) - 16))
        if found is not None:
            prompt = int(found.group(1))
    return f"{prompt}.{choice}"


def base_request_id(request_id: str) -> str:
    """The X-Request-Id behind a vLLM request id: the transfer's name where a router gives none."""
    child = _CHILD.match(request_id)
    if child is not None:
        request_id = request_id[child.end() :]
    request_id = _SUFFIX.sub("", request_id)
    if request_id.startswith("cmpl-"):
        return _PROMPT.sub("", request_id[len("cmpl-") :])
    return request_id.removeprefix("chatcmpl-")


def _transfer_id(params: Mapping[object, object], request_id: str) -> tuple[str, object]:
    """(where it stood, the transfer's name): by the router, else the request id both legs share."""
    if params.get("transfer_id") is not None:
        return "transfer_id", params.get("transfer_id")
    if params.get("do_remote_prefill") and params.get("remote_request_id") is not None:
        remote = params.get("remote_request_id")
        # An engine's id from the prefill's answer, or the X-Request-Id itself.
        if isinstance(remote, str) and _ENGINE_ID.match(remote):
            remote = base_request_id(remote)
        return "remote_request_id", remote
    return "X-Request-Id", base_request_id(request_id)


def _wrong(name: str, value: object, expected: str) -> str:
    return f"kv_transfer_params.{name}: value {_shown(value)} is not allowed: expected {expected}"


def _shown(value: object) -> str:
    if not isinstance(value, str | int | float | None):
        return f"of type {type(value).__name__}"  # its text may be endless, or nested too deep
    try:
        text = repr(value[:80] if isinstance(value, str) else value)
    except ValueError:  # Python refuses to print integers of more than 4300 digits
        return "a huge number"
    return text if len(text) <= 80 else text[:77] + "..."
