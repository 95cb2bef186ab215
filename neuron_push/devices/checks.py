"""Ordered checks of a device and what they found, and what a backend says of a machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["ok", "note", "skipped", "failed"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    outcome: ``note``: works, but somebody should know; ``skipped``: could not be looked at here,
        `says` tells why; ``failed``: nothing may be registered with NIXL before `mend` is done.
    """

    name: str
    outcome: Outcome
    says: str
    mend: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.says}; {self.mend}" if self.mend else self.says


@dataclass(frozen=True)
class Description:
    """One backend on this machine. ``reason`` is one sentence, whether available or not."""

    name: str
    available: bool
    reason: str
    checks: tuple[Check, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    """Software that was found, by distribution or library name; nothing here is required."""


Step = tuple[str, Callable[[], Check]]


def run_in_order(steps: Sequence[Step]) -> tuple[Check, ...]:
    """Every step's check. Once one has failed, those behind it rest on nothing and are skipped."""
    done: list[Check] = []
    failed = ""
    for name, look in steps:
        if failed:
            done.append(Check(name, "skipped", f"not looked at: {failed} comes first"))
            continue
        try:
            check = look()
        except Exception as e:  # a check that cannot be made must not pass
            check = Check(name, "failed", f"{name} could not be checked: {e}")
        done.append(check)
        if check.outcome == "failed":
            failed = name
    return tuple(done)


def first_failure(checks: Sequence[Check]) -> Check | None:
    return next((check for check in checks if check.outcome == "failed"), None)


def described(
    name: str, checks: Sequence[Check], good: str, versions: dict[str, str] | None = None
) -> Description:
    """A description from checks: unavailable with the first failure, else `good` and the notes."""
    failure = first_failure(checks)
    if failure is not None:
        return Description(name, False, failure.sentence, tuple(checks), versions or {})
    notes = [check.sentence for check in checks if check.outcome == "note"]
    return Description(name, True, "; ".join([good, *notes]), tuple(checks), versions or {})
