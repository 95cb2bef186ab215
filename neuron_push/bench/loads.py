"""What is measured: loads, the names of their result files, and the load list of a preset."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PAIR_MODES: Final = ("push", "vllm-push", "vllm-pull")
MODES: Final = (*PAIR_MODES, "plain")

ONE_AT_A_TIME: Final = 0.0
"""As ``qps``: the next request is sent when the last one's answer is complete."""

_NAME = re.compile(
    r"(?P<mode>[a-z]+(?:-[a-z]+)*)_qps(?P<qps>\d+(?:\.\d+)?)_in(?P<in>\d+)_out(?P<out>\d+)"
    r"_iter(?P<iter>\d+)\.json"
)


class BenchError(RuntimeError):
    """The measurement cannot go on. The text says what failed, and where its log is."""


@dataclass(frozen=True)
class Load:
    """One kind of traffic. ``link_mbps`` None: the lab's links are not limited."""

    input_len: int
    output_len: int
    qps: float
    num_prompts: int
    link_mbps: int | None = None
    modes: tuple[str, ...] = PAIR_MODES

    def __post_init__(self) -> None:
        for name, value in (("input_len", self.input_len), ("output_len", self.output_len),
                            ("num_prompts", self.num_prompts)):  # fmt: skip
            if value < 1:
                raise ValueError(f"{name}: {value} is not allowed; allowed: 1 and more")
        if self.qps < 0:
            raise ValueError(f"qps: {self.qps} is not allowed; allowed: 0 (one at a time) and more")

    @property
    def qps_text(self) -> str:
        return f"{self.qps:g}"

    @property
    def folder(self) -> str:
        """Below the results folder: runs that differ by the link alone have equal names."""
        return "" if self.link_mbps is None else f"link{self.link_mbps}"

    def seed(self, iteration: int) -> int:
        """The same for every mode, another for every round: no prompt is in a prefix cache."""
        return 1_000_003 * iteration + 31 * self.input_len + int(self.qps * 1000) + (
            7 * (self.link_mbps or 0)
        )  # fmt: skip

    def describe(self) -> str:
        rate = "one at a time" if self.qps == ONE_AT_A_TIME else f"{self.qps:g}/s"
        link = "" if self.link_mbps is None else f", link {self.link_mbps} Mbit/s"
        return f"{self.input_len} in, {self.output_len} out, {rate}{link}"


@dataclass(frozen=True)
class RunName:
    """What a result file's name says."""

    mode: str
    qps: float
    input_len: int
    output_len: int
    iteration: int


def run_name(mode: str, load: Load, iteration: int) -> str:
    """``push_qps2_in1024_out32_iter1.json``."""
    return f"{mode}_qps{load.qps_text}_in{load.input_len}_out{load.output_len}_iter{iteration}.json"


def parse_run_name(name: str) -> RunName | None:
    """None when the file is no result of a run."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return RunName(
        found["mode"], float(found["qps"]), int(found["in"]), int(found["out"]), int(found["iter"])
    )


def run_path(results_dir: Path, mode: str, load: Load, iteration: int) -> Path:
    return results_dir / load.folder / run_name(mode, load, iteration)


def is_good_run(path: Path) -> bool:
    """A run that need not be repeated: complete, and no request failed."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(result, dict) and result.get("failed") == 0 and result.get("completed", 0) > 0


def read_run(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@dataclass(frozen=True)
class Calibration:
    """What one plain engine, alone on the machine, does with one request at a time.

    ttft_s: prompt tokens -> mean time to first token.
    """

    ttft_s: dict[int, float]

    def qps_for(self, input_len: int, busy: float) -> float:
        """The rate at which prefills alone take the share ``busy`` of the time."""
        return float(f"{busy / self.ttft_s[input_len]:.2g}")

    def link_for(self, input_len: int, kv_bytes_per_token: int) -> int:
        """Mbit/s at which moving a prompt's KV takes as long as computing it."""
        bits = input_len * kv_bytes_per_token * 8
        return max(1, round(bits / self.ttft_s[input_len] / 1e6))

    def to_json(self) -> dict[str, Any]:
        return {"ttft_s": {str(length): seconds for length, seconds in self.ttft_s.items()}}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Calibration:
        return cls({int(length): float(s) for length, s in data["ttft_s"].items()})


PRESET_INPUT_LENS: Final = (1024, 4096)
PRESET_OUTPUT_LEN: Final = 32
PRESET_BUSY: Final = 0.7


def preset_loads(calibration: Calibration, kv_bytes_per_token: int) -> list[Load]:
    """The table of targets: a busy P, a link as slow as the prefill, one request at a time."""
    short, long = PRESET_INPUT_LENS
    busy = [
        Load(length, PRESET_OUTPUT_LEN, calibration.qps_for(length, PRESET_BUSY), count)
        for length, count in ((short, 20), (long, 6))
    ]
    link = calibration.link_for(long, kv_bytes_per_token)
    limited = [Load(long, PRESET_OUTPUT_LEN, ONE_AT_A_TIME, 3, link)]
    alone = [
        Load(length, PRESET_OUTPUT_LEN, ONE_AT_A_TIME, count, modes=MODES)
        for length, count in ((short, 8), (long, 3))
    ]
    return [*busy, *limited, *alone]


def custom_loads(
    input_lens: Sequence[int],
    output_lens: Sequence[int],
    qps: Sequence[float],
    num_prompts: int,
    link_mbps: int | None,
    modes: Sequence[str],
) -> list[Load]:
    """Every combination. ``plain`` stands for a single engine: one request at a time only."""
    return [
        Load(
            input_len, output_len, rate, num_prompts, link_mbps,
            tuple(mode for mode in modes if mode != "plain" or rate == ONE_AT_A_TIME),
        )
        for rate in qps
        for input_len in input_lens
        for output_len in output_lens
    ]  # fmt: skip


def kv_bytes_per_token(model: Path) -> int:
    """From the checkpoint's config.json, for a cache of two bytes an element."""
    config = json.loads((model / "config.json").read_text())
    heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    size = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    return int(config["num_hidden_layers"]) * 2 * heads * size * 2
