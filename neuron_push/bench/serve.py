"""`bench serve`: the same seeded load through each deployment in turn, round by round."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from neuron_push.bench import probes
from neuron_push.bench.client import Client, benchmark_arguments
from neuron_push.bench.cpu import grown
from neuron_push.bench.lab import Lab
from neuron_push.bench.loads import (
    MODES,
    PRESET_INPUT_LENS,
    BenchError,
    Calibration,
    Load,
    is_good_run,
    kv_bytes_per_token,
    preset_loads,
    run_path,
)
from neuron_push.bench.pairs import Deployment, Settings
from neuron_push.bench.summary import summarise
from neuron_push.launch import LaunchError, Mode

RUN_TIMEOUT_S = 600.0
CALIBRATION_PROMPTS = 4


@dataclass(frozen=True)
class ServePlan:
    """What `bench serve` was asked for.

    loads: None for the preset, whose rates come from a calibration.
    probe_len: prompt tokens of the probe of D's CPU; 0 for none.
    """

    settings: Settings
    results_dir: Path
    rounds: int
    loads: tuple[Load, ...] | None
    modes: tuple[str, ...]
    probe_len: int = 4096
    use_lab: bool = True


class ServeBench:
    """One whole measurement. Results that are there already are kept, and not repeated."""

    def __init__(self, plan: ServePlan, console: Console) -> None:
        self._plan = plan
        self._console = console
        self._failed: list[str] = []
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=console,
        )  # fmt: skip

    def run(self) -> list[str]:
        """Returns the runs that failed, as sentences. Ends every process it started."""
        plan = self._plan
        plan.results_dir.mkdir(parents=True, exist_ok=True)
        log_dir = plan.results_dir / "logs"
        log_dir.mkdir(exist_ok=True)
        # A terminated measurement ends what it started, as an interrupted one does.
        signal.signal(signal.SIGTERM, _interrupt)
        with ExitStack() as stack:
            self._lab = stack.enter_context(Lab(plan.use_lab))
            self._client = Client(log_dir / "client.log")
            stack.callback(self._client.close)
            stack.enter_context(self._progress)
            self._deployments = {
                mode: Deployment(_mode(mode), plan.settings, self._lab.hosts)
                for mode in self._modes_needed()
            }
            task = self._progress.add_task("starting", total=None)
            stack.callback(self._stop_all)
            for mode, deployment in self._deployments.items():

                def tick(text: str) -> None:
                    self._progress.update(task, description=f"starting {text}")

                deployment.start(log_dir, tick)
                self._progress.update(task, description=f"warming up {mode}")
                deployment.warm_up()
                deployment.pause()
            self._client.wait_ready()
            loads = self._loads()
            work = self._work(loads)
            self._progress.update(task, total=len(work), completed=0)
            self._note_environment(loads)
            for description, do in work:
                self._progress.update(task, description=description)
                if not self._console.is_terminal:
                    self._console.print(description, markup=False)
                try:
                    do()
                except (BenchError, LaunchError) as e:
                    self._failed.append(f"{description}: {e}")
                    self._console.print(f"[red]failed[/red]: {description}: {e}", markup=True)
                self._progress.advance(task)
        return self._failed

    def _stop_all(self) -> None:
        """All are asked to end before the first is waited for: one by one takes a minute."""
        for deployment in self._deployments.values():
            deployment.ask_to_end()
        for deployment in self._deployments.values():
            deployment.stop()

    # ------------------------------------------------------------ what to do

    def _modes_needed(self) -> list[str]:
        plan = self._plan
        wanted = set(plan.modes)
        if plan.loads is None:
            wanted.add("plain")
        return [mode for mode in MODES if mode in wanted]

    def _loads(self) -> list[Load]:
        plan = self._plan
        if plan.loads is not None:
            return list(plan.loads)
        model = Path(plan.settings.model)
        loads = preset_loads(self._calibrate(), kv_bytes_per_token(model))
        if not self._lab.is_real:
            loads = [load for load in loads if load.link_mbps is None]
        return loads

    def _work(self, loads: Sequence[Load]) -> list[tuple[str, Callable[[], None]]]:
        """A B C A B C: within a round each load goes through every mode before the next load."""
        plan = self._plan
        work: list[tuple[str, Callable[[], None]]] = []
        for iteration in range(1, plan.rounds + 1):
            for load in loads:
                # Another mode begins each round: none is always the first after a change of load.
                for mode in _rotated([m for m in plan.modes if m in load.modes], iteration):
                    path = run_path(plan.results_dir, mode, load, iteration)
                    if not is_good_run(path):
                        work.append(
                            (f"round {iteration}: {mode}: {load.describe()}",
                             _later(self._run_one, mode, load, iteration, path))
                        )  # fmt: skip
            for mode in plan.modes:
                path = probes.waiting_path(plan.results_dir, mode, iteration)
                if plan.probe_len and mode != "plain" and not path.exists():
                    work.append(
                        (f"round {iteration}: {mode}: CPU of a waiting decode engine",
                         _later(self._probe_one, mode, iteration, path))
                    )  # fmt: skip
        return work

    # ------------------------------------------------------------ doing it

    def _run_one(self, mode: str, load: Load, iteration: int, path: Path) -> None:
        deployment = self._deployments[mode]
        self._lab.set_rate(load.link_mbps)
        resumed_s = deployment.resume()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"part_{path.name}")
            part.unlink(missing_ok=True)
            arguments = benchmark_arguments(
                load, deployment.url, self._plan.settings.model, iteration, part
            )
            before, started_s = deployment.cpu_seconds(), time.monotonic()
            result = self._client.run(arguments, part, RUN_TIMEOUT_S)
            spent = grown(before, deployment.cpu_seconds())
            result["neuron_push"] = {
                "mode": mode,
                "iteration": iteration,
                "link_mbps": load.link_mbps,
                "resumed_s": round(resumed_s, 3),
                "wall_s": round(time.monotonic() - started_s, 3),
                "cpu_s_per_request": {
                    name: round(seconds / load.num_prompts, 4) for name, seconds in spent.items()
                },
            }
            for bulky in ("generated_texts", "itls"):
                result.pop(bulky, None)
            part.write_text(json.dumps(result) + "\n")
            if result["failed"] or not result["completed"]:
                part.replace(path.with_suffix(".failed"))
                errors = [error for error in result.get("errors", ()) if error]
                raise BenchError(
                    f"{result['failed']} of {load.num_prompts} requests failed: "
                    f"{(errors or ['no reason given'])[0][:300]}"
                )
            part.replace(path)
        finally:
            deployment.pause()
            self._lab.set_rate(None)

    def _probe_one(self, mode: str, iteration: int, path: Path) -> None:
        deployment = self._deployments[mode]
        deployment.resume()
        try:
            probes.write(path, probes.probe_waiting(deployment, self._plan.probe_len, iteration))
        except ValueError as e:
            raise BenchError(str(e)) from e
        finally:
            deployment.pause()

    def _calibrate(self) -> Calibration:
        """Kept with the results: a resumed measurement must offer the same load."""
        path = self._plan.results_dir / "calibration.json"
        if path.exists():
            return Calibration.from_json(json.loads(path.read_text()))
        plain = self._deployments["plain"]
        plain.resume()
        ttft_s = {}
        for length in PRESET_INPUT_LENS:
            part = path.with_name(f"part_calibration-{length}.json")
            part.unlink(missing_ok=True)
            load = Load(length, 1, 0.0, CALIBRATION_PROMPTS)
            arguments = benchmark_arguments(load, plain.url, self._plan.settings.model, 0, part)
            result = self._client.run(arguments, part, RUN_TIMEOUT_S)
            if result["failed"]:
                raise BenchError(f"calibration: requests of {length} tokens failed: {part}")
            ttft_s[length] = result["median_ttft_ms"] / 1000
            part.unlink()
        plain.pause()
        calibration = Calibration(ttft_s)
        path.write_text(json.dumps(calibration.to_json()) + "\n")
        return calibration

    def _note_environment(self, loads: Sequence[Load]) -> None:
        from neuron_push.bench.machine import describe_machine

        note = {
            **describe_machine(),
            "settings": asdict(self._plan.settings),
            "has_lab": self._lab.is_real,
            "loads": [asdict(load) for load in loads],
        }
        path = self._plan.results_dir / "environment.json"
        path.write_text(json.dumps(note, indent=1) + "\n")


def write_summary(results_dir: Path, target: Path | None) -> dict[str, Any]:
    """Also to DIR/summary.json."""
    summary = summarise(results_dir)
    environment = results_dir / "environment.json"
    if environment.exists():
        summary["environment"] = json.loads(environment.read_text())
    text = json.dumps(summary, indent=1) + "\n"
    (results_dir / "summary.json").write_text(text)
    if target is not None:
        target.write_text(text)
    return summary


def _rotated(modes: list[str], by: int) -> list[str]:
    shift = (by - 1) % len(modes) if modes else 0
    return modes[shift:] + modes[:shift]


def _later(call: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    return lambda: call(*arguments)


def _mode(name: str) -> Mode:
    if name not in MODES:
        raise BenchError(f"mode {name!r} is not allowed; allowed: {', '.join(MODES)}")
    return name  # type: ignore[return-value]


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
