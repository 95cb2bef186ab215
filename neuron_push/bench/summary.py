"""From result files to ratios: ours to each other mode, round by round."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from neuron_push.bench.loads import is_good_run, parse_run_name, read_run

OURS: Final = "push"

LATENCIES: Final = {
    "ttft_mean": "mean_ttft_ms",
    "ttft_p50": "median_ttft_ms",
    "ttft_p99": "p99_ttft_ms",
    "tpot_mean": "mean_tpot_ms",
    "tpot_p99": "p99_tpot_ms",
    "e2el_mean": "mean_e2el_ms",
    "e2el_p99": "p99_e2el_ms",
}
"""Our metric names, and the fields of vLLM's result file they come from."""

CPU_PREFIX: Final = "cpu_s_per_request "


@dataclass(frozen=True)
class Run:
    """One result file: who, under which load, in which round, and what was measured."""

    mode: str
    input_len: int
    output_len: int
    qps: float
    link_mbps: int | None
    iteration: int
    values: dict[str, float]

    @property
    def load(self) -> tuple[int, int, float, int]:
        return (self.input_len, self.output_len, self.qps, self.link_mbps or 0)


def load_runs(results_dir: Path) -> list[Run]:
    """All good runs below the folder."""
    runs = []
    for path in sorted(results_dir.rglob("*_iter*.json")):
        name = parse_run_name(path.name)
        if name is None or not is_good_run(path):
            continue
        result = read_run(path)
        ours = result.get("neuron_push", {})
        values = {
            metric: float(result[field]) for metric, field in LATENCIES.items() if field in result
        }
        for process, seconds in ours.get("cpu_s_per_request", {}).items():
            values[CPU_PREFIX + process] = float(seconds)
        runs.append(
            Run(name.mode, name.input_len, name.output_len, name.qps, ours.get("link_mbps"),
                name.iteration, values)
        )  # fmt: skip
    return runs


def ratios(runs: Sequence[Run], ours: str = OURS) -> list[dict[str, Any]]:
    """One entry for each load, other mode and metric; ``rounds`` has one value a common round.

    A ratio below 1 means ours took less.
    """
    by_load: dict[tuple[int, int, float, int], dict[str, dict[int, Run]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for run in runs:
        by_load[run.load][run.mode][run.iteration] = run
    entries = []
    for load in sorted(by_load):
        modes = by_load[load]
        for against in sorted(set(modes) - {ours}):
            common = sorted(set(modes[ours]) & set(modes[against]))
            pairs = [(modes[ours][i], modes[against][i]) for i in common]
            for metric in _metrics(pairs):
                values = [
                    round(mine.values[metric] / theirs.values[metric], 4)
                    for mine, theirs in pairs
                    if theirs.values.get(metric) and metric in mine.values
                ]
                if values:
                    entries.append(_entry(metric, against, load, values))
    return entries


def _metrics(pairs: Iterable[tuple[Run, Run]]) -> list[str]:
    """Those both sides of some pair have, in the order of the first."""
    names: dict[str, None] = {}
    for mine, theirs in pairs:
        names.update({name: None for name in mine.values if name in theirs.values})
    return list(names)


def _entry(
    metric: str, against: str, load: tuple[int, int, float, int], values: list[float]
) -> dict[str, Any]:
    input_len, output_len, qps, link = load
    return {
        "metric": metric,
        "against": against,
        "input_len": input_len,
        "output_len": output_len,
        "qps": qps,
        "link_mbps": link or None,
        "min": min(values),
        "median": round(statistics.median(values), 4),
        "max": max(values),
        "rounds": values,
    }


def medians(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Each mode's own figures under each load: the median over the rounds, in ms and seconds."""
    grouped: dict[tuple[tuple[int, int, float, int], str], list[Run]] = defaultdict(list)
    for run in runs:
        grouped[run.load, run.mode].append(run)
    entries = []
    for (load, mode), group in sorted(grouped.items()):
        names = dict.fromkeys(name for run in group for name in run.values)
        figures = {
            name: round(statistics.median(r.values[name] for r in group if name in r.values), 4)
            for name in names
        }
        input_len, output_len, qps, link = load
        entries.append(
            {"mode": mode, "input_len": input_len, "output_len": output_len, "qps": qps,
             "link_mbps": link or None, "num_rounds": len(group), "median": figures}
        )  # fmt: skip
    return entries


def waiting(results_dir: Path) -> list[dict[str, Any]]:
    """What D's CPU does while it waits for one long prefill, by mode (see probes.py)."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(results_dir.glob("waiting_*_iter*.json")):
        result = read_run(path)
        found[result["mode"]].append(result)
    entries = []
    for mode, results in sorted(found.items()):
        above = [float(r["above_idle_cores"]) for r in results]
        entries.append(
            {"mode": mode, "input_len": results[0]["input_len"],
             "above_idle_cores": {"min": min(above), "median": round(statistics.median(above), 4),
                                  "max": max(above), "rounds": above},
             "idle_cores": [r["idle_cores"] for r in results],
             "waiting_cores": [r["waiting_cores"] for r in results]}
        )  # fmt: skip
    return entries


def summarise(results_dir: Path) -> dict[str, Any]:
    runs = load_runs(results_dir)
    return {"ratios": ratios(runs), "medians": medians(runs), "waiting": waiting(results_dir)}
