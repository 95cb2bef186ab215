"""Rails read from NIXL's metadata, built here as NIXL lays it out."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_push.devices import near
from neuron_push.devices.base import DeviceError
from neuron_push.devices.host import HostDevice
from neuron_push.devices.start import confirm_device
from neuron_push.rails import api
from neuron_push.rails.errors import RailsError
from neuron_push.rails.metadata import MAGIC, NO_KEY, parse_metadata
from neuron_push.rails.model import Box
from neuron_push.rails.select import select

from .conftest import put, write_sysfs


def record(tag: str, payload: bytes) -> bytes:
    return tag.encode() + struct.pack("<Q", len(payload)) + payload + b"|"


def gid_of(rail: int) -> bytes:
    return b"\xfe\x80" + bytes(13) + bytes([rail])


def gid_text(rail: int) -> str:
    return "fe80:0000:0000:0000:0000:0000:0000:" + f"{rail:04x}"


def buffer(address: int, device: int, rails: list[int], num_rails: int) -> bytes:
    keys = b"".join(
        record(f"key_{rail}", struct.pack("<Q", 7 if rail in rails else NO_KEY))
        for rail in range(num_rails)
    )
    head = struct.pack("<QQQ", address, 1 << 20, device)
    return head + MAGIC + keys + record("addr", struct.pack("<Q", address))


def metadata(buffers: list[bytes], num_rails: int, *, memory: int = 1, efa: bool = True) -> bytes:
    connection = MAGIC + record("num_rails", str(num_rails).encode())
    for rail in range(num_rails):
        address = gid_of(rail) + bytes(40) if efa else b"\x02\x00" + bytes(54)
        connection += record(f"dest_data_ep_{rail}", address)
    blob = MAGIC + record("Agent", b"A") + record("Conns", struct.pack("<Q", 1))
    blob += record("t", b"LIBFABRIC") + record("c", connection) + record("", b"MemSection")
    blob += record("nixlSecElms", struct.pack("<Q", 1)) + record("bknd", b"LIBFABRIC")
    blob += record("nixlDList", b"nixlSDList") + record("t", struct.pack("<I", memory))
    blob += record("n", struct.pack("<Q", len(buffers)))
    return blob + b"".join(record("", one) for one in buffers)


GIDS = {
    gid_text(rail): nic
    for rail, nic in enumerate(
        [
            f"rdmap{bus}s0"
            for bus in (85, 86, 87, 88, 110, 111, 112, 113, 135, 136, 137, 138, 160, 161, 162, 163)
        ]
    )
}


def test_rails_of_every_buffer() -> None:
    blob = metadata([buffer(4096, 0, [0, 1], 16), buffer(8192, 1, [2], 16)], 16)
    found = parse_metadata(blob)
    assert (found.agent, found.num_rails) == ("A", 16)
    assert found.gids[3] == gid_text(3)
    assert [(one.memory, one.device, one.rails) for one in found.buffers] == [
        ("device", 0, [0, 1]),
        ("device", 1, [2]),
    ]
    assert found.buffers[0].length_bytes == 1 << 20


def test_compared_with_the_choice(p5en: Box) -> None:
    selection = select(p5en)
    blob = metadata(
        [
            buffer(1 << 12, 0, [0, 1], 16),
            buffer(2 << 12, 1, [2], 16),
            buffer(3 << 12, 2, [0, 1], 16),
            buffer(4 << 12, 3, list(range(16)), 16),
        ],
        16,
    )
    found = api.compare_metadata(blob, selection, nic_by_gid=GIDS)
    assert [check.verdict for check in found] == ["right", "subset", "wrong", "all_rails"]
    by_address = api.compare_metadata(
        blob, selection, nic_by_gid=GIDS, device_of_buffer={3 << 12: "0000:59:00.0"}
    )
    assert by_address[2].verdict == "right"


def test_tcp_and_unknown_gids(p5en: Box) -> None:
    selection = select(p5en)
    blob = metadata([buffer(1, 0, [0], 1)], 1, memory=0, efa=False)
    assert [check.verdict for check in api.compare_metadata(blob, selection, nic_by_gid={})] == [
        "tcp"
    ]
    unknown = metadata([buffer(1, 0, [0, 1], 16)], 16)
    (check,) = api.compare_metadata(unknown, selection, nic_by_gid={})
    assert check.verdict == "unknown"  # two rails, as chosen, but which ones is not told


def test_host_memory(p5en: Box) -> None:
    blob = metadata([buffer(1, 0, [0, 1, 4, 5], 16)], 16, memory=0)
    (check,) = api.compare_metadata(blob, select(p5en), nic_by_gid=GIDS)
    assert check.verdict == "right"


@pytest.mark.parametrize("blob", [b"", b"nixl", MAGIC + b"Agent", MAGIC + b"\xff" * 100])
def test_a_strange_layout_is_unknown_not_an_error(blob: bytes, p5en: Box) -> None:
    if blob == MAGIC + b"Agent" or blob.endswith(b"\xff"):
        with pytest.raises(RailsError, match="unknown way"):
            parse_metadata(blob)
    (check,) = api.compare_metadata(blob, select(p5en), nic_by_gid={})
    assert check.verdict == "unknown"


@given(st.binary(max_size=300), st.integers(0, 400))
def test_damaged_metadata_never_raises_anything_else(noise: bytes, at: int) -> None:
    blob = metadata([buffer(4096, 0, [0, 1], 4)], 4)
    for damaged in (blob[:at], blob[:at] + noise + blob[at:], MAGIC + noise):
        with contextlib.suppress(RailsError):
            parse_metadata(damaged)


# rail_policy


def test_rail_policy_on_what_the_metadata_tells(
    p5en: Box, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The one judgement that the connector makes at start, from real metadata to its sentence."""
    selection = select(p5en)
    monkeypatch.setattr(near, "select", lambda: selection)
    monkeypatch.setattr(api, "nics_by_gid", lambda: GIDS)

    class OnGpu(HostDevice):
        def confirm(self, memory_types: Any, metadata: bytes) -> Any:
            return (near.rails_taken(metadata),)

    def agent(rails: list[int]) -> Any:
        blob = metadata([buffer(1, 0, rails, 16)], 16)
        return SimpleNamespace(memory_types=lambda: ["VRAM"], metadata=lambda: blob)

    confirm_device(OnGpu(), agent([0, 1]), "strict")
    assert not caplog.text
    everything = agent(list(range(16)))
    confirm_device(OnGpu(), everything, "off")
    assert not caplog.text
    confirm_device(OnGpu(), everything, "warn")
    assert "all 16 NICs" in caplog.text
    with pytest.raises(DeviceError, match=r"strict.*all 16 NICs.*neuron-push doctor") as caught:
        confirm_device(OnGpu(), everything, "strict")
    assert "\n" not in str(caught.value)


