"""Start NIXL in a child process as a worker would, and see which rails it takes."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from .api import compare_metadata
from .compare import RailCheck, compare_log
from .environment import actuate
from .errors import RailsError
from .log_parser import LogReport, Trouble, read_log
from .select import Choice, Selection

DEFAULT_BYTES = 2 * 2**20
DEFAULT_TIMEOUT_S = 60.0
_WORDS_BY_STAGE = {
    "import": "NIXL cannot be imported",
    "memory": "memory of the device cannot be allocated",
    "agent": "the NIXL agent cannot be made",
    "backend": "the backend cannot be created",
    "register": "the memory cannot be registered",
    "metadata": "the agent gives no metadata",
}


class Verification(msgspec.Struct):
    """What became of the attempt. `stage` is how far it came; `done` is all the way."""

    stage: str
    error: str | None
    nixl_version: str | None
    provider: str | None
    num_rails: int | None
    memory_types: list[str]
    checks: list[RailCheck]
    troubles: list[Trouble]

    @property
    def is_good(self) -> bool:
        no_failure = all(trouble.level != "fail" for trouble in self.troubles)
        return self.stage == "done" and no_failure and not any(c.is_bad for c in self.checks)

    @property
    def could_not_look(self) -> bool:
        return self.stage == "import"


def verify(
    selection: Selection,
    choice: Choice | None,
    *,
    backend: str = "LIBFABRIC",
    environ: Mapping[str, str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Verification:
    """Register memory of one device (host memory if `choice` is None) and compare its rails.

    The child gets the same settings as a worker, and NIXL_LOG_LEVEL=DEBUG.
    """
    current = dict(os.environ if environ is None else environ)
    actuation = actuate(selection, choice, current)
    env = {**current, **actuation.as_dict(), "NIXL_LOG_LEVEL": "DEBUG"}
    options = {
        "kind": choice.kind if choice is not None else "host",
        "device": choice.process_index if choice is not None else 0,
        "num_bytes": DEFAULT_BYTES,
        "backend": backend,
        "backend_params": actuation.backend_params,
    }
    if choice is not None and choice.kind == "neuron":
        env.setdefault("NEURON_RT_MAP_HBM", "1")
        env["NEURON_RT_VISIBLE_CORES"] = str(_first_core(selection, choice))
        options["device"] = 0
    with tempfile.TemporaryDirectory(prefix="neuron-push-verify-") as directory:
        result_path, log_path = Path(directory) / "result.json", Path(directory) / "nixl.log"
        _run_child(options, result_path, log_path, env, timeout_s)
        result = json.loads(result_path.read_text()) if result_path.exists() else {}
        report = read_log(log_path)
    return _verification(selection, choice, result, report)


def _first_core(selection: Selection, choice: Choice) -> int:
    per_device = selection.entry.accelerators.logical_cores if selection.entry is not None else 1
    return max(choice.index, 0) * per_device


def _run_child(
    options: Mapping[str, object],
    result_path: Path,
    log_path: Path,
    env: Mapping[str, str],
    timeout_s: float,
) -> None:
    module = "neuron_push.rails.verify_child"
    command = [sys.executable, "-m", module, json.dumps(options), str(result_path)]
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=log, env=dict(env), start_new_session=True
        )
        try:
            child.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise RailsError(
                f"NIXL did not answer within {timeout_s:g} s; raise --timeout-s, or look at the "
                "host with `neuron-push doctor`"
            ) from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if child.returncode < 0 and not result_path.exists():
            name = signal.Signals(-child.returncode).name
            result_path.write_text(json.dumps({"stage": "agent", "error": f"killed by {name}"}))


def _verification(
    selection: Selection, choice: Choice | None, result: Mapping[str, object], report: LogReport
) -> Verification:
    stage = str(result.get("stage", "agent"))
    error = result.get("error")
    checks: list[RailCheck] = []
    metadata = result.get("metadata")
    if isinstance(metadata, str):
        address = result.get("address")
        devices = None
        if choice is not None and isinstance(address, int):
            devices = {address: choice.pci_address}
        blob = base64.b64decode(metadata)
        checks = compare_metadata(blob, selection, device_of_buffer=devices)
    if not checks or all(check.verdict == "unknown" for check in checks):
        checks = compare_log(selection, report) or checks
    attached = result.get("attached_nic")
    if isinstance(attached, str) and choice is not None:
        checks.append(_attached_check(choice, attached))
    agent = report.agents[-1] if report.agents else None
    memory_types = result.get("memory_types")
    words = None
    if error is not None or stage != "done":
        words = f"{_WORDS_BY_STAGE.get(stage, 'NIXL failed')}: {error or 'it ended without a word'}"
    return Verification(
        stage=stage,
        error=words,
        nixl_version=report.nixl_version,
        provider=agent.provider if agent is not None else None,
        num_rails=agent.num_rails if agent is not None else None,
        memory_types=[str(one) for one in memory_types] if isinstance(memory_types, list) else [],
        checks=checks,
        troubles=report.troubles,
    )


def _attached_check(choice: Choice, attached: str) -> RailCheck:
    from . import bdf

    address = bdf.normalise(attached) if bdf.is_address(attached) else attached
    is_right = address in choice.acceptable()
    return RailCheck(
        what="answer of the Neuron runtime",
        pci_address=choice.pci_address,
        expected=sorted(choice.acceptable()),
        actual=[address],
        num_actual=1,
        verdict="right" if is_right else "wrong",
        words="the attached NIC is the chosen one"
        if is_right
        else "the Neuron runtime names another NIC than the one chosen",
    )
