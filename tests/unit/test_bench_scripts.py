"""The scripts of the published interface: DRY_RUN prints, pid files limit what is ended."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NODES = {"PREFILL_IP": "10.0.0.1", "DECODE_IP": "10.0.0.2"}


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPTS / script, *arguments], env={"PATH": os.environ["PATH"], **environment},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def transfer_config(printed: str) -> dict[str, object]:
    words = shlex.split(printed.splitlines()[-1])
    config: dict[str, object] = json.loads(words[words.index("--kv-transfer-config") + 1])
    return config


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("mode", "connector"),
    [("push", "NeuronPushConnector"), ("vllm-push", "NixlPushConnector"),
     ("pull", "NixlConnector")],
)  # fmt: skip
def test_serve_pd_prints_its_command(role: str, mode: str, connector: str, tmp_path: Path) -> None:
    done = run("serve_pd.sh", DRY_RUN="1", ROLE=role, MODE=mode, RUN_DIR=str(tmp_path), **NODES)
    assert done.returncode == 0, done.stderr
    config = transfer_config(done.stdout)
    assert config["kv_connector"] == connector
    assert config["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
    # vLLM 0.32 rejects these.
    assert not {"kv_rank", "kv_parallel_size", "kv_ip", "kv_buffer_size"} & set(config)
    assert ("--no-enable-prefix-caching" in done.stdout) == (role == "decode")
    assert list(tmp_path.iterdir()) == []


def test_the_published_pull_name_and_ours_for_their_push_both_work() -> None:
    done = run("run_sweep.sh", DRY_RUN="1", MODE="pull", ITERATIONS="1", QPS_LIST="1 2",
               INPUT_LENS="64", **NODES)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "baseline_router --mode vllm-pull" in done.stdout
    assert done.stdout.count("--result-filename part_pull_qps") == 2


def test_run_sweep_takes_our_router_for_push() -> None:
    done = run("run_sweep.sh", DRY_RUN="1", ITERATIONS="2", QPS_LIST="1", INPUT_LENS="64 128",
               OUTPUT_LENS="8", **NODES)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "-m neuron_push router" in done.stdout
    assert "part_push_qps1_in128_out8_iter2.json" in done.stdout


def test_run_sweep_keeps_what_is_there(tmp_path: Path) -> None:
    kept = tmp_path / "push_qps1_in64_out8_iter1.json"
    kept.write_text('{"failed": 0, "completed": 4}')
    (tmp_path / "push_qps2_in64_out8_iter1.json").write_text('{"failed": 1, "completed": 3}')
    done = run("run_sweep.sh", DRY_RUN="1", ITERATIONS="1", QPS_LIST="1 2", INPUT_LENS="64",
               OUTPUT_LENS="8", RESULTS_DIR=str(tmp_path), **NODES)  # fmt: skip
    assert f"{kept.name} is there: kept" in done.stdout
    assert "part_push_qps2_in64_out8_iter1.json" in done.stdout


@pytest.mark.parametrize(
    ("script", "environment", "named"),
    [
        ("serve_pd.sh", {"ROLE": "both", **NODES}, "ROLE"),
        ("serve_pd.sh", {"ROLE": "prefill", "MODE": "x", **NODES}, "MODE"),
        ("serve_pd.sh", {"ROLE": "prefill", "DECODE_IP": "1"}, "PREFILL_IP"),
        ("run_sweep.sh", {"MODE": "x", **NODES}, "MODE"),
        ("run_sweep.sh", {"PREFILL_IP": "1"}, "DECODE_IP"),
    ],
)
def test_wrong_values_are_named(script: str, environment: dict[str, str], named: str) -> None:
    done = run(script, DRY_RUN="1", **environment)
    assert done.returncode != 0
    assert named in done.stderr


@pytest.mark.parametrize("script", ["serve_pd.sh", "run_sweep.sh", "cleanup.sh"])
def test_help(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0
    assert "DRY_RUN" in done.stdout


def start_time(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().split()[21]


@pytest.fixture
def sleeper() -> object:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_cleanup_ends_what_the_pid_file_names(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    file = tmp_path / "server-prefill.pid"
    file.write_text(f"{sleeper.pid} {start_time(sleeper.pid)}\n")
    assert "would end" in run("cleanup.sh", "server", RUN_DIR=str(tmp_path), DRY_RUN="1").stdout
    assert sleeper.poll() is None
    environment = {"PATH": os.environ["PATH"], "RUN_DIR": str(tmp_path)}
    ended = subprocess.Popen([SCRIPTS / "cleanup.sh", "server"], env=environment)
    assert sleeper.wait(10) != 0  # reaped here: a zombie would look alive to the script
    assert ended.wait(30) == 0
    assert not file.exists()


def test_cleanup_leaves_a_reused_pid_alone(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    file = tmp_path / "proxy.pid"
    file.write_text(f"{sleeper.pid} 1\n")
    done = run("cleanup.sh", "proxy", RUN_DIR=str(tmp_path))
    assert "not running any more" in done.stdout
    time.sleep(0.1)
    assert sleeper.poll() is None
    assert not file.exists()


SERVER = """#!/usr/bin/env python3
import http.server, json, sys
host, port = (sys.argv[sys.argv.index(name) + 1] for name in ("--host", "--port"))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "Qwen"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.HTTPServer((host, int(port)), Handler).serve_forever()
"""


def test_serve_pd_waits_for_health_and_checks_the_model(tmp_path: Path) -> None:
    from neuron_push.bench.ports import quiet_ports

    fake = tmp_path / "python"
    fake.write_text(SERVER.replace("/usr/bin/env python3", sys.executable, 1))
    fake.chmod(0o755)
    run_dir = tmp_path / "run"
    settings = {"ROLE": "prefill", "PREFILL_IP": "127.0.0.1", "DECODE_IP": "127.0.0.1",
                "PYTHON": str(fake), "RUN_DIR": str(run_dir), "START_TIMEOUT_S": "20",
                "PREFILL_PORT": str(quiet_ports(1)[0])}  # fmt: skip
    try:
        done = run("serve_pd.sh", **settings)
        assert done.returncode == 0, done.stderr
        assert "serving Qwen" in done.stdout
        again = run("serve_pd.sh", **settings)
        assert again.returncode == 1
        assert "runs already" in again.stderr
        wrong = run("serve_pd.sh", **{**settings, "SERVED_MODEL_NAME": "Other",
                                      "RUN_DIR": str(tmp_path / "other")})  # fmt: skip
        assert wrong.returncode == 1
    finally:
        for directory in (run_dir, tmp_path / "other"):
            run("cleanup.sh", "all", RUN_DIR=str(directory))
    assert list(run_dir.glob("*.pid")) == []


def test_the_plot_is_drawn_from_whatever_modes_there_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for mode, value in (("push", 1.0), ("vllm-push", 2.0), ("pull", 3.0)):
        for length in (64, 128):
            for iteration in (1, 2):
                path = tmp_path / f"{mode}_qps1_in{length}_out8_iter{iteration}.json"
                path.write_text(json.dumps({"failed": 0, "mean_ttft_ms": value * length}))
    (tmp_path / "push_qps2_in64_out8_iter1.json").write_text('{"failed": 1, "mean_ttft_ms": 1}')
    done = subprocess.run(
        [sys.executable, SCRIPTS / "plot_push_vs_pull.py", "--results-dir", tmp_path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ttft_mean.png").stat().st_size > 5_000
    assert "left out: push_qps2" in done.stderr


def test_the_plot_says_when_there_is_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "plot_push_vs_pull.py", "--results-dir", tmp_path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no result files" in done.stderr
