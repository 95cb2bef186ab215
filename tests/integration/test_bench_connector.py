"""`bench connector` over real NIXL: small, and only that it works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl._api")
pytest.importorskip("psutil")

from typer.testing import CliRunner

from neuron_push.cli import make_app

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(280)]


def test_hand_over_of_our_connector_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = CliRunner().invoke(
        make_app(),
        ["bench", "connector", "--quick", "--rounds", "1", "--mode", "push", "--only", "handover",
         "--step-ms", "5", "--json", str(file)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    result = report["results"]["handover"]["push"]
    assert report["failed"] == []
    assert 0 < result["median_ms"] < result["added_to_runnable_median_ms"]
    assert result["descriptors_per_gib"] > 0
    assert result["hooks"]["prefill worker"]["num_steps"] > 0


def test_the_cost_of_an_event_is_measured(tmp_path: Path) -> None:
    from neuron_push.bench.events import measure_events

    costs = measure_events("UCX", few=2, many=20, burst=10, rounds=1)
    assert costs["2 open"]["p_us"] > 0
    assert costs["20 open"]["d_us"] > 0
    assert costs["many_to_few"] > 0
