"""The command line: it starts on the base install, and names what is not allowed."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from neuron_push import __version__
from neuron_push.router.options import OptionError, PrefillAddress, check_options

pytestmark = pytest.mark.timeout(60)

EXTRAS = ("aiohttp", "starlette", "uvicorn", "vllm", "torch", "nixl")
GOOD = ["router", "--prefill", "http://h:8100", "--decode", "http://d:8200"]


def neuron_push(*args: str, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process in which `without` cannot be imported."""
    code = f"""
        import sys
        for name in {without!r}:
            sys.modules[name] = None
        from neuron_push.cli import main
        sys.argv[0] = "neuron-push"
        main()
    """
    command = [sys.executable, "-c", textwrap.dedent(code), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_version():
    done = neuron_push("--version", without=EXTRAS)
    assert (done.returncode, done.stdout) == (0, f"neuron-push {__version__}\n")


def test_help_without_any_extra():
    done = neuron_push("--help", without=EXTRAS)
    assert done.returncode == 0
    assert "router" in done.stdout
    done = neuron_push("router", "--help", without=EXTRAS)
    assert done.returncode == 0
    for option in ("--prefill", "--decode", "--port", "--host", "--model-check", "--drain-s"):
        assert option in done.stdout


def test_starting_imports_nothing_heavy():
    code = "import sys, neuron_push.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {*EXTRAS, "zmq", "numpy", "asyncio"} & set(done.stdout.split())


def test_a_missing_extra_is_named():
    done = neuron_push(*GOOD, without=EXTRAS)
    assert done.returncode == 1
    assert "pip install 'neuron-push[router]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], ["--prefill", "at least one"]),
        (["--prefill", "http://h:1"], ["--decode", "at least one"]),
        (["--prefill", "ftp://h", "--decode", "http://d"], ["--prefill", "'ftp://h'", "side="]),
        ([*GOOD[1:], "--port", "70000"], ["--port", "70000", "65535"]),
        ([*GOOD[1:], "--port", "abc"], ["--port", "'abc'", "whole number"]),
        ([*GOOD[1:], "--drain-s", "-1"], ["--drain-s", "-1", "0 to 3600"]),
        ([*GOOD[1:], "--colour", "red"], ["--colour"]),
    ],
)
def test_a_bad_option_is_named(args: list[str], named: list[str]):
    done = neuron_push("router", *args, without=EXTRAS)
    assert done.returncode == 2
    for text in named:
        assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("http://h:8100", PrefillAddress("http://h:8100", "h", 5600)),
        ("http://h:8100/,side=s:77", PrefillAddress("http://h:8100", "s", 77)),
        ("https://h/base/", PrefillAddress("https://h/base", "h", 5600)),
        ("http://[::1]:8100,side=[fd00::2]:9", PrefillAddress("http://[::1]:8100", "fd00::2", 9)),
    ],
)
def test_prefill_addresses(value: str, expected: PrefillAddress):
    assert check_options([value], ["http://d"]).prefill == (expected,)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "h:8100",
        "http://",
        "http://h:99999",
        "http://h:0",
        "http://u:p@h",
        "http://h?x=1",
        "http://h h",
        "http://h,side=",
        "http://h,side=s",
        "http://h,side=s:0",
        "http://h,side=s:x",
        "http://h,side=s:1/x",
        "http://h,port=5",
        "http://h,side=s:1,side=s:2",
    ],
)
def test_bad_prefill_addresses(value: str):
    with pytest.raises(OptionError, match=r"--prefill: .*allowed: URL"):
        check_options([value], ["http://d"])


def test_an_engine_given_twice_is_refused():
    with pytest.raises(OptionError, match=r"--decode: 'http://d' .*each engine once"):
        check_options(["http://h"], ["http://d", "http://d/"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_times_are_bounded(value: float):
    with pytest.raises(OptionError, match="--idle-timeout-s"):
        check_options(["http://h"], ["http://d"], idle_timeout_s=value)
