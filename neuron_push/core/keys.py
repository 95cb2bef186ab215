"""The keys of a deployment: who may speak on its side channels.

One key pair for all engines and routers that belong together. Whoever holds the secret half
is trusted with every engine's KV memory; ZeroMQ CURVE keeps everybody else out, and keeps
cards (which hold the keys to that memory) from being read on the way.
"""

from __future__ import annotations

import hmac
import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq


class KeyFileError(ValueError):
    """A key file that cannot be used. The text names it and says how to mend it."""


@dataclass(frozen=True)
class SideKeys:
    """A CURVE key pair in ZeroMQ's Z85 text. The secret half stays out of every repr."""

    public: bytes
    secret: bytes = field(repr=False)

    def protect_server(self, socket: zmq.Socket[bytes]) -> None:
        """Before bind."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    def protect_client(self, socket: zmq.Socket[bytes] | zmq.Socket[object]) -> None:
        """Before connect. The server must hold the same pair."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    def callback(self, domain: str, key: bytes) -> bool:
        """For ZeroMQ's authenticator: is this client's public key on the list?"""
        return hmac.compare_digest(key, self.public)


def make_keys(path: Path) -> SideKeys:
    """Write a new key file that only its owner can read. Raises KeyFileError if it exists."""
    public, secret = zmq.curve_keypair()
    text = json.dumps({"public": public.decode(), "secret": secret.decode()}, indent=2) + "\n"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise KeyFileError(
            f"{path} exists: a key in use must not be overwritten by accident; "
            "remove it first, or name another file"
        ) from None
    except OSError as e:
        raise KeyFileError(f"{path} cannot be written: {e.strerror}") from e
    with os.fdopen(handle, "w") as file:
        file.write(text)
    return SideKeys(public, secret)


def load_keys(path: Path) -> SideKeys:
    """Raises KeyFileError with a sentence; never shows what the file holds."""
    try:
        mode = path.stat().st_mode
        text = path.read_text()
    except OSError as e:
        raise KeyFileError(
            f"key file {path} cannot be read: {e.strerror}; make one with `neuron-push keygen`"
        ) from e
    if stat.S_IMODE(mode) & 0o077:
        raise KeyFileError(
            f"key file {path} can be read by others (mode {stat.S_IMODE(mode):o}): chmod 600 it"
        )
    try:
        found = json.loads(text)
        public, secret = found["public"].encode(), found["secret"].encode()
        matches = zmq.curve_public(secret) == public
    except (ValueError, KeyError, TypeError, AttributeError, zmq.ZMQError):
        matches = False
    if not matches:
        raise KeyFileError(f"key file {path} holds no key pair: make one with `neuron-push keygen`")
    return SideKeys(public, secret)
