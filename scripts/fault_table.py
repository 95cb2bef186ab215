"""Renders what the fault tests measured as the table in docs/reliability.md.

Usage: fault_table.py REPORT.jsonl [PAGE]. REPORT is what the tests appended to
NEURON_PUSH_FAULT_REPORT. With a page named, what stands between its two markers is replaced, else
the table is printed. A report without rows of our own connector leaves the page's as they are.

The last column is measured too: rows with a field ``connector``, from the report or else from
tests/faults/upstream.jsonl, the record that is kept. What was not run is read, and says so.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

BEGIN = "<!-- measured: begin -->"
END = "<!-- measured: end -->"
KEPT = Path(__file__).parents[1] / "tests" / "faults" / "upstream.jsonl"

# What vLLM 0.32's own push connector does, as its source says (nixl/*.py) or its issues, where
# the case was not run; a case that matches nothing here says nothing.
READ = {
    r"P killed, (registered|mid-transfer)": "waits; a watchdog only logs (push_scheduler.py:320; "
    "vLLM #48633, #46283)",
    r"D killed, (registered|mid-transfer)": "P's blocks wait for the lease (base_worker.py:3014)",
}
# Cases that were timed with vLLM's connector only: what our own tests assert there.
UNTIMED = {
    "D aborts, mid-transfer": "D's blocks back once P acknowledges (`tests/faults/soak.py`)",
    "D stopped for longer than the lease, mid-transfer": "P's blocks wait for the WRITE "
    "(`test_lease_ends_while_a_write_is_in_flight`)",
    "retry after D gave up the first attempt": "only the second attempt's blocks are written "
    "(`test_registration_of_a_first_attempt_does_not_serve_the_second`)",
}
WORDS = {
    "failed": "load failed",
    "released": "D's blocks back",
    "sent": "P's blocks back",
    "received": "received",
    "serves again": "next request served",
}
HANGS = {
    "load ends": "load hangs",
    "released": "D's blocks not back",
    "sent": "P's blocks not back",
    "serves again": "next request hangs",
}
Ends = dict[str, tuple[float, float | None]]
"""By outcome: the longest bound, and the worst time in seconds; None: it did not come."""


def collect(rows: list[dict[str, Any]]) -> dict[str, Ends]:
    """By case; the outcomes of a case in the order they were recorded."""
    cases: dict[str, Ends] = {}
    for row in rows:
        ends = cases.setdefault(row["case"], {})
        bound_s, worst_s = ends.get(row["what"], (0.0, 0.0))
        took_s = row["measured_s"]
        worst_s = None if worst_s is None or took_s is None else max(worst_s, took_s)
        ends[row["what"]] = max(bound_s, row["bound_s"]), worst_s
    return cases


def our_cells(ends: Ends) -> list[str]:
    """What happens, its bound and its worst time in the same order."""
    what = "; ".join(WORDS.get(name, name) for name in ends)
    bounds = "; ".join(f"{bound_s:.1f}" for bound_s, _ in ends.values())
    times = "; ".join(f"{worst_s:.2f}" for _, worst_s in ends.values())
    return [what, bounds, times]


def their_cell(case: str, measured: dict[str, Ends]) -> str:
    if ends := measured.get(case):
        return "; ".join(
            f"{HANGS.get(name, name)} > {bound_s:.0f} s"
            if worst_s is None
            else f"{WORDS.get(name, name)} {worst_s:.2f}"
            for name, (bound_s, worst_s) in ends.items()
        )
    found = (text for words, text in READ.items() if re.search(words, case))
    return next((f"read: {text}" for text in found), "")


def rows_of(page: Path | None) -> dict[str, list[str]]:
    """Our cells as the page has them now."""
    if page is None:
        return {}
    body = page.read_text().partition(BEGIN)[2].partition(END)[0]
    cells = [line.strip("| ").split(" | ") for line in body.splitlines()[3:]]
    return {row[0]: row[1:4] for row in cells if row[0] not in UNTIMED and len(row) >= 4}


def table(report: Path, page: Path | None) -> str:
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    kept = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    theirs = collect([row for row in rows if row.get("connector")] or kept)
    ours = collect([row for row in rows if not row.get("connector")])
    cells = {case: our_cells(ends) for case, ends in ours.items()} or rows_of(page)
    cells |= {case: [text, "", "not timed"] for case, text in UNTIMED.items() if case in theirs}
    lines = [
        "| Fault | What happens | Bound (s) | Measured (s) | vLLM's push connector (s) |",
        "|---|---|---|---|---|",
    ]
    for case, (what, bounds, times) in sorted(cells.items()):
        row = (case, what, bounds, times, their_cell(case, theirs))
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> None:
    page = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    text = table(Path(sys.argv[1]), page)
    if page is None:
        print(text)
        return
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
