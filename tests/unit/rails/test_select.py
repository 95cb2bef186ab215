"""NIXL's rule, our policy, and where they differ."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_push.rails import instances, nixl_rule
from neuron_push.rails.model import SCHEMA_VERSION, Accelerator, Box, HostBridge, Nic, PciDevice
from neuron_push.rails.select import Selection, select
from neuron_push.rails.topology import Topology

from .conftest import TOPOLOGIES, load

RAILS_PER_DEVICE = {
    "g5.48xlarge": (8, 1, 1),
    "g6.48xlarge": (8, 1, 1),
    "p4d.24xlarge": (8, 1, 4),
    "p4de.24xlarge": (8, 1, 4),
    "p5.48xlarge": (8, 4, 32),
    "p5e.48xlarge": (8, 4, 32),
    "p5en.48xlarge": (8, 2, 16),
    "p6-b200.48xlarge": (8, 1, 8),
    "p6-b300.48xlarge": (8, 2, 16),
    "trn1.32xlarge": (16, 1, 8),
    "trn1n.32xlarge": (16, 1, 16),
    "trn2.48xlarge": (16, 1, 16),
    "trn2u.48xlarge": (16, 1, 16),
    "trn3pd": (16, 1, 16),
    "trn3pds": (16, 1, 16),
}


def rails(selection: Selection) -> dict[str, list[str]]:
    """Bus numbers, for short: device to rails."""
    return {
        choice.pci_address[5:7]: [rail.pci_address[5:7] for rail in choice.rails]
        for choice in selection.choices
    }


def nixl_rails(selection: Selection) -> dict[str, list[str]]:
    return {
        choice.pci_address[5:7]: [rail.pci_address[5:7] for rail in choice.nixl_rails]
        for choice in selection.choices
    }


def verdicts(selection: Selection) -> set[str]:
    return {choice.verdict for choice in selection.choices}


def open_only(box: Box, *buses: str) -> Box:
    for nic in box.nics:
        nic.openable = nic.pci_address[5:7] in buses
    return box


def show_gpus(box: Box, *buses: str) -> Box:
    for one in box.accelerators:
        one.visible = one.pci_address[5:7] in buses
    return box


def test_every_catalog_type_has_a_fixture_and_the_other_way_round() -> None:
    fixtures = {path.stem for path in TOPOLOGIES.glob("*.json")}
    assert set(instances.names()) <= fixtures
    assert set(RAILS_PER_DEVICE) | {"trn2.3xlarge"} == set(instances.names())


@pytest.mark.parametrize("name", RAILS_PER_DEVICE)
def test_rails_of_every_type(name: str) -> None:
    devices, per_device, used = RAILS_PER_DEVICE[name]
    selection = select(load(name))
    assert selection.is_good
    assert len(selection.choices) == devices
    assert {len(choice.rails) for choice in selection.choices} == {per_device}
    counts = Counter(rail.pci_address for one in selection.choices for rail in one.rails)
    assert len(counts) == used
    assert len(set(counts.values())) == 1  # evenly used
    assert all(rail.reason for one in selection.choices for rail in one.rails)


@pytest.mark.parametrize(
    "name", [name for name in instances.names() if instances.load(name).pairing == "computed"]
)
def test_catalog_map_equals_what_nixl_does(name: str) -> None:
    entry = instances.load(name)
    for choice in select(load(name)).choices:
        expected = entry.pair_by_accelerator()[choice.pci_address].nics
        assert tuple(rail.pci_address for rail in choice.nixl_rails) == expected


@pytest.mark.parametrize("name", sorted(RAILS_PER_DEVICE))
def test_catalog_agrees_with_its_fixture(name: str) -> None:
    entry = instances.load(name)
    box = load(name)
    efa = [device for device in box.pci if device.is_efa]
    assert len(efa) == entry.nics.count
    assert len(box.accelerators) == entry.accelerators.count
    assert entry.sources["map"]
    addresses = {device.address for device in box.pci}
    for pair in entry.map:
        assert set(pair.nics) <= addresses
        assert pair.accelerator is None or pair.accelerator in addresses


def test_trn2_follows_the_crossed_table_not_the_bus_order(trn2: Box) -> None:
    found = rails(select(trn2))
    crossed = {"b5": "b4", "b6": "b3", "58": "57", "59": "56", "cc": "c9", "cb": "ca"}
    assert {device: found[device][0] for device in crossed} == crossed
    by_bus_order = nixl_rule.group(
        Topology(trn2),
        [one.pci_address for one in trn2.accelerators],
        [nic.pci_address for nic in trn2.nics],
    )
    assert all(by_bus_order[f"0000:{a}:00.0"] != (f"0000:{b}:00.0",) for a, b in crossed.items())


def test_the_runtimes_answer_wins_over_the_table(trn2: Box) -> None:
    one = trn2.accelerators[0]
    one.attached_nic = "0000:c9:00.0"
    choice = select(trn2).choices[0]
    assert [rail.pci_address for rail in choice.rails] == ["0000:c9:00.0"]
    assert choice.source == "runtime"
    one.attached_nic = "0000:01:00.0"
    choice = select(trn2).choices[0]
    assert choice.verdict == "no_rail"
    assert "0000:01:00.0" in choice.words


def test_an_old_neuron_runtime_means_all_rails(trn2: Box) -> None:
    trn2.host.has_attached_efa_call = False
    selection = select(trn2)
    assert verdicts(selection) == {"all_rails"}
    assert "nrt_get_attached_efa_bdf" in selection.choices[0].nixl_reason


def test_a_neuron_worker_pinned_to_the_wrong_nic(trn2: Box) -> None:
    trn2.env["FI_EFA_IFACE"] = "rdmap201s0"
    choice = select(trn2).of_process_device(1)
    assert choice is not None
    assert choice.verdict == "differs"
    assert [rail.name for rail in choice.nixl_rails] == ["rdmap201s0"]


def test_trn1_reports_a_tie() -> None:
    choice = select(load("trn1.32xlarge")).choices[0]
    assert choice.verdict == "tie"
    assert len(choice.candidates) == 2
    assert "runtime decides" in choice.rails[0].reason


def test_all_candidates_of_a_tie_are_too_many() -> None:
    box = open_only(load("trn1.32xlarge"), "10")
    box.host.has_attached_efa_call = False
    choice = next(one for one in select(box).choices if one.pci_address == "0000:10:1c.0")
    assert len(choice.nixl_rails) == len(choice.candidates) == 2
    assert choice.verdict == "all_rails"


@pytest.mark.parametrize("name", ["trn2.3xlarge", "trn2.48xlarge-no-efa"])
def test_launched_without_efa(name: str) -> None:
    selection = select(load(name))
    assert verdicts(selection) == {"no_rail"}
    assert not selection.is_good
    assert selection.host_memory.policy == "tcp"


# What happens in containers. The first three lines of each case are the situation.


def test_pod_with_one_gpu_loses_half_its_bandwidth(p5en: Box) -> None:
    selection = select(show_gpus(open_only(p5en, "55", "56"), "59"))
    assert rails(selection)["59"] == ["55", "56"]
    assert nixl_rails(selection)["59"] == ["55"]
    assert nixl_rails(selection)["5a"] == ["56"]
    shown = selection.of_process_device(0)
    assert shown is not None
    assert shown.verdict == "differs"
    assert "only 1 of 2" in shown.words


def test_pod_with_one_nic(p5en: Box) -> None:
    found = nixl_rails(select(open_only(p5en, "55")))
    assert len(found) == 8
    assert all(nics == ["55"] for nics in found.values())
    mapped = nixl_rule.cuda_map(p5en, Topology(p5en))
    assert set(mapped) == {"0000:59:00.0", "0000:5a:00.0"}


def test_pod_with_three_nics(p5en: Box) -> None:
    mapped = nixl_rule.cuda_map(open_only(p5en, "55", "56", "57"), Topology(p5en))
    assert mapped == {
        "0000:59:00.0": ("0000:55:00.0", "0000:56:00.0"),
        "0000:5a:00.0": ("0000:57:00.0",),
    }


@pytest.mark.parametrize(("name", "bus"), [("p4d.24xlarge", "10"), ("p6-b200.48xlarge", "4f")])
def test_both_gpus_of_a_switch_share_its_only_nic(name: str, bus: str) -> None:
    box = open_only(load(name), bus)
    mapped = nixl_rule.cuda_map(box, Topology(box))
    assert len(mapped) == 2
    assert {nics[0][5:7] for nics in mapped.values()} == {bus}


def test_g6_maps_one_socket_only() -> None:
    box = load("g6.48xlarge")
    mapped = nixl_rule.cuda_map(box, Topology(box))
    assert [gpu[5:7] for gpu in mapped] == ["9f", "a1", "a3", "a5"]
    selection = select(box)
    assert selection.is_good
    assert "in no share" in selection.choices[-1].nixl_reason


def test_pod_with_the_wrong_nic_gets_all_rails(p5en: Box) -> None:
    selection = select(show_gpus(open_only(p5en, "87", "88"), "59"))
    shown = selection.of_process_device(0)
    assert shown is not None
    assert shown.verdict == "no_rail"  # a far NIC is no rail
    assert "NUMA node 0" in shown.words
    assert nixl_rails(selection)["59"] == ["87", "88"]


def test_eight_gpus_of_which_four_are_visible(p5en: Box) -> None:
    show_gpus(p5en, "59", "72", "8b", "a4")
    selection = select(p5en)
    assert verdicts(selection) == {"good", "hidden"}
    assert sum(choice.process_index >= 0 for choice in selection.choices) == 4
    assert selection.is_good


def test_cuda_visible_devices_renumbers(p5en: Box) -> None:
    p5en.env["CUDA_VISIBLE_DEVICES"] = "3,1"
    selection = select(p5en)
    first, second = selection.of_process_device(0), selection.of_process_device(1)
    assert first is not None
    assert second is not None
    assert (first.pci_address, second.pci_address) == ("0000:73:00.0", "0000:5a:00.0")
    assert selection.of_process_device(2) is None


@pytest.mark.parametrize("value", ["GPU-<masked>", "MIG-<masked>", "0,9", "x", "1,1"])
def test_odd_cuda_visible_devices_is_noted(p5en: Box, value: str) -> None:
    p5en.env["CUDA_VISIBLE_DEVICES"] = value
    assert select(p5en).notes


@pytest.mark.parametrize(
    ("variable", "value", "devices"),
    [
        ("NEURON_RT_VISIBLE_CORES", "4-7", [1]),
        ("NEURON_RT_VISIBLE_CORES", "0,4,8-11", [0, 1, 2]),
        ("NEURON_VISIBLE_DEVICES", "60-63", [15]),
    ],
)
def test_neuron_cores_select_devices(
    trn2: Box, variable: str, value: str, devices: list[int]
) -> None:
    trn2.env[variable] = value
    selection = select(trn2)
    numbers = [selection.of_process_device(number) for number in range(len(devices))]
    assert [one.index for one in numbers if one is not None] == devices
    assert selection.of_process_device(len(devices)) is None


@pytest.mark.parametrize("value", ["abc", "0-99999999999", "-3", "4000"])
def test_odd_neuron_cores_are_noted(trn2: Box, value: str) -> None:
    trn2.env["NEURON_RT_VISIBLE_CORES"] = value
    assert select(trn2).notes


def test_nic_down(p5en: Box) -> None:
    p5en.nics[0].state = "DOWN"
    selection = select(p5en)
    assert rails(selection)["59"] == ["56"]
    assert selection.choices[0].verdict == "differs"


def test_nic_missing(p5en: Box) -> None:
    p5en.nics = p5en.nics[1:]
    p5en.pci = tuple(one for one in p5en.pci if one.address != "0000:55:00.0")
    selection = select(p5en)
    assert rails(selection)["59"] == ["56"]
    assert nixl_rails(selection)["59"] == ["56", "57"]
    assert not selection.is_good


def test_nic_of_a_neuron_device_missing(trn2: Box) -> None:
    trn2.nics = tuple(nic for nic in trn2.nics if nic.pci_address != "0000:c9:00.0")
    choice = select(trn2).of_process_device(0)
    assert choice is not None
    assert choice.verdict == "no_rail"
    assert "0000:c9:00.0" in choice.words
    assert len(choice.nixl_rails) == 15  # NIXL would fall back to all


def test_nic_on_the_wrong_switch(p5en: Box) -> None:
    devices = p5en.pci_by_address()
    devices["0000:55:00.0"].parent = devices["0000:6e:00.0"].parent
    selection = select(p5en)
    assert rails(selection)["59"] == ["56"]
    assert "against the table" in selection.choices[0].rails[0].reason
    assert nixl_rails(selection)["59"] == ["56", "57"]
    assert not selection.is_good


def test_both_nics_on_the_wrong_switch_leave_nearness(p5en: Box) -> None:
    devices = p5en.pci_by_address()
    for bus in ("55", "56"):
        devices[f"0000:{bus}:00.0"].parent = devices["0000:6e:00.0"].parent
    selection = select(p5en)
    assert selection.choices[0].source == "bridge"
    assert rails(selection)["59"] == ["57", "58"]


def test_no_nic_and_no_accelerator() -> None:
    selection = select(Box(schema_version=SCHEMA_VERSION, source="test"))
    assert not selection.choices
    assert not selection.is_good


def test_other_rdma_nics_serve_where_there_is_no_efa(p5en: Box) -> None:
    for device in p5en.pci:
        if device.is_efa:
            device.vendor_id, device.device_id = 0x15B3, 0x101E
    for nic in p5en.nics:
        nic.driver = "mlx5_core"
    selection = select(p5en)
    assert verdicts(selection) == {"tcp"}
    assert rails(selection)["59"] == ["55", "56"]


def many_devices() -> Box:
    """2,500 host bridges, each with two NICs and two GPUs."""
    bridges = tuple(HostBridge(name=f"pci{number:04x}:00") for number in range(2500))
    pci: list[PciDevice] = []
    nics = []
    accelerators = []
    for number in range(2500):
        root = f"pci{number:04x}:00"
        for slot in range(4):
            address = f"{number:04x}:00:{slot:02x}.0"
            is_nic = slot < 2
            vendor, device = (0x1D0F, 0xEFA2) if is_nic else (0x10DE, 0x2335)
            pci.append(PciDevice(address, root, vendor, device, 0x200 if is_nic else 0x302))
            if is_nic:
                nics.append(Nic(f"rdma{number}s{slot}", address, "efa", 200.0))
            else:
                accelerators.append(Accelerator("cuda", address, len(accelerators)))
    return Box(SCHEMA_VERSION, "test", None, bridges, tuple(pci), tuple(nics), tuple(accelerators))


def test_ten_thousand_devices_stay_fast() -> None:
    box = many_devices()
    start = time.process_time()
    selection = select(box)
    assert time.process_time() - start < 5
    assert {len(choice.rails) for choice in selection.choices} == {1}
    assert selection.is_good


@given(num_nics=st.integers(0, 40), num_takers=st.integers(1, 12), seed=st.randoms())
def test_shares_are_fair(num_nics: int, num_takers: int, seed: object) -> None:
    nics = [f"0000:{number:02x}:00.0" for number in range(num_nics)]
    seed.shuffle(nics)  # type: ignore[attr-defined]
    shares = nixl_rule.deal(nics, [str(taker) for taker in range(num_takers)])
    if num_nics < num_takers:
        assert all(set(share) == set(nics) for share in shares.values())
    else:
        sizes = [len(share) for share in shares.values()]
        assert max(sizes) - min(sizes) <= 1
        assert sorted(nic for share in shares.values() for nic in share) == sorted(nics)
        assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_subset_of_a_machine_gets_an_answer(data: st.DataObject) -> None:
    """Whatever is hidden: each NIC in at most one share unless NICs are fewer than GPUs."""
    box = load(data.draw(st.sampled_from(["p5en.48xlarge", "g6.48xlarge", "trn2.48xlarge"])))
    for nic in box.nics:
        nic.openable = data.draw(st.sampled_from([True, False, None]))
        nic.state = data.draw(st.sampled_from(["ACTIVE", "DOWN", None]))
    for one in box.accelerators:
        one.visible = data.draw(st.sampled_from([True, False, None]))
    if data.draw(st.booleans()):
        box.instance_type = "m5.large"
    selection = select(box)
    usable = {nic.pci_address for nic in box.nics if nic.openable is not False}
    for choice in selection.choices:
        assert choice.words
        assert {rail.pci_address for rail in choice.rails} <= usable
        if choice.kind == "neuron":
            assert len(choice.rails) <= 1
        if choice.process_index >= 0 and not choice.rails:
            assert choice.verdict == "no_rail"
