"""The steps of scripts/check_trainium.sh, on a trn2.48xlarge or its like.

Written from public sources; not one step has run on Neuron hardware yet. What a step proves is in
its words, and a step that could not run is in the report as not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import _check
from _check_gpu import compared
from _check_pair import Pair

from neuron_push.devices import near
from neuron_push.devices.checks import first_failure
from neuron_push.devices.neuron import NeuronDevice, software_versions
from neuron_push.devices.neuron_preflight import NeuronMachine
from neuron_push.devices.nrt import load_globally

ROOT = Path(__file__).resolve().parent.parent
LINE_RATE_GB_PER_S = 25.0
"""One 200 Gbit/s EFA adapter, as trn2 and trn3 have one for each device."""

LEAST_PART = 0.6
CORES_PER_DEVICE = 4  # logical cores of a trn2 or trn3 device


def options(parser: argparse.ArgumentParser) -> None:
    says = "Neuron devices to push from, each to the next (default 0,8)"
    parser.add_argument("--devices", default="0,8", metavar="LIST", help=says)
    parser.add_argument("--model", help="also serve this model, one prefill and one decode engine")
    parser.add_argument("--tp", type=int, default=4, help="tensor-parallel size of the engines")


def missing_hardware() -> str | None:
    failure = first_failure(NeuronDevice().preflight())
    if failure is not None and failure.name == "device_nodes":
        return failure.sentence
    return None


def command(*words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "neuron_push", *words],
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


def software() -> dict[str, Any]:
    found: dict[str, Any] = dict(software_versions())
    nrt = load_globally()
    found["libnrt"] = nrt.version()
    found["names the NIC of a buffer"] = nrt.has("nrt_get_attached_efa_bdf")
    found["tells the ends of executions"] = nrt.has("nrta_is_completed")
    return found


def preflight() -> dict[str, Any]:
    said = NeuronDevice().describe()
    if not said.available:
        raise _check.StepFailed(said.reason)
    return {"reason": said.reason, "instance": NeuronMachine().product_name()}


def doctor() -> dict[str, Any]:
    done = command("doctor", "--json")
    if done.returncode not in (0, 1):
        raise _check.StepFailed(f"neuron-push doctor could not look: {done.stderr[-500:]}")
    if done.returncode == 1:
        raise _check.StepFailed(f"neuron-push doctor found problems: {done.stdout[-3000:]}")
    return {"report": json.loads(done.stdout)}


def rails_verify() -> dict[str, Any]:
    done = command("rails", "verify", "--json", timeout_s=180)
    if done.returncode:
        raise _check.StepFailed(f"neuron-push rails verify: {(done.stdout or done.stderr)[-2000:]}")
    return {"report": json.loads(done.stdout)}


class Pushes:
    def __init__(self, told: argparse.Namespace) -> None:
        self.devices = [int(text) for text in told.devices.split(",")]

    def one(self, source: int, target: int, fragmented: bool) -> dict[str, Any]:
        pair = Pair(
            device="neuron", backend="LIBFABRIC", layout="neuron", fragmented=fragmented,
            tokens=32, num_blocks=512, prompt_blocks=240, torch_devices=("neuron:0", "neuron:0"),
            environments=(environment(source), environment(target)),
        )  # fmt: skip
        found = compared(pair, 0.0)
        rate = found["gb_per_s"]
        found["part_of_line_rate"] = round(rate / LINE_RATE_GB_PER_S, 3)
        if not fragmented and rate < LEAST_PART * LINE_RATE_GB_PER_S:
            raise _check.StepFailed(
                f"{rate} GB/s from device {source} to {target}, expected at least "
                f"{LEAST_PART * LINE_RATE_GB_PER_S:g} of a rail's {LINE_RATE_GB_PER_S:g}: see "
                "neuron-push rails watch for the NIC that carried it"
            )
        return found


def environment(device: int) -> dict[str, str]:
    """Of a process that uses the first core of a device, before its first device tensor."""
    core = device * CORES_PER_DEVICE
    wanted = {
        "NEURON_RT_VISIBLE_CORES": str(core),
        "NEURON_RT_MAP_HBM": "1",
        "FI_EFA_ENABLE_SHM_TRANSFER": "0",
        "LD_LIBRARY_PATH": ":".join(
            [*filter(None, [os.environ.get("LD_LIBRARY_PATH")]),
             "/opt/aws/neuron/lib", "/opt/amazon/efa/lib"]
        ),
    }  # fmt: skip
    nodes = near.select().choices
    choice = next((c for c in nodes if c.kind == "neuron" and c.index == device), None)
    if choice is not None and choice.rails and not choice.candidates:
        wanted["FI_EFA_IFACE"] = choice.rails[0].name
    return wanted


def serve(model: str, tp: int) -> dict[str, Any]:
    """One prefill engine on the first cores, one decode engine behind it, a router, one request.

    docs/trainium.md has the same by hand.
    """
    started: list[subprocess.Popen[bytes]] = []
    logs = ROOT / ".work/check_trainium"
    logs.mkdir(parents=True, exist_ok=True)

    def start(name: str, argv: list[str], more: dict[str, str]) -> None:
        with (logs / f"{name}.log").open("wb") as log:
            started.append(subprocess.Popen(argv, stdout=log, stderr=log, env=os.environ | more))

    def engine(name: str, role: str, first: int, port: int, side: int) -> None:
        config = {
            "kv_connector": "NeuronPushConnector",
            "kv_connector_module_path": "neuron_push.connector",
            "kv_role": role,
            "kv_buffer_device": "cuda",
            "engine_id": name,
            "kv_connector_extra_config": {"backends": ["LIBFABRIC"], "side_channel_port": side},
        }
        argv = ["vllm", "serve", model, "--port", str(port), "--tensor-parallel-size", str(tp),
                "--block-size", "32", "--max-model-len", "4096", "--max-num-seqs", "4",
                "--kv-transfer-config", json.dumps(config)]  # fmt: skip
        more = {
            "NEURON_VISIBLE_DEVICES": f"{first}-{first + tp - 1}",
            "NEURON_RT_ROOT_COMM_ID": f"localhost:{62182 + first}",
            "FI_EFA_ENABLE_SHM_TRANSFER": "0",
        }
        start(name, argv, more)

    try:
        engine("prefill", "kv_producer", 0, 8100, 5600)
        engine("decode", "kv_consumer", tp, 8200, 5700)
        router = [sys.executable, "-m", "neuron_push", "router", "--port", "8000",
                  "--prefill", "http://127.0.0.1:8100",
                  "--decode", "http://127.0.0.1:8200"]  # fmt: skip
        _until_healthy([8100, 8200], started, logs)
        start("router", router, {})
        _until_healthy([8000], started, logs)
        body = {"model": model, "prompt": "The capital of France is", "max_tokens": 16,
                "temperature": 0}  # fmt: skip
        request = urllib.request.Request(
            "http://127.0.0.1:8000/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            text = json.load(response)["choices"][0]["text"]
        if not text.strip():
            raise _check.StepFailed(f"the answer is empty; logs are in {logs}")
        return {"answer": text, "logs": str(logs)}
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _until_healthy(
    ports: list[int], started: list[subprocess.Popen[bytes]], logs: Path, timeout_s: float = 3600
) -> None:
    """A first start compiles graphs, which takes long. Raises StepFailed."""
    end_s = time.monotonic() + timeout_s
    for port in ports:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(2)
            if any(process.poll() is not None for process in started):
                words = "".join(log.read_text(errors="replace")[-1500:] for log in logs.iterdir())
                meaning = NeuronDevice().explain(words)
                raise _check.StepFailed(f"a server ended by itself: {words} {meaning or ''}")
            if time.monotonic() > end_s:
                raise _check.StepFailed(f"port {port} does not answer after {timeout_s:g} s")


def main() -> int:
    told = _check.parse("check_trainium.sh", options)
    pushes = Pushes(told)
    steps = [
        _check.Step("software", "versions of runtime, torch backend, plugin, NIXL", software),
        _check.Step("preflight", "neuron-push devices: every check that needs no tensor",
                    preflight, ("software",)),
        _check.Step("doctor", "neuron-push doctor: NICs, libraries, limits, environment", doctor),
        _check.Step("rails_verify", "neuron-push rails verify: NIXL takes the near rails",
                    rails_verify),
    ]  # fmt: skip
    following = [*pushes.devices[1:], pushes.devices[0]]
    for source, target in zip(pushes.devices, following, strict=True):
        for fragmented in (False, True):
            kind = "fragmented" if fragmented else "contiguous"
            rate = "" if fragmented else f", bandwidth against {LINE_RATE_GB_PER_S:g} GB/s"
            steps.append(
                _check.Step(
                    f"push_{source}_to_{target}_{kind}",
                    f"WRITE {kind} blocks from HBM of device {source} to HBM of device {target}, "
                    f"contents compared{rate}",
                    lambda s=source, t=target, f=fragmented: pushes.one(s, t, f),
                    ("preflight",),
                )
            )
    if told.model:
        steps.append(
            _check.Step(
                "serve",
                f"one prefill and one decode engine serve {told.model}",
                lambda: serve(told.model, told.tp),
                tuple(step.name for step in steps if step.name.endswith("contiguous")),
            )
        )
    return _check.run("check_trainium", steps, missing_hardware(), told)


if __name__ == "__main__":
    sys.exit(main())
