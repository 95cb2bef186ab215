"""The doctor's facts about a host: limits, modules, nodes, libraries, clock. Nothing is changed."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from pathlib import Path

from .discover_sysfs import SysfsReader
from .host_libraries import fill_libraries
from .model import Box

_MODULES = (
    "efa",
    "ib_uverbs",
    "nvidia",
    "nvidia_peermem",
    "efa_nv_peermem",
    "nv_peer_mem",
    "gdrdrv",
    "neuron",
)
_NODES = re.compile(r"nvidia\d+|nvidiactl|neuron\d+|gdrdrv")
_CLOCK_ERROR = 5
_TIMEX_BYTES = 512


def fill_host(box: Box, root: Path = Path("/")) -> None:
    """Fill in `box.host`. What cannot be read stays None, which means 'not known'."""
    reader = SysfsReader(root)
    host = box.host
    host.modules = _modules(reader)
    host.efa_driver_version = reader.text(root / "sys/module/efa/version")
    host.device_nodes = _device_nodes(reader)
    _fill_memory(box, reader)
    arguments = reader.text(root / "proc/cmdline")
    if arguments is not None:
        host.kernel_arguments = tuple(
            word for word in arguments.split() if "iommu" in word or word.startswith("pci=")
        )
    groups = reader.names(root / "sys/kernel/iommu_groups")
    host.iommu_groups = len(groups) if groups is not None else None
    if root == Path("/"):
        host.kernel = os.uname().release
        host.container = _container(reader)
        host.memlock_bytes = _limit(resource.RLIMIT_MEMLOCK)
        host.open_files = _limit(resource.RLIMIT_NOFILE)
        host.page_bytes = resource.getpagesize()
        host.clock_synchronised = _clock_synchronised()
        fill_libraries(host)
    box.gaps = (*box.gaps, *(gap for gap in reader.gaps if gap not in box.gaps))


def _modules(reader: SysfsReader) -> tuple[str, ...] | None:
    names = reader.names(reader.root / "sys/module")
    if names is None:
        return None
    return tuple(name for name in _MODULES if name in names)


def _device_nodes(reader: SysfsReader) -> tuple[str, ...] | None:
    names = reader.names(reader.root / "dev")
    if names is None:
        return None
    verbs = reader.names(reader.root / "dev/infiniband") or []
    return tuple(
        [name for name in names if _NODES.fullmatch(name)]
        + [f"infiniband/{name}" for name in verbs if name.startswith("uverbs")]
    )


def _fill_memory(box: Box, reader: SysfsReader) -> None:
    values = {}
    for line in (reader.text(reader.root / "proc/meminfo") or "").splitlines():
        match = re.match(r"(\w+):\s+(\d+)", line)
        if match:
            values[match[1]] = int(match[2])
    box.host.hugepages_total = values.get("HugePages_Total")
    box.host.hugepages_free = values.get("HugePages_Free")
    if "MemTotal" in values:
        box.host.memory_bytes = values["MemTotal"] * 1024


def _container(reader: SysfsReader) -> str | None:
    version = reader.text(reader.root / "proc/version") or ""
    if "gvisor" in version.lower() or "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54" in version:
        return "gvisor"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if (reader.root / ".dockerenv").exists():
        return "docker"
    if (reader.root / "run/.containerenv").exists():
        return "podman"
    return None


def _limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _clock_synchronised() -> bool | None:
    """The kernel's own word, by adjtimex without a change."""
    try:
        libc = ctypes.CDLL(None)
        state = libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    return bool(state != _CLOCK_ERROR)
