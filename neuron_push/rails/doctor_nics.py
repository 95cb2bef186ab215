"""Checks of the hardware: NICs, accelerators, drivers, device nodes."""

from __future__ import annotations

from collections.abc import Iterator

from .doctor_base import Check, Finding, Situation, some
from .model import nic_is_efa

EFA_INSTALLER = (
    "curl -O https://efa-installer.amazonaws.com/aws-efa-installer-latest.tar.gz && "
    "tar xf aws-efa-installer-latest.tar.gz && cd aws-efa-installer && sudo ./efa_installer.sh -y"
)
IN_CONTAINER = "in a container: request the EFA devices (vpc.amazonaws.com/efa) of the whole host"


def can_look(situation: Situation) -> Iterator[Finding]:
    box = situation.selection.box
    if not box.pci and box.gaps:
        yield Finding(
            "D01",
            "unknown",
            box.gaps[0],
            "without /sys neither NICs nor devices can be seen, and NIXL cannot see them either",
            "mount /sys into the container (docker: -v /sys:/sys:ro), or run this on the host",
        )
        return
    for gap in box.gaps:
        yield Finding(
            "D01",
            "warn",
            gap,
            "what was read around it may be incomplete",
            "run as root, or on the host itself",
        )
    if box.host.container == "gvisor":
        yield Finding(
            "D01",
            "unknown",
            "this is a gVisor sandbox, which shows a /sys of its own",
            "NICs may exist that cannot be seen from here",
            "run this on the host, or without gVisor",
        )


def nic_count(situation: Situation) -> Iterator[Finding]:
    box, entry = situation.selection.box, situation.selection.entry
    efa = [device for device in box.pci if device.is_efa]
    if entry is not None and entry.nics.count == 0:
        yield Finding(
            "R16",
            "fail",
            f"{entry.instance_type} has no NIC that reaches device memory",
            "registration of device memory fails there, and KV cannot leave the device by RDMA",
            "use an instance type with EFA, such as trn2.48xlarge, or KV in host memory over TCP",
        )
    elif not efa and not any(nic.openable is not False for nic in box.nics):
        where = f" on this {box.instance_type}" if box.instance_type else ""
        yield Finding(
            "R16",
            "fail",
            f"no EFA device is on the PCI bus{where}",
            "NIXL's LIBFABRIC backend falls back to TCP silently: 3 to 100 times slower",
            "launch the instance with EFA network interfaces (InterfaceType=efa, one per network "
            "card), on an instance type that has them",
        )
    elif entry is not None and len(efa) < entry.nics.count:
        yield Finding(
            "R16",
            "fail",
            f"{len(efa)} of the {entry.nics.count} EFA devices of {entry.instance_type} are there",
            "each missing NIC takes its share of bandwidth from the devices near it",
            "add the missing network cards to the launch template (NetworkCardIndex 0 to "
            f"{entry.nics.count - 1}); the default launch attaches one",
        )


def other_nics(situation: Situation) -> Iterator[Finding]:
    box = situation.selection.box
    devices = box.pci_by_address()
    others = [nic for nic in box.nics if not nic_is_efa(nic, devices.get(nic.pci_address))]
    if not others or len(others) == len(box.nics):
        return
    yield Finding(
        "R17",
        "info",
        f"{some([nic.name for nic in others])} are RDMA devices but no EFA",
        "device plugins before 0.5.10 count them as EFA, and pods then ask for too many",
        "nothing on the host; on Kubernetes use the EFA device plugin 0.5.10 or newer",
    )
    closed = [nic.name for nic in others if nic.openable is False]
    if closed:
        yield Finding(
            "R07",
            "warn",
            f"{some(closed)} cannot be opened by this process",
            "older libfabric gives up all of EFA when one RDMA device cannot be opened",
            "do not mount all of /dev/infiniband, only the EFA nodes; or use a newer libfabric",
        )


def driver(situation: Situation) -> Iterator[Finding]:
    box = situation.selection.box
    with_nic = {nic.pci_address for nic in box.nics}
    bare = [
        device.address for device in box.pci if device.is_efa and device.address not in with_nic
    ]
    modules = box.host.modules
    if bare:
        yield Finding(
            "D02",
            "fail",
            f"EFA devices without a driver: {some(bare)}",
            "libfabric sees RDMA devices, not PCI ones",
            f"sudo modprobe efa; if there is no such module: {EFA_INSTALLER}",
        )
    elif modules is not None and "efa" not in modules and not box.nics:
        yield Finding(
            "D02",
            "fail",
            "the efa kernel module is not loaded",
            "without it an EFA is no RDMA device",
            f"sudo modprobe efa; if there is no such module: {EFA_INSTALLER}",
        )


