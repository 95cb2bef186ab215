"""The deployments that are compared: started once, and stopped in their tracks while others run.

An idle engine is not idle: vLLM's connectors poll, and NIXL's progress threads spin. So whoever
is not being measured is stopped by signal (SIGSTOP) and goes on later where it was.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from neuron_push.bench.cpu import cpu_seconds, free_all_threads
from neuron_push.bench.loads import BenchError
from neuron_push.bench.ports import quiet_ports
from neuron_push.launch import (
    Engine,
    Host,
    LaunchError,
    Mode,
    Role,
    Server,
    metrics,
    start_engine,
    start_router,
)

Tick = Callable[[str], None]

SERVED_NAME = "bench"
QUIET_TIMEOUT_S = 40.0
RESUME_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Settings:
    """What all engines have in common."""

    model: str
    backend: str = "UCX"
    block_size: int = 32
    max_model_len: int = 8192
    chunk_tokens: int = 512
    num_blocks: int = 800
    """KV pool of each engine: 25,600 tokens at 32 a block. All engines are up at once."""
    placement: str = "free"
    extra: dict[str, bool] = field(default_factory=dict)
    """Options of our connector, as ``verify_kv``."""


class Deployment:
    """The servers of one mode: prefill, decode and router; or, for ``plain``, one engine."""

    def __init__(self, mode: Mode, settings: Settings, hosts: tuple[Host, Host]) -> None:
        self.mode: Mode = mode
        self.settings = settings
        self.engines: dict[str, Engine] = {}
        self.servers: dict[str, Server] = {}
        self.is_paused = False
        ports = quiet_ports(5)
        if mode == "plain":
            self.engines["plain"] = self._engine("plain", "plain", ports[0], 0, hosts[0])
            self.url = self.engines["plain"].url
        else:
            self.engines["prefill"] = self._engine(
                "prefill", "producer", ports[0], ports[1], hosts[0]
            )
            self.engines["decode"] = self._engine(
                "decode", "consumer", ports[2], ports[3], hosts[1]
            )
            self.url = f"http://127.0.0.1:{ports[4]}"
        self._router_port = ports[4]

    def _engine(self, name: str, role: Role, port: int, side_port: int, host: Host) -> Engine:
        settings = self.settings
        # UCX would move bytes between two processes of one kernel through shared memory,
        # past the link between the two hosts that they stand for.
        network = {"UCX_TLS": "tcp,self"} if settings.backend == "UCX" else {}
        if host.namespace:
            network |= {"UCX_NET_DEVICES": "eth0", "FI_TCP_IFACE": "eth0"}
        arguments = [
            "--max-num-batched-tokens", str(settings.chunk_tokens), "--max-num-seqs", "64",
            "--no-enable-prefix-caching", "--num-gpu-blocks-override", str(settings.num_blocks),
        ]  # fmt: skip
        return Engine(
            name=f"{self.mode}-{name}",
            role=role,
            mode=self.mode,
            model=settings.model,
            port=port,
            side_port=side_port,
            host=host,
            served_name=SERVED_NAME,
            backend=settings.backend,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len,
            kv_cache_gib=2,
            num_threads=1,
            extra=dict(settings.extra) if self.mode == "push" else {},
            arguments=tuple(arguments),
            environment=network,
        )

    # ------------------------------------------------------------ start and end

    def start(self, log_dir: Path, tick: Tick) -> None:
        """Engines, then the router; returns when all answer. Raises LaunchError."""
        log_dir.mkdir(parents=True, exist_ok=True)
        for name, engine in self.engines.items():
            self.servers[name] = start_engine(engine, log_dir)
        for name, engine in self.engines.items():
            text = f"{self.mode} {name}"

            def waited(seconds: float, text: str = text) -> None:
                tick(f"{text}, {seconds:.0f} s")

            self.servers[name].wait_ready(f"{engine.url}/health", tick=waited)
        if self.mode != "plain":
            self.servers["router"] = self._start_router(log_dir)
            self.servers["router"].wait_ready(f"{self.url}/health", 60)
        if self.settings.placement == "free":
            for server in self.servers.values():
                free_all_threads(server.pid)

    def _start_router(self, log_dir: Path) -> Server:
        prefill, decode = self.engines["prefill"], self.engines["decode"]
        if self.mode == "push":
            return start_router([prefill], [decode], self._router_port, log_dir)
        argv = [
            sys.executable, "-m", "neuron_push.bench.baseline_router",
            "--mode", self.mode, "--prefill", prefill.url, "--decode", decode.url,
            "--engine-id", prefill.name, "--kv-host", prefill.host.address,
            "--kv-port", str(prefill.side_port), "--port", str(self._router_port),
        ]  # fmt: skip
        log = log_dir / f"{self.mode}-router.log"
        return Server(f"{self.mode}-router", argv, {"PYTHONUNBUFFERED": "1"}, log)

    def ask_to_end(self) -> None:
        """Returns at once; `stop` waits."""
        self._signal(signal.SIGCONT)
        for server in self.servers.values():
            server.ask_to_end()

    def stop(self) -> None:
        self._signal(signal.SIGCONT)
        for server in reversed(self.servers.values()):
            server.stop()
        self.servers.clear()

    # ------------------------------------------------------------ pause

    def pause(self) -> None:
        """Stop every process where it is, once no request is left anywhere."""
        if not self.is_paused:
            self.wait_quiet()
            self._signal(signal.SIGSTOP)
            self.is_paused = True

    def resume(self) -> float:
        """Go on; returns the seconds until all servers answered."""
        started_s = time.monotonic()
        if self.is_paused:
            self._signal(signal.SIGCONT)
            self.is_paused = False
        for name, server in self.servers.items():
            url = self.url if name == "router" else self.engines[name].url
            try:
                server.wait_ready(f"{url}/health", RESUME_TIMEOUT_S)
            except LaunchError as e:
                raise BenchError(f"{self.mode}: after a pause: {e}") from e
        return time.monotonic() - started_s

    def _signal(self, number: int) -> None:
        # The router last to go on and first to halt: it asks the engines how they are.
        order = list(self.servers.values())
        for server in order if number == signal.SIGCONT else reversed(order):
            server.signal(number)

    def wait_quiet(self) -> None:
        """Until no engine has a request or holds blocks for one.

        Blocks may stay until a lease ends (vLLM: 30 s); after that, go on regardless.
        """
        end_s = time.monotonic() + QUIET_TIMEOUT_S
        while time.monotonic() < end_s:
            if all(_is_quiet(engine.url) for engine in self.engines.values()):
                return
            time.sleep(0.2)

    # ------------------------------------------------------------ use

    def warm_up(self) -> None:
        """The first steps of every process: each engine alone, then a transfer."""
        for engine in self.engines.values():
            complete(engine.url, _prompt(96, 1), 2)
        if self.mode != "plain":
            for salt, length in enumerate((96, 700, 1500), 2):
                complete(self.url, _prompt(length, salt), 4)
        if self.settings.placement == "free":
            for server in self.servers.values():
                free_all_threads(server.pid)

    def cpu_seconds(self) -> dict[str, float]:
        """``prefill worker`` and so on: CPU seconds since start."""
        return {
            f"{name} {role}": seconds
            for name, server in self.servers.items()
            for role, seconds in cpu_seconds(server.pid).items()
        }


def _prompt(num_tokens: int, salt: int) -> list[int]:
    return [1000 + (salt * 7919 + i * 31) % 20000 for i in range(num_tokens)]


def complete(url: str, prompt: Sequence[int], max_tokens: int, timeout_s: float = 120) -> None:
    """One greedy completion of token ids. Raises BenchError."""
    body = {
        "model": SERVED_NAME, "prompt": list(prompt), "max_tokens": max_tokens,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            answer.read()
    except urllib.error.HTTPError as e:
        raise BenchError(f"{url}: {e.code}: {e.read().decode(errors='replace')[:500]}") from e
    except OSError as e:
        raise BenchError(f"{url}: no answer: {e}") from e


def _is_quiet(url: str) -> bool:
    try:
        now = metrics(url)
    except OSError:
        return False
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return not any(now.get(f"vllm:{name}", 0.0) for name in names)
