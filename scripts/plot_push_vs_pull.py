#!/usr/bin/env python3
"""Plots result files of a sweep: latency over prompt length, a panel for each request rate.

Reads MODE_qpsQ_inI_outO_iterN.json below --results-dir, as `neuron-push bench serve` and
scripts/run_sweep.sh write them. The bars around a point span the iterations.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

NAME = re.compile(
    r"(?P<mode>[a-z]+(?:-[a-z]+)*)_qps(?P<qps>[\d.]+)_in(?P<in>\d+)_out\d+_iter\d+\.json"
)
# One colour a mode, in every panel: only the first has the legend.
STYLES = {
    "push": "C0o-", "vllm-push": "C3s--", "pull": "C2^:", "vllm-pull": "C2^:", "plain": "C7x-.",
}  # fmt: skip

Series = dict[float, dict[str, dict[int, list[float]]]]


def collect(results_dir: Path, field: str) -> Series:
    """qps -> mode -> prompt tokens -> one value an iteration. Failed runs are left out."""
    found: Series = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for path in sorted(results_dir.glob("*.json")):
        name = NAME.fullmatch(path.name)
        if name is None:
            continue
        result = json.loads(path.read_text())
        if result.get("failed") or field not in result:
            print(f"left out: {path.name}: failed requests, or no {field}", file=sys.stderr)
            continue
        found[float(name["qps"])][name["mode"]][int(name["in"])].append(float(result[field]))
    return found


def panel_title(qps: float) -> str:
    return "one request at a time" if qps == 0 else f"{qps:g} requests/s"


def plot(series: Series, label: str, title: str, output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = sorted(series)
    figure, axes = plt.subplots(
        1, len(rates), figsize=(4.2 * len(rates), 3.8), squeeze=False, layout="constrained"
    )
    for axis, qps in zip(axes[0], rates, strict=True):
        for mode, lengths in sorted(series[qps].items()):
            xs = sorted(lengths)
            ys = [statistics.mean(lengths[x]) for x in xs]
            low = [y - min(lengths[x]) for x, y in zip(xs, ys, strict=True)]
            high = [max(lengths[x]) - y for x, y in zip(xs, ys, strict=True)]
            axis.errorbar(xs, ys, yerr=(low, high), fmt=STYLES.get(mode, "d-"), label=mode,
                          capsize=3)  # fmt: skip
        axis.set_title(panel_title(qps))
        axis.set_xlabel("prompt tokens")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(label)
    axes[0][0].legend()
    if title:
        figure.suptitle(title)
    figure.savefig(output, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results-dir", type=Path, default=Path("results"))
    parser.add_argument("--metric", choices=("ttft", "tpot"), default="ttft")
    parser.add_argument("--stat", choices=("mean", "median", "p99"), default="mean")
    parser.add_argument("--model", default="", help="for the title")
    parser.add_argument("--platform", default="", help="for the title")
    parser.add_argument("--output", type=Path, help="default: RESULTS_DIR/METRIC_STAT.png")
    options = parser.parse_args()
    series = collect(options.results_dir, f"{options.stat}_{options.metric}_ms")
    if not series:
        print(f"no result files in {options.results_dir}", file=sys.stderr)
        return 1
    output = options.output or options.results_dir / f"{options.metric}_{options.stat}.png"
    title = ", ".join(part for part in (options.model, options.platform) if part)
    plot(series, f"{options.stat} {options.metric.upper()} (ms)", title, output)
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
