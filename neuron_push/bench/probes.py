"""What a decode engine's CPU does while it waits for one long prefill."""

from __future__ import annotations

import bisect
import json
import threading
import time
from pathlib import Path
from typing import Any

from neuron_push.bench.cpu import cpu_seconds
from neuron_push.bench.pairs import Deployment, complete

IDLE_S = 2.0
SAMPLE_S = 0.05
HEAD_S = 0.3
"""Left out at the start: the request's own way through D's API server."""
TAIL_S = 0.3
"""Left out at the end: the last token's prefill, and the answer."""


def waiting_path(results_dir: Path, mode: str, iteration: int) -> Path:
    return results_dir / f"waiting_{mode}_iter{iteration}.json"


def probe_waiting(deployment: Deployment, input_len: int, iteration: int) -> dict[str, Any]:
    """Cores that all of D's processes use: without a request, and while P computes one."""
    pid = deployment.servers["decode"].pid
    deployment.wait_quiet()
    idle_cores = _rate(pid, IDLE_S)
    samples: list[tuple[float, float]] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.is_set():
            samples.append((time.monotonic(), sum(cpu_seconds(pid).values())))
            stop.wait(SAMPLE_S)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    started_s = time.monotonic()
    try:
        prompt = [500 + (iteration * 104_729 + i * 37) % 30_000 for i in range(input_len)]
        complete(deployment.url, prompt, 1)
    finally:
        ended_s = time.monotonic()
        stop.set()
        sampler.join()
    waiting_cores = rate_between(samples, started_s + HEAD_S, ended_s - TAIL_S)
    return {
        "mode": deployment.mode,
        "input_len": input_len,
        "iteration": iteration,
        "prefill_s": round(ended_s - started_s, 3),
        "idle_cores": round(idle_cores, 4),
        "waiting_cores": round(waiting_cores, 4),
        "above_idle_cores": round(waiting_cores - idle_cores, 4),
    }


def rate_between(samples: list[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """CPU seconds a second between two moments, from (time, CPU seconds) samples."""
    times = [moment for moment, _ in samples]
    first = bisect.bisect_left(times, begin_s)
    last = bisect.bisect_right(times, end_s) - 1
    if last <= first:
        raise ValueError(
            f"{len(samples)} samples do not span {end_s - begin_s:.2f} s: the prefill was too short"
        )
    (t0, cpu0), (t1, cpu1) = samples[first], samples[last]
    return (cpu1 - cpu0) / (t1 - t0)


def _rate(pid: int, seconds: float) -> float:
    started_s, before = time.monotonic(), sum(cpu_seconds(pid).values())
    time.sleep(seconds)
    return (sum(cpu_seconds(pid).values()) - before) / (time.monotonic() - started_s)


def write(path: Path, result: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)
