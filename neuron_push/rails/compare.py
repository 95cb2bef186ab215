"""What was chosen against what happened: from a log, from metadata, from counters.

Verdicts: right, subset (some of the expected rails), wrong (other NICs), all_rails (the fallback to
every NIC), tcp, unknown. Only right and unknown let a strict worker start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from . import bdf
from .log_parser import AgentLog, LogReport, Registration
from .metadata import AgentRails
from .select import Choice, Selection

BAD_VERDICTS = frozenset({"subset", "wrong", "all_rails", "tcp"})
TCP_PROVIDERS = frozenset({"tcp", "sockets"})


class RailCheck(msgspec.Struct):
    """One registration of memory: expected and actual NIC names, and a sentence."""

    what: str
    pci_address: str | None
    expected: list[str]
    actual: list[str]
    num_actual: int
    verdict: str
    words: str

    @property
    def is_bad(self) -> bool:
        return self.verdict in BAD_VERDICTS


def judge(
    what: str,
    choice: Choice | None,
    names: Mapping[str, str],
    *,
    actual: Sequence[str] | None,
    num_actual: int,
    num_rails: int | None,
) -> RailCheck:
    """Compare one buffer's NICs with its device's choice.

    `names` maps PCI addresses to NIC names; `actual` is None where only the number is known;
    `num_rails` is how many rails the agent has, None if not known.
    """
    acceptable = (
        {names.get(address, address) for address in choice.acceptable()} if choice else set()
    )
    wanted = [rail.name for rail in choice.rails] if choice else []
    verdict, words = _judge(
        choice, acceptable, wanted, actual=actual, num_actual=num_actual, num_rails=num_rails
    )
    return RailCheck(
        what=what,
        pci_address=choice.pci_address if choice is not None else None,
        expected=sorted(acceptable) if choice is not None and choice.candidates else wanted,
        actual=list(actual or ()),
        num_actual=num_actual,
        verdict=verdict,
        words=words,
    )


def _judge(
    choice: Choice | None,
    acceptable: set[str],
    wanted: list[str],
    *,
    actual: Sequence[str] | None,
    num_actual: int,
    num_rails: int | None,
) -> tuple[str, str]:
    if choice is None:
        return "unknown", "it is not told which device the memory belongs to"
    if not wanted:
        return "unknown", f"no rail is known for this device: {choice.reason}"
    count = len(wanted)
    if actual is not None:
        found = set(actual)
        if choice.candidates:
            if len(found) == 1 and found <= acceptable:
                return "right", "one of the equally near NICs"
        elif found == set(wanted):
            return "right", "exactly the chosen rails"
        elif found < set(wanted):
            return "subset", f"{len(found)} of {count} rails: some bandwidth is lost"
    if num_rails is not None and num_actual == num_rails and num_actual > count:
        return "all_rails", f"NIXL uses all {num_actual} NICs where {count} are near"
    if actual is not None:
        far = sorted(set(actual) - acceptable)
        return "wrong", f"NIXL uses {', '.join(far[:4])}, not {', '.join(wanted[:4])}"
    if num_actual == count:
        return (
            "unknown",
            f"the number of rails, {count}, is right; their names need NIXL_LOG_LEVEL=DEBUG",
        )
    if num_actual < count:
        return "subset", f"{num_actual} of {count} rails: some bandwidth is lost"
    return "wrong", f"{num_actual} rails where {count} were chosen"


def compare_log(selection: Selection, report: LogReport) -> list[RailCheck]:
    """Every registration and every mapped GPU of a log against the box's choice."""
    names = {nic.pci_address: nic.name for nic in selection.box.nics}
    checks = []
    for number, agent in enumerate(report.agents):
        who = f"agent {number} (thread {agent.thread})"
        for address, nics in agent.accelerator_map.items():
            choice = selection.of_address(address)
            if choice is not None and choice.process_index >= 0:
                what = f"{who}, map of {address}"
                checks.append(
                    judge(
                        what,
                        choice,
                        names,
                        actual=nics,
                        num_actual=len(nics),
                        num_rails=agent.num_rails,
                    )
                )
        for registration in agent.registrations:
            checks.append(_of_registration(selection, names, who, agent, registration))
    return checks


