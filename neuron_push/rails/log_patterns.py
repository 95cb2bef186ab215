"""Lines of NIXL's log that mean trouble, what they mean, and what mends it.

Texts are matched, never line numbers or the level letter: DEBUG lines carry the letter I as well.
`check` names the doctor's check of the same trouble.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Pattern(NamedTuple):
    check: str
    level: str
    """fail or warn."""
    text: re.Pattern[str]
    meaning: str
    mend: str


def _pattern(check: str, level: str, text: str, meaning: str, mend: str) -> Pattern:
    return Pattern(check, level, re.compile(text), meaning, mend)


PATTERNS = (
    _pattern(
        "R01",
        "fail",
        r"Discovered \d+ (?:tcp|sockets) devices \(TCP fallback\)",
        "NIXL saw no EFA device and fell back to TCP without an error",
        "give the process /dev/infiniband and set FI_PROVIDER=efa, which turns this into an error",
    ),
    _pattern(
        "R01",
        "fail",
        r"No network devices found|no suitable network providers found",
        "libfabric offered no provider at all",
        "run `fi_info -p efa`; install the EFA driver and libfabric, or unset FI_PROVIDER",
    ),
    _pattern(
        "R01",
        "fail",
        r"Memory type 1 is not supported by libfabric backend",
        "device memory cannot be registered: NIXL runs on TCP or found no accelerator",
        "mend the TCP fallback first; unset HWLOC_COMPONENTS if it hides PCI devices",
    ),
    _pattern(
        "R02",
        "fail",
        r"Failed to load plugin from \S+LIBFABRIC\S*: .*(?:cannot open shared object)",
        "a library that NIXL's plugin needs is missing",
        "install the library named in the line, or add its directory to LD_LIBRARY_PATH",
    ),
    _pattern(
        "R03",
        "fail",
        r"Failed to load plugin from \S+LIBFABRIC\S*: .*version `(\S+)' not found",
        "libfabric is older than the one NIXL was built against",
        "install a libfabric that defines this symbol version, or an older NIXL",
    ),
    _pattern(
        "R02",
        "fail",
        r"createBackend: unsupported backend 'LIBFABRIC'",
        "the LIBFABRIC plugin did not load; the cause stands in an INFO line above",
        "set NIXL_LOG_LEVEL=INFO to see it, or run `neuron-push doctor`",
    ),
    _pattern(
        "R14",
        "fail",
        r"PCI bus ID (\S*).*not found in accelerator-EFA mapping, returning all",
        "the device is in no share of NIXL's map, so its memory goes over every NIC",
        "give the container every EFA of the host, or the NICs nearest to its device",
    ),
    _pattern(
        "R40",
        "fail",
        r"Failed to parse PCI bus ID format: (.*), returning all devices",
        "NIXL did not learn which NIC the memory belongs to, so it uses every NIC",
        "on Neuron: SDK 2.29 or newer, and NEURON_RT_MAP_HBM on before the first tensor",
    ),
    _pattern(
        "R14",
        "fail",
        r"Topology-aware grouping failed|accelerators will use all available EFA",
        "NIXL found no NIC in the PCI tree, so every device uses every NIC",
        "mount /sys into the container; check HWLOC_XMLFILE and HWLOC_COMPONENTS",
    ),
    _pattern(
        "R43",
        "warn",
        r"Could not find hwloc object for PCIe address: (\S+)",
        "a NIC is missing from the PCI tree, so it takes no part in the choice of rails",
        "check HWLOC_XMLFILE, or mount the host's /sys",
    ),
    _pattern(
        "R14",
        "fail",
        r"EFA device \S+ not found in rail mapping|but only \d+ rails available",
        "a NIC of the device could not be opened, so it was left out",
        "check the NIC with `neuron-push doctor`",
    ),
    _pattern(
        "R14",
        "fail",
        r"No valid rail mapping found|No rails selected for memory type",
        "no NIC is left for the device, so registration fails",
        "check FI_EFA_IFACE and the container's NICs",
    ),
    _pattern(
        "R31",
        "fail",
        r"fi_mr_reg failed on rail \d+|Failed to register memory on rail \d+",
        "the NIC refused to register memory",
        "raise the memlock limit, use huge pages or smaller regions; see `neuron-push doctor`",
    ),
    _pattern(
        "R22",
        "fail",
        r"Failed to create rails|fi_(?:enable|domain|endpoint) failed for rail \d+",
        "one NIC could not be opened, and NIXL gives up the whole backend for it",
        "leave that NIC out with FI_EFA_IFACE",
    ),
    _pattern(
        "R28",
        "fail",
        r"VRAM memory requested but provider does not support FI_HMEM",
        "device memory is registered as host memory: libfabric cannot reach the device",
        "use the vendor's libfabric build; load nvidia-peermem or enable dma-buf",
    ),
    _pattern(
        "R21",
        "warn",
        r"Rail count mismatch \(local: \d+, remote: \d+\)",
        "the two ends have different numbers of NICs",
        "give both ends the same set of NICs",
    ),
    _pattern(
        "R21",
        "fail",
        r"Deserialization of tag dest_data_ep_\d+ failed",
        "the two ends have different numbers of NICs, and this NIXL cannot bear it",
        "give both ends the same set of NICs, or use NIXL 1.1 or newer",
    ),
    _pattern(
        "R23",
        "fail",
        r"Handshake from peer '.*' not received after",
        "the peer's first packet never came over EFA",
        "let the security group allow all protocols to and from itself, egress included; "
        "put both hosts into one subnet",
    ),
    _pattern(
        "R40",
        "fail",
        r"Could not resolve libnrt symbol|Could not query EFA device from memory",
        "the Neuron runtime did not tell the attached NIC, so NIXL uses every NIC",
        "Neuron SDK 2.29 or newer, /opt/aws/neuron/lib in the loader path, NEURON_RT_MAP_HBM on",
    ),
    _pattern(
        "R10",
        "fail",
        r"Amazon EFA\(s\) were detected, but the UCX backend was configured",
        "UCX does not use EFA well: hundreds of times slower than LIBFABRIC",
        "set the backend to LIBFABRIC",
    ),
    _pattern(
        "R20",
        "warn",
        r"Invalid \S+ configuration value",
        "a NIXL setting was not understood and its default is used",
        "correct the value",
    ),
    _pattern(
        "R45",
        "warn",
        r"Using default \(all\) rail selection policy.*previous errors"
        r"|Failed to load DRAM_SEG rail selection policy",
        "host memory goes over every NIC, near or far",
        "nothing, if KV lives on the device; else limit the NICs with FI_EFA_IFACE",
    ),
    _pattern(
        "R51",
        "fail",
        r"CQ read failed on rail \d+|fi_(?:writedata|read|senddata) failed on rail"
        r"|Transfer completed with CQ error|post failed .* on rail",
        "a transfer failed on the NIC",
        "look at `neuron-push rails watch` for retransmissions and an unresponsive peer",
    ),
    _pattern(
        "R19",
        "fail",
        r"Failed to set CUDA device|Failed to query device from memory",
        "memory was registered under a wrong device number",
        "register with the process-local number of the tensor's device",
    ),
    _pattern(
        "R33",
        "fail",
        r"exceeds 8-bit wire limit",
        "one NIXL agent knows at most 256 agents, itself included",
        "spread the load over more processes",
    ),
    _pattern(
        "R15",
        "warn",
        r"Mismatch between hwloc \((\d+)\) and libfabric \((\d+)\) EFA device counts",
        "some of the host's NICs are hidden from this process",
        "request all EFA devices for the container",
    ),
    _pattern(
        "R26",
        "fail",
        r"Inconsistent support status detected on unsolicited write recv",
        "the two ends differ in unsolicited write receive, so libfabric emulates every WRITE",
        "set FI_EFA_USE_UNSOLICITED_WRITE_RECV=0 on both ends",
    ),
    _pattern(
        "R30",
        "fail",
        r"fork\(\).*(?:EFA|libfabric|rdma)|FI_EFA_FORK_SAFE",
        "this kernel needs fork-safe mode for EFA",
        "set FI_EFA_FORK_SAFE=1",
    ),
)

# Every pattern's lines hold one of these: a cheap test before the expensive ones.
ALARM_WORDS = (
    "rail",
    "Rail count",
    "FI_HMEM",
    "EFA",
    "FABRIC",
    "fabric",
    "fallback",
    "returning all",
    "network",
    "hwloc",
    "libnrt",
    "grouping failed",
    "CUDA device",
    "from memory",
    "configuration value",
    "wire limit",
    "dest_data_ep_",
    "Handshake from",
    "CQ error",
    "unsolicited",
    "fork()",
)
