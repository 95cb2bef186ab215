"""Evidence that bytes took a rail: growth of the NIC's own counters.

`rdma_write_bytes` grows on the sender, `rdma_write_recv_bytes` on the receiver. NIXL's log and its
telemetry prove nothing: they count what was asked for, not what carried it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from .errors import RailsError
from .select import Selection

COUNTERS = (
    "rdma_write_bytes",
    "rdma_write_recv_bytes",
    "rdma_read_bytes",
    "send_bytes",
    "recv_bytes",
    "tx_bytes",
    "rx_bytes",
    "rx_drops",
    "rdma_write_wr_err",
    "retrans_bytes",
    "retrans_timeout_events",
    "unresponsive_remote_events",
    "impaired_remote_conn_events",
)
ALARM_COUNTERS = (
    "rx_drops",
    "rdma_write_wr_err",
    "retrans_timeout_events",
    "unresponsive_remote_events",
    "impaired_remote_conn_events",
)
NOISE_BYTES = 1 << 20

Snapshot = dict[str, dict[str, int]]
"""NIC name to counter to value."""


class NicDelta(msgspec.Struct):
    """Growth of one NIC's counters over the interval. Counters that the driver lacks are absent."""

    name: str
    pci_address: str
    expected: bool
    """Whether it is a rail of the device in question (or of any device)."""
    growth: dict[str, int]


class WatchResult(msgspec.Struct):
    """One interval. `findings` are sentences; a bad one makes the command end with 1."""

    seconds: float
    nics: list[NicDelta]
    findings: list[str]
    good: bool


def read_counters(root: Path, names: list[str]) -> Snapshot:
    """All known counters of the NICs. RailsError if no NIC has any."""
    found: Snapshot = {}
    for name in names:
        directory = root / "sys/class/infiniband" / name / "ports/1/hw_counters"
        values = {}
        for counter in COUNTERS:
            try:
                values[counter] = int((directory / counter).read_text())
            except (OSError, ValueError):
                continue
        if values:
            found[name] = values
    if not found:
        raise RailsError(
            f"no NIC below {root / 'sys/class/infiniband'} has hw_counters; "
            "this needs a host with EFA (or another RDMA NIC) and /sys mounted"
        )
    return found


def watch(
    selection: Selection,
    *,
    root: Path = Path("/"),
    seconds: float = 5.0,
    device: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> WatchResult:
    """Read, wait, read again, and say which NICs carried what."""
    names = [nic.name for nic in selection.box.nics]
    before = read_counters(root, names)
    sleep(seconds)
    after = read_counters(root, names)
    return explain(selection, before, after, seconds=seconds, device=device)


def explain(
    selection: Selection,
    before: Snapshot,
    after: Snapshot,
    *,
    seconds: float,
    device: int | None = None,
) -> WatchResult:
    """Turn two readings into growth and findings."""
    expected = _expected(selection, device)
    deltas = []
    for nic in selection.box.nics:
        if nic.name in before and nic.name in after:
            growth = {
                counter: max(0, value - before[nic.name].get(counter, value))
                for counter, value in after[nic.name].items()
            }
            is_expected = nic.pci_address in expected
            deltas.append(NicDelta(nic.name, nic.pci_address, is_expected, growth))
    bad, notes = _findings(deltas, device)
    return WatchResult(seconds, deltas, bad + notes, good=not bad)


def _expected(selection: Selection, device: int | None) -> frozenset[str]:
    choices = selection.choices
    if device is not None:
        one = selection.of_process_device(device)
        choices = [one] if one is not None else []
    return frozenset(address for choice in choices for address in choice.acceptable())


def _findings(deltas: list[NicDelta], device: int | None) -> tuple[list[str], list[str]]:
    bad: list[str] = []
    notes: list[str] = []
    wrote = _total(deltas, "rdma_write_bytes")
    received = _total(deltas, "rdma_write_recv_bytes")
    sent = _total(deltas, "send_bytes")
    has_writes = any("rdma_write_bytes" in delta.growth for delta in deltas)
    if not has_writes:
        notes.append("this EFA driver has no rdma_write counters: nothing can be proved with it")
    elif wrote < NOISE_BYTES and sent > NOISE_BYTES and sent > wrote:
        bad.append(
            f"{sent / 1e6:.1f} MB left as sends and almost nothing as RDMA writes: libfabric "
            "emulates WRITE; set FI_EFA_USE_UNSOLICITED_WRITE_RECV=0 on both ends (R26)"
        )
    elif wrote < NOISE_BYTES and received < NOISE_BYTES:
        notes.append("no KV moved in this time: start a prompt of several MB and watch again")
    for delta in deltas:
        moved = max(
            delta.growth.get("rdma_write_bytes", 0), delta.growth.get("rdma_write_recv_bytes", 0)
        )
        if device is not None and not delta.expected and moved > NOISE_BYTES:
            notes.append(
                f"{delta.name} carried {moved / 1e6:.1f} MB and is no rail of device {device}; "
                "another device's worker, or a wrong rail"
            )
        for counter in ALARM_COUNTERS:
            if delta.growth.get(counter, 0) > 0:
                bad.append(f"{delta.name}: {counter} grew by {delta.growth[counter]} (R51)")
    if device is not None and max(wrote, received) >= NOISE_BYTES:
        idle = [delta.name for delta in deltas if delta.expected and _moved(delta) < NOISE_BYTES]
        if idle:
            bad.append(f"rails of device {device} that carried nothing: {', '.join(idle)}")
    return bad, notes


def _moved(delta: NicDelta) -> int:
    growth = delta.growth
    return max(growth.get("rdma_write_bytes", 0), growth.get("rdma_write_recv_bytes", 0))


def _total(deltas: list[NicDelta], counter: str) -> int:
    return sum(delta.growth.get(counter, 0) for delta in deltas)