def _of_registration(
    selection: Selection,
    names: Mapping[str, str],
    who: str,
    agent: AgentLog,
    registration: Registration,
) -> RailCheck:
    what = f"{who}, {registration.memory} memory of device {registration.device}"
    actual = registration.nics or None
    if agent.provider in TCP_PROVIDERS:
        nics = list(actual or ())
        words = "NIXL runs on TCP: no EFA carries this memory"
        return RailCheck(what, None, [], nics, registration.num_rails, "tcp", words)
    if registration.memory == "host":
        return _of_host_memory(selection, names, what, actual, registration.num_rails)
    num_rails = agent.num_rails or (len(agent.rails) or None)
    choice = _choice_of(selection, registration)
    return judge(
        what,
        choice,
        names,
        actual=actual,
        num_actual=registration.num_rails,
        num_rails=num_rails,
    )


def _choice_of(selection: Selection, registration: Registration) -> Choice | None:
    """The device of a registration.

    For a GPU NIXL prints the GPU's address. For a Neuron device it prints the attached NIC's, and
    the device number is the worker's own, so the NIC tells the device.
    """
    by_number = selection.of_process_device(registration.device)
    address = registration.pci_address
    if address is None:
        return by_number
    by_address = selection.of_address(address)
    if by_address is not None:
        return by_address
    if by_number is not None and address in by_number.acceptable():
        return by_number
    owners = (choice for choice in selection.choices if address in choice.acceptable())
    return next(owners, by_number)


def _of_host_memory(
    selection: Selection,
    names: Mapping[str, str],
    what: str,
    actual: Sequence[str] | None,
    num_actual: int,
) -> RailCheck:
    memory = selection.host_memory
    expected = {names.get(nic, nic) for nics in memory.nics_by_node.values() for nic in nics}
    nics = list(actual or ())
    if num_actual != memory.rails_per_buffer:
        words = f"{num_actual} rails where {memory.rails_per_buffer} were predicted"
        verdict = "subset" if num_actual < memory.rails_per_buffer else "wrong"
    elif actual is None:
        verdict, words = "unknown", "the number of rails is as predicted; their names are not told"
    elif set(nics) <= expected:
        verdict, words = "right", "as predicted"
    else:
        verdict, words = "wrong", "NICs that host memory should not use"
    shown = sorted(expected) if len(expected) <= 8 else []
    return RailCheck(what, None, shown, nics, num_actual, verdict, words)


def compare_agent(
    selection: Selection,
    agent: AgentRails,
    nic_by_gid: Mapping[str, str],
    device_of_buffer: Mapping[int, str] | None = None,
) -> list[RailCheck]:
    """Every buffer of an agent's metadata.

    `nic_by_gid` maps GIDs (as sysfs writes them) to NIC names; `device_of_buffer` maps a buffer's
    address to its accelerator's PCI address, where the device number alone does not tell.
    """
    names = {nic.pci_address: nic.name for nic in selection.box.nics}
    checks = []
    for buffer in agent.buffers:
        what = f"{buffer.memory} memory of device {buffer.device} at 0x{buffer.address:x}"
        if agent.num_rails and not any(agent.gids):
            words = "NIXL runs on TCP: no EFA carries this memory"
            checks.append(RailCheck(what, None, [], [], len(buffer.rails), "tcp", words))
            continue
        actual = _nics_of(agent, buffer.rails, nic_by_gid)
        if buffer.memory == "host":
            checks.append(_of_host_memory(selection, names, what, actual, len(buffer.rails)))
            continue
        address = (device_of_buffer or {}).get(buffer.address)
        choice = (
            selection.of_address(bdf.normalise(address))
            if address is not None
            else selection.of_process_device(buffer.device)
        )
        checks.append(
            judge(
                what,
                choice,
                names,
                actual=actual,
                num_actual=len(buffer.rails),
                num_rails=agent.num_rails,
            )
        )
    return checks


def _nics_of(
    agent: AgentRails, rails: Sequence[int], nic_by_gid: Mapping[str, str]
) -> list[str] | None:
    found = []
    for rail in rails:
        gid = agent.gids[rail] if rail < len(agent.gids) else None
        name = nic_by_gid.get(gid) if gid is not None else None
        if name is None:
            return None
        found.append(name)
    return found
