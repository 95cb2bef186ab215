"""The doctor: every check in the order in which things must be right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from . import (
    doctor_environment,
    doctor_host,
    doctor_libraries,
    doctor_nics,
    doctor_peer,
    doctor_rails,
)
from .doctor_base import NOTHING, Check, Finding, Situation
from .errors import EXIT_COULD_NOT_LOOK, EXIT_GOOD, EXIT_PROBLEM
from .model import SCHEMA_VERSION

if TYPE_CHECKING:
    from rich.console import Console

AREAS: tuple[tuple[str, tuple[Check, ...]], ...] = (
    ("hardware and drivers", doctor_nics.CHECKS),
    ("libraries", doctor_libraries.CHECKS),
    ("environment", doctor_environment.CHECKS),
    ("rails", doctor_rails.CHECKS),
    ("limits and host", doctor_host.CHECKS),
    ("peer, log and counters", doctor_peer.CHECKS),
)
_STYLE_BY_LEVEL = {"fail": "bold red", "warn": "yellow", "unknown": "magenta", "info": "dim"}


class Diagnosis(msgspec.Struct):
    """Findings by area, in order."""

    findings: dict[str, list[Finding]]

    def all_findings(self) -> list[Finding]:
        return [finding for found in self.findings.values() for finding in found]

    def count(self, level: str) -> int:
        return sum(finding.level == level for finding in self.all_findings())

    def exit_code(self, *, strict: bool = False) -> int:
        """1 on a failure (with `strict` on a warning too), 2 if something could not be seen."""
        if self.count("fail") or (strict and self.count("warn")):
            return EXIT_PROBLEM
        return EXIT_COULD_NOT_LOOK if self.count("unknown") else EXIT_GOOD


def diagnose(situation: Situation) -> Diagnosis:
    """Run every check. A check looks only at the situation, so this works on a captured box too."""
    return Diagnosis(
        {area: [one for check in checks for one in check(situation)] for area, checks in AREAS}
    )


def document(diagnosis: Diagnosis) -> dict[str, object]:
    """What `doctor --json` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "good": diagnosis.exit_code() == EXIT_GOOD,
        "counts": {level: diagnosis.count(level) for level in _STYLE_BY_LEVEL},
        "findings": [
            {"area": area, **msgspec.to_builtins(finding)}
            for area, found in diagnosis.findings.items()
            for finding in found
        ],
    }


def print_diagnosis(diagnosis: Diagnosis, out: Console, *, with_info: bool = True) -> None:
    """Findings numbered in order, each with why and how to mend it."""
    number = 0
    for area, found in diagnosis.findings.items():
        shown = [one for one in found if with_info or one.level != "info"]
        if not shown:
            out.print(f"{area}: nothing found", style="dim", markup=False)
            continue
        out.print(f"{area}:", style="bold", markup=False)
        for finding in shown:
            number += 1
            head = f"{number:3}. {finding.level.upper():7} {finding.check}  {finding.what}"
            out.print(
                head, style=_STYLE_BY_LEVEL.get(finding.level, ""), markup=False, soft_wrap=True
            )
            out.print(f"             why:  {finding.why}", markup=False, soft_wrap=True)
            if finding.mend != NOTHING:
                out.print(f"             mend: {finding.mend}", markup=False, soft_wrap=True)
    fails, warns = diagnosis.count("fail"), diagnosis.count("warn")
    if fails:
        out.print(
            f"{_count(fails, 'problem')}, {_count(warns, 'warning')}; mend them from the top",
            style="bold red",
        )
    elif diagnosis.count("unknown"):
        out.print("no problem was found, but not everything could be seen", style="magenta")
    else:
        out.print(f"no problem was found, {_count(warns, 'warning')}", style="green")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
