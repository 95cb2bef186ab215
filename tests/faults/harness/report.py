"""What a fault did, and in what time: kept for docs/reliability.md.

With NEURON_PUSH_FAULT_REPORT set to a file's name, every case appends a JSON line to it;
scripts/fault_table.py renders them.
"""

from __future__ import annotations

import json
import os
from typing import Any


def record(
    case: str, what: str, bound_s: float, measured_s: float | None, connector: str = ""
) -> None:
    """``case``: the fault; ``what``: the outcome that was waited for.

    ``connector``: whose, if not ours; then None is an outcome that did not come within bound_s.
    """
    path = os.environ.get("NEURON_PUSH_FAULT_REPORT")
    if path and case:
        row: dict[str, Any] = {
            "case": case, "what": what, "bound_s": bound_s, "measured_s": measured_s
        }  # fmt: skip
        if connector:
            row["connector"] = connector
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
