"""A box from wherever the operator points: this machine, a captured tree, a file."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from . import bdf, box_io, instances
from .errors import RailsError
from .model import Accelerator, Box

if TYPE_CHECKING:
    from .discover_sysfs import SysfsReader

LIBNRT_NAMES = ("libnrt.so.1", "/opt/aws/neuron/lib/libnrt.so.1")
_AWS_TYPE = re.compile(r"[a-z][a-z0-9-]*\.(?:\d*x?large|metal|\d+xlarge|metal-\d+xl)")


def read_box(path: Path, instance_type: str | None = None) -> Box:
    """A box file or hwloc XML, told apart by its first character."""
    try:
        with path.open("rb") as file:
            head = file.read(256)
    except OSError:
        head = b""  # load_box says what is wrong with the path
    if head.lstrip()[:1] == b"<":
        from .discover_hwloc import box_from_hwloc

        box = box_from_hwloc(path)
        box_io.check_box(box, str(path))
    else:
        box = box_io.load_box(path)
    return _named(box, instance_type)


def look(root: Path = Path("/"), instance_type: str | None = None) -> Box:
    """This machine, or a tree captured below `root`, as far as the choice of rails needs it."""
    from .discover_sysfs import pci_and_nics
    from .environ_filter import relevant_environment

    if not root.is_dir():
        raise RailsError(f"--root {root} is no directory; expected one that holds sys/")
    box, reader = pci_and_nics(root)
    live = root == Path("/")
    if live:
        box.env = relevant_environment(os.environ)
        box.host.has_attached_efa_call = _has_attached_efa_call(box)
        _resolve_cuda_uuids(box, reader, os.environ)
    box.instance_type = _product_name(reader)
    box = _named(box, instance_type)
    if live:
        from .neuron_ls import number_devices

        failure = number_devices(box)
        if failure is not None:
            reader.gap(failure)
    _mark_visible(box, reader)
    box.gaps = tuple(reader.gaps)
    return box


def _named(box: Box, instance_type: str | None) -> Box:
    if instance_type is not None:
        instances.load(instance_type)  # a sentence if there is none of that name
        box.instance_type = instance_type
    return instances.complete(box)


def _product_name(reader: SysfsReader) -> str | None:
    """The instance type as the firmware tells it; other machines' product names are left out."""
    name = reader.text(reader.root / "sys/devices/virtual/dmi/id/product_name")
    if name and (_AWS_TYPE.fullmatch(name) or name.startswith("trn")):
        return name
    return None


def _mark_visible(box: Box, reader: SysfsReader) -> None:
    """Which accelerators this process may use, from /proc and /dev."""
    gpus = reader.names(reader.root / "proc/driver/nvidia/gpus")
    if gpus is not None:
        open_gpus = {bdf.normalise(name) for name in gpus if bdf.is_address(name)}
        for one in box.accelerators:
            if one.kind == "cuda":
                one.visible = one.pci_address in open_gpus
    neuron = [one for one in box.accelerators if one.kind == "neuron"]
    nodes = reader.names(reader.root / "dev") if neuron else None
    if nodes is not None:
        _mark_neuron(reader, neuron, nodes)


def _mark_neuron(reader: SysfsReader, neuron: list[Accelerator], nodes: list[str]) -> None:
    """A container renumbers /dev/neuron<N>; the minor number is the host's index."""
    names = [name for name in nodes if re.fullmatch(r"neuron\d+", name)]
    minors = set()
    for name in names:
        try:
            found = (reader.root / "dev" / name).stat()
        except OSError:
            continue
        is_device = stat.S_ISCHR(found.st_mode)
        minors.add(os.minor(found.st_rdev) if is_device else int(name.removeprefix("neuron")))
    if names and all(one.index >= 0 for one in neuron):
        for one in neuron:
            one.visible = one.index in minors


def _resolve_cuda_uuids(box: Box, reader: SysfsReader, environment: Mapping[str, str]) -> None:
    """Replace GPU UUIDs in CUDA_VISIBLE_DEVICES by indices, so that a box holds none."""
    from .environ_filter import relevant_environment

    text = environment.get("CUDA_VISIBLE_DEVICES", "")
    if "GPU-" not in text:
        return
    index_by_uuid = {}
    for one in box.accelerators:
        path = reader.root / "proc/driver/nvidia/gpus" / one.pci_address / "information"
        match = re.search(r"GPU UUID:\s*(\S+)", reader.text(path) or "")
        if match:
            index_by_uuid[match[1]] = str(one.index)
    tokens = [index_by_uuid.get(token.strip(), token.strip()) for token in text.split(",")]
    box.env["CUDA_VISIBLE_DEVICES"] = relevant_environment(
        {"CUDA_VISIBLE_DEVICES": ",".join(tokens)}
    )["CUDA_VISIBLE_DEVICES"]


def _has_attached_efa_call(box: Box) -> bool | None:
    """Whether libnrt can name a buffer's NIC. Loading the library claims no core."""
    if not any(one.kind == "neuron" for one in box.accelerators):
        return None
    import ctypes

    for name in LIBNRT_NAMES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return hasattr(library, "nrt_get_attached_efa_bdf")
    return None
