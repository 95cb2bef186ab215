"""The JSON that the commands print. `schema_version` changes when a field changes its meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from .model import SCHEMA_VERSION, nic_is_efa

if TYPE_CHECKING:
    from .predict import Prediction
    from .select import Choice, Selection

JsonObject = dict[str, Any]


def encode(document: object) -> str:
    """Indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def show_document(selection: Selection, prediction: Prediction | None = None) -> JsonObject:
    """What `rails show --json` prints."""
    box = selection.box
    document: JsonObject = {
        "schema_version": SCHEMA_VERSION,
        "instance_type": box.instance_type,
        "source": box.source,
        "good": selection.is_good,
        "accelerators": [choice_document(choice) for choice in selection.choices],
        "nics": _nics(selection),
        "host_memory": msgspec.to_builtins(selection.host_memory, str_keys=True),
        "notes": selection.notes,
        "gaps": list(box.gaps),
    }
    if prediction is not None:
        document["prediction"] = msgspec.to_builtins(prediction)
    return document


def choice_document(choice: Choice) -> JsonObject:
    """One accelerator of `rails show --json`."""
    return {
        "kind": choice.kind,
        "pci_address": choice.pci_address,
        "numa_node": choice.numa_node,
        "index": choice.index,
        "process_index": choice.process_index,
        "rails": msgspec.to_builtins(choice.rails),
        "candidates": choice.candidates,
        "source": choice.source,
        "nixl_rails": msgspec.to_builtins(choice.nixl_rails),
        "nixl_reason": choice.nixl_reason,
        "verdict": choice.verdict,
        "words": choice.words,
    }


def _nics(selection: Selection) -> list[JsonObject]:
    devices = selection.box.pci_by_address()
    users: dict[str, list[str]] = {}
    for choice in selection.choices:
        for rail in choice.rails:
            users.setdefault(rail.pci_address, []).append(choice.pci_address)
    found = []
    for nic in selection.box.nics:
        device = devices.get(nic.pci_address)
        found.append(
            {
                "name": nic.name,
                "pci_address": nic.pci_address,
                "is_efa": nic_is_efa(nic, device),
                "driver": nic.driver,
                "rate_gbps": nic.rate_gbps,
                "state": nic.state,
                "openable": nic.openable,
                "numa_node": device.numa_node if device is not None else -1,
                "accelerators": users.get(nic.pci_address, []),
            }
        )
    return found
