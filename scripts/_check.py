"""What check_gpu and check_trainium share: steps in order, a report that says what was not run.

Exit codes: 0 every step passed; 1 a step failed; 2 the hardware is not here, or only a list was
asked for and it would not be. A report holds every step, also those that were not run, and why.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

GOOD, PROBLEM, NO_HARDWARE = 0, 1, 2


class StepFailed(Exception):
    """The step's answer is no. The text says what was found and how to mend it."""


@dataclass
class Step:
    """name, what it does in words, and the function: returns numbers for the report."""

    name: str
    what: str
    run: Callable[[], dict[str, Any]]
    needs: tuple[str, ...] = ()
    """Names of steps without whose success this one means nothing."""


@dataclass
class Result:
    name: str
    what: str
    outcome: str = "not run"
    says: str = ""
    seconds: float = 0.0
    numbers: dict[str, Any] = field(default_factory=dict)


def parse(title: str, extra: Callable[[argparse.ArgumentParser], None]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=title, description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="list the steps, run none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    extra(parser)
    return parser.parse_args()


def run(
    title: str,
    steps: Sequence[Step],
    missing_hardware: str | None,
    options: argparse.Namespace,
) -> int:
    """missing_hardware: one sentence, or None where it is here."""
    results = [Result(step.name, step.what) for step in steps]
    began_s = time.monotonic()
    if options.dry_run or missing_hardware:
        for number, step in enumerate(steps, 1):
            print(f"{number:2}. {step.name}: {step.what}")
        for result in results:
            result.says = "dry run" if options.dry_run else str(missing_hardware)
        print(f"none of these {len(steps)} steps was run", end="")
        print(f": {missing_hardware}" if missing_hardware else " (--dry-run)")
        code = NO_HARDWARE if missing_hardware else GOOD
    else:
        passed: set[str] = set()
        for step, result in zip(steps, results, strict=True):
            lacking = [name for name in step.needs if name not in passed]
            if lacking:
                result.says = f"not run, because {lacking[0]} did not pass"
            else:
                _run_one(step, result)
            if result.outcome == "passed":
                passed.add(step.name)
            print(f"{result.outcome:>8}  {step.name}: {result.says}", flush=True)
        code = GOOD if len(passed) == len(steps) else PROBLEM
    report = {
        "schema_version": 1,
        "check": title,
        "passed": code == GOOD and not options.dry_run,
        "exit_code": code,
        "seconds": round(time.monotonic() - began_s, 1),
        "machine": {"system": platform.platform(), "python": platform.python_version()},
        "not_run": [result.name for result in results if result.outcome == "not run"],
        "steps": [asdict(result) for result in results],
    }
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
        print(f"report: {options.json}")
    return code


def _run_one(step: Step, result: Result) -> None:
    began_s = time.monotonic()
    try:
        result.numbers = step.run()
    except StepFailed as e:
        result.outcome, result.says = "failed", str(e)
    except Exception as e:  # a step that breaks has not passed; the others still run
        result.outcome, result.says = "failed", f"{type(e).__name__}: {e}"
    else:
        result.outcome = "passed"
        result.says = ", ".join(f"{k} {v}" for k, v in result.numbers.items() if _is_short(v))
    result.seconds = round(time.monotonic() - began_s, 2)


def _is_short(value: Any) -> bool:
    return isinstance(value, (int, float, bool)) or (isinstance(value, str) and len(value) < 80)


def stop(message: str) -> int:
    print(message, file=sys.stderr)
    return PROBLEM
