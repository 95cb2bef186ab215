"""The test's end of a rank process, and of the network it is in."""

from __future__ import annotations

import functools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.integration.engines import free_port

ROOT = Path(__file__).parents[3]

LIMITS = {
    "lease_s": 3.0,
    "request_timeout_s": 8.0,
    "peer_timeout_s": 1.0,
    "handshake_timeout_s": 1.0,
    "quarantine_s": 1.0,
    "stall_timeout_s": 4.0,
    "nixl_call_timeout_s": 1.0,
}


def no_lab() -> str:
    """Why no network namespace can be made here; empty if one can."""
    if not shutil.which("ip") or not shutil.which("tc"):
        return "needs the commands ip and tc (Debian: apt-get install iproute2)"
    if os.geteuid():
        return "network namespaces need root"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        return "this container may not make network namespaces"
    return ""


def no_nixl() -> str:
    return "" if find_spec("nixl") else "nixl is not installed"


@functools.cache
def libfabric_environment() -> dict[str, str]:
    """What scripts/libfabric_cpu.sh exports. Raises CalledProcessError."""
    done = subprocess.run(
        [str(ROOT / "scripts" / "libfabric_cpu.sh"), "env"],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHON": sys.executable},
        check=True,
    )
    return dict(re.findall(r"(\w+)=(\S+)", done.stdout))


class Lab:
    """Namespaces joined by a switch: scripts/lab.sh."""

    def __init__(self, name: str, hosts: str = "p d") -> None:
        self.name = name
        self.hosts = hosts

    def run(self, *args: str) -> str:
        done = subprocess.run(
            [str(ROOT / "scripts" / "lab.sh"), *args],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"LAB": self.name, "LAB_HOSTS": self.hosts},
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"lab.sh {' '.join(args)}: {done.stderr}")
        return done.stdout.strip()

    def link(self, host: str, state: str) -> None:
        """``up`` or ``down``: what a pulled cable does."""
        where = ["ip", "-n", f"{self.name}-{host}", "link", "set", "dev", "eth0", state]
        subprocess.run(where, check=True, timeout=10)


class RankProcess:
    """An engine with one rank, started, killed and started again under the same name and port."""

    def __init__(
        self,
        name: str,
        logs: Path,
        *,
        backend: str = "UCX",
        lab: Lab | None = None,
        host: str = "",
        limits: dict[str, float] | None = None,
        **settings: object,
    ) -> None:
        self.name = name
        self.namespace = f"{lab.name}-{host}" if lab else ""
        self.address = lab.run("ip", host) if lab else "127.0.0.1"
        self.port = free_port()
        self.settings = {
            "name": name,
            "backend": backend,
            "host": self.address,
            "port": self.port,
            "limits": {**LIMITS, **(limits or {})},
            **settings,
        }
        self._log = logs / f"{name}.log"
        self._env = os.environ | {"PYTHONPATH": str(ROOT), "UCX_TLS": "tcp"}
        self._env["UCX_NET_DEVICES"] = "eth0" if lab else "lo"
        if backend == "LIBFABRIC":
            self._env |= libfabric_environment() | {"FI_TCP_IFACE": "eth0"}
        self._process: subprocess.Popen[str] | None = None
        self.is_stopped = False
        self.start()

    @property
    def target(self) -> list[object]:
        return [self.address, self.port, self.name]

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        enter = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        log = self._log.open("a")
        self._process = subprocess.Popen(
            [*enter, sys.executable, "-m", "tests.faults.harness.rank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env=self._env,
        )
        log.close()
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(
            target=_pump, args=(self._process.stdout, self._answers), daemon=True
        ).start()
        self._tell(self.settings)
        self.is_stopped = False

    def wait_up(self, timeout_s: float = 30) -> None:
        self.call("info", timeout_s=timeout_s)

    def _tell(self, what: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def call(self, op: str, *, timeout_s: float = 20, **arguments: object) -> Any:
        self._tell({"op": op, **arguments})
        try:
            answer = json.loads(self._answers.get(timeout=timeout_s))
        except queue.Empty:
            raise AssertionError(
                f"{self.name}: no answer to {op} in {timeout_s} s; {self.tail()}"
            ) from None
        assert "error" not in answer, f"{self.name}: {op}: {answer['error']}; {self.tail()}"
        return answer["ok"]

    def tail(self, num_bytes: int = 3000) -> str:
        return self._log.read_text(errors="replace")[-num_bytes:]

    def results(self, request: str) -> list[dict[str, Any]]:
        return [r for r in self.call("results") if r["request"] == request]

    def wait(self, request: str, outcome: str, timeout_s: float) -> dict[str, Any]:
        """The result; asserts that it comes in time."""
        end_s = time.monotonic() + timeout_s
        while True:
            found = self.results(request)
            for result in found:
                if result["outcome"] == outcome:
                    return result
            assert time.monotonic() < end_s, (
                f"{self.name}: {request} is not {outcome} within {timeout_s:g} s, only {found}; "
                f"{self.tail()}"
            )
            time.sleep(0.02)

    # ------------------------------------------------------------ what happens to it

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)
        self.is_stopped = number == signal.SIGSTOP

    def kill(self) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self.signal(signal.SIGKILL)
        self._process.wait(10)
        self.is_stopped = False

    def restart(self) -> None:
        self.kill()
        self.start()
        self.wait_up()


def _pump(lines: Any, into: queue.Queue[str]) -> None:
    for line in lines:
        into.put(line)
