"""Checks of the environment: settings that abort, mislead, or do nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .discover_hwloc import box_from_hwloc_xml
from .doctor_base import Check, Finding, Situation, some
from .errors import RailsError
from .nixl_rule import visible_efa

KNOWN_NIXL_VARIABLES = frozenset(
    {
        "NIXL_LIBFABRIC_MAX_BW_PER_DRAM_SEG",
        "NIXL_LIBFABRIC_NUM_THREADS",
        "NIXL_LIBFABRIC_SPLIT_BATCH_SIZE",
        "NIXL_LIBFABRIC_POST_QUEUE_SIZE",
    }
)
LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARN", "ERROR", "FATAL")
REMOVED = ("FI_EFA_MTU_SIZE", "FI_EFA_TX_IOV_LIMIT", "FI_EFA_RX_IOV_LIMIT")
IGNORED = ("FI_EFA_SET_CUDA_SYNC_MEMOPS", "FI_EFA_SHM_MAX_MEDIUM_SIZE", "FI_EFA_ZCPY_RX_SEED")
OFF = ("0", "false", "no", "off")


def is_off(env: Mapping[str, str], name: str) -> bool:
    """Whether a variable is set and means no."""
    return env.get(name, "1").strip().lower() in OFF


def aborting(situation: Situation) -> Iterator[Finding]:
    env = situation.selection.box.env
    for name in REMOVED:
        if name in env:
            yield Finding(
                "R29",
                "fail",
                f"{name} is set",
                "libfabric has removed it and aborts the process when it is there",
                f"unset {name}",
            )
    if env.get("FI_EFA_IFACE") == "":
        yield Finding(
            "R29",
            "fail",
            "FI_EFA_IFACE is set and empty",
            "libfabric aborts the process",
            "unset FI_EFA_IFACE, or name NICs (neuron-push rails env --device N)",
        )
    credits = env.get("FI_EFA_TX_MIN_CREDITS", "1")
    if not credits.isdigit() or int(credits) <= 0:
        yield Finding(
            "R29",
            "fail",
            f"FI_EFA_TX_MIN_CREDITS is {credits!r}",
            "libfabric aborts the process",
            "unset FI_EFA_TX_MIN_CREDITS",
        )
    fork_safe = [n for n in ("FI_EFA_FORK_SAFE", "RDMAV_FORK_SAFE", "IBV_FORK_SAFE") if n in env]
    if "FI_EFA_USE_HUGE_PAGE" in env and not is_off(env, "FI_EFA_USE_HUGE_PAGE") and fork_safe:
        yield Finding(
            "R29",
            "fail",
            f"FI_EFA_USE_HUGE_PAGE and {fork_safe[0]} are both set",
            "libfabric aborts: huge pages and fork-safe mode exclude each other",
            "unset FI_EFA_USE_HUGE_PAGE",
        )
    if env.get("FI_TCP_IFACE") == "lo":
        yield Finding(
            "R49",
            "warn",
            "FI_TCP_IFACE is lo",
            "LIBFABRIC over TCP fails on it with 'Bad file descriptor'",
            "export FI_TCP_IFACE=eth0, or another interface with an address",
        )


def unknown_names(situation: Situation) -> Iterator[Finding]:
    env = situation.selection.box.env
    strangers = [
        name
        for name in env
        if name.startswith("NIXL_LIBFABRIC_") and name not in KNOWN_NIXL_VARIABLES
    ]
    if strangers:
        yield Finding(
            "R20",
            "warn",
            f"NIXL does not know {some(strangers)}",
            "the setting has no effect, and the number of rails stays as it was",
            "limit NICs with FI_EFA_IFACE; unset these",
        )
    ignored = [name for name in IGNORED if name in env]
    if ignored:
        yield Finding(
            "R20",
            "info",
            f"libfabric ignores {some(ignored)}",
            "the setting has no effect",
            "unset " + " ".join(ignored),
        )
    names = {nic.name for nic in situation.selection.box.nics}
    wanted = env.get("FI_EFA_IFACE", "")
    if wanted and names and not wanted.startswith("all"):
        lost = [name for name in wanted.split(",") if name not in names]
        if lost:
            yield Finding(
                "R20",
                "fail",
                f"FI_EFA_IFACE names {some(lost)}, which is no NIC of this host",
                "libfabric leaves it out; with none left NIXL falls back to TCP",
                "names change between boots: take them from neuron-push rails env --device N",
            )
    level = env.get("NIXL_LOG_LEVEL")
    if level is not None and level.upper() not in LOG_LEVELS:
        yield Finding(
            "R20",
            "info",
            f"NIXL_LOG_LEVEL is {level!r}",
            "NIXL does not know it and uses WARN",
            "one of " + ", ".join(LOG_LEVELS),
        )


def provider(situation: Situation) -> Iterator[Finding]:
    selection = situation.selection
    env = selection.box.env
    value = env.get("FI_PROVIDER")
    if not visible_efa(selection.box):
        return
    if value is None:
        yield Finding(
            "D08",
            "info",
            "FI_PROVIDER is not set",
            "should EFA vanish from a process, NIXL would go on over TCP without a word",
            "export FI_PROVIDER=efa (the connector does it by itself)",
        )
    elif "efa" not in value or value.startswith("^efa"):
        yield Finding(
            "R01",
            "fail",
            f"FI_PROVIDER is {value!r}",
            "it keeps EFA from being used",
            "export FI_PROVIDER=efa",
        )


def write_path(situation: Situation) -> Iterator[Finding]:
    selection = situation.selection
    env = selection.box.env
    if not visible_efa(selection.box):
        return
    if not is_off(env, "FI_EFA_USE_UNSOLICITED_WRITE_RECV"):
        yield Finding(
            "R26",
            "warn",
            "FI_EFA_USE_UNSOLICITED_WRITE_RECV is not 0",
            "NIXL builds differ in it, and where two ends differ libfabric quietly emulates every "
            "WRITE with sends",
            "export FI_EFA_USE_UNSOLICITED_WRITE_RECV=0 on both ends (the connector does it)",
        )
    if "FI_EFA_USE_DEVICE_RDMA" in env:
        has_write = selection.entry.nics.rdma_write if selection.entry is not None else None
        if is_off(env, "FI_EFA_USE_DEVICE_RDMA"):
            yield Finding(
                "D09",
                "warn",
                "FI_EFA_USE_DEVICE_RDMA is off",
                "every WRITE is emulated",
                "export FI_EFA_USE_DEVICE_RDMA=1",
            )
        elif has_write is False:
            yield Finding(
                "R29",
                "fail",
                "FI_EFA_USE_DEVICE_RDMA is on, and the NICs cannot write",
                "libfabric aborts on hardware without RDMA",
                "unset FI_EFA_USE_DEVICE_RDMA",
            )


def neuron(situation: Situation) -> Iterator[Finding]:
    selection = situation.selection
    env = selection.box.env
    if not any(choice.kind == "neuron" for choice in selection.choices):
        return
    if is_off(env, "NEURON_RT_MAP_HBM"):
        yield Finding(
            "D10",
            "fail",
            "NEURON_RT_MAP_HBM is off",
            "device tensors have no address then, and none can be registered",
            "export NEURON_RT_MAP_HBM=1 before the first device tensor",
        )
    elif "NEURON_RT_MAP_HBM" not in env:
        yield Finding(
            "D10",
            "info",
            "NEURON_RT_MAP_HBM is not set in this shell",
            "it must be on before the first device tensor; the vLLM plugin for Neuron sets it",
            "export NEURON_RT_MAP_HBM=1 where you start anything else",
        )
    if "FI_EFA_ENABLE_SHM_TRANSFER" in env and not is_off(env, "FI_EFA_ENABLE_SHM_TRANSFER"):
        yield Finding(
            "D11",
            "fail",
            "FI_EFA_ENABLE_SHM_TRANSFER is on",
            "libfabric's shared memory path does not know Neuron memory: wrong output or a hang",
            "export FI_EFA_ENABLE_SHM_TRANSFER=0",
        )
    if env.get("FI_HMEM_DISABLE_P2P", "0") not in OFF:
        yield Finding(
            "D12",
            "fail",
            "FI_HMEM_DISABLE_P2P is on",
            "it switches Neuron memory off altogether",
            "unset FI_HMEM_DISABLE_P2P",
        )


def hwloc(situation: Situation) -> Iterator[Finding]:
    env = situation.selection.box.env
    if "HWLOC_XMLFILE" in env:
        level, words = _hwloc_file(situation)
        yield Finding(
            "R48",
            level,
            f"HWLOC_XMLFILE is set to {env['HWLOC_XMLFILE']}{words}",
            "NIXL takes the topology from that file, and a wrong one misleads it",
            "unset HWLOC_XMLFILE, or make the file anew: neuron-push rails env --device N "
            "--write-hwloc FILE",
        )
    if "-pci" in env.get("HWLOC_COMPONENTS", ""):
        yield Finding(
            "R48",
            "fail",
            "HWLOC_COMPONENTS hides PCI devices",
            "NIXL finds no accelerator, so device memory cannot be registered",
            "unset HWLOC_COMPONENTS",
        )


def _hwloc_file(situation: Situation) -> tuple[str, str]:
    """How bad a file of topology is, and what is wrong with it."""
    raw = situation.hwloc_xml
    if raw is None:
        return "warn", ""
    if not raw:
        return "fail", ", which cannot be read"
    if b"<!--" in raw.split(b"<!DOCTYPE")[0]:
        return "fail", ", which has a comment before its DOCTYPE: hwloc's own reader refuses it"
    try:
        told = {nic.pci_address for nic in box_from_hwloc_xml(raw, "it").nics}
    except RailsError as error:
        return "fail", f", and {error}"
    here = {nic.pci_address for nic in situation.selection.box.nics}
    if not here <= told:
        return "fail", f", which lacks {some(sorted(here - told))}"
    return "info", ""


def ucx(situation: Situation) -> Iterator[Finding]:
    selection = situation.selection
    box = selection.box
    if box.nics and not visible_efa(box) and "UCX_NET_DEVICES" not in box.env:
        yield Finding(
            "R12",
            "warn",
            "UCX_NET_DEVICES is not set",
            "UCX picks NICs by its own rules, and may take a far or virtual one",
            'eval "$(neuron-push rails env --device N)" in each worker, with the UCX backend',
        )


def allocator(situation: Situation) -> Iterator[Finding]:
    env = situation.selection.box.env
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in env.get(name, "").lower():
            yield Finding(
                "R35",
                "warn",
                f"{name} asks for expandable segments",
                "such memory cannot be reached by RDMA in many driver versions: EINVAL",
                f"unset {name}, or keep KV out of it",
            )


CHECKS: tuple[Check, ...] = (
    aborting,
    provider,
    write_path,
    neuron,
    unknown_names,
    hwloc,
    ucx,
    allocator,
)
