"""`rails verify` with a real NIXL: on TCP, and where its plugin cannot load."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed"),
]


def rails(*arguments: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "neuron_push.rails", *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**env, "PYTHONPATH": str(ROOT)},
    )


def with_libraries() -> dict[str, str]:
    """The environment in which NIXL's plugin finds libfabric and its kin."""
    directory = Path(os.environ.get("LIBFABRIC_DIR", ROOT / ".work" / "libfabric"))
    paths = [str(directory)] if directory.is_dir() else []
    paths += [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(paths)}


def without_libraries() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}


def plugin_loads(env: Mapping[str, str]) -> bool:
    box = json.loads(rails("capture", env=env).stdout)
    return any(plugin.get("loads") for plugin in box["host"].get("plugins", []))


def has_efa() -> bool:
    directory = Path("/sys/class/infiniband")
    return directory.is_dir() and any(directory.iterdir())


def test_verify_on_tcp_says_that_it_is_no_efa() -> None:
    env = with_libraries()
    if not plugin_loads(env):
        pytest.skip("libfabric or another library of NIXL's plugin is missing; set LIBFABRIC_DIR")
    if has_efa():
        pytest.skip("this host has RDMA NICs")
    done = rails("verify", "--json", env=env)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["stage"] == "done"
    assert document["provider"] == "tcp"
    assert document["memory_types"] == ["DRAM_SEG"]
    assert [check["verdict"] for check in document["checks"]] == ["tcp"]
    assert document["troubles"][0]["check"] == "R01"
    shown = rails("verify", env=env)
    assert shown.returncode == 1
    assert "this is no EFA" in shown.stdout


def test_verify_names_the_library_that_is_missing() -> None:
    env = without_libraries()
    if plugin_loads(env):
        pytest.skip("this host has everything that the plugin needs")
    done = rails("verify", env=env)
    assert done.returncode == 1
    assert "the backend cannot be created" in done.stdout
    assert "cannot open shared object file" in done.stdout or "not found" in done.stdout


def test_verify_without_nixl_could_not_look(tmp_path: Path) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("raise ImportError('no NIXL here')\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "neuron_push.rails", "verify"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=env,
    )
    assert done.returncode == 2
    assert "NIXL cannot be imported" in done.stdout


def test_verify_that_does_not_answer_in_time() -> None:
    done = rails("verify", "--timeout-s", "0.01", env=dict(os.environ))
    assert done.returncode == 2
    assert "did not answer within 0.01 s" in done.stderr


def test_device_that_is_not_there() -> None:
    done = rails("verify", "--device", "99", env=dict(os.environ))
    assert done.returncode == 2
    assert "--device 99 does not exist" in done.stderr
