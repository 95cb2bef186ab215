"""Checks of the choice: what NIXL will do with the NICs that are there."""

from __future__ import annotations

from collections.abc import Iterator

from . import bdf
from .doctor_base import Check, Finding, Situation, some
from .nixl_rule import visible_efa
from .predict import BUFFER_BYTES_PER_RAIL
from .select import Choice

ALL_NICS = "give the container every EFA of the host (NIXL deals them by the whole PCI tree)"


def devices(situation: Situation) -> Iterator[Finding]:
    choices = situation.selection.choices
    if not choices:
        yield Finding(
            "D13",
            "info",
            "no GPU and no Neuron device is here",
            "KV lives in host memory; its rails are predicted below `rails show`",
            "nothing",
        )
    elif all(choice.process_index < 0 for choice in choices):
        yield Finding(
            "D13",
            "fail",
            "no accelerator of this host is visible to this process",
            "a worker could register no device memory",
            "check CUDA_VISIBLE_DEVICES, NEURON_RT_VISIBLE_CORES and the container's devices",
        )
    for note in situation.selection.notes:
        yield Finding(
            "D14",
            "warn",
            note,
            "device numbers may not mean what they seem to",
            "correct the variable",
        )


def verdicts(situation: Situation) -> Iterator[Finding]:
    if not visible_efa(situation.selection.box):
        return  # told by the checks of the NICs already
    grouped: dict[tuple[str, str, str], list[Choice]] = {}
    for choice in situation.selection.choices:
        if not choice.is_good:
            key = (choice.verdict, choice.words, choice.nixl_reason)
            grouped.setdefault(key, []).append(choice)
    for (verdict, words, reason), choices in grouped.items():
        who = some([bdf.short(choice.pci_address) for choice in choices])
        yield _verdict_finding(verdict, words, reason, who, choices[0].kind)


def _verdict_finding(verdict: str, words: str, reason: str, who: str, kind: str) -> Finding:
    if verdict == "all_rails" and kind == "neuron":
        return Finding(
            "R40",
            "fail",
            f"{who}: {words} ({reason})",
            "a Neuron buffer belongs on exactly one NIC",
            "Neuron SDK 2.29 or newer; FI_EFA_IFACE of the worker must name its own NIC",
        )
    if verdict == "all_rails":
        return Finding(
            "R14",
            "fail",
            f"{who}: {words} ({reason})",
            "most of those NICs are far away; tens of times slower in the worst case",
            ALL_NICS,
        )
    if verdict == "differs":
        return Finding(
            "R13",
            "fail",
            f"{who}: {words} ({reason})",
            "GPUs that the container does not see take their share of its NICs",
            f"{ALL_NICS}, or hide the others: neuron-push rails env --device N --write-hwloc FILE",
        )
    if verdict == "no_rail":
        return Finding(
            "R14", "fail", f"{who}: {words}", "there is no near NIC for this device", ALL_NICS
        )
    return Finding(
        "R16",
        "fail",
        f"{who}: {words}",
        "the device has less bandwidth than its type provides",
        "look for the missing NIC in the launch template",
    )


def topology_data(situation: Situation) -> Iterator[Finding]:
    selection = situation.selection
    against = [choice for choice in selection.choices if "against the table" in choice.reason]
    for choice in against:
        yield Finding(
            "R44",
            "warn",
            f"{bdf.short(choice.pci_address)}: {choice.reason}",
            "a virtual bridge, or a NIC on another switch than on every other host of the type",
            "compare with another host of the type: neuron-push rails capture on both",
        )
    nics = visible_efa(selection.box)
    without = [nic.name for nic in nics if situation.topology.numa_node(nic.pci_address) < 0]
    if without and selection.box.num_numa_nodes > 1:
        yield Finding(
            "R43",
            "info",
            f"the NUMA node of {some(without)} is not told",
            "host memory cannot be kept near its NIC",
            "nothing: the firmware does not tell it",
        )


def undecided(situation: Situation) -> Iterator[Finding]:
    tied = [choice for choice in situation.selection.choices if choice.verdict == "tie"]
    if tied:
        who = some([bdf.short(choice.pci_address) for choice in tied])
        yield Finding(
            "D15",
            "info",
            f"which NIC is attached to {who} is not published",
            "several are equally near; the Neuron runtime knows, and NIXL asks it",
            "neuron-push rails verify --device N asks it as well",
        )


def host_memory(situation: Situation) -> Iterator[Finding]:
    selection = situation.selection
    memory = selection.host_memory
    if memory.policy == "all" and memory.rails_per_buffer > 1:
        uses_host = not selection.choices
        yield Finding(
            "R45",
            "warn" if uses_host else "info",
            f"host memory goes over all {memory.rails_per_buffer} NICs: {memory.reason}",
            "half of them are on the other socket",
            "matters only if KV lives in host memory; then limit the NICs with FI_EFA_IFACE",
        )


def control_rail(situation: Situation) -> Iterator[Finding]:
    box = situation.selection.box
    nics = visible_efa(box)
    first = min(nics, key=lambda nic: bdf.numbers(nic.pci_address), default=None)
    if first is not None and first.state not in (None, "ACTIVE"):
        yield Finding(
            "R46",
            "fail",
            f"{first.name}, the first NIC, is {first.state}",
            "NIXL's handshake and every notification go over the first NIC alone",
            "leave it out with FI_EFA_IFACE, naming the others",
        )


def buffers(situation: Situation) -> Iterator[Finding]:
    box = situation.selection.box
    nics = visible_efa(box)
    seen = [choice for choice in situation.selection.choices if choice.process_index >= 0]
    processes = max(situation.tensor_parallel, len(seen), 1)
    pinned = bool(seen) and seen[0].kind == "neuron"
    rails = 1 if pinned else len(nics)
    total = rails * processes * BUFFER_BYTES_PER_RAIL
    limit = box.host.memlock_bytes
    per_process = rails * BUFFER_BYTES_PER_RAIL
    if not nics:
        return
    if total >= 2 << 30:
        yield Finding(
            "R47",
            "info",
            f"{processes} workers with {rails} rails register {total / 2**30:.0f} GiB of buffers",
            "each rail costs 32 MiB per process, and time at start",
            "fewer rails per process",
        )
    if limit is not None and 0 <= limit < per_process:
        yield Finding(
            "R47",
            "fail",
            f"a memlock limit of {limit / 2**20:.0f} MiB is below the "
            f"{per_process / 2**20:.0f} MiB that NIXL's own buffers need in each process",
            "registration fails with -12",
            "ulimit -l unlimited (docker: --ulimit memlock=-1)",
        )


def queue_pairs(situation: Situation) -> Iterator[Finding]:
    processes = max(situation.tensor_parallel, 1)
    if visible_efa(situation.selection.box) and processes > 128:
        yield Finding(
            "R33",
            "warn",
            f"{processes} processes may open the same NICs",
            "one EFA has 256 queue pairs, and every NIXL agent takes at least one on each rail",
            "pin each process to its rails with FI_EFA_IFACE",
        )


CHECKS: tuple[Check, ...] = (
    devices,
    verdicts,
    topology_data,
    undecided,
    host_memory,
    control_rail,
    buffers,
    queue_pairs,
)
