"""`bench connector`: what the connector classes cost, without a model and without a link limit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from neuron_push.bench.couple import Couple, Keys, Settings
from neuron_push.bench.events import measure_events
from neuron_push.bench.geometry import BLOCK_TOKENS, GEOMETRIES, Geometry, Tables
from neuron_push.bench.loads import PAIR_MODES, BenchError
from neuron_push.bench.machine import describe_machine

MEASUREMENTS: Final = ("handover", "hooks", "rate", "handshake", "events")
FRAGMENT_RUN: Final = 8
SMALL_POOL: Final = 1_000
LARGE_POOL: Final = 100_000
NUM_OPEN: Final = 32
FEW_OPEN, MANY_OPEN = 10, 10_000


@dataclass(frozen=True)
class Options:
    """Checked; see `check_options`."""

    geometry: Geometry
    modes: tuple[str, ...]
    only: tuple[str, ...]
    backend: str
    rounds: int
    step_s: float
    decode_step_s: float
    chunk_tokens: int
    quick: bool


def check_options(
    *,
    geometry: str,
    modes: Sequence[str] | None,
    only: Sequence[str] | None,
    backend: str,
    rounds: int,
    step_ms: float,
    decode_step_ms: float,
    chunk_tokens: int,
    quick: bool,
) -> Options:
    """Raises ValueError: option, value, what is allowed."""
    if geometry not in GEOMETRIES:
        raise ValueError(_wrong("--geometry", geometry, GEOMETRIES))
    for mode in modes or ():
        if mode not in PAIR_MODES:
            raise ValueError(_wrong("--mode", mode, PAIR_MODES))
    for name in only or ():
        if name not in MEASUREMENTS:
            raise ValueError(_wrong("--only", name, MEASUREMENTS))
    if backend not in ("UCX", "LIBFABRIC"):
        raise ValueError(_wrong("--backend", backend, ("UCX", "LIBFABRIC")))
    return Options(
        GEOMETRIES[geometry], tuple(modes or PAIR_MODES), tuple(only or MEASUREMENTS), backend,
        rounds, step_ms / 1000, decode_step_ms / 1000, chunk_tokens, quick,
    )  # fmt: skip


Report = dict[str, Any]


def run(options: Options, console: Console, keep: Callable[[Report], None]) -> Report:
    """Measures and prints. ``keep`` is handed the report after every measurement."""
    report: Report = {
        **describe_machine(),
        "geometry": options.geometry.name,
        "kv_bytes_per_token": options.geometry.bytes_per_token,
        "backend": options.backend,
        "step_s": options.step_s,
        "decode_step_s": options.decode_step_s,
        "chunk_tokens": options.chunk_tokens,
        "results": {},
        "failed": [],
    }
    work: list[tuple[str, str, Callable[[Options, str], dict[str, Any]]]] = [
        (name, mode, _MEASURE[name])
        for name in options.only
        for mode in options.modes
        if name != "events" or mode == "push"
    ]
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console,
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=len(work))
        for name, mode, measure in work:
            progress.update(task, description=f"{name}: {mode}")
            try:
                report["results"].setdefault(name, {})[mode] = measure(options, mode)
            except BenchError as e:
                report["failed"].append(f"{name}: {mode}: {e}")
                console.print(f"failed: {name}: {mode}: {e}", markup=False)
            report["ratios"] = compare(report["results"])
            keep(report)
            progress.advance(task)
    _show(report, console)
    return report


def compare(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Ours to each other mode where both were measured."""
    ratios = {}
    handover = results.get("handover", {})
    for against in (mode for mode in handover if mode != "push"):
        if "push" in handover:
            ours, theirs = handover["push"]["median_ms"], handover[against]["median_ms"]
            ratios[f"hand-over push / {against}"] = round(ours / theirs, 3)
    return ratios


# ---------------------------------------------------------------- measurements


def measure_handover(options: Options, mode: str) -> dict[str, Any]:
    """From the end of a prompt's last forward on P until D can run it; one request at a time."""
    num_tokens = _prompt_tokens(options)
    rounds = 3 if options.quick else max(10, 4 * options.rounds)
    with _couple(options, mode) as couple:
        tables, keys = _tables(options, None), Keys("h")
        couple.transfer(keys.take(), num_tokens, tables)  # the first meets the peer
        couple.reset()
        lives = [
            life
            for _ in range(rounds)
            for life in couple.transfer(keys.take(), num_tokens, tables).values()
        ]
        counts = couple.read()
    spans = [life.hand_over_s * 1000 for life in lives]
    totals = [(life.runnable_s - life.added_s) * 1000 for life in lives]
    return {
        "num_tokens": num_tokens,
        "median_ms": _median(spans),
        "p99_ms": _percentile(spans, 99),
        "each_ms": [round(span, 2) for span in spans],
        "added_to_runnable_median_ms": _median(totals),
        "descriptors_per_gib": _descriptors(counts),
        "hooks": _hooks(counts),
    }


