"""A corpus of NIXL's lines, real and made, and what is understood of them."""

from __future__ import annotations

import random
import string
from pathlib import Path

import pytest

from neuron_push.rails.compare import compare_log
from neuron_push.rails.errors import RailsError
from neuron_push.rails.log_parser import LogReport, parse_log, read_log
from neuron_push.rails.model import Box
from neuron_push.rails.select import select

from .conftest import load

SHARED = Path(__file__).parents[4] / "shared" / "samples"
needs_samples = pytest.mark.skipif(not SHARED.is_dir(), reason="no log samples on this machine")


def line(text: str, thread: int = 1001, letter: str = "I", file: str = "libfabric_x.cpp") -> str:
    return f"{letter}1201 13:29:05.302242 {thread:7} {file}:80] {text}\n"


def checks(report: LogReport) -> list[str]:
    return [trouble.check for trouble in report.troubles]


def efa_agent(names: list[str], thread: int = 1001) -> list[str]:
    found = [line("Creating rail manager with striping threshold: 131072 bytes", thread)]
    found.append(line(f"Discovered {len(names)} EFA devices", thread))
    found += [
        line(f"Created rail {number} (device={name}-rdm, provider=efa)", thread)
        for number, name in enumerate(names)
    ]
    found.append(line(f"Created {len(names)} rails using provider=efa", thread))
    return found


def device_memory(
    address: str, rails: dict[int, str], device: int = 0, thread: int = 1001
) -> list[str]:
    found = [
        line(
            f"VRAM memory 0x7f00 on device PCI {address} mapped to rail {rail} "
            f"(EFA device={name}-rdm)",
            thread,
        )
        for rail, name in rails.items()
    ]
    found.append(
        line(
            f"VRAM memory 0x7f00 on device PCI {address} will use {len(rails)} rails total", thread
        )
    )
    found.append(
        line(f"Registered memory on {len(rails)} rails, mem_type=1 device={device}", thread)
    )
    return found


P5EN = [nic.name for nic in load("p5en.48xlarge").nics]
TRN2 = [nic.name for nic in load("trn2.48xlarge").nics]


def test_a_good_gpu_log(p5en: Box) -> None:
    lines = efa_agent(P5EN)
    lines.append(line("Accelerator-PCI 0:59:00.0 → [rdmap85s0-rdm, rdmap86s0-rdm]"))
    lines += device_memory("0000:59:00.0", {0: "rdmap85s0", 1: "rdmap86s0"})
    report = parse_log(lines)
    (agent,) = report.agents
    assert (agent.provider, agent.num_rails) == ("efa", 16)
    assert agent.rails[15] == "rdmap163s0"
    assert agent.accelerator_map == {"0000:59:00.0": ["rdmap85s0", "rdmap86s0"]}
    assert agent.registrations[0].nics == ["rdmap85s0", "rdmap86s0"]
    assert [check.verdict for check in compare_log(select(p5en), report)] == ["right", "right"]
    assert not report.troubles


def test_upper_case_and_old_spellings(p5en: Box) -> None:
    lines = efa_agent(P5EN)
    lines.append(
        "I0000 00:00:1762238119.117773    77 f.cpp:1] GPU-PCI 0:5A:00.0 -> [rdmap87s0-rdm]"
    )
    report = parse_log(lines)
    (check,) = compare_log(select(p5en), report)
    assert (check.verdict, check.pci_address) == ("subset", "0000:5a:00.0")


def test_fallback_to_all_devices(p5en: Box) -> None:
    lines = efa_agent(P5EN)
    lines.append(
        line(
            "PCI bus ID 0000:59:00.0 (normalized to 0:59:00.0) not found in accelerator-EFA "
            "mapping, returning all devices",
            letter="W",
        )
    )
    lines += device_memory("0000:59:00.0", dict(enumerate(P5EN)))
    report = parse_log(lines)
    assert checks(report) == ["R14"]
    (check,) = compare_log(select(p5en), report)
    assert check.verdict == "all_rails"
    assert check.is_bad


def test_half_of_the_rails_and_wrong_ones(p5en: Box) -> None:
    lines = efa_agent(P5EN)
    lines += device_memory("0000:59:00.0", {0: "rdmap85s0"})
    lines += device_memory("0000:5a:00.0", {0: "rdmap85s0", 1: "rdmap86s0"}, device=1)
    found = compare_log(select(p5en), parse_log(lines))
    assert [check.verdict for check in found] == ["subset", "wrong"]


@pytest.mark.parametrize(
    ("count", "verdict"), [(2, "unknown"), (1, "subset"), (16, "all_rails"), (3, "wrong")]
)
def test_counts_alone_at_level_info(p5en: Box, count: int, verdict: str) -> None:
    lines = [
        line("Creating rail manager with striping threshold: 131072 bytes"),
        line("Created 16 rails using provider=efa"),
        line(f"Registered memory on {count} rails, mem_type=1 device=0"),
    ]
    (check,) = compare_log(select(p5en), parse_log(lines))
    assert check.verdict == verdict


