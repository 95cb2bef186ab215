"""The commands as an operator runs them: output, exit codes, JSON, speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner, Result

from neuron_push.rails.cli import doctor, rails_app

from .conftest import TOPOLOGIES, load, put, write_sysfs
from .test_logs import P5EN, device_memory, efa_agent, line

ROOT = Path(__file__).parents[3]
doctor_app = typer.Typer(rich_markup_mode=None)
doctor_app.command()(doctor)


def fixture(name: str) -> str:
    return str(TOPOLOGIES / f"{name}.json")


def rails(*arguments: str) -> Result:
    return CliRunner().invoke(rails_app, list(arguments), catch_exceptions=False)


def child(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )


NAMES = sorted(path.stem for path in TOPOLOGIES.glob("*.json"))
BROKEN = ("trn2.3xlarge", "trn2.48xlarge-no-efa")


@pytest.mark.parametrize("name", NAMES)
def test_show_and_its_json(name: str) -> None:
    result = rails("show", "--from", fixture(name))
    assert result.exit_code == (1 if name in BROKEN else 0)
    assert "\x1b" not in result.output  # no colour when not on a terminal
    as_json = rails("show", "--json", "--from", fixture(name))
    assert as_json.exit_code == result.exit_code
    document = json.loads(as_json.stdout)
    assert document["schema_version"] == 1
    assert document["good"] is (name not in BROKEN)
    for one in document["accelerators"]:
        assert {"kind", "pci_address", "numa_node", "rails", "nixl_rails", "verdict"} <= set(one)
        for rail in one["rails"]:
            assert set(rail) == {"pci_address", "name", "reason"}
    assert len(document["nics"]) == len(load(name).nics)


def test_differences_come_first(tmp_path: Path) -> None:
    box = json.loads(Path(fixture("p5en.48xlarge")).read_text())
    for nic in box["nics"]:
        nic["openable"] = nic["pci_address"] in ("0000:55:00.0", "0000:56:00.0")
    path = tmp_path / "pod.json"
    path.write_text(json.dumps(box))
    result = rails("show", "--from", str(path))
    assert result.exit_code == 1
    assert result.output.splitlines()[1].startswith("DIFFERS: NIXL would use only 1 of 2 rails")


def test_prediction_of_a_prompt() -> None:
    arguments = ["show", "--from", fixture("p5en.48xlarge"), "--model", "qwen3-32b"]
    result = rails(*arguments, "--tokens", "16384", "--tp", "8")
    assert result.exit_code == 0
    assert "10.7 ms at line rate" in result.output
    document = json.loads(rails(*arguments, "--json").stdout)
    assert document["prediction"]["bytes_total"] == 4294967296


@pytest.mark.parametrize("name", ["p5en.48xlarge", "trn1.32xlarge", "g5.48xlarge", "trn2.3xlarge"])
def test_drawing(name: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.svg"
    rails("show", "--from", fixture(name), "--svg", str(path))
    root = ElementTree.fromstring(path.read_text())
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    tag = "{http://www.w3.org/2000/svg}"
    for rect in root.iter(f"{tag}rect"):
        if rect.get("x") is not None:
            assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= width
            assert float(rect.get("y", 0)) + float(rect.get("height", 0)) <= height
    box = load(name)
    texts = " ".join(text.text or "" for text in root.iter(f"{tag}text"))
    assert all(nic.name in texts for nic in box.nics)
    lines = len(list(root.iter(f"{tag}line")))
    assert lines == {"p5en.48xlarge": 16, "trn1.32xlarge": 16, "g5.48xlarge": 8}.get(name, 0)


def test_environment_as_shell_lines() -> None:
    result = rails("env", "--device", "1", "--from", fixture("trn2.48xlarge"))
    assert result.exit_code == 0
    done = subprocess.run(
        ["sh", "-c", result.stdout + "\nprintenv FI_EFA_IFACE FI_PROVIDER"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["rdmap180s0", "efa"]
    document = json.loads(
        rails("env", "--device", "1", "--from", fixture("trn2.48xlarge"), "--json").stdout
    )
    assert document["env"]["FI_EFA_IFACE"] == "rdmap180s0"
    assert document["pci_address"] == "0000:b5:00.0"
    host = rails("env", "--host-memory", "--from", fixture("p5en.48xlarge"))
    assert host.exit_code == 0
    assert "FI_PROVIDER=efa" in host.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "--from", "/absent/box.json"], "does not exist; make it with"),
        (["show", "--from", "/"], "is a directory"),
        (["show", "--root", "/absent"], "is no directory"),
        (["show", "--instance-type", "p9", "--from", fixture("p5en.48xlarge")], "known are"),
        (["show", "--model", "x", "--from", fixture("p5en.48xlarge")], "known are deepseek"),
        (["show", "--svg", "/absent/x.svg", "--from", fixture("p5en.48xlarge")], "cannot be"),
        (["env", "--device", "77", "--from", fixture("p5en.48xlarge")], "expected 0 to 7"),
        (["env", "--device", "0", "--from", "/absent.json"], "does not exist"),
        (["check-log", "/absent.log", "--from", fixture("p5en.48xlarge")], "cannot be read"),
        (["check-log", fixture("p5en.48xlarge")], "no line of NIXL's"),
        (["watch", "--seconds", "-1"], "more than 0"),
    ],
)
def test_errors_are_one_sentence(arguments: list[str], words: str) -> None:
    result = rails(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("neuron-push: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_capture_of_a_tree_and_back(tmp_path: Path) -> None:
    write_sysfs(load("p5en.48xlarge"), tmp_path / "tree")
    path = tmp_path / "box.json"
    done = rails("capture", "--root", str(tmp_path / "tree"), "--output", str(path))
    assert done.exit_code == 0
    shown = json.loads(rails("show", "--json", "--from", str(path)).stdout)
    assert shown["good"]
    assert shown["instance_type"] == "p5en.48xlarge"
    assert rails("capture", "--from", str(path)).stdout == path.read_text()


def test_no_sysfs_is_could_not_look(tmp_path: Path) -> None:
    assert rails("show", "--root", str(tmp_path)).exit_code == 2
    assert rails("capture", "--root", str(tmp_path)).exit_code == 2


def test_check_log(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    good = efa_agent(P5EN) + device_memory("0000:59:00.0", {0: P5EN[0], 1: P5EN[1]})
    path.write_text("".join(good))
    arguments = ["check-log", str(path), "--from", fixture("p5en.48xlarge")]
    result = rails(*arguments)
    assert result.exit_code == 0
    assert "the rails are as chosen" in result.output
    bad = good + device_memory("0000:5a:00.0", dict(enumerate(P5EN)), device=1)
    path.write_text("".join([*bad, line("Rail count mismatch (local: 16, remote: 8)")]))
    result = rails(*arguments)
    assert result.exit_code == 1
    assert "expected rdmap87s0, rdmap88s0" in result.output
    document = json.loads(rails(*arguments, "--json").stdout)
    assert [check["verdict"] for check in document["checks"]] == ["right", "all_rails"]
    assert document["troubles"][0]["check"] == "R21"


def test_watch(tmp_path: Path) -> None:
    write_sysfs(load("p5en.48xlarge"), tmp_path)
    for nic in load("p5en.48xlarge").nics:
        put(tmp_path / f"sys/class/infiniband/{nic.name}/ports/1/hw_counters/rdma_write_bytes", "1")
    arguments = ["watch", "--root", str(tmp_path), "--seconds", "0.01"]
    result = rails(*arguments, "--device", "0")
    assert result.exit_code == 0
    assert "no KV moved" in result.output
    document = json.loads(rails(*arguments, "--json").stdout)
    assert document["schema_version"] == 1
    assert len(document["nics"]) == 16


def test_doctor(tmp_path: Path) -> None:
    runner = CliRunner()
    arguments = ["--from", fixture("trn2.48xlarge-no-efa")]
    result = runner.invoke(doctor_app, arguments)
    assert result.exit_code == 1
    assert "R16" in result.output
    assert "mend:" in result.output
    document = json.loads(runner.invoke(doctor_app, [*arguments, "--json"]).stdout)
    assert document["schema_version"] == 1
    assert document["findings"][0]["check"] == "R16"
    good = runner.invoke(doctor_app, ["--from", fixture("p5en.48xlarge"), "--no-info"])
    assert good.exit_code == 0
    peers = runner.invoke(
        doctor_app,
        ["--from", fixture("p5en.48xlarge"), "--peer-box", fixture("p4d.24xlarge")],
    )
    assert "16 NICs and the other 4" in peers.output
    assert runner.invoke(doctor_app, ["--from", "/absent"]).exit_code == 2
    assert runner.invoke(doctor_app, [*arguments, "--peer", "nonsense"]).exit_code == 2


@pytest.mark.parametrize(
    "command", [[], ["show"], ["env"], ["capture"], ["verify"], ["check-log"], ["watch"]]
)
def test_help_has_examples(command: list[str]) -> None:
    result = rails(*command, "--help")
    assert result.exit_code == 0
    if command:
        assert "Examples:" in result.output
        assert f"\n    neuron-push rails {command[0]}" in result.output


def test_module_runs_and_has_the_doctor() -> None:
    done = child("-m", "neuron_push.rails", "--help")
    assert done.returncode == 0
    assert "doctor" in done.stdout
    assert "--install-completion" in done.stdout


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, neuron_push.rails.cli; "
        "print([m for m in ('rich', 'numpy', 'torch', 'vllm', 'nixl', 'zmq', "
        "'neuron_push.core', 'neuron_push.rails.select') if m in sys.modules])"
    )
    assert child("-c", code).stdout.strip() == "[]"


def cpu_s(*arguments: str) -> float:
    """Least processor time of a few runs: what a quiet machine would take."""
    found = []
    for _ in range(3):
        before = os.times()
        child(*arguments)
        after = os.times()
        found.append(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
    return min(found)


def test_commands_are_quick() -> None:
    is_busy = os.getloadavg()[0] > (os.cpu_count() or 1) / 2
    slack = 3 if is_busy else 1  # neighbours on the same cores cost processor time as well
    bare = cpu_s("-c", "pass")
    assert cpu_s("-c", "import neuron_push.rails.cli") - bare < 0.15 * slack
    show = cpu_s("-m", "neuron_push.rails", "show", "--from", fixture("p5en.48xlarge"))
    assert show < 0.4 * slack


def test_a_closed_pipe_is_no_traceback() -> None:
    command = (
        f"{sys.executable} -m neuron_push.rails show --from {fixture('p5.48xlarge')} | head -1"
    )
    done = subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "Traceback" not in done.stderr
