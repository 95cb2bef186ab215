"""Errors as the client sees them: OpenAI-style JSON with a proper status."""

from __future__ import annotations

from typing import Any

import msgspec


class RouterError(Exception):
    """A request that cannot be served, with the status and body the client gets.

    `outcome` names the kind for the metrics, `leg` the leg that failed, if one
    did. `client_fault` is true when the engine blamed the request itself (4xx):
    another engine would say the same.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        outcome: str,
        body: bytes | None = None,
        retry_after: str | None = None,
        leg: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.leg = leg
        self.outcome = outcome
        self.retry_after = retry_after
        self._body = body

    @property
    def client_fault(self) -> bool:
        return self.outcome == "http_4xx"

    def body(self) -> bytes:
        """The JSON body: the engine's own where it was OpenAI-style already."""
        if self._body is not None:
            return self._body
        return error_body(self.status, str(self))

    def event(self) -> bytes:
        """The same as one SSE event, for a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"


def error_body(status: int, message: str) -> bytes:
    error = {"message": message, "type": _type_of(status), "code": status, "param": None}
    return msgspec.json.encode({"error": error})


def from_engine_body(status: int, raw: bytes, who: str, retry_after: str | None) -> RouterError:
    """What an engine answered with an HTTP error status.

    A 4xx keeps its body if that is OpenAI-style, else its message is wrapped.
    """
    outcome = "http_4xx" if 400 <= status < 500 else "http_5xx"
    try:
        decoded: Any = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        decoded = None
    if isinstance(decoded, dict) and isinstance(decoded.get("error"), dict):
        message = decoded["error"].get("message")
        return RouterError(
            status,
            message if isinstance(message, str) else f"{who} answered {status}",
            outcome=outcome,
            body=msgspec.json.encode(decoded),
            retry_after=retry_after,
        )
    return RouterError(
        status, _message_in(decoded, raw, status, who), outcome=outcome, retry_after=retry_after
    )


def from_event(data: bytes, who: str) -> RouterError | None:
    """The error in one event of a stream (what follows `data:`), if it is one."""
    if not data.startswith(b'{"error"'):
        return None
    try:
        decoded: Any = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None
    error = decoded["error"]
    if not isinstance(error, dict):
        return None
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 502
    return from_engine_body(status, data, who, None)


def _message_in(decoded: Any, raw: bytes, status: int, who: str) -> str:
    if isinstance(decoded, dict):
        for key in ("message", "detail", "error"):
            value = decoded.get(key)
            if value:
                return value if isinstance(value, str) else msgspec.json.encode(value).decode()
    text = raw[:500].decode("utf-8", "replace").strip()
    return f"{who} answered {status}" + (f": {text}" if text else "")


def _type_of(status: int) -> str:
    if status < 500:
        return "invalid_request_error"
    return {502: "engine_error", 503: "unavailable", 504: "timeout"}.get(status, "server_error")
