"""What must be true on a Trainium machine before NIXL may look at it, in this order.

libfabric and NIXL look for the Neuron runtime once per process and go on without device memory,
or with every NIC instead of the near one, if they do not find what they need. Nothing fails then
until the first transfer, or ever. Sources of the facts: the Neuron SDK's documentation, the source
of NIXL's LIBFABRIC plugin and of libfabric's EFA provider; docs/trainium.md names them. Not one of
these checks has run on Neuron hardware yet: scripts/check_trainium.sh is for that.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from neuron_push.devices.base import KvCaches, all_tensors
from neuron_push.devices.checks import Check, run_in_order
from neuron_push.devices.nrt import Nrt, load_globally, mapped_copies

TORCH_TYPES = ("neuron", "privateuseone")

_AMAZON = "0x1d0f"
_EFA_IDS = ("0xefa0", "0xefa1", "0xefa2", "0xefa3")
_NEURON_IDS = ("0x7164", "0x7264", "0x7364", "0x7564", "0x7565")

_UNSUPPORTED = (
    (r"trn2\.3xlarge", "its EFA interface cannot register Neuron memory"),
    (r"trn1\.2xlarge", "it has no EFA interface"),
    (r"trn3[a-z]*\.3xlarge", "it has no EFA interface"),
    (r"inf[12]\..*", "it has no EFA interface that Neuron memory can use"),
)

_FAULTY_RUNTIME = "2.32.31.0"


@dataclass
class NeuronMachine:
    """Where the checks look; a test points them elsewhere."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    load_nrt: Callable[[], Nrt] = load_globally
    open_library: Callable[[str], object] = ctypes.CDLL
    near_nic: Callable[[], str | None] = lambda: None
    """Name of the NIC that serves this process's core, by the rails; None if undecided."""

    @property
    def maps(self) -> Path:
        return self.root / "proc/self/maps"

    def device_nodes(self) -> list[str]:
        try:
            names = os.listdir(self.root / "dev")
        except OSError:
            return []
        return sorted(name for name in names if re.fullmatch(r"neuron\d+", name))

    def product_name(self) -> str:
        try:
            path = self.root / "sys/devices/virtual/dmi/id/product_name"
            return path.read_text().strip()
        except OSError:
            return ""

    def pci_counts(self) -> tuple[int, int] | None:
        """(EFA adapters, Neuron devices) on the PCI bus; None where it cannot be read."""
        bus = self.root / "sys/bus/pci/devices"
        try:
            devices = os.listdir(bus)
        except OSError:
            return None
        found = [self._ids(bus / device) for device in devices]
        ours = [device for vendor, device in found if vendor == _AMAZON]
        return sum(d in _EFA_IDS for d in ours), sum(d in _NEURON_IDS for d in ours)

    def nic_names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.root / "sys/class/infiniband"))
        except OSError:
            return []

    def _ids(self, path: Path) -> tuple[str, str]:
        try:
            return (path / "vendor").read_text().strip(), (path / "device").read_text().strip()
        except OSError:
            return "", ""


