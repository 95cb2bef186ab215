"""The steps of scripts/check_gpu.sh: one GPU, two processes, the real worker classes."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import _check
from _check_pair import Pair, PairFailed, path_in_words, push
from neuron_push_gpu.device import CudaDevice

from neuron_push.devices.checks import first_failure

COPY_GIB = 1


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", type=int, default=0, help="CUDA's index of the GPU (default 0)")
    parser.add_argument("--backend", default="UCX", choices=["UCX", "LIBFABRIC"])


def missing_hardware() -> str | None:
    """One sentence, or None. Only what makes every step pointless."""
    failure = first_failure(CudaDevice().preflight())
    if failure is not None and failure.name == "driver":
        return failure.sentence
    return None


class Gpu:
    def __init__(self, told: argparse.Namespace) -> None:
        self._told = told
        self._copy_gb_per_s = 0.0

    def preflight(self) -> dict[str, Any]:
        said = CudaDevice().describe()
        if not said.available:
            raise _check.StepFailed(said.reason)
        return {"reason": said.reason, "versions": said.versions}

    def torch(self) -> dict[str, Any]:
        import torch

        if not torch.cuda.is_available():
            raise _check.StepFailed(
                f"torch {torch.__version__} sees no GPU: install a CUDA build that this driver runs"
            )
        name = torch.cuda.get_device_name(self._told.gpu)
        return {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": name}

    def copy(self) -> dict[str, Any]:
        import torch

        device = f"cuda:{self._told.gpu}"
        one = torch.ones(COPY_GIB << 30, dtype=torch.uint8, device=device)
        other = torch.empty_like(one)
        best_ms = float("inf")
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
            begin.record()
            other.copy_(one)
            end.record()
            end.synchronize()
            best_ms = min(best_ms, begin.elapsed_time(end))
        self._copy_gb_per_s = (COPY_GIB << 30) / best_ms / 1e6
        return {"gb_per_s": round(self._copy_gb_per_s, 1)}

    def events(self) -> dict[str, Any]:
        """A mark is not done before the work in front of it, and done after it."""
        import torch

        device = CudaDevice()
        torch.cuda.set_device(self._told.gpu)
        caches = {"layers.0": torch.zeros(4, 1, 1, 8, device=f"cuda:{self._told.gpu}")}
        device.preflight(caches)
        matrix = torch.rand(8192, 8192, device=f"cuda:{self._told.gpu}")
        for _ in range(50):
            matrix = matrix @ matrix
        mark = device.marker()
        early = mark.done()
        if not mark.wait(60):
            raise _check.StepFailed("a mark behind 50 products of matrices is not done in 60 s")
        if early:
            raise _check.StepFailed("a mark was done before the work in front of it")
        return {"waited": True}

    def push(self, layout: str, fragmented: bool) -> dict[str, Any]:
        device = f"cuda:{self._told.gpu}"
        pair = Pair(
            device="cuda", backend=self._told.backend, layout=layout, fragmented=fragmented,
            torch_devices=(device, device),
        )  # fmt: skip
        return compared(pair, self._copy_gb_per_s)


def compared(pair: Pair, copy_gb_per_s: float) -> dict[str, Any]:
    """Push and compare contents. Raises StepFailed."""
    try:
        found = push(pair)
    except PairFailed as e:
        raise _check.StepFailed(str(e)) from None
    if found["wrong_blocks"]:
        raise _check.StepFailed(
            f"{found['wrong_blocks']} of {pair.prompt_blocks} blocks are not what was sent"
        )
    size_gib = pair.prompt_blocks * pair.block_bytes / 2**30
    found["descriptors_per_gib"] = round(found["descriptors"] / size_gib)
    if copy_gb_per_s:
        found["part_of_copy"] = round(found["gb_per_s"] / copy_gb_per_s, 3)
    found["path"] = path_in_words(found["path"])
    return found


def main() -> int:
    told = _check.parse("check_gpu.sh", options)
    gpu = Gpu(told)
    steps = [
        _check.Step("preflight", "driver, GPU, MIG, and ways from NICs to its memory",
                    gpu.preflight),
        _check.Step("torch", "torch sees the GPU", gpu.torch, ("preflight",)),
        _check.Step("copy", f"{COPY_GIB} GiB from device to device, for comparison", gpu.copy,
                    ("torch",)),
        _check.Step("events", "a mark waits for the work in front of it", gpu.events, ("torch",)),
    ]  # fmt: skip
    for layout in ("BLHNC", "LBNHC"):
        for fragmented in (False, True):
            kind = "fragmented" if fragmented else "contiguous"
            steps.append(
                _check.Step(
                    f"push_{layout}_{kind}",
                    f"two processes push {kind} blocks of layout {layout} over {told.backend}, "
                    "contents compared",
                    lambda layout=layout, fragmented=fragmented: gpu.push(layout, fragmented),
                    ("torch",),
                )
            )
    return _check.run("check_gpu", steps, missing_hardware(), told)


if __name__ == "__main__":
    sys.exit(main())
