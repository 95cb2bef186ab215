"""libnrt, the Neuron runtime, through ctypes: the few calls this project makes.

Prototypes and meanings follow the headers that ship with the runtime (``nrt.h``, ``nrt_version.h``,
``nrt_status.h``, ``nrt_async.h``). None of the calls claims a core: `nrt_init` is not among them.
A library that is missing or older gives a sentence, never an AttributeError.
"""

from __future__ import annotations

import ctypes
import enum
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuron_push.devices.base import DeviceError

SONAME = "libnrt.so.1"
INSTALLED = "/opt/aws/neuron/lib/libnrt.so.1"
"""Not on the loader's path by default, where NIXL and libfabric look for the soname only."""

COMPUTE_UNIT = 3
"""The execution unit that runs compiled models (NRTA_XU_COMPUTE)."""

_SINCE = {
    "nrt_get_attached_efa_bdf": "2.31",
    "nrta_is_completed": "2.29",
    "nrta_get_sequence": "2.29",
}
_PCI_ADDRESS = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})\.([0-7])")


class NrtStatus(enum.IntEnum):
    SUCCESS = 0
    FAILURE = 1
    INVALID = 2
    RESOURCE = 4
    TIMEOUT = 5
    QUEUE_FULL = 7
    UNINITIALIZED = 13
    CLOSED = 14
    COLL_PENDING = 1100


_MEANING = {
    NrtStatus.FAILURE: "the runtime failed; its own log says more (NEURON_RT_LOG_LEVEL=INFO)",
    NrtStatus.INVALID: "an argument means nothing to the runtime",
    NrtStatus.RESOURCE: "a buffer was too small, or the runtime is out of a resource",
    NrtStatus.TIMEOUT: "the device did not answer in time",
    NrtStatus.QUEUE_FULL: "the execution queue is full",
    NrtStatus.UNINITIALIZED: "the runtime is not initialised in this process",
    NrtStatus.CLOSED: "the runtime has been closed in this process",
    NrtStatus.COLL_PENDING: "a collective operation is still running",
}


class NrtError(DeviceError):
    """libnrt is missing, too old, or refused. ``status`` is None where no call was made."""

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status


class _Version(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint64),
        ("minor", ctypes.c_uint64),
        ("patch", ctypes.c_uint64),
        ("maintenance", ctypes.c_uint64),
        ("detail", ctypes.c_char * 128),
        ("git_hash", ctypes.c_char * 64),
    )


