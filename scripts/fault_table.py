"""Renders what the fault tests measured as the table in docs/reliability.md.

Usage: NEURON_PUSH_FAULT_REPORT=report.jsonl pytest tests/faults; python scripts/fault_table.py
report.jsonl [docs/reliability.md]. With a page named, what stands between its two markers is
replaced; else the table is printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

BEGIN = "<!-- measured: begin -->"
END = "<!-- measured: end -->"

# What vLLM 0.32's own push connector does, read in its source and its issues; not run here.
UPSTREAM = {
    "P killed": "waits for ever; a watchdog logs after 480 s (vLLM #48633, #46283)",
    "P stopped": "waits for ever; a watchdog logs after 480 s (vLLM #48633, #46283)",
    "P aborted": "D is not told and waits for ever (0.32, push_worker.py)",
    "P unreachable": "fails after 5 s (0.32, base_worker.py)",
    "WRITE cannot be posted": "logged on P; D is not told (vLLM #50754)",
    "D killed": "P holds the blocks to the end of the lease (0.32, base_worker.py)",
    "lease over": "the late registration is stored, D waits for ever (vLLM #53095)",
    "prompts of P and D differ": "no count or hash on the wire (0.32, base_worker.py)",
    "two registrations": "the earliest pending one wins (0.32, push_worker.py)",
    "retry with the same id": "can match the first dispatch's registration (0.32, push_worker.py)",
    "D has the whole prompt": "P is not told, blocks stay for the lease (0.32, push_scheduler.py)",
}


def upstream(case: str) -> str:
    return next((text for words, text in UPSTREAM.items() if words in case), "")


def table(report: Path) -> str:
    rows: dict[tuple[str, str], tuple[float, list[float]]] = {}
    for line in report.read_text().splitlines():
        row = json.loads(line)
        key = row["case"], row["what"]
        bound_s, times = rows.get(key, (0.0, []))
        rows[key] = max(bound_s, row["bound_s"]), [*times, row["measured_s"]]
    lines = [
        "| Fault | What happens | Bound (s) | Measured (s) "
        "| vLLM's push connector (read, not run here) |",
        "|---|---|---|---|---|",
    ]
    for (case, what), (bound_s, times) in sorted(rows.items()):
        text = "the next request is served" if what == "serves again" else what
        lines.append(f"| {case} | {text} | {bound_s:.1f} | {max(times):.2f} | {upstream(case)} |")
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
