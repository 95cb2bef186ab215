"""Which NICs are near a device: a thin, guarded use of neuron_push.rails.

Rails are advice here. Whatever goes wrong in looking at the machine becomes the reason of a
Locality, or no variable at all, never an error: the checks after registration say what happened.
"""

from __future__ import annotations

import logging
from typing import Any

from neuron_push.devices.base import Locality
from neuron_push.devices.checks import Check

logger = logging.getLogger(__name__)


def select() -> Any:
    """The machine's selection of rails. Raises whatever rails raises."""
    from neuron_push import rails

    return rails.select_here()


def locality_of(pci_address: str | None, attached_nic: str | None, why: str) -> Locality:
    """From an accelerator's or its NIC's PCI address.

    attached_nic: PCI address of the NIC that the device's runtime named; it wins.
    why: one sentence on what is known so far.
    """
    try:
        selection = select()
    except Exception as e:
        return Locality(pci_address, None, (), f"{why}; the machine could not be looked at: {e}")
    nics = {nic.pci_address: nic.name for nic in selection.box.nics}
    choice = next((c for c in selection.choices if c.pci_address == pci_address), None)
    if choice is None:
        seen = [c for c in selection.choices if c.process_index >= 0]
        choice = _owner(seen, attached_nic) if attached_nic else None
        if choice is None and pci_address is None and len(seen) == 1:
            choice = seen[0]
    if choice is None:
        name = nics.get(attached_nic or "")
        return Locality(pci_address, None, (name,) if name else (), why)
    node = choice.numa_node if choice.numa_node >= 0 else None
    if attached_nic in nics:
        return Locality(choice.pci_address, node, (nics[attached_nic or ""],), why)
    rails = tuple(rail.name for rail in choice.rails)
    if choice.candidates:
        either = " or ".join(nics.get(one, one) for one in choice.candidates)
        return Locality(choice.pci_address, node, (), f"{why}; undecided between {either}")
    return Locality(choice.pci_address, node, rails, f"{why}; {choice.reason}")


def _owner(choices: list[Any], nic: str) -> Any:
    """The one accelerator that this NIC serves, if only one has it among its rails."""
    found = [c for c in choices if any(rail.pci_address == nic for rail in c.rails)]
    return found[0] if len(found) == 1 else None


def environment_of(pci_address: str | None) -> dict[str, str]:
    """Variables that make NIXL take the device's own rails; empty where rails cannot say."""
    try:
        from neuron_push import rails

        selection = select()
        device: str | int | None = pci_address
        if device is None:
            seen = [c for c in selection.choices if c.process_index >= 0]
            if len(seen) != 1:
                return {}
            device = seen[0].pci_address
        found = rails.environment_for(device, selection=selection)
    except Exception:
        return {}
    return dict(found)


def rails_taken(metadata: bytes) -> Check:
    """Whether the agent registered its memory on the rails that are near: a check that warns."""
    try:
        from neuron_push import rails

        checks = rails.compare_metadata(metadata, select())
    except Exception as e:
        return Check("rails", "note", f"which rails NIXL took is not known: {e}")
    bad = [f"{check.what}: {check.words}" for check in checks if check.is_bad]
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        return Check("rails", "note", f"{bad[0]}{more}", "run neuron-push doctor")
    unknown = [check.words for check in checks if check.verdict == "unknown"]
    if unknown:
        return Check("rails", "note", f"which rails NIXL took is not known: {unknown[0]}")
    return Check("rails", "ok", f"{len(checks)} registrations are on the rails that are near")


def rails_card(rank: int, pci_address: str | None, nixl_backend: str) -> bytes:
    """What this rank tells other engines and the doctor of its rails; empty if it cannot tell.

    Logs one line with the rails. To be asked once NIXL has its backend: the card names the
    libfabric that it loaded.
    """
    try:
        from neuron_push import rails

        selection = select()
        logger.info(
            "%s", rails.start_line(rank, rails.choice_for(selection, pci_address), selection)
        )
        return rails.encode_card(rails.card_for(selection, pci_address, backend=nixl_backend))
    except Exception as e:
        logger.warning("rank %d tells other engines nothing of its rails: %s", rank, e)
        return b""
