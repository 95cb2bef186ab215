"""The bodies and headers of both legs, made from the client's request.

Only the top level of the client's JSON is taken apart; every value in it is
carried as the bytes the client wrote, so numbers stay exact and a long prompt
is not decoded at all.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

import msgspec

from neuron_push.router.errors import RouterError
from neuron_push.router.identity import EngineIdentity

_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_PASSED_HEADERS = ("authorization", "traceparent", "tracestate")
_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True)
class ClientRequest:
    """A client's request, checked, before any engine was chosen."""

    path: str
    request_id: str
    headers: dict[str, str]
    fields: dict[str, msgspec.Raw]


def request_id_of(headers: dict[str, str]) -> str:
    """The client's X-Request-Id where it is sane, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex


def passed_headers(headers: dict[str, str]) -> dict[str, str]:
    """Those of the client's headers that an engine must see."""
    return {name: headers[name] for name in _PASSED_HEADERS if name in headers}


def parse_request(
    path: str, request_id: str, headers: dict[str, str], body: bytes
) -> ClientRequest:
    """Raises RouterError (400) when the body is no JSON object."""
    try:
        fields = _DECODER.decode(body)
    except msgspec.DecodeError as err:
        raise RouterError(
            400, f"the request body is no JSON object: {err}", outcome="http_4xx"
        ) from None
    fields.pop("kv_transfer_params", None)
    sent = passed_headers(headers)
    sent["X-Request-Id"] = request_id
    sent["Content-Type"] = "application/json"
    return ClientRequest(path, request_id, sent, fields)


def prefill_body(request: ClientRequest, transfer_id: str) -> bytes:
    """The P leg: one token, no stream; its KV goes out under `transfer_id`."""
    fields: dict[str, object] = {**request.fields}
    fields.pop("stream_options", None)
    fields.pop("min_tokens", None)
    fields["stream"] = False
    fields["max_tokens"] = 1
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    fields["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
    }
    return msgspec.json.encode(fields)


def decode_body(request: ClientRequest, transfer_id: str, identity: EngineIdentity) -> bytes:
    """The D leg: the client's own request, and where its KV will come from."""
    fields: dict[str, object] = {**request.fields}
    fields["kv_transfer_params"] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": identity.engine_id,
        "remote_host": identity.host,
        "remote_port": identity.port,
        "tp_size": identity.tp_size,
        "pp_size": identity.pp_size,
        "remote_request_id": request.request_id,
    }
    return msgspec.json.encode(fields)
