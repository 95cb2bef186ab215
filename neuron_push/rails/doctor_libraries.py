"""Checks of software: NIXL, its plugin, libfabric, verbs libraries, versions."""

from __future__ import annotations

from collections.abc import Iterator

from .doctor_base import Check, Finding, Situation, some, version_tuple
from .environment import kernel_numbers
from .model import Host

HOW_TO_GET = {
    "libfabric.so": "install libfabric 1.21 or newer with EFA: the EFA installer puts it into "
    "/opt/amazon/efa/lib, then export LD_LIBRARY_PATH=/opt/amazon/efa/lib:$LD_LIBRARY_PATH",
    "libhwloc.so": "sudo apt-get install libhwloc15 (or: sudo dnf install hwloc-libs)",
    "libcudart.so": "pip install nvidia-cuda-runtime and add its lib directory to LD_LIBRARY_PATH, "
    "on a host without GPU as well, because the plugin links against it",
    "libcuda.so": "install the NVIDIA driver; on a host without GPU put a stub libcuda.so.1 "
    "(cuda-compat or the toolkit's stubs directory) into LD_LIBRARY_PATH",
    "libnrt.so": "sudo apt-get install aws-neuronx-runtime-lib, and add /opt/aws/neuron/lib to "
    "LD_LIBRARY_PATH",
}


def nixl_present(situation: Situation) -> Iterator[Finding]:
    host = situation.selection.box.host
    if host.nixl_versions or not _was_asked(host):
        return
    yield Finding(
        "D07",
        "fail",
        "NIXL is not installed in this Python",
        "nothing can be transferred",
        "pip install 'nixl>=1.4.1' into the environment that runs the server",
    )


def _was_asked(host: Host) -> bool:
    """Whether libraries were looked for at all: a box of topology alone says nothing about them."""
    return bool(host.libraries or host.plugins or host.nixl_versions)


def plugin_libraries(situation: Situation) -> Iterator[Finding]:
    host = situation.selection.box.host
    if any(plugin.loads for plugin in host.plugins):
        return
    lacking = [library for library in host.libraries if not library.found]
    for library in lacking:
        stem = library.name.split(".so")[0] + ".so"
        users = sorted(
            {plugin.distribution for plugin in host.plugins if library.name in plugin.needed}
        )
        needed_by = f", which the plugin of {some(users)} needs" if users else ""
        yield Finding(
            "R02",
            "fail",
            f"{library.name} cannot be loaded{needed_by}",
            "NIXL then says no more than: unsupported backend 'LIBFABRIC'",
            HOW_TO_GET.get(stem, f"install the package that brings {library.name}"),
        )
    for plugin in host.plugins:
        is_version = "version `FABRIC" in (plugin.load_error or "")  # a check of its own tells
        if plugin.load_error and not lacking and not is_version:
            yield Finding(
                "R02",
                "fail",
                f"the plugin of {plugin.distribution} does not load: {plugin.load_error}",
                "NIXL then says no more than: unsupported backend 'LIBFABRIC'",
                "mend what the loader names",
            )


def symbol_versions(situation: Situation) -> Iterator[Finding]:
    host = situation.selection.box.host
    libfabric = next((one for one in host.libraries if one.name == "libfabric.so.1"), None)
    if libfabric is None or not libfabric.versions:
        return
    for plugin in host.plugins:
        wanted = [one.split(":", 1)[1] for one in plugin.needed_versions if "libfabric" in one]
        lacking = [one for one in wanted if one not in libfabric.versions]
        if lacking:
            newest = max(libfabric.versions, key=lambda text: version_tuple(text[7:]) or ())
            yield Finding(
                "R03",
                "fail",
                f"{plugin.distribution} {plugin.version} wants {some(lacking)} of libfabric; "
                f"{libfabric.path} offers up to {newest}",
                "the plugin does not load: unsupported backend 'LIBFABRIC'",
                "install a newer libfabric, or an older NIXL: 1.4.1 is content with FABRIC_1.7 "
                "(libfabric 1.21 and newer)",
            )


def libfabric_version(situation: Situation) -> Iterator[Finding]:
    box = situation.selection.box
    version = version_tuple(box.host.libfabric_version)
    if version is None:
        return
    text = box.host.libfabric_version
    if version[:2] == (1, 21) and situation.selection.choices:
        yield Finding(
            "R36",
            "fail",
            f"libfabric {text} is loaded",
            "1.21 crashes on device memory",
            "install libfabric 1.22 or newer",
        )
    grace = any(device.device_id == 0x2941 for device in box.pci if device.vendor_id == 0x10DE)
    if grace and version < (2, 5):
        yield Finding(
            "R34",
            "fail",
            f"libfabric {text} with GB200 GPUs",
            "registration of GPU memory by dma-buf fails with 'Bad address'",
            "install libfabric 2.5.1 or newer",
        )
    if "FI_EFA_IFACE" in box.env and version < (2, 0):
        yield Finding(
            "R20",
            "warn",
            f"FI_EFA_IFACE is set, and libfabric {text} may not know it",
            "it came with libfabric 2.0: an older one uses every NIC",
            "install libfabric 2.0 or newer",
        )


