"""Two hosts on one machine with a link between them whose rate can be set (scripts/lab.sh)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from neuron_push.bench.loads import BenchError
from neuron_push.launch import Host

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "lab.sh"


class Lab:
    """A network of our own as root; else both engines are on loopback, and no rate can be set."""

    def __init__(self, wanted: bool = True) -> None:
        self.is_real = wanted and os.geteuid() == 0 and SCRIPT.exists()
        self._id = f"nb{os.getpid() % 100_000}"
        self.hosts = (Host(), Host())

    def __enter__(self) -> Lab:
        if self.is_real:
            self._call("up")
            try:
                self.hosts = (
                    Host(self._call("ip", "p"), f"{self._id}-p"),
                    Host(self._call("ip", "d"), f"{self._id}-d"),
                )
            except BaseException:
                self._call("down")
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_real:
            self._call("down")

    def set_rate(self, link_mbps: int | None) -> None:
        """Of each direction of each host's link; None removes the limit."""
        if self.is_real:
            self._call("rate", "off" if link_mbps is None else str(link_mbps))
        elif link_mbps is not None:
            raise BenchError(
                f"--link-mbps {link_mbps} needs the lab's network namespaces: run as root, from a "
                "checkout (scripts/lab.sh), with iproute2 installed"
            )

    def _call(self, *args: str) -> str:
        done = subprocess.run(
            [SCRIPT, *args],
            env={**os.environ, "LAB": self._id},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise BenchError(f"scripts/lab.sh {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout.strip()