class NeuronPreflight:
    """One run of the checks."""

    def __init__(self, machine: NeuronMachine, caches: KvCaches | None) -> None:
        self._machine = machine
        self._caches = caches
        self.nrt: Nrt | None = None

    def run(self) -> tuple[Check, ...]:
        return run_in_order(
            [
                ("device_nodes", self.device_nodes),
                ("runtime", self.runtime),
                ("address", self.address),
                ("libnrt", self.libnrt),
                ("shared_memory", self.shared_memory),
                ("efa_interface", self.efa_interface),
                ("instance", self.instance),
                ("device_rdma", self.device_rdma),
                ("nixl_libraries", self.nixl_libraries),
            ]
        )

    def device_nodes(self) -> Check:
        nodes = self._machine.device_nodes()
        if nodes:
            return _ok("device_nodes", f"{len(nodes)} Neuron devices: /dev/{nodes[0]} and on")
        return _failed(
            "device_nodes",
            "there is no /dev/neuron* on this machine",
            "run on a Trainium instance with the driver aws-neuronx-dkms loaded, and give a "
            "container its devices (--device /dev/neuron0 ...)",
        )

    def runtime(self) -> Check:
        if self._caches is None:
            return _skipped("runtime", "no device tensor here: looked at when an engine starts")
        types = {tensor.device.type for _, tensor in all_tensors(self._caches)}
        if not types or not types <= set(TORCH_TYPES):
            return _failed(
                "runtime",
                f"KV tensors are on torch devices {sorted(types)}, expected 'neuron' only",
                "start vLLM with its Neuron plugin, not in CPU mode",
            )
        numbers = {tensor.get_device() for _, tensor in all_tensors(self._caches)}
        if len(numbers) > 1:
            return _failed(
                "runtime",
                f"KV tensors are on several cores: {sorted(numbers)}",
                "run one worker process per logical core, as vLLM's Neuron plugin does",
            )
        if not mapped_copies(self._machine.maps):
            return _failed(
                "runtime",
                "libnrt is not loaded in this process, so the Neuron runtime is not initialised",
                "let the first KV tensor exist before the connector registers memory: import the "
                "torch backend (libtorch_neuronx_lite or torch_neuronx) and initialise the runtime",
            )
        return _ok("runtime", f"the runtime is up: KV tensors are on neuron:{min(numbers)}")

    def address(self) -> Check:
        if self._caches is None:
            return _skipped("address", "no device tensor here: looked at when an engine starts")
        for layer, tensor in all_tensors(self._caches):
            if tensor.data_ptr() == 0:
                set_to = self._machine.environ.get("NEURON_RT_MAP_HBM")
                return _failed(
                    "address",
                    f"the KV tensor of layer {layer!r} has no address (data_ptr is 0; "
                    f"NEURON_RT_MAP_HBM is {'not set' if set_to is None else repr(set_to)})",
                    "set NEURON_RT_MAP_HBM=1 before the process makes its first device tensor",
                )
        return _ok("address", "every KV tensor has an address")

    def libnrt(self) -> Check:
        self.nrt = nrt = self._machine.load_nrt()  # an NrtError becomes a failed check
        try:
            version = nrt.version()
        except Exception as e:
            return _note("libnrt", f"{nrt.path} is loaded; its version is not known: {e}")
        if version == _FAULTY_RUNTIME:
            return _note(
                "libnrt",
                f"runtime {version} fails to export device memory with older drivers",
                "use aws-neuronx-dkms 2.x.9372 or newer, or another runtime",
            )
        return _ok("libnrt", f"runtime {version} from {nrt.path} is loaded for everybody to find")

    def shared_memory(self) -> Check:
        value = self._machine.environ.get("FI_EFA_ENABLE_SHM_TRANSFER")
        if value is None:
            return _ok("shared_memory", "FI_EFA_ENABLE_SHM_TRANSFER will be set to 0")
        if value.strip().lower() in ("0", "no", "false", "off"):
            return _ok("shared_memory", f"FI_EFA_ENABLE_SHM_TRANSFER is {value}")
        return _failed(
            "shared_memory",
            f"FI_EFA_ENABLE_SHM_TRANSFER is {value!r}: libfabric's shared memory path does not "
            "know Neuron memory and gives wrong output or hangs between engines of one host",
            "set FI_EFA_ENABLE_SHM_TRANSFER=0 for both engines",
        )

    def efa_interface(self) -> Check:
        value = self._machine.environ.get("FI_EFA_IFACE")
        names = self._machine.nic_names()
        if value is not None:
            wanted = [name for name in value.split(",") if name]
            missing = [n for n in wanted if names and n not in names and not n.startswith("all")]
            if not wanted or missing:
                return _failed(
                    "efa_interface",
                    f"FI_EFA_IFACE is {value!r}, and "
                    + (f"there is no {missing[0]}" if missing else "an empty value aborts"),
                    f"unset it, or choose from {names}",
                )
            return _ok("efa_interface", f"FI_EFA_IFACE={value} is respected")
        near = self._machine.near_nic()
        if near:
            return _ok("efa_interface", f"FI_EFA_IFACE will be set to {near}")
        can_ask = self.nrt is not None and self.nrt.has("nrt_get_attached_efa_bdf")
        if can_ask or len(names) == 1:
            return _note(
                "efa_interface",
                "which NIC serves this core is undecided here: NIXL asks the runtime per buffer",
            )
        return _failed(
            "efa_interface",
            "nobody knows which NIC serves this core (the runtime is older than 2.31, and the "
            "topology does not decide): NIXL would use all of them",
            "upgrade aws-neuronx-runtime-lib, or set FI_EFA_IFACE",
        )

    def instance(self) -> Check:
        product = self._machine.product_name()
        for pattern, why in _UNSUPPORTED:
            if re.fullmatch(pattern, product):
                return _failed(
                    "instance",
                    f"{product} cannot do this: {why}",
                    "use trn2.48xlarge, trn2u, trn1.32xlarge or a larger trn3 instance",
                )
        counts = self._machine.pci_counts()
        if counts is None:
            return _note("instance", "the PCI bus cannot be read: EFA adapters were not counted")
        num_efa, num_neuron = counts
        if num_efa == 0:
            return _failed(
                "instance",
                f"{product or 'this machine'} has {num_neuron} Neuron devices and no EFA adapter",
                "launch it with EFA interfaces attached (a default launch attaches none)",
            )
        told = f"{product or 'unknown type'}: {num_efa} EFA adapters, {num_neuron} Neuron devices"
        if product.startswith(("trn2", "trn3")) and num_efa < num_neuron:
            return _note(
                "instance",
                told,
                "attach one EFA interface per Neuron device in the launch template",
            )
        return _ok("instance", told)

    def device_rdma(self) -> Check:
        environ = self._machine.environ
        if environ.get("FI_HMEM_DISABLE_P2P", "0") not in ("", "0", "false", "no"):
            return _failed(
                "device_rdma",
                "FI_HMEM_DISABLE_P2P is on, which switches Neuron memory off in libfabric",
                "unset FI_HMEM_DISABLE_P2P",
            )
        if environ.get("FI_EFA_USE_DEVICE_RDMA") in ("0", "false", "no"):
            return _failed(
                "device_rdma",
                "FI_EFA_USE_DEVICE_RDMA is off, so that every WRITE would be emulated",
                "unset FI_EFA_USE_DEVICE_RDMA, or set it to 1",
            )
        return _ok("device_rdma", "nothing in the environment switches RDMA off")

    def nixl_libraries(self) -> Check:
        for name, source in (
            ("libfabric.so.1", "the EFA installer (/opt/amazon/efa/lib)"),
            ("libhwloc.so.15", "the package libhwloc15"),
            ("libcuda.so.1", "a stub: NIXL's wheel links it even where no GPU is"),
        ):
            try:
                self._machine.open_library(name)
            except OSError as e:
                return _failed(
                    "nixl_libraries",
                    f"NIXL's LIBFABRIC plugin needs {name}, which does not load ({e}): NIXL would "
                    "say only \"unsupported backend 'LIBFABRIC'\"",
                    f"put it on LD_LIBRARY_PATH; it comes from {source}",
                )
        return _ok("nixl_libraries", "the libraries that NIXL's LIBFABRIC plugin needs load")


def _ok(name: str, says: str) -> Check:
    return Check(name, "ok", says)


def _note(name: str, says: str, mend: str = "") -> Check:
    return Check(name, "note", says, mend)


def _skipped(name: str, says: str) -> Check:
    return Check(name, "skipped", says)


def _failed(name: str, says: str, mend: str) -> Check:
    return Check(name, "failed", says, mend)
