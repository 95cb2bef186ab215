"""What one end tells the other about its rails, and what must agree.

The card is small and travels with the engine's card over the side channel, so that a mismatch is a
sentence when two engines meet (or when `doctor --peer` asks) instead of a slow transfer nobody can
explain. A card that is received comes from a stranger: `decode_card` bounds and checks it.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import msgspec

from .environment import actuate
from .errors import RailsError
from .nixl_rule import visible_efa
from .select import Choice, Selection, select

CARD_VERSION = 1
UNSOLICITED_VARIABLE = "FI_EFA_USE_UNSOLICITED_WRITE_RECV"
DEVICE_RDMA_VARIABLE = "FI_EFA_USE_DEVICE_RDMA"
MAX_CLOCK_SKEW_S = 5.0
MAX_ITEMS = 64
MAX_CHARACTERS = 100
LEVELS = ("fail", "warn", "info")
UPGRADE_NIXL = "pip install 'nixl==VERSION' with one VERSION on both ends"


class RailCard(msgspec.Struct, omit_defaults=True):
    """One end. Unknown fields of a newer version are ignored."""

    version: int = CARD_VERSION
    instance_type: str | None = None
    nixl_version: str | None = None
    libfabric_version: str | None = None
    backend: str | None = None
    """NIXL backend of the engine; None on a card that no engine made."""
    provider: str = "tcp"
    num_nics: int = 0
    rates_gbps: list[float] = []
    device: str | None = None
    """PCI address of this rank's device; None for host memory."""
    rails: list[str] = []
    """PCI addresses of the device's rails; empty for host memory."""
    unsolicited_write_recv: bool | None = None
    """Whether the environment leaves it on; None where nothing is set, so the build decides."""
    device_rdma: bool | None = None
    """The same of FI_EFA_USE_DEVICE_RDMA."""
    same_host_token: str = ""
    """Equal on both ends if they run on one host. Made by the caller; not stored in a box."""
    time_s: float = 0.0


def make_card(
    selection: Selection,
    choice: Choice | None,
    *,
    backend: str | None = None,
    time_s: float = 0.0,
    same_host_token: str = "",
) -> RailCard:
    """The card of one rank; `choice` None for host memory."""
    box = selection.box
    nics = visible_efa(box)
    versions = box.host.nixl_versions
    return RailCard(
        instance_type=box.instance_type,
        nixl_version=next(iter(versions.values()), None),
        libfabric_version=box.host.libfabric_version,
        backend=backend,
        provider="efa" if nics else "tcp",
        num_nics=len(nics),
        rates_gbps=sorted({nic.rate_gbps for nic in nics}),
        device=choice.pci_address if choice is not None else None,
        rails=[rail.pci_address for rail in choice.rails] if choice is not None else [],
        unsolicited_write_recv=_switch(box.env.get(UNSOLICITED_VARIABLE)),
        device_rdma=_switch(box.env.get(DEVICE_RDMA_VARIABLE)),
        same_host_token=same_host_token,
        time_s=time_s,
    )


def expected_card(
    selection: Selection, device: str | None, *, same_host_token: str = ""
) -> RailCard:
    """The card that an engine would make if it were started here, with this environment.

    `device`: PCI address; where this box has none such, its first visible device, if any. The
    variables that the connector would set count as set.
    """
    choice = selection.of_address(device) if device is not None else None
    if choice is None and device is not None:
        choice = selection.of_process_device(0)
    if choice is not None:
        env = selection.box.env
        env = actuate(selection, choice, env).as_dict() | env
        selection = select(msgspec.structs.replace(selection.box, env=env))
        choice = selection.of_address(choice.pci_address)
    return make_card(selection, choice, same_host_token=same_host_token)


def _switch(text: str | None) -> bool | None:
    if text is None:
        return None
    return text.strip().lower() not in ("0", "false", "no", "off")


def host_token(root: Path = Path("/")) -> str:
    """The same for all processes of one host, containers included, until it boots; "" unknown."""
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return ""
    return hashlib.blake2b(boot.strip(), digest_size=8, person=b"neuron_push_host").hexdigest()


def encode_card(card: RailCard) -> bytes:
    """For the side channel."""
    return msgspec.msgpack.encode(card)


def decode_card(blob: bytes) -> RailCard:
    """A card from the side channel. RailsError if there is none, or one that cannot be."""
    if not blob:
        raise RailsError("there is no rails card")
    try:
        card = msgspec.msgpack.decode(blob, type=RailCard)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RailsError(f"the rails card does not decode: {error}") from None
    texts = [
        card.provider,
        card.same_host_token,
        *card.rails,
        *(
            text
            for text in (
                card.instance_type,
                card.nixl_version,
                card.libfabric_version,
                card.backend,
                card.device,
            )
            if text is not None
        ),
    ]
    if len(card.rails) > MAX_ITEMS or len(card.rates_gbps) > MAX_ITEMS:
        raise RailsError(f"the rails card lists more than {MAX_ITEMS} rails")
    if any(
        len(text) > MAX_CHARACTERS or not (text.isascii() and text.isprintable()) for text in texts
    ):
        raise RailsError("the rails card holds text that is too long or not printable")
    if not math.isfinite(card.time_s):
        raise RailsError("the rails card holds no sound time")
    return card


class Mismatch(msgspec.Struct):
    """One disagreement. `check` names the doctor's check, `level` is fail, warn or info."""

    check: str
    level: str
    words: str
    why: str
    mend: str


