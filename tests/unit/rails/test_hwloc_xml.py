"""hwloc XML written from a box: read back the same, and NIXL's rule gives one GPU its rails."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from neuron_push.rails.cli import rails_app
from neuron_push.rails.discover_hwloc import box_from_hwloc_xml
from neuron_push.rails.errors import RailsError
from neuron_push.rails.hwloc_xml import pruned_to, to_xml
from neuron_push.rails.select import select

from .conftest import TOPOLOGIES, load
from .test_discovery import FIXTURES, comparable
from .test_select import open_only, show_gpus

KEEP_ALL = 0
PCI_DEVICE_DEPTH, BRIDGE_DEPTH, OS_DEVICE_DEPTH = -5, -4, -6
GPU_TYPES = ["g6.48xlarge", "p4d.24xlarge", "p5.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge"]


@pytest.mark.parametrize("name", FIXTURES)
def test_written_and_read_back(name: str) -> None:
    box = load(name)
    found = box_from_hwloc_xml(to_xml(box).encode(), name)
    for one in (*found.accelerators, *box.accelerators):
        one.index = 0
    assert comparable(found) == comparable(box)
    assert found.num_numa_nodes == box.num_numa_nodes


@pytest.mark.parametrize("name", GPU_TYPES)
def test_each_gpu_gets_its_rails_once_the_others_are_hidden(name: str) -> None:
    selection = select(load(name))
    for choice in selection.choices:
        box = box_from_hwloc_xml(to_xml(pruned_to(selection, choice)).encode(), name)
        wanted = [rail.name for rail in choice.rails]
        box.env["FI_EFA_IFACE"] = ",".join(wanted)
        (then,) = select(box).choices
        assert [rail.name for rail in then.nixl_rails] == wanted


def libhwloc() -> ctypes.CDLL | None:
    directory = os.environ.get("LIBFABRIC_DIR")
    places = [str(Path(directory) / "libhwloc.so.15")] if directory else []
    for name in [*places, "libhwloc.so.15"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@pytest.mark.parametrize("name", FIXTURES)
def test_hwloc_itself_reads_it(name: str, tmp_path: Path) -> None:
    library = libhwloc()
    if library is None:
        pytest.skip("libhwloc.so.15 is not here")
    path = tmp_path / "machine.xml"
    box = load(name)
    path.write_text(to_xml(box))
    topology = ctypes.c_void_p()
    assert library.hwloc_topology_init(ctypes.byref(topology)) == 0
    assert library.hwloc_topology_set_xml(topology, str(path).encode()) == 0
    assert library.hwloc_topology_set_io_types_filter(topology, KEEP_ALL) == 0
    assert library.hwloc_topology_load(topology) == 0
    bridges = sum(device.class_id == 0x0604 for device in box.pci)
    count = library.hwloc_get_nbobjs_by_depth
    assert count(topology, PCI_DEVICE_DEPTH) == len(box.pci) - bridges
    assert count(topology, BRIDGE_DEPTH) == bridges + len(box.host_bridges)
    assert count(topology, OS_DEVICE_DEPTH) == len(box.nics)
    library.hwloc_topology_destroy(topology)


def test_command(tmp_path: Path) -> None:
    box = show_gpus(open_only(load("p5en.48xlarge"), "55", "56"), "59")
    path, xml = tmp_path / "pod.json", tmp_path / "gpu0.xml"
    from neuron_push.rails.box_io import dump_box

    path.write_bytes(dump_box(box))
    base = ["env", "--device", "0", "--from", str(path), "--json"]
    assert CliRunner().invoke(rails_app, base).exit_code == 1
    result = CliRunner().invoke(rails_app, [*base, "--write-hwloc", str(xml)])
    assert result.exit_code == 0
    env = json.loads(result.stdout)["env"]
    assert env["FI_EFA_IFACE"] == "rdmap85s0,rdmap86s0"
    assert env["HWLOC_XMLFILE"] == str(xml)
    (one,) = box_from_hwloc_xml(xml.read_bytes(), "x").accelerators
    assert one.pci_address == "0000:59:00.0"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", str(TOPOLOGIES / "trn2.48xlarge.json")], "is for GPUs"),
        (["--from", str(TOPOLOGIES / "p5en.48xlarge.json"), "--host-memory"], "needs --device"),
    ],
)
def test_where_it_makes_no_sense(arguments: list[str], words: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        rails_app, ["env", *arguments, "--write-hwloc", str(tmp_path / "x.xml")]
    )
    assert result.exit_code == 2
    assert words in result.stderr


def test_no_rails_no_file() -> None:
    selection = select(open_only(load("p5en.48xlarge")))
    with pytest.raises(RailsError, match="no rails to give"):
        pruned_to(selection, selection.choices[0])
