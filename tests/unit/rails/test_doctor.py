"""Every check of the doctor on a box that has the trouble, and healthy boxes that have none."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from neuron_push.rails import commands, doctor, doctor_peer, machine
from neuron_push.rails.card import RailCard, make_card
from neuron_push.rails.doctor_base import Peer, PeerRails, Reach, Situation, version_tuple
from neuron_push.rails.errors import RailsError
from neuron_push.rails.hwloc_xml import to_xml
from neuron_push.rails.log_parser import parse_log
from neuron_push.rails.model import Box, Library, Plugin
from neuron_push.rails.select import select
from neuron_push.rails.topology import Topology

from .conftest import load, put
from .test_logs import P5EN, device_memory, efa_agent, line
from .test_select import many_devices, open_only, show_gpus

Scenario = Callable[[], Situation]


def situation(box: Box, **more: object) -> Situation:
    return Situation(selection=select(box), topology=Topology(box), **more)


def healthy(name: str) -> Box:
    """A host as it should be."""
    box = load(name)
    cuda = any(one.kind == "cuda" for one in box.accelerators)
    host = box.host
    host.kernel = "6.1.100-cloud"
    host.nixl_versions = {"nixl": "1.1.0"}
    wanted = ("libfabric.so.1:FABRIC_1.7",)
    host.plugins = (Plugin("nixl-cu12", "1.1.0", ("libfabric.so.1",), wanted, None, True),)
    host.libraries = (
        Library(
            "libfabric.so.1",
            True,
            "/opt/amazon/efa/lib/libfabric.so.1",
            None,
            ("FABRIC_1.0", "FABRIC_1.7"),
        ),
    )
    host.libfabric_version = "2.4"
    host.libfabric_copies = ("/opt/amazon/efa/lib/libfabric.so.1",)
    host.libfabric_providers = ("efa", "tcp")
    host.modules = (
        ("efa", "ib_uverbs", "gdrdrv", "nvidia", "nvidia_peermem")
        if cuda
        else ("efa", "ib_uverbs", "neuron")
    )
    host.device_nodes = ("nvidia0",) if cuda else ("neuron0",)
    host.device_nodes += ("infiniband/uverbs0",)
    host.memlock_bytes = -1
    host.open_files = 65536
    host.page_bytes = 4096
    host.hugepages_total = 1024
    host.kernel_arguments = ()
    host.iommu_groups = 0
    host.clock_synchronised = True
    host.has_attached_efa_call = None if cuda else True
    box.env = {
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_UNSOLICITED_WRITE_RECV": "0",
        "NEURON_RT_MAP_HBM": "1",
    }
    for nic in box.nics:
        nic.openable = True
        nic.p2p = "NVIDIA" if cuda else "NEURON"
    return box


@pytest.mark.parametrize("name", ["p5.48xlarge", "p5en.48xlarge", "trn2.48xlarge", "trn3pds"])
def test_healthy_hosts_have_no_problem(name: str) -> None:
    found = doctor.diagnose(situation(healthy(name)))
    assert [one for one in found.all_findings() if one.level != "info"] == []
    assert found.exit_code(strict=True) == 0


P5 = "p5en.48xlarge"
TRN2 = "trn2.48xlarge"


def with_env(name: str = P5, **env: str) -> Scenario:
    def make() -> Situation:
        box = healthy(name)
        box.env |= env
        return situation(box)

    return make


def without_env(key: str, name: str = P5) -> Scenario:
    def make() -> Situation:
        box = healthy(name)
        del box.env[key]
        return situation(box)

    return make


def with_host(name: str = P5, **values: object) -> Scenario:
    def make() -> Situation:
        box = healthy(name)
        for key, value in values.items():
            setattr(box.host, key, value)
        return situation(box)

    return make


def changed(change: Callable[[Box], object], name: str = P5, **more: object) -> Scenario:
    def make() -> Situation:
        box = healthy(name)
        change(box)
        return situation(box, **more)

    return make


def drop_nic(box: Box) -> None:
    box.pci = tuple(one for one in box.pci if one.address != box.nics[0].pci_address)
    box.nics = box.nics[1:]


def no_drivers(box: Box) -> None:
    box.nics = ()


def first_down(box: Box) -> None:
    box.nics[0].state = "DOWN"


def close_ibp(box: Box) -> None:
    for nic in box.nics:
        if nic.name.startswith("ibp"):
            nic.openable = False


def other_make(box: Box) -> None:
    for device in box.pci:
        if device.is_efa:
            device.vendor_id = 0x15B3
    for nic in box.nics:
        nic.driver = "mlx5_core"


def no_p2p(box: Box) -> None:
    for nic in box.nics:
        nic.p2p = ""


def no_way_to_gpu(box: Box) -> None:
    box.host.modules = ("efa", "nvidia", "gdrdrv")
    box.host.kernel = "5.4.0"
    for nic in box.nics:
        nic.p2p = None


def wrong_switch(box: Box) -> None:
    devices = box.pci_by_address()
    devices["0000:55:00.0"].parent = devices["0000:6e:00.0"].parent


def no_numa(box: Box) -> None:
    for device in box.pci:
        device.numa_node = -1


def grace(box: Box) -> None:
    for device in box.pci:
        if device.accelerator_kind:
            device.device_id = 0x2941


def sandbox(box: Box) -> None:
    box.host.container = "gvisor"


def gap(box: Box) -> None:
    box.gaps = ("/sys/x cannot be read: Permission denied",)


def blind(box: Box) -> None:
    box.gaps = ("/sys/bus/pci/devices is missing",)
    box.pci = box.nics = box.accelerators = ()


def old_runtime(box: Box) -> None:
    box.host.has_attached_efa_call = False


def with_log(*texts: str) -> Scenario:
    return lambda: situation(healthy(P5), log=parse_log([line(text) for text in texts]))


def with_counters(**values: int) -> Scenario:
    def make() -> Situation:
        counters = {"rdmap85s0": values, "rdmap86s0": {"rdma_write_bytes": 0}}
        return situation(healthy(P5), counters=counters)

    return make


def with_peer(change: Callable[[Box], object] = lambda box: None, **more: object) -> Scenario:
    def make() -> Situation:
        box, other = healthy(P5), healthy(P5)
        change(other)
        own, theirs = make_card(select(box), None, **more), make_card(select(other), None, **more)
        if "time_s" in more:
            theirs.time_s += 100
        return situation(box, pairs=[(own, theirs), (own, theirs)])

    return make


def library(name: str, error: str = "cannot open shared object file") -> dict[str, object]:
    lacking = Library(name, False, None, f"{name}: {error}")
    plugin = Plugin("nixl-cu12", "1.4.1", (name,), (), lacking.error, False)
    return {"libraries": (lacking,), "plugins": (plugin,)}


NEW_PLUGIN = Plugin(
    "nixl-cu12",
    "1.5.1",
    ("libfabric.so.1",),
    ("libfabric.so.1:FABRIC_1.10",),
    "version not found",
    False,
)
BAD_PLUGIN = Plugin("nixl-cu12", "1.4.1", (), (), "undefined symbol: x", False)
TWO_COPIES = ("/usr/lib/libfabric.so.1", "/opt/amazon/efa/lib/libfabric.so.1")


def bare_host(**host: object) -> Box:
    box = healthy(P5)
    box.instance_type = None
    box.pci = box.nics = box.accelerators = box.host_bridges = ()
    for key, value in host.items():
        setattr(box.host, key, value)
    return box


def pinned_on_old_libfabric() -> Situation:
    box = healthy(P5)
    box.env["FI_EFA_IFACE"] = "rdmap85s0"
    box.host.libfabric_version = "1.22"
    return situation(box)


def crossed_cards() -> Situation:
    selection = select(healthy(TRN2))
    own = make_card(selection, selection.of_process_device(0))
    theirs = make_card(selection, selection.of_process_device(1))
    return situation(healthy(TRN2), pairs=[(own, theirs)])


def cards(change: Callable[[RailCard], object]) -> Scenario:
    """An engine there whose card differs in one thing."""

    def make() -> Situation:
        own, theirs = make_card(select(healthy(P5)), None), make_card(select(healthy(P5)), None)
        change(theirs)
        return situation(healthy(P5), pairs=[(own, theirs)])

    return make


def asked(reach: Reach | None = None, container: str | None = None, **peer: object) -> Scenario:
    def make() -> Situation:
        box = healthy(P5)
        box.host.container = container
        found = reach or Reach(speaks="zmq", address="10.1.0.7")
        return situation(box, peer=Peer("h:1", found, **peer))

    return make


# (check, level, words in the finding, the host that has it)
SCENARIOS: list[tuple[str, str, str, Scenario]] = [
    ("D01", "unknown", "is missing", changed(blind)),
    ("D01", "warn", "Permission denied", changed(gap)),
    ("D01", "unknown", "gVisor", changed(sandbox)),
    ("D02", "fail", "without a driver", changed(no_drivers)),
    ("D02", "fail", "not loaded", lambda: situation(bare_host(modules=("nvidia",)))),
    ("D03", "fail", "neuron kernel module", with_host(TRN2, modules=("efa",))),
    ("D03", "fail", "nvidia kernel module", with_host(modules=("efa",))),
    ("D04", "info", "gdrcopy", with_host(modules=("efa", "nvidia"))),
    ("D05", "fail", "/dev/neuron<N>", with_host(TRN2, device_nodes=("infiniband/uverbs0",))),
    ("D05", "fail", "/dev/nvidia<N>", with_host(device_nodes=("infiniband/uverbs0", "nvidiactl"))),
    ("D06", "warn", "do not write remote memory", lambda: situation(healthy("p4d.24xlarge"))),
    ("D07", "fail", "NIXL is not installed", with_host(nixl_versions={}, plugins=())),
    ("D08", "info", "FI_PROVIDER is not set", without_env("FI_PROVIDER")),
    ("D09", "warn", "is off", with_env(FI_EFA_USE_DEVICE_RDMA="0")),
    ("D10", "fail", "MAP_HBM is off", with_env(TRN2, NEURON_RT_MAP_HBM="0")),
    ("D10", "info", "not set", without_env("NEURON_RT_MAP_HBM", TRN2)),
    ("D11", "fail", "SHM_TRANSFER is on", with_env(TRN2, FI_EFA_ENABLE_SHM_TRANSFER="1")),
    ("D12", "fail", "FI_HMEM_DISABLE_P2P", with_env(TRN2, FI_HMEM_DISABLE_P2P="1")),
    ("D13", "fail", "visible to this process", with_env(CUDA_VISIBLE_DEVICES="")),
    ("D13", "info", "no GPU and no Neuron", lambda: situation(bare_host())),
    ("D14", "warn", "CUDA stops at", with_env(CUDA_VISIBLE_DEVICES="0,77")),
    ("D15", "info", "is not published", lambda: situation(healthy("trn1.32xlarge"))),
    ("D16", "warn", "open files", with_host(open_files=256)),
    ("D17", "info", "IOMMU", with_host(kernel_arguments=("intel_iommu=on",))),
    ("D18", "warn", "clock", with_host(clock_synchronised=False)),
    (
        "D19",
        "fail",
        "cannot be reached",
        asked(Reach(error="refused")),
    ),
    ("D19", "fail", "is no side channel: it says nothing", asked(Reach())),
    ("D19", "fail", "it says 'SSH-2.0'", asked(Reach(speaks="'SSH-2.0'"))),
    (
        "D19",
        "fail",
        "with keys",
        asked(Reach(speaks="zmq", wants_keys=True), silence=("silent", "no answer")),
    ),
    ("D19", "fail", "not compared: no answer", asked(silence=("silent", "no answer"))),
    ("D20", "unknown", "not compared", asked()),
    ("D20", "unknown", "is starting", asked(silence=("starting", "engine 'p' is starting"))),
    ("D20", "unknown", "no rails card", asked(silence=("old", "it has no rails card"))),
    (
        "D20",
        "unknown",
        "1 of 2 ranks of engine p",
        asked(rails=PeerRails("p", 0.0, {0: RailCard()}, {1: "there is no rails card"})),
    ),
    (
        "D20",
        "info",
        "has 1 rank: NIXL 1.4.1 with UCX, libfabric not loaded",
        asked(rails=PeerRails("p", 0.0, {0: RailCard(nixl_version="1.4.1", backend="UCX")})),
    ),
    (
        "D21",
        "unknown",
        "no line of NIXL's",
        lambda: situation(healthy(P5), log=parse_log(["hello"])),
    ),
    ("D22", "warn", "clocks of both ends", with_peer(time_s=1.0)),
    (
        "D23",
        "warn",
        "NIXL is 1.1.0 here and 1.5.1 there",
        with_peer(lambda box: setattr(box.host, "nixl_versions", {"nixl": "1.5.1"})),
    ),
    (
        "D24",
        "warn",
        "libfabric is 2.4 here and 1.22 there",
        with_peer(lambda box: setattr(box.host, "libfabric_version", "1.22")),
    ),
    (
        "D09",
        "warn",
        "not set here and off there",
        with_peer(lambda box: box.env.update(FI_EFA_USE_DEVICE_RDMA="0")),
    ),
    ("R01", "fail", "no EFA device can be opened", changed(open_only)),
    ("R01", "fail", "holds no device node", with_host(device_nodes=("nvidia0",))),
    ("R01", "fail", "FI_PROVIDER is", with_env(FI_PROVIDER="tcp")),
    ("R01", "fail", "is efa here and tcp there", with_peer(open_only)),
    ("R01", "fail", "log line", with_log("Discovered 1 tcp devices (TCP fallback)")),
    ("R02", "fail", "libfabric.so.1 cannot", with_host(**library("libfabric.so.1"))),
    ("R02", "fail", "libcudart.so.12 cannot", with_host(**library("libcudart.so.12"))),
    ("R02", "fail", "libnrt.so.1 cannot", with_host(**library("libnrt.so.1"))),
    ("R02", "fail", "undefined symbol", with_host(plugins=(BAD_PLUGIN,))),
    ("R03", "fail", "wants FABRIC_1.10", with_host(plugins=(NEW_PLUGIN,))),
    ("R04", "warn", "several copies", with_host(libfabric_copies=TWO_COPIES)),
    ("R05", "fail", "has no EFA provider", with_host(libfabric_providers=("tcp",))),
    ("R06", "fail", "ABI 59", with_host(verbs_abi="59", efa_verbs_abi="34")),
    ("R07", "warn", "cannot be opened", changed(close_ibp, "p6-b200.48xlarge")),
    ("R09", "warn", "although the EFA installer's", with_host(libfabric_copies=TWO_COPIES)),
    (
        "R10",
        "fail",
        "UCX backend",
        with_log("16 Amazon EFA(s) were detected, but the UCX backend was configured."),
    ),
    (
        "R10",
        "fail",
        "UCX backend, and it sees 16 EFA",
        cards(lambda card: setattr(card, "backend", "UCX")),
    ),
    ("R11", "fail", "dma-buf", changed(no_way_to_gpu)),
    ("R12", "warn", "UCX_NET_DEVICES", changed(other_make)),
    (
        "R13",
        "fail",
        "only 1 of 2",
        changed(lambda box: show_gpus(open_only(box, "55", "56"), "59")),
    ),
    (
        "R14",
        "fail",
        "no NIC shares",
        changed(lambda box: show_gpus(open_only(box, "87", "88"), "59")),
    ),
    (
        "R14",
        "fail",
        "all 16 NICs",
        lambda: situation(
            healthy(P5),
            log=parse_log(efa_agent(P5EN) + device_memory("0000:59:00.0", dict(enumerate(P5EN)))),
        ),
    ),
    ("R15", "warn", "14 of 16", changed(lambda box: open_only(box, "55", "56"))),
    ("R16", "fail", "15 of the 16", changed(drop_nic)),
    (
        "R16",
        "fail",
        "no EFA device is on the PCI bus",
        lambda: situation(healthy("trn2.48xlarge-no-efa")),
    ),
    ("R16", "fail", "no NIC that reaches", lambda: situation(healthy("trn2.3xlarge"))),
    ("R17", "info", "no EFA", lambda: situation(healthy("p6-b200.48xlarge"))),
    ("R18", "fail", "by number", with_host(nixl_versions={"nixl": "0.8.0"})),
    ("R18", "fail", "does not know Neuron", with_host(TRN2, nixl_versions={"nixl": "0.9.0"})),
    ("R19", "fail", "Failed to set CUDA", with_log("Failed to set CUDA device")),
    ("R20", "warn", "NIXL_LIBFABRIC_NUM_RAILS", with_env(NIXL_LIBFABRIC_NUM_RAILS="2")),
    ("R20", "fail", "rdmap1s0", with_env(FI_EFA_IFACE="rdmap1s0,rdmap85s0")),
    ("R20", "info", "ignores", with_env(FI_EFA_ZCPY_RX_SEED="1")),
    ("R20", "info", "NIXL_LOG_LEVEL", with_env(NIXL_LOG_LEVEL="LOUD")),
    ("R20", "warn", "may not know it", pinned_on_old_libfabric),
    ("R21", "warn", "sees 16 NICs and the other 15", with_peer(drop_nic)),
    ("R22", "fail", "not active", changed(first_down)),
    ("R23", "warn", "did not answer", with_counters(unresponsive_remote_events=2)),
    ("R24", "warn", "10.1.0.7 leads over a gateway", asked(has_gateway=True)),
    ("R24", "info", "inside a container", asked(has_gateway=True, container="docker")),
    ("R25", "warn", "one host", with_peer(same_host_token="x")),
    ("R26", "warn", "is not 0", without_env("FI_EFA_USE_UNSOLICITED_WRITE_RECV")),
    (
        "R26",
        "warn",
        "not set there",
        with_peer(lambda box: box.env.pop("FI_EFA_USE_UNSOLICITED_WRITE_RECV")),
    ),
    ("R27", "fail", "p2p file is empty", changed(no_p2p)),
    (
        "R28",
        "fail",
        "FI_HMEM",
        with_log("VRAM memory requested but provider does not support FI_HMEM - falling back"),
    ),
    ("R29", "fail", "FI_EFA_MTU_SIZE", with_env(FI_EFA_MTU_SIZE="1")),
    ("R29", "fail", "set and empty", with_env(FI_EFA_IFACE="")),
    ("R29", "fail", "MIN_CREDITS", with_env(FI_EFA_TX_MIN_CREDITS="0")),
    ("R29", "fail", "both set", with_env(FI_EFA_USE_HUGE_PAGE="1", FI_EFA_FORK_SAFE="1")),
    ("R29", "fail", "cannot write", with_env("p4d.24xlarge", FI_EFA_USE_DEVICE_RDMA="1")),
    ("R30", "warn", "FORK_SAFE", with_host(kernel="5.10.1")),
    ("R31", "fail", "memlock limit is 8 MiB", with_host(memlock_bytes=8 << 20)),
    ("R32", "info", "4 GiB", with_host(hugepages_total=0)),
    ("R33", "warn", "200 processes", changed(lambda box: None, tensor_parallel=200)),
    ("R34", "fail", "GB200", changed(grace)),
    ("R35", "warn", "expandable", with_env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")),
    ("R36", "fail", "1.21", with_host(libfabric_version="1.21")),
    ("R39", "info", "in batches", with_host(nixl_versions={"nixl": "1.4.1"})),
    ("R40", "fail", "nrt_get_attached_efa_bdf", changed(old_runtime, TRN2)),
    ("R41", "info", "left by rdmap85s0", with_counters(rdma_write_bytes=5 << 30)),
    ("R42", "warn", "the rails are", crossed_cards),
    ("R43", "info", "is not told", changed(no_numa)),
    ("R44", "warn", "against the table", changed(wrong_switch)),
    ("R45", "info", "all 16 NICs", lambda: situation(healthy(TRN2))),
    ("R46", "fail", "the first NIC", changed(first_down)),
    ("R47", "fail", "below the 512 MiB", with_host(memlock_bytes=256 << 20)),
    ("R47", "info", "8 workers with 16 rails", lambda: situation(healthy(P5))),
    ("R48", "warn", "HWLOC_XMLFILE", with_env(HWLOC_XMLFILE="/tmp/x.xml")),
    ("R48", "fail", "hides PCI", with_env(HWLOC_COMPONENTS="-pci")),
    ("R49", "warn", "FI_TCP_IFACE", with_env(FI_TCP_IFACE="lo")),
    ("R51", "info", "retransmissions", with_counters(retrans_timeout_events=1)),
]


@pytest.mark.parametrize(
    ("check", "level", "words", "scenario"),
    SCENARIOS,
    ids=[f"{check}-{words[:24]}" for check, _, words, _ in SCENARIOS],
)
def test_check(check: str, level: str, words: str, scenario: Scenario) -> None:
    found = [
        one
        for one in doctor.diagnose(scenario()).all_findings()
        if one.check == check and words in one.what
    ]
    assert found, f"{check} was not found"
    assert found[0].level == level
    for one in found:
        assert one.what
        assert one.why
        assert one.mend
        assert "\n" not in one.what + one.why + one.mend


def test_every_check_has_a_scenario() -> None:
    directory = Path(doctor.__file__).parent
    sources = [*directory.glob("doctor_*.py"), directory / "card.py"]
    named = {name for path in sources for name in re.findall(r'"([RD]\d\d)"', path.read_text())}
    assert named <= {check for check, *_ in SCENARIOS}


def test_a_bare_host_hears_what_is_missing_in_order() -> None:
    box = bare_host(
        modules=(), device_nodes=(), libfabric_providers=None, **library("libfabric.so.1")
    )
    found = doctor.diagnose(situation(box))
    fails = [one.check for one in found.all_findings() if one.level == "fail"]
    assert fails == ["R16", "D02", "R01", "R02"]
    assert found.exit_code() == 1


def test_exit_codes() -> None:
    assert doctor.diagnose(situation(healthy(P5))).exit_code() == 0
    warned = doctor.diagnose(with_host(open_files=256)())
    assert (warned.exit_code(), warned.exit_code(strict=True)) == (0, 1)
    assert doctor.diagnose(changed(sandbox)()).exit_code() == 2
    assert doctor.diagnose(changed(first_down)()).exit_code() == 1


@pytest.mark.parametrize("name", ["p5en.48xlarge", "trn2.48xlarge", "g5.48xlarge"])
def test_a_box_of_topology_alone_is_judged_without_a_traceback(name: str) -> None:
    found = doctor.diagnose(situation(load(name)))
    assert all(one.check not in ("R02", "D07", "R31") for one in found.all_findings())


def test_this_machine() -> None:
    from neuron_push.rails.host_facts import fill_host

    box = machine.look()
    fill_host(box)
    assert box.host.kernel
    found = doctor.diagnose(situation(box))
    if not box.nics and box.host.container != "gvisor":
        assert found.exit_code() == 1


COMMENT = b"<?xml version='1.0'?><!-- hello --><!DOCTYPE topology><topology/>"


@pytest.mark.parametrize(
    ("raw", "level", "words"),
    [
        (b"", "fail", "cannot be read"),
        (COMMENT, "fail", "comment before its DOCTYPE"),
        (b"<topology>", "fail", "no well-formed XML"),
        (b"<!DOCTYPE topology><topology/>", "fail", "lacks 0000:55:00.0"),
        (to_xml(load(P5)).encode(), "info", "/x.xml"),
    ],
)
def test_topology_files(raw: bytes, level: str, words: str) -> None:
    made = with_env(HWLOC_XMLFILE="/x.xml")()
    made.hwloc_xml = raw
    (found,) = [one for one in doctor.diagnose(made).all_findings() if one.check == "R48"]
    assert found.level == level
    assert words in found.what


@pytest.mark.parametrize("text", ["host", "host:", ":1", "host:x", "host:70000", "host:0"])
def test_peers_that_are_no_address(text: str) -> None:
    with pytest.raises(RailsError, match="is no HOST:PORT"):
        doctor_peer.split_peer(text)


def test_trying_a_peer() -> None:
    assert doctor_peer.split_peer("[::1]:80") == ("::1", 80)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reach = doctor_peer.try_peer(f"127.0.0.1:{port}")
        assert (reach.error, reach.speaks, reach.is_here) == (None, "nothing", True)
    assert doctor_peer.try_peer(f"127.0.0.1:{port}").error == "Connection refused"
    assert doctor_peer.try_peer("no-such-host.invalid:80").error


def test_another_protocol_is_quoted_without_control_characters() -> None:
    def serve() -> None:
        sock, _ = server.accept()
        with sock:
            sock.sendall(b"SSH-2.0-x\x1b[2J\r\n")
            sock.recv(100)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        reach = doctor_peer.try_peer(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join(5)
    assert reach.error is None
    assert reach.speaks.startswith("'SSH-2.0-")
    assert reach.speaks.isprintable()


ROUTES = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
ens5 00000000 0100000A 0003 0 0 0 00000000 0 0 0
ens5 0000000A 00000000 0001 0 0 0 00F0FFFF 0 0 0
ens5 0500000A 0100000A 0007 0 0 0 FFFFFFFF 0 0 0
bad line
"""


@pytest.mark.parametrize(
    ("address", "answer"),
    [
        ("10.0.0.7", False),
        ("10.0.15.7", False),
        ("10.0.16.7", True),
        ("10.0.0.5", True),
        ("fe80::1", None),
        (None, None),
    ],
)
def test_routes(tmp_path: Path, address: str | None, answer: bool | None) -> None:
    assert doctor_peer.has_gateway(tmp_path, address) is None
    put(tmp_path / "proc/net/route", ROUTES)
    assert doctor_peer.has_gateway(tmp_path, address) is answer


def test_ten_thousand_devices_stay_fast() -> None:
    import time

    start = time.process_time()
    doctor.diagnose(situation(many_devices()))
    assert time.process_time() - start < 8


def test_a_key_file_without_a_peer_is_refused() -> None:
    request = commands.DoctorRequest(key_file=Path("x"))
    with pytest.raises(RailsError, match="--key-file is for --peer"):
        commands.run_doctor(healthy(P5), request, root=None, as_json=False)


def test_versions() -> None:
    assert version_tuple("2.5.1-rc1") == (2, 5, 1)
    assert version_tuple("1.4.1+cu12") == (1, 4, 1)
    assert version_tuple("unknown") is None
    assert version_tuple(None) is None
