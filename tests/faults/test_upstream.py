"""What vLLM's own push connector does in our fault cases: recorded, not judged.

Soak: it takes minutes, most of them waiting for what does not come. Asserted is only that the
harness works: each case is brought about, and leaves a record.

    NEURON_PUSH_FAULT_REPORT=upstream.jsonl pytest -m soak tests/faults/test_upstream.py
"""

from __future__ import annotations

import json
import os
import re
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from neuron_push.bench.ports import quiet_ports
from tests.faults.harness.process import no_nixl
from tests.faults.harness.upstream import CONNECTOR, Upstream
from tests.faults.harness.upstream_cases import cases

pytestmark = [
    pytest.mark.soak,
    pytest.mark.nixl,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(no_nixl()), reason=no_nixl()),
]
pytest.importorskip("vllm")

ONLY = os.environ.get("NEURON_PUSH_UPSTREAM_CASES", "")
"""A pattern for the names of cases; empty: all."""
SIDE_BY_SIDE = 6
"""Pairs at once: each waits, most of the time."""


def test_vllms_push_connector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Path(os.environ.get("NEURON_PUSH_FAULT_REPORT") or tmp_path / "report.jsonl")
    monkeypatch.setenv("NEURON_PUSH_FAULT_REPORT", str(report))
    wanted = [name for name in cases() if re.search(ONLY, name)]
    ports = quiet_ports(2 * len(wanted))
    folders = [tmp_path / f"case{number}" for number in range(len(wanted))]

    starting = threading.Lock()  # it costs seconds of a core

    def run(number: int) -> str:
        name, folder = wanted[number], folders[number]
        folder.mkdir()
        (folder / "name").write_text(name)
        pair = Upstream(folder, ports[2 * number : 2 * number + 2])
        try:
            with starting:
                pair.start_both()
            cases()[name](pair, name)
        except Exception:
            return f"{name} ({folder}):\n{traceback.format_exc()}"
        finally:
            pair.close()
        return ""

    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        wrong = [text for text in threads.map(run, range(len(wanted))) if text]
    assert not wrong, "\n".join(wrong)
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    recorded = {row["case"] for row in rows if row.get("connector") == CONNECTOR}
    assert not set(wanted) - recorded
