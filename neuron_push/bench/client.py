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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from neuron_push.bench.loads import ONE_AT_A_TIME, BenchError, Load
from neuron_push.bench.pairs import SERVED_NAME

START_TIMEOUT_S = 180.0

DRIVER: Final = (sys.executable, "-m", "neuron_push.bench.driver")


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
    """The child; one run at a time.

    A child whose run failed, or took too long, is given up: its late answer would be taken for
    that of the next run. The next run starts another.
    """

    def __init__(self, log: Path, argv: Sequence[str] = DRIVER) -> None:
        self.log = log
        self._argv = list(argv)
        self._file = log.open("wb")
        self._child: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._child = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._file,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
            process_group=0,  # and not a session: see launch.Server
        )
        return self._child

    def wait_ready(self) -> None:
        assert self._child is not None
        self._answer(self._child, START_TIMEOUT_S)

    def run(self, arguments: list[str], result: Path, timeout_s: float) -> dict[str, Any]:
        """What the benchmark wrote to ``result``.

        Raises BenchError when it fails, takes longer, or writes nothing.
        """
        try:
            if self._child is None:
                self._start()
                self.wait_ready()
            child = self._child
            assert child is not None
            assert child.stdin is not None
            child.stdin.write(json.dumps(arguments).encode() + b"\n")
            child.stdin.flush()
            self._answer(child, timeout_s)
            answer: dict[str, Any] = json.loads(result.read_text())
        except BenchError:
            self._end()
            raise
        except (OSError, ValueError) as e:
            self._end()
            raise BenchError(f"the load generator left no result: {e}: see {self.log}") from e
        return answer

    def _answer(self, child: subprocess.Popen[bytes], timeout_s: float) -> None:
        stream = child.stdout
        assert stream is not None
        end_s = time.monotonic() + timeout_s
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, end_s - time.monotonic())):
                    raise BenchError(
                        f"the load generator gave no answer in {timeout_s:g} s: {self.log}"
                    )
                read = os.read(stream.fileno(), 65_536)
                if not read:
                    raise BenchError(f"the load generator has ended: see {self.log}")
                line += read
        error = json.loads(line)["error"]
        if error is not None:
            raise BenchError(f"the load generator failed: {error}: see {self.log}")

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def close(self) -> None:
        self._end()
        self._file.close()
