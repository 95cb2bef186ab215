"""Two processes push KV between two pieces of device memory through the real worker classes.

    result = push(Pair(device="cuda", ...))          two children, each this file with --role

Everything but vLLM is what an engine runs: device backend, preflight, side channel, worker,
transfer thread, NIXL. Contents are compared block by block on the consumer.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 180.0
ITEM = 2  # bytes of a bfloat16


@dataclass
class Pair:
    """What to push. environments: of the producer and of the consumer.

    layout: ``BLHNC`` or ``LBNHC`` as vLLM on GPUs, ``neuron`` as vllm-neuron.
    fragmented: no two blocks of the prompt are neighbours.
    """

    device: str
    backend: str
    layout: str
    fragmented: bool
    num_layers: int = 16
    num_heads: int = 8
    head_dim: int = 128
    tokens: int = 16
    num_blocks: int = 1024
    prompt_blocks: int = 480
    rounds: int = 5
    torch_devices: tuple[str, str] = ("cpu", "cpu")
    environments: tuple[dict[str, str], dict[str, str]] = ({}, {})

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.num_heads * self.tokens * 2 * self.head_dim * ITEM


class PairFailed(RuntimeError):
    """One of the two processes failed; the text holds its last words."""


def push(pair: Pair) -> dict[str, Any]:
    """Run both; returns the consumer's numbers and the way that UCX took, if it was UCX.

    Raises PairFailed.
    """
    ports = [_free_port(), _free_port()]
    run_id = secrets.token_hex(4)
    children = []
    for role in (0, 1):
        told = {"pair": asdict(pair), "role": role, "ports": ports, "run_id": run_id}
        environ = os.environ | {"UCX_PROTO_INFO": "y"} | pair.environments[role]
        children.append(
            subprocess.Popen(
                [sys.executable, __file__, "--told", json.dumps(told)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ,
                stdin=subprocess.PIPE,
            )
        )  # fmt: skip
    try:
        return _collect(children)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def _collect(children: Sequence[subprocess.Popen[str]]) -> dict[str, Any]:
    try:
        consumer, _ = children[1].communicate(timeout=TIMEOUT_S)
        producer, _ = children[0].communicate("end\n", timeout=30)
    except subprocess.TimeoutExpired:
        for child in children:
            child.kill()
        words = [child.communicate()[0][-1500:] for child in children]
        raise PairFailed(
            f"the push did not end within {TIMEOUT_S:g} s. Producer: {words[0]} "
            f"Consumer: {words[1]}"
        ) from None
    answers = []
    for who, text in (("producer", producer), ("consumer", consumer)):
        lines = [line for line in text.splitlines() if line.startswith("ANSWER ")]
        if not lines:
            raise PairFailed(f"the {who} failed: {text[-2000:]}")
        answers.append(json.loads(lines[-1].removeprefix("ANSWER ")))
    taken = write_path(producer)
    more = {"path": taken, "descriptors": answers[0]["descriptors"]}
    return answers[1] | more | {"locality": answers[0]["locality"]}


def write_path(log: str) -> str:
    """How UCX wrote to the peer, from its table of protocols; empty where it printed none.

    The tables look alike: a title with `remote memory write`, then rows of range, kind and
    transport. The last row of the last table that is not about the process itself counts.
    """
    found, title, place = "", "", ""
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.partition("|")[2].split("|") if cell.strip()]
        if len(cells) == 1:
            if cells[0].startswith("ucp_context"):
                place = cells[0]
            else:
                title = cells[0]
        elif len(cells) == 3 and "remote memory write" in title and " self " not in place:
            if cells[0] != "Range":
                found = f"{cells[1]} {cells[2]} ({title.partition(' from ')[2]})"
    return found


def path_in_words(path: str) -> str:
    """Device to device, RDMA, or through the host."""
    if "cuda_ipc" in path:
        return f"device to device: {path}"
    if any(name in path for name in ("rc_", "dc_", "srd")):
        return f"RDMA: {path}"
    return f"through host memory: {path}" if path else "not told by NIXL's backend"


# ------------------------------------------------------------ one process


def _child(told: dict[str, Any]) -> dict[str, Any]:
    pair = Pair(**told["pair"])
    role: int = told["role"]
    torch_device = pair.torch_devices[role]
    if torch_device.startswith("neuron"):
        import importlib

        for module in ("libtorch_neuronx_lite", "torch_neuronx"):
            try:
                importlib.import_module(module)
                break
            except ImportError:
                continue
        else:
            raise SystemExit("neither libtorch_neuronx_lite nor torch_neuronx can be imported")
    memory = _Memory(pair, torch_device)
    engine = _Engine(pair, role, told["ports"], told["run_id"], memory)
    try:
        return engine.produce() if role == 0 else engine.consume()
    finally:
        engine.close()


class _Memory:
    """KV caches on the device, and what the producer wrote into them."""

    def __init__(self, pair: Pair, torch_device: str) -> None:
        import torch

        self._torch = torch
        self.pair = pair
        shape = (pair.num_blocks, pair.num_heads, pair.tokens, 2 * pair.head_dim)
        page = pair.num_heads * pair.tokens * 2 * pair.head_dim
        self.whole: list[Any] = []
        self.views: list[Any] = []
        if pair.layout == "neuron":
            two = (2, pair.num_blocks, pair.num_heads, pair.tokens, pair.head_dim)
            for _ in range(pair.num_layers):
                self.whole.append(torch.zeros(two, dtype=torch.bfloat16, device=torch_device))
            self.views = self.whole
            return
        self.whole = [
            torch.zeros(
                pair.num_layers * pair.num_blocks * page, dtype=torch.bfloat16, device=torch_device
            )
        ]
        n, c = pair.tokens, 2 * pair.head_dim
        inner = (n * c, c, 1) if pair.layout == "BLHNC" else (c, pair.num_heads * c, 1)
        block = page * (pair.num_layers if pair.layout == "BLHNC" else 1)
        for layer in range(pair.num_layers):
            offset = layer * page * (1 if pair.layout == "BLHNC" else pair.num_blocks)
            self.views.append(torch.as_strided(self.whole[0], shape, (block, *inner), offset))

    def host_copy(self, seed: int) -> list[Any]:
        """What the producer's caches hold, made on the host: the same on both sides."""
        torch = self._torch
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randint(
                1, 2**15 - 1, whole.shape, dtype=torch.int16, generator=generator
            ).view(torch.bfloat16)
            for whole in self.whole
        ]  # fmt: skip

    def fill(self, seed: int) -> None:
        for whole, host in zip(self.whole, self.host_copy(seed), strict=True):
            whole.copy_(host)

    def wrong_blocks(self, seed: int, source: Sequence[int], target: Sequence[int]) -> int:
        """Blocks of the consumer that are not what the producer holds."""
        torch = self._torch
        sent = _Memory(self.pair, "cpu")
        for whole, host in zip(sent.whole, self.host_copy(seed), strict=True):
            whole.copy_(host)
        wrong: set[int] = set()
        axis = 1 if self.pair.layout == "neuron" else 0
        for ours, theirs in zip(self.views, sent.views, strict=True):
            here = ours.cpu()
            for at, (s, t) in enumerate(zip(source, target, strict=True)):
                got, want = here.select(axis, t), theirs.select(axis, s)
                if not torch.equal(got.contiguous().view(torch.int16),
                                   want.contiguous().view(torch.int16)):  # fmt: skip
                    wrong.add(at)
        return len(wrong)


