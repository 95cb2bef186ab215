"""Renders what the fault tests measured as the table in docs/reliability.md.

Usage: NEURON_PUSH_FAULT_REPORT=report.jsonl pytest tests/faults; python scripts/fault_table.py
report.jsonl [docs/reliability.md]. With a page named, what stands between its two markers is
replaced; else the table is printed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

BEGIN = "<!-- measured: begin -->"
END = "<!-- measured: end -->"

# What vLLM 0.32's own push connector does, as its source says (nixl/*.py) or its issues; a case
# that matches nothing here says nothing.
UPSTREAM = {
    r"P killed, (registered|mid-transfer)": "waits; a watchdog only logs (push_scheduler.py:320; "
    "vLLM #48633, #46283)",
    "P unreachable": "fails after the handshake's 5 s (base_worker.py:1044)",
    "P's NIXL refuses D": "logged on P, D is not told (push_worker.py:471)",
    "WRITE cannot be posted": "logged on P, D is not told (push_worker.py:726; vLLM #50754)",
    r"D killed, (registered|mid-transfer)": "P's blocks wait for the lease (base_worker.py:3014)",
    "two registrations": "matched by the base of the request id (push_worker.py:407)",
    "lease over": "the late registration is kept and never served (vLLM #53095)",
}
WORDS = {
    "failed": "load failed",
    "released": "D's blocks back",
    "sent": "P's blocks back",
    "received": "received",
    "serves again": "next request served",
}


def upstream(case: str) -> str:
    return next((text for words, text in UPSTREAM.items() if re.search(words, case)), "")


def table(report: Path) -> str:
    """A row per fault; what happens, its bound and its worst time in the same order."""
    cases: dict[str, dict[str, tuple[float, float]]] = {}
    for line in report.read_text().splitlines():
        row = json.loads(line)
        ends = cases.setdefault(row["case"], {})
        bound_s, worst_s = ends.get(row["what"], (0.0, 0.0))
        ends[row["what"]] = max(bound_s, row["bound_s"]), max(worst_s, row["measured_s"])
    lines = [
        "| Fault | What happens | Bound (s) | Measured (s) | vLLM's push connector |",
        "|---|---|---|---|---|",
    ]
    for case, ends in sorted(cases.items()):
        what = "; ".join(WORDS.get(name, name) for name in ends)
        bounds = "; ".join(f"{bound_s:.1f}" for bound_s, _ in ends.values())
        times = "; ".join(f"{worst_s:.2f}" for _, worst_s in ends.values())
        lines.append(f"| {case} | {what} | {bounds} | {times} | {upstream(case)} |")
    return "\n".join(lines)


def main() -> None:
    text = table(Path(sys.argv[1]))
    if len(sys.argv) < 3:
        print(text)
        return
    page = Path(sys.argv[2])
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
