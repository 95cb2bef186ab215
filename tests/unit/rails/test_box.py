"""Box files: what is written is read back, and broken ones are one sentence each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neuron_push.rails import box_io, environ_filter, machine
from neuron_push.rails.errors import RailsError

from .conftest import TOPOLOGIES, load

Document = dict[str, Any]


@pytest.mark.parametrize("path", sorted(TOPOLOGIES.glob("*.json")), ids=lambda path: path.stem)
def test_fixtures_are_written_as_they_are_read(path: Path) -> None:
    assert box_io.dump_box(box_io.load_box(path)) == path.read_bytes()


def set_at(*keys: str | int) -> Callable[[Any], Callable[[Document], None]]:
    def with_value(value: Any) -> Callable[[Document], None]:
        def change(document: Document) -> None:
            place: Any = document
            for key in keys[:-1]:
                place = place[key]
            place[keys[-1]] = value

        return change

    return with_value


def repeat(kind: str) -> Callable[[Document], None]:
    return lambda document: document[kind].append(document[kind][0])


BROKEN = {
    "no schema": (lambda d: d.pop("schema_version"), "has no schema_version"),
    "future schema": (set_at("schema_version")(99), "schema_version 99 and this program reads 1"),
    "schema of words": (set_at("schema_version")("one"), "has no schema_version"),
    "unknown field": (set_at("colour")("red"), "unknown field"),
    "wrong type": (set_at("pci")(7), "Expected `array`"),
    "NUMA node 70000": (set_at("pci", 0, "numa_node")(70000), "numa_node 70000"),
    "NUMA node of words": (set_at("pci", 0, "numa_node")("left"), "Expected `int`"),
    "negative link": (set_at("pci", 0, "link_gbyte_per_s")(-1.0), "link_gbyte_per_s -1.0"),
    "huge link": (set_at("pci", 0, "link_gbyte_per_s")(1e300), "link_gbyte_per_s 1e+300"),
    "vendor too wide": (set_at("pci", 0, "vendor_id")(1 << 40), "16 bits"),
    "no address": (set_at("pci", 0, "address")("somewhere"), "no PCI address"),
    "odd spelling": (set_at("pci", 0, "address")("44:00.0"), "must be written '0000:44:00.0'"),
    "unknown parent": (set_at("pci", 0, "parent")("0000:ff:00.0"), "unknown parent"),
    "own parent": (
        lambda d: d["pci"][0].update(parent=d["pci"][0]["address"]),
        "form a loop",
    ),
    "device twice": (repeat("pci"), "listed twice"),
    "NIC twice": (repeat("nics"), "listed twice"),
    "accelerator twice": (repeat("accelerators"), "listed twice"),
    "accelerator off the bus": (
        set_at("accelerators", 0, "pci_address")("0000:fe:00.0"),
        "not among the PCI devices",
    ),
    "absurd rate": (set_at("nics", 0, "rate_gbps")(1e9), "rate_gbps 1000000000.0"),
    "NIC without address": (set_at("nics", 0, "pci_address")(""), "no PCI address"),
    "kind of no accelerator": (set_at("accelerators", 0, "kind")("abacus"), "Invalid enum value"),
    "attached to nothing": (set_at("accelerators", 0, "attached_nic")("x"), "no PCI address"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_box_is_one_sentence(name: str, tmp_path: Path) -> None:
    change, words = BROKEN[name]
    document = json.loads((TOPOLOGIES / "p5en.48xlarge.json").read_text())
    change(document)
    path = tmp_path / "box.json"
    path.write_text(json.dumps(document))
    with pytest.raises(RailsError) as caught:
        machine.read_box(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[1, 2]", "no schema_version"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"<topology>", "no well-formed XML"),
        (b'{"schema_version": NaN}', "is not JSON"),
    ],
)
def test_files_that_are_no_box(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    path.write_bytes(content)
    with pytest.raises(RailsError, match=words):
        machine.read_box(path)


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(RailsError, match="does not exist; make it with"):
        machine.read_box(tmp_path / "absent.json")
    with pytest.raises(RailsError, match="is a directory"):
        machine.read_box(tmp_path)


def test_too_many_devices() -> None:
    box = load("g5.48xlarge")
    box.pci = box.pci[:1] * (box_io.MAX_DEVICES + 1)
    with pytest.raises(RailsError, match="more than 100000 devices"):
        box_io.check_box(box, "box")


def test_too_large_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "box.json"
    path.write_bytes(b"{}" * 100)
    monkeypatch.setattr(box_io, "MAX_FILE_BYTES", 100)
    with pytest.raises(RailsError, match="larger than"):
        box_io.load_box(path)


def test_unknown_instance_type() -> None:
    with pytest.raises(RailsError, match="not in the catalog; known are g5"):
        machine.read_box(TOPOLOGIES / "p5en.48xlarge.json", "p9.huge")


def test_environment_keeps_nothing_private() -> None:
    kept = environ_filter.relevant_environment(
        {
            "FI_PROVIDER": "efa",
            "NEURON_RT_ROOT_COMM_ID": "10.1.2.3:62182",
            "NIXL_ETCD_ENDPOINTS": "http://10.0.0.1:2379",
            "UCX_NET_DEVICES": "mlx5_0:1",
            "NCCL_SOCKET_IFNAME": "eth0",
            "NIXL_PLUGIN_DIR": "/home/alice/plugins",
            "CUDA_VISIBLE_DEVICES": "GPU-01234567-89ab-cdef-0123-456789abcdef",
            "FI_TCP_IFACE": "10.1.2.3",
            "NCCL_NET": "fe80:0:0:0:48f:94ff:fe25:3613",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "HOME": "/home/alice",
        }
    )
    text = json.dumps(kept)
    for secret in ("10.1.2.3", "10.0.0.1", "alice", "01234567", "secret", "94ff"):
        assert secret not in text
    assert kept["FI_PROVIDER"] == "efa"
    assert kept["UCX_NET_DEVICES"] == "mlx5_0:1"
    assert kept["CUDA_VISIBLE_DEVICES"] == "GPU-<masked>"
    assert "HOME" not in kept