def test_a_good_neuron_log(trn2: Box) -> None:
    """NIXL prints the attached NIC's address; every worker calls its device 0."""
    lines = []
    for thread, nic in ((1, "c9"), (2, "b4")):
        name = f"rdmap{int(nic, 16)}s0"
        lines += efa_agent([name], thread)
        lines.append(line(f"Queried PCI bus ID: {nic}:00.0 for Neuron device 0", thread))
        lines += device_memory(f"0000:{nic}:00.0", {0: name}, thread=thread)
    found = compare_log(select(trn2), parse_log(lines))
    assert [check.verdict for check in found] == ["right", "right"]
    assert [check.pci_address for check in found] == ["0000:cc:00.0", "0000:b5:00.0"]


def test_a_failed_neuron_query_means_all_rails(trn2: Box) -> None:
    lines = efa_agent(TRN2)
    lines.append(line("Could not query EFA device from memory 0x7f00", letter="E"))
    lines.append(line("Failed to parse PCI bus ID format: , returning all devices", letter="W"))
    lines += device_memory("", dict(enumerate(TRN2)))
    report = parse_log(lines)
    assert checks(report) == ["R40", "R40"]
    (check,) = compare_log(select(trn2), report)
    assert check.verdict == "all_rails"


def test_tcp_fallback(p5en: Box) -> None:
    lines = [
        line("Discovered 1 tcp devices (TCP fallback)"),
        line("Created rail 0 (device=eth0, provider=tcp)"),
        line("Registered memory on rail 0 (mr=0x1, key=2)"),
        line("Registered memory on 1 rails, mem_type=0 device=0"),
    ]
    report = parse_log(lines)
    assert checks(report) == ["R01"]
    assert [check.verdict for check in compare_log(select(p5en), report)] == ["tcp"]


def test_host_memory_by_rail_numbers(p5en: Box) -> None:
    lines = efa_agent(P5EN)
    lines += [line(f"Registered memory on rail {rail} (mr=0x1, key=2)") for rail in range(4)]
    lines.append(line("Registered memory on 4 rails, mem_type=0 device=0"))
    (check,) = compare_log(select(p5en), parse_log(lines))
    assert (check.verdict, len(check.actual)) == ("right", 4)
    lines[-1] = line("Registered memory on 16 rails, mem_type=0 device=0")
    (check,) = compare_log(select(p5en), parse_log(lines))
    assert check.verdict == "wrong"


TROUBLES = {
    "No network devices found": "R01",
    "Memory type 1 is not supported by libfabric backend.": "R01",
    "Failed to load plugin from /x/libplugin_LIBFABRIC.so: libcuda.so.1: cannot open shared object "
    "file: No such file or directory": "R02",
    "createBackend: unsupported backend 'LIBFABRIC'": "R02",
    "Failed to load plugin from /x/libplugin_LIBFABRIC.so: /y/libfabric.so.1: version `FABRIC_1.10'"
    " not found (required by z)": "R03",
    "N Amazon EFA(s) were detected, but the UCX backend was configured.": "R10",
    "Topology-aware grouping failed, using fallback to use all available devices": "R14",
    "EFA device rdmap1s0-rdm not found in rail mapping for device PCI 0:59:00.0": "R14",
    "EFA device X maps to rail 9 but only 8 rails available": "R14",
    "No rails selected for memory type 1": "R14",
    "Mismatch between hwloc (16) and libfabric (2) EFA device counts": "R15",
    "Failed to set CUDA device": "R19",
    "Invalid max_bw_per_dram_seg configuration value 'x'": "R20",
    "Rail count mismatch (local: 16, remote: 8)": "R21",
    "Deserialization of tag dest_data_ep_9 failed": "R21",
    "Failed to create rails: Bad file descriptor": "R22",
    "fi_enable failed for rail 0: Bad file descriptor": "R22",
    "Handshake from peer 'B' not received after 60s; connection cannot be established.": "R23",
    "Inconsistent support status detected on unsolicited write recv.": "R26",
    "VRAM memory requested but provider does not support FI_HMEM - falling back to system memory "
    "registration": "R28",
    "fi_mr_reg failed on rail 3: Cannot allocate memory (buffer=0x1, length=2)": "R31",
    "Cannot add agent 'x': agent index 256 exceeds 8-bit wire limit (255)": "R33",
    "Could not resolve libnrt symbol: nrt_get_attached_efa_bdf": "R40",
    "Failed to parse PCI bus ID format: xyz, returning all devices": "R40",
    "Could not find hwloc object for PCIe address: 0:59:00.0": "R43",
    "Using default (all) rail selection policy for DRAM memory type due to previous errors": "R45",
    "CQ read failed on rail 3 with error: x prov_errno: 4126 len: 1": "R51",
    "Your process called fork() while EFA was in use; set FI_EFA_FORK_SAFE": "R30",
}


