"""The connector against the vLLM versions it is for, each in a process of its own.

0.24.0 is the base of vllm-neuron, and has no build for CPUs: its Python sources are enough here
(scripts/get_vllm_024.sh). What each process checks stands in contract_child.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.versions import ASKED, KNOWN, ROOT, find_python, python_of, run

pytest.importorskip("vllm")
pytest.importorskip("nixl._api")

CHILD = Path(__file__).with_name("contract_child.py")
SOURCES = ROOT / ".work" / "vllm-0.24.0"

pytestmark = [pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(900)]


def check(python: str, version: str, *sources: Path) -> None:
    # Not the interfaces that other tests' network namespaces make and unmake meanwhile.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "UCX_NET_DEVICES": "lo"}
    done = subprocess.run(
        [python, str(CHILD), *map(str, sources)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert f"contract kept with vLLM {version}" in done.stdout


def test_installed() -> None:
    check(sys.executable, "")


def test_0_24_0() -> None:
    if "0.24.0" in ASKED:
        run([ROOT / "scripts" / "get_vllm_024.sh", SOURCES], PYTHON=sys.executable)
    if not SOURCES.exists():
        pytest.skip(f"there is no {SOURCES}: scripts/get_vllm_024.sh makes it")
    check(sys.executable, "0.24.0", SOURCES)


@pytest.mark.parametrize("version", sorted({*KNOWN, *ASKED} - {"0.24.0"}))
def test_other_versions(version: str) -> None:
    if version not in ASKED and find_python(version) is None:
        pytest.skip(f"NEURON_PUSH_VERSIONS does not list {version}")
    check(python_of(version), version)
