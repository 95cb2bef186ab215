"""What people read of check-log, verify and watch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .compare import RailCheck
from .log_parser import LogReport, Trouble
from .output import console
from .verify import Verification
from .watch import ALARM_COUNTERS, WatchResult

if TYPE_CHECKING:
    from rich.console import Console

MAX_CHECKS = 64
_STYLE_BY_VERDICT = {"right": "green", "unknown": "magenta"}
_SHOWN_COUNTERS = (
    "rdma_write_bytes",
    "rdma_write_recv_bytes",
    "send_bytes",
    "tx_bytes",
    "rx_bytes",
)

__all__ = [
    "console",
    "print_agents",
    "print_checks",
    "print_end",
    "print_troubles",
    "print_verification",
    "print_watch",
]


def print_agents(report: LogReport, out: Console) -> None:
    """One line per NIXL agent."""
    out.print(
        f"{report.num_lines} lines, {report.num_nixl_lines} of NIXL's, {len(report.agents)} agents",
        style="bold",
    )
    for number, agent in enumerate(report.agents):
        rails = ", ".join(f"{rail}={name}" for rail, name in sorted(agent.rails.items())[:8])
        more = ", ..." if len(agent.rails) > 8 else ""
        count = agent.num_rails if agent.num_rails is not None else len(agent.rails) or "?"
        out.print(
            f"agent {number} (thread {agent.thread}): NIXL {agent.nixl_version or '?'}, provider "
            f"{agent.provider or '?'}, {count} rails {rails}{more}; "
            f"{len(agent.registrations)} registrations",
            markup=False,
        )


def print_checks(checks: Sequence[RailCheck], out: Console) -> None:
    """One line per registration, bad ones first."""
    for check in sorted(checks, key=lambda one: not one.is_bad)[:MAX_CHECKS]:
        style = _STYLE_BY_VERDICT.get(check.verdict, "bold red")
        out.print(
            f"{check.verdict.upper():9} {check.what}: {check.words}", style=style, markup=False
        )
        if check.is_bad and check.expected:
            actual = ", ".join(check.actual[:8]) or f"{check.num_actual} rails"
            out.print(
                f"          expected {', '.join(check.expected[:8])}; got {actual}", markup=False
            )
    if len(checks) > MAX_CHECKS:
        out.print(f"... and {len(checks) - MAX_CHECKS} more; --json lists them all")


def print_troubles(troubles: Sequence[Trouble], out: Console) -> None:
    """Alarming lines with their meaning and cure."""
    for trouble in troubles:
        style = "bold red" if trouble.level == "fail" else "yellow"
        out.print(
            f"{trouble.level.upper():9} {trouble.check}  {trouble.meaning}",
            style=style,
            markup=False,
        )
        out.print(f"          line {trouble.first_line}, {trouble.count} times: ", end="")
        out.print(trouble.example, markup=False, soft_wrap=True)
        out.print(f"          mend: {trouble.mend}", markup=False)


def print_end(bad: bool, checks: Sequence[RailCheck], out: Console) -> None:
    """One closing sentence."""
    if bad:
        out.print("the rails are not as they should be", style="bold red")
    elif any(check.verdict == "right" for check in checks):
        out.print("the rails are as chosen", style="green")
    else:
        out.print("nothing wrong was found, and nothing proves the rails", style="magenta")


def print_verification(done: Verification, out: Console) -> None:
    """What NIXL did in the child process."""
    out.print(
        f"NIXL {done.nixl_version or '?'}: provider {done.provider or '?'}, "
        f"{done.num_rails if done.num_rails is not None else '?'} rails, memory types "
        f"{', '.join(done.memory_types) or '?'}",
        style="bold",
        markup=False,
    )
    if done.error is not None:
        out.print(f"FAILED    {done.error}", style="bold red", markup=False)
    print_checks(done.checks, out)
    print_troubles(done.troubles, out)
    if done.provider in ("tcp", "sockets"):
        out.print("this is no EFA: NIXL runs over TCP here", style="bold red")
    print_end(not done.is_good, done.checks, out)


def print_watch(result: WatchResult, out: Console) -> None:
    """Growth per NIC in MB/s, and findings."""
    from rich import box as borders
    from rich.table import Table

    table = Table(box=borders.SIMPLE_HEAD, pad_edge=False)
    for name in ("NIC", "PCI address", "rail", *_SHOWN_COUNTERS, "alarms"):
        table.add_column(name, justify="left" if name in ("NIC", "PCI address") else "right")
    for nic in result.nics:
        alarms = sum(nic.growth.get(counter, 0) for counter in ALARM_COUNTERS)
        table.add_row(
            nic.name,
            nic.pci_address,
            "yes" if nic.expected else "-",
            *(_rate(nic.growth.get(counter), result.seconds) for counter in _SHOWN_COUNTERS),
            str(alarms) if alarms else "-",
        )
    out.print(f"growth over {result.seconds:g} s, in MB/s", style="bold")
    out.print(table)
    for finding in result.findings:
        out.print(finding, markup=False, style="" if result.good else "bold red")


def _rate(growth: int | None, seconds: float) -> str:
    if growth is None:
        return "?"
    return f"{growth / seconds / 1e6:.1f}" if growth else "-"