def compare_cards(local: RailCard, remote: RailCard) -> list[Mismatch]:
    """What does not fit between two ends, worst first."""
    found = []
    if remote.backend == "UCX" and remote.provider == "efa":
        found.append(
            Mismatch(
                "R10",
                "fail",
                f"the other engine uses NIXL's UCX backend, and it sees {remote.num_nics} EFA",
                "UCX does not write over EFA by itself: hundreds of times slower",
                "set kv_connector_extra_config.backends to ['LIBFABRIC'] on both engines",
            )
        )
    is_libfabric = local.backend != "UCX" and remote.backend != "UCX"
    if is_libfabric and local.provider != remote.provider:
        found.append(
            Mismatch(
                "R01",
                "fail",
                f"the provider is {local.provider} here and {remote.provider} there",
                "an end without EFA cannot talk to one with it, or both go over TCP",
                "give both ends EFA: export FI_PROVIDER=efa turns a silent fallback into an error, "
                "and neuron-push doctor on the end that says tcp tells what it lacks",
            )
        )
    found.extend(_version_mismatches(local, remote))
    if is_libfabric and local.provider == remote.provider == "efa":
        found.extend(_efa_mismatches(local, remote))
        if local.same_host_token and local.same_host_token == remote.same_host_token:
            found.append(
                Mismatch(
                    "R25",
                    "warn",
                    "both ends run on one host",
                    "between two processes of one host EFA is slower than between hosts",
                    "put them on two hosts, or export FI_EFA_ENABLE_SHM_TRANSFER=0 and accept it",
                )
            )
    if local.time_s and remote.time_s and abs(local.time_s - remote.time_s) > MAX_CLOCK_SKEW_S:
        skew_s = abs(local.time_s - remote.time_s)
        found.append(
            Mismatch(
                "D22",
                "warn",
                f"the clocks of both ends differ by {skew_s:.0f} s",
                "logs of the two hosts cannot be laid side by side",
                "sudo systemctl enable --now chronyd, on both",
            )
        )
    return sorted(found, key=lambda one: LEVELS.index(one.level))


def _version_mismatches(local: RailCard, remote: RailCard) -> list[Mismatch]:
    found = []
    if local.nixl_version and remote.nixl_version and local.nixl_version != remote.nixl_version:
        found.append(
            Mismatch(
                "D23",
                "warn",
                f"NIXL is {local.nixl_version} here and {remote.nixl_version} there",
                "metadata and handshake are NIXL's own formats, and are tested between equal "
                "releases",
                UPGRADE_NIXL,
            )
        )
    one, other = local.libfabric_version, remote.libfabric_version
    if one and other and one != other:
        found.append(
            Mismatch(
                "D24",
                "warn",
                f"libfabric is {one} here and {other} there",
                "releases differ in what they emulate, and the older end decides",
                "install the same EFA installer on both, and put /opt/amazon/efa/lib first in "
                "LD_LIBRARY_PATH",
            )
        )
    return found


def _efa_mismatches(local: RailCard, remote: RailCard) -> list[Mismatch]:
    found = []
    one, other = local.unsolicited_write_recv, remote.unsolicited_write_recv
    versions_differ = (local.nixl_version, local.libfabric_version) != (
        remote.nixl_version,
        remote.libfabric_version,
    )
    if one != other or (one is None and versions_differ):
        found.append(
            Mismatch(
                "R26",
                "fail" if None not in (one, other) else "warn",
                f"{UNSOLICITED_VARIABLE} is {_words(one)} here and {_words(other)} there, with "
                f"NIXL {local.nixl_version or '?'} here and {remote.nixl_version or '?'} there",
                "where the two ends differ, libfabric quietly emulates every WRITE with sends",
                f"export {UNSOLICITED_VARIABLE}=0 on both ends and start both again",
            )
        )
    if local.device_rdma != remote.device_rdma and False in (local.device_rdma, remote.device_rdma):
        found.append(
            Mismatch(
                "D09",
                "warn",
                f"{DEVICE_RDMA_VARIABLE} is {_words(local.device_rdma)} here and "
                f"{_words(remote.device_rdma)} there",
                "the end where it is off emulates every WRITE",
                f"export {DEVICE_RDMA_VARIABLE}=1 on both ends, where the NICs can write",
            )
        )
    if local.num_nics != remote.num_nics:
        found.append(
            Mismatch(
                "R21",
                "warn",
                f"this end sees {local.num_nics} NICs and the other {remote.num_nics}",
                "NIXL before 1.1 cannot bear different numbers of rails, and later ones leave "
                "NICs idle",
                "give both ends the same set of NICs: every EFA of the host into each container, "
                "and the same FI_EFA_IFACE, or none, on both",
            )
        )
    found.extend(_rail_mismatches(local, remote))
    return found


def _rail_mismatches(local: RailCard, remote: RailCard) -> list[Mismatch]:
    if not (local.rails and remote.rails):
        return []
    if len(local.rails) != len(remote.rails):
        return [
            Mismatch(
                "R42",
                "warn",
                f"the device has {len(local.rails)} rails here and {len(remote.rails)} there",
                "rail i goes to rail i modulo the other's number, so the narrower end decides",
                "nothing, if the instance types differ; else neuron-push rails show on both, and "
                "look for the missing NIC",
            )
        ]
    if local.instance_type == remote.instance_type and local.rails != remote.rails:
        return [
            Mismatch(
                "R42",
                "warn",
                f"the rails are {', '.join(local.rails)} here and {', '.join(remote.rails)} there",
                "rail i of one end goes to rail i of the other, and these are not the same NICs of "
                "their hosts",
                "give both ranks the same device number, or nothing where that is intended",
            )
        ]
    return []


def _words(value: bool | None) -> str:
    return "not set" if value is None else ("on" if value else "off")
