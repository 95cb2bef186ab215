"""What a fault did, and in what time: kept for docs/reliability.md.

With NEURON_PUSH_FAULT_REPORT set to a file's name, every case appends a JSON line to it;
scripts/fault_table.py renders them.
"""

from __future__ import annotations

import json
import os


def record(case: str, what: str, bound_s: float, measured_s: float) -> None:
    """``case``: the fault; ``what``: the outcome that was waited for."""
    path = os.environ.get("NEURON_PUSH_FAULT_REPORT")
    if path and case:
        with open(path, "a") as file:
            row = {"case": case, "what": what, "bound_s": bound_s, "measured_s": measured_s}
            file.write(json.dumps(row) + "\n")
