"""The load generator: vLLM's serving benchmark in a child process (driver.py)."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

from neuron_push.bench.loads import ONE_AT_A_TIME, BenchError, Load
from neuron_push.bench.pairs import SERVED_NAME

START_TIMEOUT_S = 180.0


def benchmark_arguments(
    load: Load, url: str, tokenizer: str, iteration: int, result: Path
) -> list[str]:
    """Of vLLM's serving benchmark, for one run."""
    arguments = [
        "--backend", "vllm", "--base-url", url, "--endpoint", "/v1/completions",
        "--model", SERVED_NAME, "--tokenizer", tokenizer,
        "--dataset-name", "random", "--random-input-len", str(load.input_len),
        "--random-output-len", str(load.output_len), "--num-prompts", str(load.num_prompts),
        "--seed", str(load.seed(iteration)), "--ignore-eos", "--temperature", "0",
        "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99",
        "--save-result", "--save-detailed", "--disable-tqdm",
        "--result-dir", str(result.parent), "--result-filename", result.name,
    ]  # fmt: skip
    if load.qps == ONE_AT_A_TIME:
        return [*arguments, "--max-concurrency", "1"]
    return [*arguments, "--request-rate", load.qps_text]


class Client:
    """The child; one run at a time."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._file = log.open("wb")
        self._child = subprocess.Popen(
            [sys.executable, "-m", "neuron_push.bench.driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._file,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        self._answer(START_TIMEOUT_S)

    def run(self, arguments: list[str], timeout_s: float) -> None:
        """Raises BenchError when the benchmark fails or takes longer."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(arguments).encode() + b"\n")
        self._child.stdin.flush()
        self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> None:
        stream = self._child.stdout
        assert stream is not None
        end_s = time.monotonic() + timeout_s
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, end_s - time.monotonic())):
                    raise BenchError(
                        f"the load generator gave no answer in {timeout_s:.0f} s: {self.log}"
                    )
                read = os.read(stream.fileno(), 65_536)
                if not read:
                    raise BenchError(f"the load generator has ended: see {self.log}")
                line += read
        error = json.loads(line)["error"]
        if error is not None:
            raise BenchError(f"the load generator failed: {error}: see {self.log}")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._file.close()
