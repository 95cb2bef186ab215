"""The table of docs/reliability.md: what was measured, joined with vLLM's own connector."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "scripts" / "fault_table.py"
PAGE = "# Page\n<!-- measured: begin -->\n{}<!-- measured: end -->\nlast words\n"


def row(case: str, what: str, bound_s: float, measured_s: float | None, **more: str) -> Any:
    return {"case": case, "what": what, "bound_s": bound_s, "measured_s": measured_s, **more}


def render(folder: Path, rows: list[Any], page: str) -> dict[str, list[str]]:
    """The cells by case; what stands around the table stays."""
    report, path = folder / "report.jsonl", folder / "page.md"
    report.write_text("".join(json.dumps(each) + "\n" for each in rows))
    path.write_text(page)
    subprocess.run([sys.executable, SCRIPT, report, path], check=True, timeout=60)
    text = path.read_text()
    assert text.startswith("# Page\n")
    assert text.endswith("<!-- measured: end -->\nlast words\n")
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines[1:]}


def test_the_worst_of_all_runs_beside_the_other_connector(tmp_path: Path) -> None:
    theirs = {"connector": "NixlPushConnector"}
    rows = [
        row("UCX: P killed, registered", "failed", 2.0, 0.5),
        row("UCX: P killed, registered", "failed", 2.0, 0.75),
        row("UCX: P killed, registered", "released", 9.0, 1.0),
        row("UCX: P killed, registered", "load ends", 60.0, None, **theirs),
        row("lease over", "load failed: lease_over", 1.0, 0.07),
        row("not ours", "sent", 60.0, 1.0, **theirs),
    ]
    cells = render(tmp_path, rows, PAGE.format(""))
    assert cells["UCX: P killed, registered"] == [
        "load failed; D's blocks back", "2.0; 9.0", "0.75; 1.00", "load hangs > 60 s",
    ]  # fmt: skip
    assert cells["lease over"] == ["load failed: lease_over", "1.0", "0.07", ""]
    assert "not ours" not in cells


def test_what_was_not_run_says_that_it_was_read(tmp_path: Path) -> None:
    rows = [
        row("LIBFABRIC: D killed, registered", "sent", 2.0, 0.5),
        row("lease over", "sent", 60.0, 1.0, connector="NixlPushConnector"),
    ]
    cells = render(tmp_path, rows, PAGE.format(""))
    assert cells["LIBFABRIC: D killed, registered"][3].startswith("read: ")


def test_their_record_alone_leaves_our_figures(tmp_path: Path) -> None:
    ours = [row("lease over", "load failed: lease_over", 1.0, 0.07)]
    first = render(tmp_path, ours, PAGE.format(""))
    page = (tmp_path / "page.md").read_text()
    theirs = [row("lease over", "load ends", 60.0, None, connector="NixlPushConnector")]
    second = render(tmp_path, theirs, page)
    assert second["lease over"] == [*first["lease over"][:3], "load hangs > 60 s"]
