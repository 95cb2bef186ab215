"""Boxes from sysfs trees and hwloc XML."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from neuron_push.rails import bdf, box_io, discover_hwloc, machine, neuron_ls, nixl_rule
from neuron_push.rails.discover_common import link_gbyte_per_s
from neuron_push.rails.errors import RailsError
from neuron_push.rails.model import Box
from neuron_push.rails.select import select
from neuron_push.rails.topology import Topology

from .conftest import TOPOLOGIES, load, put, write_sysfs

FIXTURES = sorted(path.stem for path in TOPOLOGIES.glob("*.json"))
SHARED = Path(__file__).parents[4] / "shared" / "topologies"
needs_exports = pytest.mark.skipif(not SHARED.is_dir(), reason="no hwloc exports on this machine")


def comparable(box: Box) -> object:
    """A box without what only one of two importers can know."""
    copy = msgspec.json.decode(msgspec.json.encode(box), type=Box)
    for device in copy.pci:
        device.driver = None
        device.link_speed_gt_per_s = 0
        device.link_width = 0
        device.link_gbyte_per_s = round(device.link_gbyte_per_s, 3)
    for nic in copy.nics:
        nic.driver = nic.state = None
        nic.openable = None
        nic.rate_gbps = 0
    for one in copy.accelerators:
        one.visible = None
    bridges = sorted((one.name, one.locality) for one in copy.host_bridges)
    return copy.pci, sorted(copy.nics, key=lambda nic: nic.name), copy.accelerators, bridges


@pytest.mark.parametrize("name", FIXTURES)
def test_sysfs_tree_of_a_box_gives_the_box_back(name: str, tmp_path: Path) -> None:
    box = load(name)
    write_sysfs(box, tmp_path)
    found = machine.look(tmp_path)
    if name.startswith("trn3"):  # Neuron addresses are not published, so no index is known
        for one in (*box.accelerators,):
            one.index = -1
    assert comparable(found) == comparable(box)
    assert found.num_numa_nodes == box.num_numa_nodes
    assert found.instance_type == box.instance_type
    assert {nic.name: nic.rate_gbps for nic in found.nics} == {
        nic.name: nic.rate_gbps for nic in box.nics
    }


@needs_exports
@pytest.mark.parametrize("path", sorted(SHARED.glob("*-topo.xml")), ids=lambda path: path.stem)
def test_xml_and_fixture_agree(path: Path) -> None:
    box = machine.read_box(path)
    name = path.stem.removesuffix("-topo")
    fixture = {
        "trn2.48xl-no-efa": "trn2.48xlarge-no-efa",
    }.get(name, name + "arge")
    if fixture not in FIXTURES:
        assert select(box).box.nics
        return
    assert comparable(box) == comparable(load(fixture))
    if fixture not in ("p4d.24xlarge", "trn2.48xlarge-no-efa"):
        assert box.instance_type == load(fixture).instance_type  # told by addresses alone


@needs_exports
def test_nixl_rails_equal_the_golden_map() -> None:
    golden = json.loads((SHARED / "expected.json").read_text())
    assert len(golden) == 8
    for name, expected in golden.items():
        box = machine.read_box(SHARED / f"{name}-topo.xml")
        mapped = nixl_rule.cuda_map(box, Topology(box))
        assert {gpu: list(nics) for gpu, nics in mapped.items()} == expected["rails_by_accelerator"]
        shown = {
            choice.pci_address: [rail.pci_address for rail in choice.nixl_rails]
            for choice in select(box).choices
            if choice.pci_address in mapped
        }
        assert shown == expected["rails_by_accelerator"]


def test_infiniband_of_other_makes_and_software_devices(tmp_path: Path) -> None:
    box = load("p6-b200.48xlarge")
    write_sysfs(box, tmp_path)
    put(tmp_path / "sys/class/infiniband/rxe0/ports/1/rate", "10 Gb/sec")
    found = machine.look(tmp_path)
    drivers = {nic.driver for nic in found.nics}
    assert drivers == {"efa", "mlx5_core"}
    assert all(nic.name != "rxe0" for nic in found.nics)


def test_missing_numa_and_unknown_link(tmp_path: Path) -> None:
    write_sysfs(load("g5.48xlarge"), tmp_path)
    found = machine.look(tmp_path)
    assert {device.numa_node for device in found.pci} == {-1}
    assert all(choice.verdict == "good" for choice in select(found).choices)


def test_no_sysfs_is_a_gap(tmp_path: Path) -> None:
    box = machine.look(tmp_path)
    assert not box.pci
    assert any("is missing" in gap and "mount /sys" in gap for gap in box.gaps)


def test_root_that_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(RailsError, match="no directory"):
        machine.look(tmp_path / "absent")


def test_container_that_hides_bridges(tmp_path: Path) -> None:
    box = load("p5en.48xlarge")
    write_sysfs(box, tmp_path)
    bus = tmp_path / "sys/bus/pci/devices"
    for path in list(bus.iterdir()):  # flat directories where links into the tree were
        target = path.resolve()
        path.unlink()
        path.mkdir()
        for name in ("vendor", "device", "class", "numa_node"):
            put(path / name, (target / name).read_text().strip())
    found = machine.look(tmp_path)
    assert any("hidden" in gap for gap in found.gaps)
    selection = select(found)
    assert len(selection.choices) == 8
    assert all(choice.rails for choice in selection.choices)  # the table still names them
    found.instance_type = None
    for one in found.pci:
        one.address = one.address  # the addresses alone still tell the type
    assert select(found).choices[0].rails


@pytest.mark.skipif(os.geteuid() == 0 and not hasattr(os, "chroot"), reason="needs permissions")
def test_unreadable_and_absurd_files(tmp_path: Path) -> None:
    write_sysfs(load("p5en.48xlarge"), tmp_path)
    bus = tmp_path / "sys/bus/pci/devices"
    gpu = (bus / "0000:59:00.0").resolve()
    (gpu / "numa_node").unlink()
    (gpu / "numa_node").mkdir()  # reading it fails for root as well
    put((bus / "0000:5a:00.0").resolve() / "numa_node", "70000")
    put((bus / "0000:72:00.0").resolve() / "vendor", "not a number")
    put(bus / "rubbish" / "vendor", "0x10de")
    found = machine.look(tmp_path)
    text = "\n".join(found.gaps)
    assert "cannot be read" in text
    assert "70000" in text
    assert "not a number" in text
    assert "rubbish" in text
    box_io.check_box(found, "here")
    select(found)


def test_nodes_under_dev_tell_what_is_open(tmp_path: Path) -> None:
    box = load("p5en.48xlarge")
    for nic in box.nics[:2]:
        nic.openable = True
    write_sysfs(box, tmp_path)
    found = machine.look(tmp_path)
    assert [nic.name for nic in found.nics if nic.openable] == ["rdmap85s0", "rdmap86s0"]
    assert sum(nic.openable is False for nic in found.nics) == 14


def test_gpus_of_a_container(tmp_path: Path) -> None:
    write_sysfs(load("p5en.48xlarge"), tmp_path)
    for address in ("0000:59:00.0", "0000:5A:00.0"):
        put(tmp_path / f"proc/driver/nvidia/gpus/{address}/information", "Device Minor: 0")
    found = machine.look(tmp_path)
    seen = [one.pci_address for one in found.accelerators if one.visible]
    assert seen == ["0000:59:00.0", "0000:5a:00.0"]


def test_neuron_devices_of_a_container(tmp_path: Path) -> None:
    write_sysfs(load("trn2.48xlarge"), tmp_path)
    for number in (3, 4):
        put(tmp_path / f"dev/neuron{number}", "")
    found = machine.look(tmp_path)
    assert sorted(one.index for one in found.accelerators if one.visible) == [3, 4]
    assert [choice.index for choice in select(found).choices if choice.process_index == 0] == [3]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<topology", "no well-formed XML"),
        ("<html></html>", "no hwloc topology"),
        (
            '<topology><object type="PCIDev" pci_busid="nonsense" pci_type="0200 [1d0f:efa2]"/>'
            "</topology>",
            "not a PCI address",
        ),
        (
            '<topology><object type="PCIDev" pci_busid="0000:01:00.0" pci_type="what"/></topology>',
            "pci_type",
        ),
        (
            '<topology><object type="PCIDev" pci_busid="0000:01:00.0" pci_link_speed="fast"'
            ' pci_type="0200 [1d0f:efa2]"/></topology>',
            "fast",
        ),
        ('<topology><object type="Bridge" bridge_pci="?"/></topology>', "bridge_pci"),
        ('<topology><object type="Machine" nodeset="zz"/></topology>', "Machine"),
    ],
)
def test_broken_xml_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(RailsError, match=words):
        discover_hwloc.box_from_hwloc_xml(text.encode(), "file.xml")


def test_deep_xml_needs_no_recursion() -> None:
    depth = 5000
    text = "<topology>" + '<object type="Group">' * depth + "</object>" * depth + "</topology>"
    assert not discover_hwloc.box_from_hwloc_xml(text.encode(), "deep.xml").pci


@pytest.mark.parametrize(
    ("speed", "width", "expected"),
    [(32.0, 8, 31.507692), (32.0, 16, 63.015385), (5.0, 1, 0.5), (0.0, 16, 0.0), (8.0, 0, 0.0)],
)
def test_link_arithmetic(speed: float, width: int, expected: float) -> None:
    assert link_gbyte_per_s(speed, width) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("spelling", "normal"),
    [
        ("0000:59:00.0", "0000:59:00.0"),
        ("0:59:00.0", "0000:59:00.0"),
        ("00000000:5A:00.0", "0000:5a:00.0"),
        ("cc:00.0", "0000:cc:00.0"),
        ("0001:C9:1f.7", "0001:c9:1f.7"),
    ],
)
def test_spellings_of_addresses(spelling: str, normal: str) -> None:
    assert bdf.normalise(spelling) == normal


@pytest.mark.parametrize("text", ["", "59", "0000:59:20.0", "0000:59:00.8", "x:y:z.0", "a" * 999])
def test_what_is_no_address(text: str) -> None:
    assert not bdf.is_address(text)
    with pytest.raises(RailsError):
        bdf.normalise(text)


def fake_neuron_ls(tmp_path: Path, output: str, code: int = 0) -> Path:
    path = tmp_path / "neuron-ls"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {code}\n")
    path.chmod(0o755)
    return path


def test_neuron_ls_numbers_devices_where_no_table_does(tmp_path: Path) -> None:
    box = load("trn3pds")
    wanted = {one.pci_address: one.index for one in box.accelerators}
    for one in box.accelerators:
        one.index = -1
    assert {choice.verdict for choice in select(box).choices} == {"tie"}
    listing = [
        {"neuron_device": index, "bdf": address[5:].upper(), "numa_node": "1"}
        for address, index in wanted.items()
    ]
    tool = fake_neuron_ls(tmp_path, json.dumps(listing))
    assert neuron_ls.number_devices(box, tool) is None
    assert {one.pci_address: one.index for one in box.accelerators} == wanted
    assert {choice.verdict for choice in select(box).choices} == {"good"}


@pytest.mark.parametrize(("output", "code"), [("[]", 1), ("nonsense", 0), ("[{}]", 0), ("7", 0)])
def test_neuron_ls_that_fails_is_a_gap(output: str, code: int, tmp_path: Path) -> None:
    box = load("trn1n.32xlarge")
    sentence = neuron_ls.number_devices(box, fake_neuron_ls(tmp_path, output, code))
    assert sentence is not None
    assert "are not known" in sentence
    assert neuron_ls.number_devices(box, tmp_path / "absent") is not None
    assert neuron_ls.number_devices(load("trn2.48xlarge"), tmp_path / "absent") is None
