"""Every option of the router: its default, its unit, its one validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

SIDE_PORT = 5600
MIB = 1024 * 1024

_PREFILL_FORM = "URL[,side=HOST:PORT], for example http://10.0.0.1:8100,side=10.0.0.1:5600"
_URL_FORM = "http://HOST[:PORT][/PREFIX] or https://..., without user, query or fragment"


class OptionError(ValueError):
    """An option has a value that is not allowed. The message names all three."""

    def __init__(self, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{option}: {value!r} is not allowed; allowed: {allowed}")
        self.option = option


@dataclass(frozen=True)
class PrefillAddress:
    """Where a prefill engine is spoken to: HTTP, and its side channel."""

    url: str
    side_host: str
    side_port: int


@dataclass(frozen=True)
class RouterOptions:
    """The router's options, checked. Make one with `check_options`."""

    prefill: tuple[PrefillAddress, ...]
    decode: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    model_check: bool = False
    max_body_bytes: int = 32 * MIB
    connect_timeout_s: float = 5.0
    idle_timeout_s: float = 300.0
    receive_timeout_s: float = 60.0
    drain_s: float = 30.0
    breaker_failures: int = 5
    decode_recomputes: bool = False
    key_file: str = ""


def check_options(
    prefill: Sequence[str],
    decode: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int | str = 8000,
    model_check: bool = False,
    max_body_mib: float | str = 32.0,
    connect_timeout_s: float | str = 5.0,
    idle_timeout_s: float | str = 300.0,
    receive_timeout_s: float | str = 60.0,
    drain_s: float | str = 30.0,
    breaker_failures: int | str = 5,
    decode_recomputes: bool = False,
    key_file: str = "",
) -> RouterOptions:
    """Checks what a user wrote; numbers may still be text.

    Raises OptionError for the first value not allowed.
    """
    if not prefill:
        raise OptionError("--prefill", "", f"at least one {_PREFILL_FORM}")
    if not decode:
        raise OptionError("--decode", "", f"at least one {_URL_FORM}")
    prefill_addresses = tuple(_prefill_address(value) for value in prefill)
    decode_urls = tuple(_engine_url("--decode", value, value, _URL_FORM) for value in decode)
    _refuse_repeated("--prefill", [address.url for address in prefill_addresses])
    _refuse_repeated("--decode", decode_urls)
    if not host or any(char.isspace() for char in host):
        raise OptionError("--host", host, "a host name or address to listen on")
    return RouterOptions(
        prefill=prefill_addresses,
        decode=decode_urls,
        host=host,
        port=_port("--port", port),
        model_check=model_check,
        max_body_bytes=int(_within("--max-body-mib", max_body_mib, 0.001, 1024.0) * MIB),
        connect_timeout_s=_within("--connect-timeout-s", connect_timeout_s, 0.1, 600.0),
        idle_timeout_s=_within("--idle-timeout-s", idle_timeout_s, 0.1, 86400.0),
        receive_timeout_s=_within("--receive-timeout-s", receive_timeout_s, 0.1, 3600.0),
        drain_s=_within("--drain-s", drain_s, 0.0, 3600.0),
        breaker_failures=_count("--breaker-failures", breaker_failures, 1, 1000),
        decode_recomputes=decode_recomputes,
        key_file=key_file,
    )


def _prefill_address(value: str) -> PrefillAddress:
    url_text, comma, rest = value.partition(",")
    url = _engine_url("--prefill", value, url_text, _PREFILL_FORM)
    if not comma:
        return PrefillAddress(url, urlsplit(url).hostname or "", SIDE_PORT)
    name, equals, side = rest.partition("=")
    if name.strip() != "side" or not equals:
        raise OptionError("--prefill", value, _PREFILL_FORM)
    try:
        parts = urlsplit(f"//{side.strip()}")
        side_host, side_port = parts.hostname, parts.port
    except ValueError:
        side_host, side_port = None, None
    if not side_host or not side_port or parts.netloc != side.strip() or "@" in side:
        raise OptionError("--prefill", value, _PREFILL_FORM)
    return PrefillAddress(url, side_host, side_port)


def _engine_url(option: str, value: str, text: str, form: str) -> str:
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError:
        raise OptionError(option, value, form) from None
    plain = not (parts.query or parts.fragment or "@" in parts.netloc)
    spaced = any(char.isspace() for char in parts.geturl())
    if parts.scheme not in {"http", "https"} or not parts.hostname or not plain or spaced:
        raise OptionError(option, value, form)
    if port == 0:
        raise OptionError(option, value, form)
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _refuse_repeated(option: str, urls: Sequence[str]) -> None:
    for index, url in enumerate(urls):
        if url in urls[:index]:
            raise OptionError(option, url, "each engine once")


def _port(option: str, value: int | str) -> int:
    return _count(option, value, 0, 65535, " (0: any free port)")


def _count(option: str, value: int | str, low: int, high: int, note: str = "") -> int:
    text = str(value)
    if text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high:
        return int(text)
    raise OptionError(option, value, f"a whole number from {low} to {high}{note}")


def _within(option: str, value: float | str, low: float, high: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not low <= number <= high:
        raise OptionError(option, value, f"a number from {low:g} to {high:g}")
    return number