class _Engine:
    """An engine without a model: side channel, worker, one rank."""

    def __init__(
        self, pair: Pair, role: int, ports: Sequence[int], run_id: str, memory: _Memory
    ) -> None:
        from neuron_push.core.agent import NixlAgent
        from neuron_push.core.commands import Target
        from neuron_push.core.layout import KvLayout
        from neuron_push.core.link import link_path
        from neuron_push.core.messages import WIRE_VERSION, EngineCard, Identity, ModelCard
        from neuron_push.core.shop import Limits
        from neuron_push.core.sidechannel import SideChannel
        from neuron_push.core.transfer import RankSetup
        from neuron_push.devices.start import confirm_device, start_device
        from neuron_push.fit import explain_cards
        from neuron_push.worker import PushWorker

        self.pair, self.memory = pair, memory
        self.results: list[Any] = []
        device = _backend(pair.device)
        caches = {f"layers.{n}": view for n, view in enumerate(memory.views)}
        start_device(device, caches, pair.backend)
        regions = [r for n, v in enumerate(memory.views) for r in device.regions(v, self._facts(n))]
        allocations = {a.address: a for v in memory.views for a in device.allocations(v)}
        layout = KvLayout(
            0, 0, pair.num_heads, device.element_type("bfloat16"), device.memory_type,
            tuple(allocations[address] for address in sorted(allocations)), tuple(regions),
        )  # fmt: skip
        layout.validate()
        self.where = device.locality(regions[0])
        name = f"{'pd'[role]}-{run_id}"
        self.target = Target("127.0.0.1", ports[0], f"p-{run_id}")
        identity = Identity(
            engine_id=name, incarnation=secrets.token_hex(4), host="127.0.0.1", port=ports[role],
            tp_size=1, pp_size=1, model="check", role="both",
        )  # fmt: skip
        path = link_path(name, "127.0.0.1", ports[role])
        limits = Limits(
            lease_s=120, request_timeout_s=120, peer_timeout_s=20, handshake_timeout_s=20,
            quarantine_s=5,
        )  # fmt: skip
        card = ModelCard("check", {"layout": pair.layout})

        def make_card(who: Identity, ranks: Any) -> EngineCard:
            return EngineCard(who, WIRE_VERSION, "push", "none", card, ranks)

        self.side = SideChannel(
            identity, link_path=path, num_ranks=1, make_card=make_card, judge=explain_cards,
            handshake_timeout_s=20,
        )  # fmt: skip
        setup = RankSetup(
            rank=0, layout=layout, limits=limits, link_path=path, read_memory=device.read_memory,
            make_agent=lambda: NixlAgent(f"{name}/0/{secrets.token_hex(4)}", pair.backend),
            confirm=lambda agent: confirm_device(device, agent),
        )  # fmt: skip
        self.worker = PushWorker(setup, device, idle_wait_s=0.01, on_result=self.results.append)

    def produce(self) -> dict[str, Any]:
        from neuron_push.core.commands import BeginProducer, FinishProducer, Progress
        from neuron_push.core.session import Outcome
        from neuron_push.scheduler import StepPlan

        self.memory.fill(seed=7)
        source, _ = blocks(self.pair)
        num_descriptors = 0
        tokens = self._prompt().num_tokens
        for number in range(self.pair.rounds):
            request = f"p{number}"
            begin = BeginProducer(request, f"k{number}", self._prompt())
            progress = Progress(request, (tuple(source),), True, tokens)
            self.worker.begin_step(StepPlan(before=[begin], after=[progress]))
            self.worker.end_forward()
            self.worker.take_results()
            self.worker.begin_step(StepPlan(before=[FinishProducer(request)]))
            num_descriptors = self._wait(Outcome.SENT).num_descriptors
        sys.stdin.readline()  # stay until the consumer has looked at what arrived
        return {"locality": asdict(self.where), "descriptors": num_descriptors}

    def consume(self) -> dict[str, Any]:
        from neuron_push.core.commands import OpenConsumer
        from neuron_push.core.session import Outcome
        from neuron_push.scheduler import StepPlan

        source, target = blocks(self.pair)
        seconds = []
        for number in range(self.pair.rounds):
            prompt = self._prompt()
            command = OpenConsumer(
                f"d{number}", f"k{number}", self.target, prompt, 0, prompt.num_tokens, 0,
                (tuple(target),),
            )  # fmt: skip
            began_s = time.perf_counter()
            self.worker.begin_step(StepPlan(before=[command]))
            self._wait(Outcome.RECEIVED)
            seconds.append(time.perf_counter() - began_s)
        wrong = self.memory.wrong_blocks(7, source, target)
        size = self.pair.prompt_blocks * self.pair.block_bytes
        best_s = min(seconds[1:] or seconds)  # the first one also meets the peer
        return {
            "gb_per_s": round(size / best_s / 1e9, 3),
            "first_s": round(seconds[0], 4),
            "best_s": round(best_s, 4),
            "mib": size >> 20,
            "wrong_blocks": wrong,
        }

    def close(self) -> None:
        self.worker.shutdown()
        self.side.close()

    def _prompt(self) -> Any:
        from neuron_push.core.session import Prompt

        return Prompt(self.pair.prompt_blocks * self.pair.tokens, b"c" * 16)

    def _wait(self, outcome: Any) -> Any:
        from neuron_push.core.session import Outcome
        from neuron_push.scheduler import StepPlan

        end_s = time.monotonic() + 120
        self.results.clear()
        while time.monotonic() < end_s:
            self.worker.begin_step(StepPlan())
            self.worker.take_results()
            for result in self.results:
                if result.outcome is outcome:
                    return result
                if result.outcome in (Outcome.FAILED, Outcome.RELEASED):
                    raise SystemExit(f"the transfer failed: {result.reason} {result.detail}")
        raise SystemExit(f"no {outcome.value} within 120 s")

    def _facts(self, layer: int) -> Any:
        from neuron_push.devices.base import CacheFacts

        size = self.pair.head_dim * ITEM
        return CacheFacts(
            f"layers.{layer}", 0, self.pair.num_blocks, self.pair.tokens, self.pair.num_heads, 0,
            size, size,
        )  # fmt: skip


def blocks(pair: Pair) -> tuple[list[int], list[int]]:
    """The prompt's blocks on the producer and on the consumer; never block 0."""
    if not pair.fragmented:
        return list(range(1, pair.prompt_blocks + 1)), list(range(2, pair.prompt_blocks + 2))
    every_other = range(1, pair.num_blocks, 2)
    source = list(every_other)[: pair.prompt_blocks]
    return source, list(reversed(source))


def _backend(name: str) -> Any:
    """By class, not by entry point: the check runs from the repository, installed or not."""
    if name == "cuda":
        from neuron_push_gpu.device import CudaDevice

        return CudaDevice()
    if name == "neuron":
        from neuron_push.devices.neuron import NeuronDevice

        return NeuronDevice()
    from neuron_push.devices.host import HostDevice

    return HostDevice()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--told", required=True)
    code = 1
    try:
        print("ANSWER " + json.dumps(_child(json.loads(parser.parse_args().told))), flush=True)
        code = 0
    except BaseException as e:  # threads of a failed transfer may not end by themselves
        print(f"{type(e).__name__}: {e}", flush=True)
    os._exit(code)