def test_choice_for_any_spelling(p5en: Box) -> None:
    selection = select(p5en)
    by_number = api.choice_for(selection, 1)
    assert api.choice_for(selection, "0:5A:00.0") is by_number
    assert api.choice_for(selection, None) is None
    with pytest.raises(RailsError, match="not among the accelerators"):
        api.choice_for(selection, 9)


def test_environment_for_a_worker(trn2: Box) -> None:
    selection = select(trn2)
    found = api.environment_for(0, selection=selection, environ={})
    assert found["FI_EFA_IFACE"] == "rdmap201s0"
    assert "FI_EFA_IFACE" not in api.environment_for(
        0, selection=selection, environ={"FI_EFA_IFACE": "x"}
    )


def test_one_line_at_start(trn2: Box) -> None:
    selection = select(trn2)
    text = api.start_line(3, api.choice_for(selection, 3), selection)
    assert "rank=3" in text
    assert "rails=rdmap202s0" in text
    assert "verdict=good" in text
    assert "host memory" in api.start_line(0, None, selection)


def test_looking_at_a_machine_with_the_runtimes_answer(trn2: Box, tmp_path: Path) -> None:
    write_sysfs(trn2, tmp_path)
    selection = api.select_here(
        {"FI_EFA_IFACE": "rdmap201s0"}, tmp_path, attached_nics={"0000:cc:00.0": "0:CA:00.0"}
    )
    choice = api.choice_for(selection, 0)
    assert choice is not None
    assert [rail.pci_address for rail in choice.rails] == ["0000:ca:00.0"]
    assert choice.source == "runtime"
    assert choice.verdict == "differs"  # FI_EFA_IFACE hides the attached NIC
    put(tmp_path / "sys/class/infiniband/rdmap201s0/ports/1/gids/0", gid_text(1).upper())
    assert api.nics_by_gid(tmp_path) == {gid_text(1): "rdmap201s0"}
    assert api.nics_by_gid(tmp_path / "absent") == {}