def measure_hooks(options: Options, mode: str) -> dict[str, Any]:
    """The hooks' time on the calling thread, a step, with 32 requests open on both sides.

    Always so many: when one is over the next arrives.
    """
    pool_tokens = (options.geometry.num_blocks - 1) // NUM_OPEN * BLOCK_TOKENS
    num_tokens = min(1024, pool_tokens)
    with _couple(options, mode) as couple:
        tables, keys = _tables(options, None), Keys("k")
        couple.transfer(keys.take(), num_tokens, tables)
        count = NUM_OPEN * (1 + (1 if options.quick else options.rounds))
        couple.transfer(
            keys.take(count), num_tokens, tables, num_open=NUM_OPEN, reset_after=NUM_OPEN // 2
        )
        counts = couple.read()
    return {"num_tokens": num_tokens, "num_open": NUM_OPEN, **_hooks(counts)}


def measure_rate(options: Options, mode: str) -> dict[str, Any]:
    """Bytes a second when a whole prompt becomes final at once, beside one plain NIXL WRITE.

    The plain WRITE moves the same bytes between the same processes, in turn with ours: once as
    one run a layer, once in the fragments of the fragmented case.
    """
    num_tokens = _prompt_tokens(options)
    num_bytes = num_tokens * options.geometry.bytes_per_token
    rounds = 2 if options.quick else max(5, options.rounds)
    settings = replace(_settings(options, mode), chunk_tokens=num_tokens, step_s=0.005)
    answer: dict[str, Any] = {"num_tokens": num_tokens, "num_bytes": num_bytes}
    with Couple(replace(settings, decode_step_s=0.0)) as couple:
        couple.raw_meet()
        keys = Keys("r")
        for name, run_blocks in (("contiguous", None), ("fragmented", FRAGMENT_RUN)):
            tables, straight = _tables(options, run_blocks), _tables(options, None)
            fragments = _tables(options, run_blocks)
            couple.transfer(keys.take(), num_tokens, tables)
            couple.reset()
            ours, plain, plain_same = [], [], []
            for _ in range(rounds):
                life = next(iter(couple.transfer(keys.take(), num_tokens, tables).values()))
                ours.append(life.hand_over_s)
                plain.append(_raw(couple, straight, num_tokens))
                plain_same.append(_raw(couple, fragments, num_tokens))
            counts = couple.read()
            answer[name] = {
                "gb_per_s": round(num_bytes / statistics.median(ours) / 1e9, 3),
                "plain_gb_per_s": round(num_bytes / statistics.median(plain) / 1e9, 3),
                "ratio_to_plain": _round_ratio(plain, ours),
                "ratio_to_plain_same_runs": _round_ratio(plain_same, ours),
                "descriptors_per_gib": _descriptors(counts),
            }
    return answer


def measure_handshake(options: Options, mode: str) -> dict[str, Any]:
    """First contact, and what it leaves in memory, for a small and a large pool of blocks."""
    answer: dict[str, Any] = {}
    pools = (SMALL_POOL, 10 * SMALL_POOL if options.quick else LARGE_POOL)
    for num_blocks in pools:
        geometry = replace(options.geometry, num_blocks=num_blocks)
        settings = replace(
            _settings(options, mode), geometry=geometry, lazy_memory=True, step_s=0.0,
            decode_step_s=0.0,
        )  # fmt: skip
        spans: list[float] = []
        grown: dict[str, list[float]] = {"p": [], "d": []}
        for _ in range(1 if options.quick else min(3, options.rounds)):
            with Couple(settings) as couple:
                tables = (Tables(num_blocks, None, 1), Tables(num_blocks, None, 2))
                keys = Keys("s")
                before = couple.read()
                first = _span(couple, keys, tables)
                after = couple.read()
                later = statistics.median(_span(couple, keys, tables) for _ in range(5))
            spans.append(first - later)
            for side, values in grown.items():
                values.append((after[side]["rss"] - before[side]["rss"]) / 2**20)
        answer[str(num_blocks)] = {
            "handshake_ms": _median([span * 1000 for span in spans]),
            "rss_grown_mib": {side: _median(values) for side, values in grown.items()},
        }
    small, large = (answer[str(number)] for number in pools)
    answer["large_to_small"] = round(large["handshake_ms"] / small["handshake_ms"], 3)
    return answer


