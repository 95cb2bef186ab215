"""scripts/check_gpu.sh and check_trainium.sh where there is neither: they list, refuse, report;
and the pushing they do, over host memory instead of a device's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
HARDWARE = {"check_gpu": "/proc/driver/nvidia/version", "check_trainium": "/dev/neuron0"}
STEPS = {
    "check_gpu": ["preflight", "torch", "copy", "events", "push_BLHNC_contiguous",
                  "push_BLHNC_fragmented", "push_LBNHC_contiguous", "push_LBNHC_fragmented"],
    "check_trainium": ["software", "preflight", "doctor", "rails_verify", "push_0_to_8_contiguous",
                       "push_0_to_8_fragmented", "push_8_to_0_contiguous",
                       "push_8_to_0_fragmented"],
}  # fmt: skip


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import _check
    import _check_pair

    return argparse.Namespace(check=_check, pair=_check_pair)


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / f"{name}.sh"), *arguments], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHON": sys.executable}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dry_run", [True, False])
def test_without_the_hardware(name: str, dry_run: bool, tmp_path: Path) -> None:
    if Path(HARDWARE[name]).exists():
        pytest.skip("the hardware is here")
    report = tmp_path / "report.json"
    done = script(name, "--json", str(report), *(["--dry-run"] if dry_run else []))
    assert done.returncode == 2, done.stderr
    for number, step in enumerate(STEPS[name], 1):
        assert f"{number}. {step}: " in done.stdout
    assert f"none of these {len(STEPS[name])} steps was run: there is no" in done.stdout
    said = json.loads(report.read_text())
    assert said["passed"] is False
    assert said["not_run"] == STEPS[name]
    assert all(step["outcome"] == "not run" and step["says"] for step in said["steps"])


@pytest.mark.parametrize("name", STEPS)
def test_help(name: str) -> None:
    done = script(name, "--help")
    assert done.returncode == 0
    for option in ("--dry-run", "--json", "Exit codes: 0 all steps passed; 1 a step failed; 2"):
        assert option in done.stdout


def test_serving_is_one_more_step() -> None:
    done = script("check_trainium", "--dry-run", "--model", "m")
    assert "9. serve: one prefill and one decode engine serve m" in done.stdout


# ------------------------------------------------------------ steps and reports


def test_a_failure_is_told_and_what_rests_on_it_is_not_run(
    modules: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check = modules.check

    def no() -> dict[str, Any]:
        raise check.StepFailed("the cable is loose; push it in")

    def broken() -> dict[str, Any]:
        return {"x": 1 // 0}

    steps = [
        check.Step("a", "first", lambda: {"gb_per_s": 3.5}),
        check.Step("b", "second", no, ("a",)),
        check.Step("c", "third", lambda: {}, ("b",)),
        check.Step("d", "fourth", broken),
    ]
    told = argparse.Namespace(dry_run=False, json=tmp_path / "r.json")
    assert check.run("t", steps, None, told) == 1
    out = capsys.readouterr().out
    assert "passed  a: gb_per_s 3.5" in out
    assert "failed  b: the cable is loose; push it in" in out
    assert "not run  c: not run, because b did not pass" in out
    assert "failed  d: ZeroDivisionError" in out
    said = json.loads((tmp_path / "r.json").read_text())
    assert [step["outcome"] for step in said["steps"]] == ["passed", "failed", "not run", "failed"]
    assert said["not_run"] == ["c"]
    assert not said["passed"]
    assert check.run("t", steps[:1], None, told) == 0
    dry = argparse.Namespace(dry_run=True, json=tmp_path / "r.json")
    assert check.run("t", steps, None, dry) == 0, "the hardware is here, nothing was asked of it"
    assert json.loads((tmp_path / "r.json").read_text())["passed"] is False


UCX_TABLES = """\
[1.1] [vm:1:0]   | ucp_context_0 self cfg#0                                 |
[1.1] [vm:1:0]   | remote memory write by ucp_put* from host memory to host |
[1.1] [vm:1:0]   | Range  | Description |              Config               |
[1.1] [vm:1:0]   | 0..inf | zero-copy   | cma/memory                        |
[1.1] [vm:1:0]   | ucp_context_0 intra-node cfg#1                           |
[1.1] [vm:1:0]   | remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda |
[1.1] [vm:1:0]   | Range  | Description |              Config               |
[1.1] [vm:1:0]   | 0      | short       | tcp/lo                            |
[1.1] [vm:1:0]   | 1..inf | zero-copy   | cuda_ipc/cuda                     |
[1.1] [vm:1:0]   | active message by ucp_am_send* from host memory          |
[1.1] [vm:1:0]   | 0..inf | short       | tcp/lo                            |
"""


def test_the_way_ucx_took(modules: Any) -> None:
    path = modules.pair.write_path(UCX_TABLES)
    assert path == "zero-copy cuda_ipc/cuda (cuda/GPU0 to cuda)"
    words = modules.pair.path_in_words
    assert words(path).startswith("device to device")
    assert words("zero-copy rc_mlx5/mlx5_0:1 (cuda to cuda)").startswith("RDMA")
    assert words("multi-frag copy-in tcp/lo (host memory to host)").startswith("through host")
    assert words("") == "not told by NIXL's backend"


# ------------------------------------------------------------ the push itself


@pytest.mark.nixl
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("layout", "fragmented", "descriptors"),
    [("BLHNC", False, 1), ("BLHNC", True, 30), ("LBNHC", True, 60), ("neuron", True, 120)],
)
def test_two_processes_push_and_compare(
    modules: Any, layout: str, fragmented: bool, descriptors: int
) -> None:
    pytest.importorskip("nixl._api")
    pytest.importorskip("torch")
    pair = modules.pair.Pair(
        "host", "UCX", layout, fragmented, num_layers=2, num_heads=2, head_dim=32, num_blocks=64,
        prompt_blocks=30, rounds=2,
    )  # fmt: skip
    found = modules.pair.push(pair)
    assert found["wrong_blocks"] == 0
    assert found["descriptors"] == descriptors
    assert found["gb_per_s"] > 0
    assert "host" in found["path"]


def test_wrong_contents_would_be_noticed(modules: Any) -> None:
    pytest.importorskip("torch")
    pair = modules.pair.Pair(
        "host", "UCX", "neuron", True, num_layers=1, num_heads=1, head_dim=4, num_blocks=9,
        prompt_blocks=3,
    )  # fmt: skip
    source, target = modules.pair.blocks(pair)
    memory = modules.pair._Memory(pair, "cpu")
    assert memory.wrong_blocks(7, source, target) == 3
    memory.fill(7)
    assert memory.wrong_blocks(7, source, source) == 0
    memory.views[0][1, source[1], 0, 5, 2] += 1
    assert memory.wrong_blocks(7, source, source) == 1


@pytest.mark.timeout(60)
def test_a_push_that_fails_says_why(modules: Any) -> None:
    pair = modules.pair.Pair("neuron", "LIBFABRIC", "neuron", False, num_layers=1, num_blocks=4)
    if Path("/dev/neuron0").exists():
        pytest.skip("the hardware is here")
    with pytest.raises(modules.pair.PairFailed, match="device_nodes"):
        modules.pair.push(pair)
