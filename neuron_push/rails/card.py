"""What one end tells the other about its rails, and what must agree.

The card is small and travels with the engine's card over the side channel, so that a mismatch is a
sentence at the handshake instead of a slow transfer nobody can explain.
"""

from __future__ import annotations

import msgspec

from .nixl_rule import visible_efa
from .select import Choice, Selection

CARD_VERSION = 1
UNSOLICITED_VARIABLE = "FI_EFA_USE_UNSOLICITED_WRITE_RECV"
MAX_CLOCK_SKEW_S = 5.0


class RailCard(msgspec.Struct, omit_defaults=True):
    """One end. Unknown fields of a newer version are ignored."""

    version: int = CARD_VERSION
    instance_type: str | None = None
    nixl_version: str | None = None
    libfabric_version: str | None = None
    provider: str = "tcp"
    num_nics: int = 0
    rates_gbps: list[float] = []
    rails: list[str] = []
    """PCI addresses of this rank's device rails; empty for host memory."""
    unsolicited_write_recv: bool | None = None
    """Whether the environment leaves it on; None where nothing is set, so the build decides."""
    same_host_token: str = ""
    """Equal on both ends if they run on one host. Made by the caller; not stored in a box."""
    time_s: float = 0.0


def make_card(
    selection: Selection, choice: Choice | None, *, time_s: float = 0.0, same_host_token: str = ""
) -> RailCard:
    """The card of one rank; `choice` None for host memory."""
    box = selection.box
    nics = visible_efa(box)
    versions = box.host.nixl_versions
    return RailCard(
        instance_type=box.instance_type,
        nixl_version=next(iter(versions.values()), None),
        libfabric_version=box.host.libfabric_version,
        provider="efa" if nics else "tcp",
        num_nics=len(nics),
        rates_gbps=sorted({nic.rate_gbps for nic in nics}),
        rails=[rail.pci_address for rail in choice.rails] if choice is not None else [],
        unsolicited_write_recv=_unsolicited(box.env.get(UNSOLICITED_VARIABLE)),
        same_host_token=same_host_token,
        time_s=time_s,
    )


def _unsolicited(text: str | None) -> bool | None:
    if text is None:
        return None
    return text.strip().lower() not in ("0", "false", "no", "off")


class Mismatch(msgspec.Struct):
    """One disagreement. `check` names the doctor's check, `level` is fail or warn."""

    check: str
    level: str
    words: str
    mend: str


def compare_cards(local: RailCard, remote: RailCard) -> list[Mismatch]:
    """What does not fit between two ends, worst first."""
    found = []
    if local.provider != remote.provider:
        found.append(
            Mismatch(
                "R01",
                "fail",
                f"this end uses {local.provider} and the other {remote.provider}",
                "give both ends EFA (FI_PROVIDER=efa turns a silent fallback into an error)",
            )
        )
    if local.provider == remote.provider == "efa":
        found.extend(_efa_mismatches(local, remote))
    if local.same_host_token and local.same_host_token == remote.same_host_token:
        found.append(
            Mismatch(
                "R25",
                "warn",
                "both ends run on one host, where EFA is slower than between hosts",
                "put them on two hosts, or set FI_EFA_ENABLE_SHM_TRANSFER=0 and accept it",
            )
        )
    if local.time_s and remote.time_s and abs(local.time_s - remote.time_s) > MAX_CLOCK_SKEW_S:
        skew_s = abs(local.time_s - remote.time_s)
        found.append(
            Mismatch(
                "D22",
                "warn",
                f"the clocks of both ends differ by {skew_s:.0f} s",
                "start chronyd or systemd-timesyncd on both",
            )
        )
    return sorted(found, key=lambda one: one.level)


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
                f"NIXL {local.nixl_version} and {remote.nixl_version}: where the two ends differ, "
                "libfabric quietly emulates every WRITE",
                f"set {UNSOLICITED_VARIABLE}=0 on both ends",
            )
        )
    if local.num_nics != remote.num_nics:
        found.append(
            Mismatch(
                "R21",
                "warn",
                f"this end has {local.num_nics} NICs and the other {remote.num_nics}",
                "give both ends the same set of NICs; NIXL before 1.1 cannot bear a difference",
            )
        )
    if local.rails and remote.rails and len(local.rails) != len(remote.rails):
        found.append(
            Mismatch(
                "R42",
                "warn",
                f"this rank has {len(local.rails)} rails and its partner {len(remote.rails)}: rail "
                "i goes to rail i modulo the partner's number, so the slower end decides",
                "nothing, if the instance types differ; else look for a missing NIC",
            )
        )
    if (
        local.instance_type == remote.instance_type
        and local.rails
        and remote.rails
        and local.rails != remote.rails
    ):
        found.append(
            Mismatch(
                "R42",
                "warn",
                f"rank i uses {', '.join(local.rails)} here and {', '.join(remote.rails)} there: "
                "rails are not paired i to i",
                "give both ranks the same device number",
            )
        )
    return found


def _words(value: bool | None) -> str:
    return "not set" if value is None else ("on" if value else "off")