def measure_events_of_push(options: Options, mode: str) -> dict[str, Any]:
    """The transfer threads' time a request, with few and with many other requests open."""
    many = 1_000 if options.quick else MANY_OPEN
    burst = 100 if options.quick else 500
    return measure_events(options.backend, FEW_OPEN, many, burst, 1 if options.quick else 3)


_MEASURE: Final[dict[str, Callable[[Options, str], dict[str, Any]]]] = {
    "handover": measure_handover,
    "hooks": measure_hooks,
    "rate": measure_rate,
    "handshake": measure_handshake,
    "events": measure_events_of_push,
}


# ---------------------------------------------------------------- inside


def _settings(options: Options, mode: str) -> Settings:
    return Settings(
        mode, options.geometry, options.backend, options.step_s, options.chunk_tokens,
        options.decode_step_s,
    )  # fmt: skip


def _couple(options: Options, mode: str) -> Couple:
    return Couple(_settings(options, mode))


def _tables(options: Options, run: int | None) -> tuple[Tables, Tables]:
    """Fragments of P and of D lie in different orders: runs meet at their boundaries only."""
    count = options.geometry.num_blocks
    return Tables(count, run, seed=1), Tables(count, run, seed=2)


def _prompt_tokens(options: Options) -> int:
    return 1024 if options.quick else 4096


def _raw(couple: Couple, tables: tuple[Tables, Tables], num_tokens: int) -> float:
    source, target = tables[0].take(num_tokens), tables[1].take(num_tokens)
    seconds = couple.raw_write(source, target)
    tables[0].give(source)
    tables[1].give(target)
    return seconds


def _span(couple: Couple, keys: Keys, tables: tuple[Tables, Tables]) -> float:
    life = next(iter(couple.transfer(keys.take(), BLOCK_TOKENS, tables).values()))
    return life.runnable_s - life.added_s


def _hooks(counts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    hooks: dict[str, Any] = {}
    for side, name in (("p", "prefill"), ("d", "decode")):
        for thread in ("worker", "scheduler"):
            values = counts[side][f"{thread}_us"]
            if values:
                hooks[f"{name} {thread}"] = {
                    "p50_us": round(_percentile(values, 50), 1),
                    "p99_us": round(_percentile(values, 99), 1),
                    "max_us": round(max(values), 1),
                    "cpu_p99_us": round(_percentile(counts[side][f"{thread}_cpu_us"], 99), 1),
                    "num_steps": len(values),
                }
    return hooks


def _descriptors(counts: dict[str, dict[str, Any]]) -> float | None:
    number = sum(side["stats"].get("descriptors", 0) for side in counts.values())
    num_bytes = sum(side["stats"].get("bytes", 0) for side in counts.values())
    return round(number / num_bytes * 2**30, 1) if num_bytes else None


def _round_ratio(limit: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Rate to rate, round by round: seconds of the limit to ours."""
    rounds = [round(a / b, 3) for a, b in zip(limit, ours, strict=True)]
    return {"median": round(statistics.median(rounds), 3), "rounds": rounds}


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


def _percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent do not exceed."""
    ordered = sorted(values)
    rank = math.ceil(len(ordered) * percent / 100)
    return round(ordered[max(rank, 1) - 1], 3)


def _wrong(option: str, value: str, allowed: Any) -> str:
    return f"{option}: {value!r} is not allowed; allowed: {', '.join(allowed)}"


def _show(report: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{report['geometry']}, {report['backend']}")
    for column in ("measurement", "mode", "figure", "value"):
        table.add_column(column)
    for name, modes in report["results"].items():
        for mode, result in modes.items():
            for figure, value in flatten(result):
                if not isinstance(value, list):
                    table.add_row(name, mode, figure, f"{value}")
    console.print(table)
    for name, value in report["ratios"].items():
        console.print(f"{name}: {value}")


def flatten(result: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in result.items():
        if isinstance(value, dict):
            rows += flatten(value, f"{prefix}{key}, ")
        else:
            rows.append((prefix + key, value))
    return rows
