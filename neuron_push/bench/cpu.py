"""CPU seconds of a server's processes, and where they may run."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import psutil


def tree(pid: int) -> list[psutil.Process]:
    """The process and all its descendants; empty when it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def role_of(process: psutil.Process, is_root: bool) -> str:
    """``api``, ``engine`` or ``worker`` for vLLM's processes, else ``other``."""
    try:
        title = f"{process.name()} {' '.join(process.cmdline()[:3])}"
    except psutil.Error:
        return "other"
    if "EngineCore" in title:
        return "engine"
    if "Worker" in title:
        return "worker"
    return "api" if is_root else "other"


def cpu_seconds(pid: int) -> dict[str, float]:
    """User and system time of a server since its start, by process role."""
    seconds: dict[str, float] = defaultdict(float)
    for process in tree(pid):
        try:
            times = process.cpu_times()
            seconds[role_of(process, process.pid == pid)] += times.user + times.system
        except psutil.Error:
            continue
    return dict(seconds)


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {role: after[role] - before.get(role, 0.0) for role in after}


def free_all_threads(pid: int) -> None:
    """Let every thread of a server run on every core.

    vLLM's NIXL connectors tie a CPU worker's main thread, and all threads it starts later, to
    the last core: two engines on one machine, which stand for two hosts, would share that core.
    """
    cores = set(range(os.cpu_count() or 1))
    for process in tree(pid):
        for task in Path(f"/proc/{process.pid}/task").glob("*"):
            try:
                os.sched_setaffinity(int(task.name), cores)
            except (ProcessLookupError, PermissionError):
                continue