def providers(situation: Situation) -> Iterator[Finding]:
    host = situation.selection.box.host
    if host.libfabric_providers is None or "efa" in host.libfabric_providers:
        return
    path = next((one.path for one in host.libraries if one.name == "libfabric.so.1"), "libfabric")
    yield Finding(
        "R05",
        "fail",
        f"{path} has no EFA provider",
        "NIXL then uses TCP, silently; with FI_PROVIDER=efa it fails",
        "use the libfabric of the EFA installer: "
        "export LD_LIBRARY_PATH=/opt/amazon/efa/lib:$LD_LIBRARY_PATH, then check with: "
        "fi_info -p efa -t FI_EP_RDM",
    )


def copies(situation: Situation) -> Iterator[Finding]:
    host = situation.selection.box.host
    found = host.libfabric_copies
    if len(found) > 1:
        yield Finding(
            "R04",
            "warn",
            f"several copies of libfabric: {some(list(found))}; the first is loaded",
            "a process that picks another, or two at once, misses EFA or device memory",
            "put the wanted directory first in LD_LIBRARY_PATH and remove the others",
        )
    first = found[0] if found else ""
    if len(found) > 1 and "/opt/amazon/efa" not in first:
        others = [path for path in found[1:] if "/opt/amazon/efa" in path]
        if others:
            yield Finding(
                "R09",
                "warn",
                f"{first} is loaded although the EFA installer's {others[0]} exists",
                "an image's or distribution's library shadows the one built for EFA",
                "export LD_LIBRARY_PATH=/opt/amazon/efa/lib:$LD_LIBRARY_PATH",
            )


def verbs_abi(situation: Situation) -> Iterator[Finding]:
    host = situation.selection.box.host
    if host.verbs_abi and host.efa_verbs_abi and host.verbs_abi != host.efa_verbs_abi:
        yield Finding(
            "R06",
            "fail",
            f"libibverbs has ABI {host.verbs_abi} and its EFA driver ABI {host.efa_verbs_abi}",
            "libibverbs ignores the driver, so libfabric finds no EFA",
            "install both from one rdma-core (the EFA installer's)",
        )


def nixl_version(situation: Situation) -> Iterator[Finding]:
    selection = situation.selection
    kinds = {choice.kind for choice in selection.choices}
    for name, text in selection.box.host.nixl_versions.items():
        version = version_tuple(text)
        if version is None:
            continue
        if version < (0, 9) and "cuda" in kinds:
            yield Finding(
                "R18",
                "fail",
                f"{name} {text} knows GPUs by number, not by PCI address",
                "with CUDA_VISIBLE_DEVICES it takes another GPU's NICs",
                "pip install -U 'nixl>=1.4.1'",
            )
        elif version < (0, 10) and "neuron" in kinds:
            yield Finding(
                "R18",
                "fail",
                f"{name} {text} does not know Neuron devices",
                "it registers no device memory on Trainium",
                "pip install -U 'nixl>=1.3.2'",
            )
        if version >= (1, 2) and name == next(iter(selection.box.host.nixl_versions)):
            yield Finding(
                "R39",
                "info",
                f"{name} {text} posts small WRITEs in batches",
                "descriptors below 128 KiB have been seen to hang (an open issue of NIXL)",
                "prefer KV layouts whose runs of blocks reach 128 KiB",
            )


def fork_safety(situation: Situation) -> Iterator[Finding]:
    box = situation.selection.box
    kernel = kernel_numbers(box.host.kernel)
    safe = any(
        box.env.get(name, "0") not in ("0", "")
        for name in ("FI_EFA_FORK_SAFE", "RDMAV_FORK_SAFE", "IBV_FORK_SAFE")
    )
    if kernel is not None and kernel < (5, 15) and box.nics and not safe:
        yield Finding(
            "R30",
            "warn",
            f"kernel {box.host.kernel} without FI_EFA_FORK_SAFE",
            "libfabric aborts, naming fork(), or memory is corrupted after a fork",
            "export FI_EFA_FORK_SAFE=1, or use kernel 5.15 or newer",
        )


CHECKS: tuple[Check, ...] = (
    plugin_libraries,
    symbol_versions,
    providers,
    libfabric_version,
    copies,
    verbs_abi,
    nixl_present,
    nixl_version,
    fork_safety,
)
