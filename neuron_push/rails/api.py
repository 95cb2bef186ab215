"""Plain functions for the connector: actuation before the agent exists, and checks at start.

Described in the package's docstring. Nothing here starts NIXL or imports it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from . import bdf
from .card import RailCard, host_token, make_card
from .compare import RailCheck, compare_agent
from .compare import compare_log as _compare_log
from .environ_filter import relevant_environment
from .environment import Actuation, actuate
from .errors import RailsError
from .host_libraries import loaded_libfabric, nixl_versions
from .log_parser import parse_log
from .machine import look
from .metadata import parse_metadata
from .model import Box
from .select import Choice, Selection, select

logger = logging.getLogger(__name__)

Device = int | str | None
"""A process-local number, a PCI address, or None for host memory."""


def select_here(
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    *,
    attached_nics: Mapping[str, str] | None = None,
) -> Selection:
    """Look at this machine and choose.

    `environ` defaults to this process's environment. `attached_nics` maps the PCI address of a
    Neuron device to that of its NIC, where nrt_get_attached_efa_bdf was asked.
    """
    box = look(root)
    for one in box.accelerators:
        if attached_nics and one.pci_address in attached_nics:
            one.attached_nic = bdf.normalise(attached_nics[one.pci_address])
    if environ is not None:
        box.env = relevant_environment(environ)
    return select(box)


def choice_for(selection: Selection, device: Device) -> Choice | None:
    """The choice for a device, None for host memory. RailsError if the box has no such device."""
    if device is None:
        return None
    if isinstance(device, int):
        choice = selection.of_process_device(device)
    else:
        choice = selection.of_address(bdf.normalise(device))
    if choice is None:
        raise RailsError(f"device {device} is not among the accelerators that this process sees")
    return choice


def actuation_for(
    device: Device,
    *,
    selection: Selection | None = None,
    environ: Mapping[str, str] | None = None,
    same_host: bool = False,
) -> Actuation:
    """Settings with reasons, the backend and its parameters, for one worker."""
    current = os.environ if environ is None else environ
    selection = selection if selection is not None else select_here(current)
    return actuate(selection, choice_for(selection, device), current, same_host=same_host)


def environment_for(
    device: Device,
    *,
    selection: Selection | None = None,
    environ: Mapping[str, str] | None = None,
    same_host: bool = False,
) -> dict[str, str]:
    """Variables to set in this process before NIXL is imported. Never one that is set already."""
    return actuation_for(
        device, selection=selection, environ=environ, same_host=same_host
    ).as_dict()


def compare_log(lines: Iterable[str], *, selection: Selection | None = None) -> list[RailCheck]:
    """Check NIXL's log lines of this or another process against the choice."""
    return _compare_log(selection if selection is not None else select_here(), parse_log(lines))


def compare_metadata(
    blob: bytes,
    selection: Selection,
    *,
    nic_by_gid: Mapping[str, str] | None = None,
    device_of_buffer: Mapping[int, str] | None = None,
) -> list[RailCheck]:
    """Check every registered buffer in an agent's metadata against the choice.

    `nic_by_gid` defaults to this machine's NICs; give the peer's for a peer's metadata. A layout
    that is not understood gives one check with the verdict unknown.
    """
    try:
        agent = parse_metadata(blob)
    except RailsError as error:
        return [RailCheck("metadata", None, [], [], 0, "unknown", str(error))]
    gids = nic_by_gid if nic_by_gid is not None else nics_by_gid()
    return compare_agent(selection, agent, gids, device_of_buffer)


def nics_by_gid(root: Path = Path("/")) -> dict[str, str]:
    """GID to NIC name, from sysfs. GIDs are network addresses: they never go into a box."""
    found = {}
    directory = root / "sys/class/infiniband"
    try:
        names = os.listdir(directory)
    except OSError:
        return {}
    for name in names:
        try:
            gid = (directory / name / "ports/1/gids/0").read_text().strip()
        except OSError:
            continue
        found[gid.lower()] = name
    return found


def start_line(rank: int, choice: Choice | None, selection: Selection) -> str:
    """One line for a worker's log: rank, device, rails, what NIXL takes, source, verdict."""
    if choice is None:
        memory = selection.host_memory
        return (
            f"rails rank={rank} host memory: {memory.rails_per_buffer} per buffer ({memory.reason})"
        )
    rails = ",".join(rail.name for rail in choice.rails) or "none"
    nixl = ",".join(rail.name for rail in choice.nixl_rails) or "not known"
    return (
        f"rails rank={rank} device={choice.pci_address} numa={choice.numa_node} rails={rails} "
        f"nixl={nixl} source={choice.source} verdict={choice.verdict}"
    )


def card_for(selection: Selection, device: Device, *, backend: str | None = None) -> RailCard:
    """What the other end should know of this process; compare with `rails.compare_cards`.

    The libfabric named is the one that this process has loaded, if any.
    """
    host = selection.box.host
    host.nixl_versions = host.nixl_versions or nixl_versions()
    host.libfabric_version = host.libfabric_version or loaded_libfabric()
    choice = choice_for(selection, device)
    return make_card(selection, choice, backend=backend, same_host_token=host_token())


__all__ = [
    "Box",
    "actuation_for",
    "card_for",
    "choice_for",
    "compare_log",
    "compare_metadata",
    "environment_for",
    "nics_by_gid",
    "select_here",
    "start_line",
]