class Nrt:
    """An opened libnrt."""

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self._library = library
        self.path = path

    # ------------------------------------------------------------ calls

    def version(self) -> str:
        """Such as ``"2.31.24.0"``. Raises NrtError."""
        found = _Version()
        self._call("nrt_get_version", ctypes.byref(found), ctypes.c_size_t(ctypes.sizeof(found)))
        return f"{found.major}.{found.minor}.{found.patch}.{found.maintenance}"

    def total_cores(self) -> int:
        """Cores of the whole host; may be asked before the runtime is initialised."""
        count = ctypes.c_uint32()
        self._call("nrt_get_total_nc_count", ctypes.byref(count))
        return count.value

    def attached_efa(self, address: int) -> str:
        """PCI address ``0000:c9:00.0`` of the EFA adapter that serves device memory at `address`.

        Raises NrtError. The runtime counts the terminating NUL in the length it is given, not in
        the length it returns; 2.31 is the first that has this call.
        """
        for size in (16, 64):
            buffer = ctypes.create_string_buffer(size)
            length = ctypes.c_size_t(size)
            try:
                self._call(
                    "nrt_get_attached_efa_bdf",
                    ctypes.c_void_p(address),
                    buffer,
                    ctypes.byref(length),
                )
            except NrtError as e:
                if e.status == NrtStatus.RESOURCE and size < 64:
                    continue
                raise
            text = (
                buffer.raw[: min(length.value, size)].partition(b"\0")[0].decode("ascii", "replace")
            )
            match = _PCI_ADDRESS.fullmatch(text.strip())
            if match is None:
                raise NrtError(
                    f"nrt_get_attached_efa_bdf answered {text!r} for address {address:#x}; "
                    "expected a PCI address such as 0000:c9:00.0: report this with the runtime's "
                    "version"
                )
            domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
            return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"
        raise AssertionError("unreachable")

    def host_device(self, device: int) -> int:
        """Host index of a Neuron device: containers renumber theirs. Raises NrtError."""
        host = ctypes.c_uint32()
        self._call("nrt_host_device_id_get", ctypes.c_int(device), ctypes.byref(host))
        return host.value

    def dmabuf_fd(self, address: int, num_bytes: int) -> int:
        """A file descriptor of device memory for RDMA; the caller closes it. Raises NrtError."""
        fd = ctypes.c_int(-1)
        self._call(
            "nrt_get_dmabuf_fd",
            ctypes.c_uint64(address),
            ctypes.c_uint64(num_bytes),
            ctypes.byref(fd),
        )
        return fd.value

    def last_completed(self, core: int) -> int:
        """Sequence id of the last model execution that ended on a logical core. Raises NrtError."""
        sequence = ctypes.c_uint64()
        self._call(
            "nrta_get_sequence",
            ctypes.c_uint32(core),
            ctypes.c_int(COMPUTE_UNIT),
            ctypes.c_int(0),
            ctypes.byref(sequence),
        )
        return sequence.value

    def is_completed(self, sequence: int) -> bool | None:
        """Whether an execution has ended; None if no such execution was submitted.

        Raises NrtError for anything else.
        """
        ended = ctypes.c_bool()
        try:
            self._call("nrta_is_completed", ctypes.c_uint64(sequence), ctypes.byref(ended))
        except NrtError as e:
            if e.status == NrtStatus.INVALID:
                return None
            raise
        return ended.value

    # ------------------------------------------------------------ underneath

    def has(self, symbol: str) -> bool:
        return hasattr(self._library, symbol)

    def _call(self, symbol: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, symbol)
        except AttributeError:
            since = _SINCE.get(symbol)
            needs = f"Neuron runtime {since} or newer" if since else "a complete Neuron runtime"
            raise NrtError(
                f"{self.path} has no {symbol}: it needs {needs}; upgrade aws-neuronx-runtime-lib"
            ) from None
        function.restype = ctypes.c_int
        status = int(function(*arguments))
        if status != NrtStatus.SUCCESS:
            raise NrtError(f"{symbol} answered {status_words(status)}", status)


def status_words(status: int) -> str:
    """Such as ``"NRT_INVALID (2): an argument means nothing to the runtime"``."""
    try:
        known = NrtStatus(status)
    except ValueError:
        return f"NRT_STATUS {status}, which this release does not know"
    meaning = _MEANING.get(known)
    return f"NRT_{known.name} ({status})" + (f": {meaning}" if meaning else "")


def load_globally(maps: Path = Path("/proc/self/maps"), also: Sequence[str] = ()) -> Nrt:
    """Open libnrt so that libraries loaded later find it by its soname. Raises NrtError.

    A copy that is mapped already is adopted: a second one would be a second runtime. Then the
    loader's path, then the place where the Neuron packages install it, then `also`.
    RTLD_GLOBAL, because libfabric and NIXL look the functions up on their own, once, and give up
    device memory for the life of the process if they do not find them.
    """
    tried: list[str] = []
    for path in [*mapped_copies(maps), SONAME, INSTALLED, *also]:
        try:
            library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOW)
        except OSError as e:
            tried.append(f"{path}: {e}")
            continue
        return Nrt(library, path)
    raise NrtError(
        f"the Neuron runtime library {SONAME} cannot be loaded ({'; '.join(tried)}): install "
        "aws-neuronx-runtime-lib and put /opt/aws/neuron/lib into LD_LIBRARY_PATH before the "
        "process starts"
    )


def mapped_copies(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Paths of the libnrt files mapped into this process, each once."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    paths = [line.split(maxsplit=5)[5] for line in lines if "/libnrt.so" in line]
    return list(dict.fromkeys(path.removesuffix(" (deleted)") for path in paths))