def open_nics(situation: Situation) -> Iterator[Finding]:
    box = situation.selection.box
    devices = box.pci_by_address()
    efa = [nic for nic in box.nics if nic_is_efa(nic, devices.get(nic.pci_address))]
    closed = [nic.name for nic in efa if nic.openable is False]
    nodes = box.host.device_nodes
    if efa and len(closed) == len(efa):
        yield Finding(
            "R01",
            "fail",
            "no EFA device can be opened by this process",
            "NIXL then falls back to TCP without an error",
            f"give the process /dev/infiniband (docker: --device /dev/infiniband/uverbs0 ...); "
            f"{IN_CONTAINER}; set FI_PROVIDER=efa to get an error instead of TCP",
        )
    elif closed:
        yield Finding(
            "R15",
            "warn",
            f"{len(closed)} of {len(efa)} EFA devices cannot be opened here: {some(closed)}",
            "NIXL deals the open NICs to all GPUs of the host, seen or not",
            IN_CONTAINER,
        )
    elif nodes is not None and not any(name.startswith("infiniband/") for name in nodes):
        yield Finding(
            "R01",
            "fail",
            "/dev/infiniband holds no device node",
            "libfabric opens NICs through /dev/infiniband/uverbs*",
            "sudo modprobe ib_uverbs; in a container give it the nodes of the host",
        )


def nics_down(situation: Situation) -> Iterator[Finding]:
    down = [
        f"{nic.name} ({nic.state})"
        for nic in situation.selection.box.nics
        if nic.state not in (None, "ACTIVE")
    ]
    if down:
        yield Finding(
            "R22",
            "fail",
            f"NICs that are not active: {some(down)}",
            "NIXL gives up its whole backend when one NIC fails to open",
            "detach and attach the network interface, or leave the NIC out with FI_EFA_IFACE",
        )


def device_memory_path(situation: Situation) -> Iterator[Finding]:
    box = situation.selection.box
    modules = box.host.modules
    kinds = {choice.kind for choice in situation.selection.choices if choice.process_index >= 0}
    told = [nic for nic in box.nics if nic.p2p is not None]
    if kinds and told and all(not nic.p2p for nic in told):
        yield Finding(
            "R27",
            "fail",
            "the EFA driver offers no path to device memory (its p2p file is empty)",
            "libfabric then copies through host memory or refuses the registration",
            f"{EFA_INSTALLER} (it builds the driver with GPU and Neuron support)",
        )
    if modules is None:
        return
    if "cuda" in kinds:
        yield from _nvidia(situation, modules)
    if "neuron" in kinds and "neuron" not in modules:
        yield Finding(
            "D03",
            "fail",
            "the neuron kernel module is not loaded",
            "no Neuron device can be used, and none can be registered",
            "sudo apt-get install aws-neuronx-dkms && sudo modprobe neuron",
        )


def _nvidia(situation: Situation, modules: tuple[str, ...]) -> Iterator[Finding]:
    from .environment import kernel_numbers

    box = situation.selection.box
    if "nvidia" not in modules:
        yield Finding(
            "D03",
            "fail",
            "the nvidia kernel module is not loaded",
            "no GPU can be used",
            "install the NVIDIA driver, then sudo modprobe nvidia",
        )
        return
    peermem = {"nvidia_peermem", "efa_nv_peermem", "nv_peer_mem"} & set(modules)
    kernel = kernel_numbers(box.host.kernel)
    has_dmabuf = kernel is not None and kernel >= (5, 12)
    if not peermem and not has_dmabuf and not any(nic.p2p for nic in box.nics):
        yield Finding(
            "R11",
            "fail",
            "neither nvidia-peermem is loaded nor does this kernel have dma-buf for RDMA (5.12)",
            "the NIC cannot reach GPU memory: hundreds of times slower, or refused",
            "sudo modprobe nvidia-peermem, or use kernel 5.12 or newer with the open GPU driver",
        )
    if "gdrdrv" not in modules:
        yield Finding(
            "D04",
            "info",
            "gdrcopy (gdrdrv) is not loaded",
            "small copies between host and GPU are slower; KV itself does not need it",
            "sudo modprobe gdrdrv after installing gdrcopy, if small messages matter",
        )


def device_nodes(situation: Situation) -> Iterator[Finding]:
    box = situation.selection.box
    nodes = box.host.device_nodes
    if nodes is None:
        return
    for kind, prefix in (("neuron", "neuron"), ("cuda", "nvidia")):
        has_device = any(one.kind == kind for one in box.accelerators)
        if has_device and not any(
            name.startswith(prefix) and name[len(prefix) :].isdigit() for name in nodes
        ):
            yield Finding(
                "D05",
                "fail",
                f"there is no /dev/{prefix}<N>",
                "this process can use none of the devices on the bus",
                f"load the driver, or give the container /dev/{prefix}*",
            )


def rdma_write(situation: Situation) -> Iterator[Finding]:
    entry = situation.selection.entry
    if entry is not None and entry.nics.count and entry.nics.rdma_write is False:
        yield Finding(
            "D06",
            "warn",
            f"the NICs of {entry.instance_type} do not write remote memory",
            "a push is emulated with sends: it works, slower and with more processor time",
            "use a type of Nitro version 4 or later, such as p5 or trn2, where speed matters",
        )


CHECKS: tuple[Check, ...] = (
    can_look,
    nic_count,
    driver,
    open_nics,
    other_nics,
    nics_down,
    device_nodes,
    device_memory_path,
    rdma_write,
)
