"""scripts/libfabric_cpu.sh: NIXL's LIBFABRIC backend carries bytes on a machine without EFA."""

import os
import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "libfabric_cpu.sh"


def no_libfabric() -> str:
    """Why the check cannot run here; empty if it can."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the libfabric that is gathered runs on Linux x86_64 only"
    if not find_spec("nixl"):
        return "nixl is not installed"
    if os.geteuid():
        return "network namespaces need root"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        return "this container may not make network namespaces"
    if not all(shutil.which(tool) for tool in ("cc", "apt-get", "dpkg")):
        return "needs a C compiler, and Debian's apt-get and dpkg"
    return ""


pytestmark = [
    pytest.mark.lab,
    pytest.mark.nixl,
    pytest.mark.skipif(bool(no_libfabric()), reason=no_libfabric()),
]


def run(*args: str, timeout: float, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"PYTHON": sys.executable} | env,
        check=False,
    )


@pytest.mark.timeout(300)
def test_a_write_between_two_namespaces() -> None:
    done = run("check", timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "p: wrote 4 MiB" in done.stdout
    assert "d: every byte and the notification arrived" in done.stdout


@pytest.mark.timeout(120)
def test_env_exports_what_a_process_needs_once() -> None:
    folder = run(timeout=100).stdout.strip()
    exports = run("env", timeout=10, LD_LIBRARY_PATH="/opt/x").stdout.split()
    assert exports == [
        "export",
        f"LD_LIBRARY_PATH={folder}:/opt/x",
        f"FI_PROVIDER_PATH={folder}",
        "FI_PROVIDER=tcp",
    ]
    again = run("env", timeout=10, LD_LIBRARY_PATH=f"{folder}:/opt/x").stdout.split()
    assert again == exports


@pytest.mark.timeout(30)
def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    done = run("build", timeout=20, LIBFABRIC_DIR=str(tmp_path / "mine"))
    assert done.returncode == 1
    assert "was not made by this script" in done.stderr
