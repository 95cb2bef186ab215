"""Device numbers from `neuron-ls -j`, for types whose addresses are not in a published table.

The tool reads the driver; it claims no core. Its addresses have no domain, and its numbers are
those of this container.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from . import bdf
from .model import Box

NEURON_LS = Path("/opt/aws/neuron/bin/neuron-ls")
TIMEOUT_S = 5.0


def number_devices(box: Box, tool: Path = NEURON_LS) -> str | None:
    """Number the Neuron devices that have no index yet. A sentence if that failed, else None."""
    unnumbered = [one for one in box.accelerators if one.kind == "neuron" and one.index < 0]
    if not unnumbered:
        return None
    if not tool.exists():
        return f"the numbers of {len(unnumbered)} Neuron devices are not known: {tool} is missing"
    try:
        done = subprocess.run(
            [str(tool), "-j"], capture_output=True, timeout=TIMEOUT_S, check=True, text=True
        )
        index_by_address = parse(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        return f"the numbers of Neuron devices are not known: {tool} -j failed ({error})"[:300]
    for one in unnumbered:
        one.index = index_by_address.get(one.pci_address, -1)
    return None


def parse(text: str) -> dict[str, int]:
    """PCI address to device number. ValueError, KeyError or TypeError on other output."""
    return {
        bdf.normalise(str(device["bdf"])): int(device["neuron_device"])
        for device in json.loads(text)
        if bdf.is_address(str(device["bdf"]))
    }