@pytest.mark.parametrize("text", TROUBLES)
def test_every_alarming_line(text: str) -> None:
    report = parse_log([line("all is well"), line(text, letter="W"), line(text, letter="E")])
    (trouble,) = report.troubles
    assert (trouble.check, trouble.count, trouble.first_line) == (TROUBLES[text], 2, 2)
    assert trouble.meaning
    assert trouble.mend


def test_every_pattern_has_an_example() -> None:
    from neuron_push.rails.log_patterns import PATTERNS

    texts = [
        *TROUBLES,
        "Discovered 1 tcp devices (TCP fallback)",
        "PCI bus ID 1 not found in accelerator-EFA mapping, returning all devices",
    ]
    for pattern in PATTERNS:
        assert any(pattern.text.search(text) for text in texts), pattern.text.pattern


@pytest.mark.parametrize(
    "text",
    [
        "fi_close fabric failed for rail 0: Device or resource busy",
        "fi_senddata still retrying EAGAIN on rail 0 after 200 attempts",
        "Using provider without FI_HMEM support for rail 0",
    ],
)
def test_noise_is_no_trouble(text: str) -> None:
    assert not parse_log([line(text, letter="W")]).troubles


def test_lines_behind_other_prefixes_and_several_workers(p5en: Box) -> None:
    """kubectl, ray and vLLM put names before a line; workers interleave."""
    one = ["[pod/a] " + text for text in efa_agent(P5EN, 7)]
    two = ["(Worker_TP1 pid=12) " + text for text in efa_agent(P5EN, 7)]
    mixed = [text for pair in zip(one, two, strict=True) for text in pair]
    mixed += ["[pod/a] " + t for t in device_memory("0000:59:00.0", {0: P5EN[0], 1: P5EN[1]}, 0, 7)]
    mixed += [
        "(Worker_TP1 pid=12) " + t
        for t in device_memory("0000:5a:00.0", {2: P5EN[2], 3: P5EN[3]}, 1, 7)
    ]
    report = parse_log(mixed)
    assert len(report.agents) == 2
    assert [len(agent.registrations) for agent in report.agents] == [1, 1]
    assert {check.verdict for check in compare_log(select(p5en), report)} == {"right"}


def test_memory_registered_by_another_thread(p5en: Box) -> None:
    lines = efa_agent(P5EN, thread=1) + device_memory(
        "0000:59:00.0", {0: P5EN[0], 1: P5EN[1]}, thread=2
    )
    assert len(parse_log(lines).agents) == 1


def test_second_agent_without_a_rail_manager_line() -> None:
    lines = [
        line("Created rail 0 (device=a, provider=efa)"),
        line("Created rail 0 (device=a, provider=efa)"),
    ]
    assert len(parse_log(lines).agents) == 2


def test_garbage_is_survived(tmp_path: Path) -> None:
    source = random.Random(7)
    letters = string.printable + "→é\x00\x1b"
    lines = ["".join(source.choices(letters, k=source.randrange(200))) for _ in range(500)]
    lines += [
        line("Created rail x (device=,provider"),
        line("Registered memory on  rails"),
        line("Accelerator-PCI zz → [a]"),
        line("x" * 100_000),
    ]
    path = tmp_path / "server.log"
    path.write_bytes("\n".join(lines).encode() + b"\xff\xfe\x80")
    report = read_log(path)
    assert report.num_lines >= 500
    assert not report.agents or not report.agents[0].accelerator_map


def test_log_that_is_absent(tmp_path: Path) -> None:
    with pytest.raises(RailsError, match="cannot be read"):
        read_log(tmp_path / "absent.log")


@needs_samples
def test_real_log_on_tcp() -> None:
    report = read_log(SHARED / "nixl-1.4.1-libfabric-tcp-debug.log")
    assert report.nixl_version == "1.4.1"
    assert len(report.agents) == 2
    assert {agent.provider for agent in report.agents} == {"tcp"}
    assert sum(len(agent.registrations) for agent in report.agents) == 2
    assert checks(report) == ["R01"]
    assert report.troubles[0].count == 2


@needs_samples
def test_real_log_of_a_plugin_that_does_not_load() -> None:
    report = read_log(SHARED / "nixl-1.5.1-plugin-load-failure.log")
    assert checks(report) == ["R03", "R02"]
    assert "FABRIC_1.10" in report.troubles[0].example


@needs_samples
def test_real_python_log_has_no_agent() -> None:
    assert not read_log(SHARED / "nixl-1.4.1-python-logger.log").agents
