"""What to set so that the chosen rails are the ones that carry KV.

Everything here must be in place before the NIXL agent exists, and before anything else in the
process asks libfabric for its devices (NCCL over OFI does): the EFA provider reads its variables
once. A variable that the operator has set already is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .nixl_rule import visible_efa
from .select import Choice, Selection

SKIP_AFFINITY_VARIABLE = "NEURON_SKIP_EFA_AFFINITY"
FORK_SAFE_KERNEL = (5, 15)


class Setting(msgspec.Struct):
    """One environment variable, and why it is needed."""

    name: str
    value: str
    reason: str


class Actuation(msgspec.Struct):
    """Settings for one worker. `kept` are variables that were set to something else already."""

    settings: list[Setting]
    kept: list[Setting]
    backend: str
    backend_params: dict[str, str]
    notes: list[str]

    def as_dict(self) -> dict[str, str]:
        return {setting.name: setting.value for setting in self.settings}


def actuate(
    selection: Selection,
    choice: Choice | None,
    current_env: Mapping[str, str],
    *,
    same_host: bool = False,
) -> Actuation:
    """Settings for the worker of one accelerator; `choice` None means host memory only.

    `same_host` says that producer and consumer share this host.
    """
    wanted, notes = _wanted(selection, choice, current_env, same_host)
    settings = [one for one in wanted if one.name not in current_env]
    kept = [
        Setting(one.name, current_env[one.name], f"already set; {one.value!r} was wanted")
        for one in wanted
        if one.name in current_env and current_env[one.name] != one.value
    ]
    backend = "LIBFABRIC" if visible_efa(selection.box) else _other_backend(selection)
    return Actuation(settings, kept, backend, {}, notes)


def _other_backend(selection: Selection) -> str:
    """mlx5 and its like are UCX's business; LIBFABRIC would fall back to TCP on them."""
    return "UCX" if selection.box.nics else "LIBFABRIC"


def _wanted(
    selection: Selection, choice: Choice | None, current_env: Mapping[str, str], same_host: bool
) -> tuple[list[Setting], list[str]]:
    notes: list[str] = []
    if not visible_efa(selection.box):
        if selection.box.nics and choice is not None and choice.rails:
            names = ",".join(f"{rail.name}:1" for rail in choice.rails)
            return [Setting("UCX_NET_DEVICES", names, choice.rails[0].reason)], notes
        notes.append("no EFA device is visible: NIXL will use TCP, and nothing here changes that")
        return [], notes
    wanted = [
        Setting("FI_PROVIDER", "efa", "without it a missing EFA means a silent fallback to TCP"),
        Setting(
            "FI_EFA_USE_UNSOLICITED_WRITE_RECV",
            "0",
            "both ends must agree, or libfabric quietly emulates every WRITE",
        ),
    ]
    has_rdma_write = selection.entry.nics.rdma_write if selection.entry is not None else None
    if has_rdma_write:
        wanted.append(
            Setting("FI_EFA_USE_DEVICE_RDMA", "1", "the NICs of this type write remote memory")
        )
    elif has_rdma_write is False:
        notes.append("the NICs of this type do not write remote memory: WRITE will be emulated")
    if same_host or (choice is not None and choice.kind == "neuron"):
        reason = (
            "libfabric's shared memory path does not know Neuron memory"
            if choice is not None and choice.kind == "neuron"
            else "producer and consumer share this host"
        )
        wanted.append(Setting("FI_EFA_ENABLE_SHM_TRANSFER", "0", reason))
    if _needs_fork_safe(selection.box.host.kernel):
        wanted.append(Setting("FI_EFA_FORK_SAFE", "1", "this kernel is older than 5.15"))
    if choice is not None:
        wanted.extend(_pinning(selection, choice, current_env, notes))
    return wanted, notes


def _pinning(
    selection: Selection, choice: Choice, current_env: Mapping[str, str], notes: list[str]
) -> list[Setting]:
    if choice.kind != "neuron":
        if not choice.is_good:
            notes.append(
                f"{choice.words}: FI_EFA_IFACE alone cannot mend it, because NIXL also counts GPUs "
                "that this process does not see; give the container every NIC of the host, or hide "
                "the other GPUs: neuron-push rails env --device N --write-hwloc FILE sets "
                "HWLOC_XMLFILE and FI_EFA_IFACE"
            )
        return []
    if current_env.get(SKIP_AFFINITY_VARIABLE, "").lower() in ("1", "true", "yes"):
        notes.append(f"{SKIP_AFFINITY_VARIABLE} is set, so the worker is not pinned to its NIC")
        return []
    if choice.candidates:
        names = {nic.pci_address: nic.name for nic in selection.box.nics}
        either = " or ".join(names.get(one, one) for one in choice.candidates[:8])
        notes.append(
            f"which NIC is attached is undecided ({either}), so FI_EFA_IFACE is left alone and the "
            "Neuron runtime decides"
        )
        return []
    if not choice.rails:
        notes.append(f"no rail for {choice.pci_address}: {choice.reason}")
        return []
    rail = choice.rails[0]
    return [Setting("FI_EFA_IFACE", rail.name, f"{rail.pci_address}: {rail.reason}")]


def _needs_fork_safe(kernel: str | None) -> bool:
    numbers = kernel_numbers(kernel)
    return numbers is not None and numbers < FORK_SAFE_KERNEL


def kernel_numbers(kernel: str | None) -> tuple[int, int] | None:
    """(major, minor) of a kernel release; None if it is not known."""
    if kernel is None:
        return None
    try:
        major, minor = (int(part) for part in kernel.split("-")[0].split(".")[:2])
    except ValueError:
        return None
    return major, minor
