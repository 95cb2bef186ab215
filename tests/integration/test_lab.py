"""scripts/lab.sh: the network comes up, is limited when asked, and goes away without a trace."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LAB_SH = Path(__file__).parents[2] / "scripts" / "lab.sh"


def no_lab() -> str:
    """Why no network namespace can be made here; empty if one can."""
    if not shutil.which("ip") or not shutil.which("tc"):
        return "needs the commands ip and tc (Debian: apt-get install iproute2)"
    if os.geteuid():
        return "network namespaces need root"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        return "this container may not make network namespaces"
    return ""


pytestmark = [pytest.mark.lab, pytest.mark.skipif(bool(no_lab()), reason=no_lab())]

RECEIVER = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 0))
server.settimeout(20)
print(server.getsockname()[1], flush=True)
link = server.accept()[0]
link.settimeout(20)
total, began = len(link.recv(1 << 16)), time.perf_counter()
while got := len(link.recv(1 << 16)):
    total += got
print(total * 8e-6 / (time.perf_counter() - began))
"""
SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 20) as link:
    link.sendall(bytes(int(sys.argv[3])))
"""


class Lab:
    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"LAB": self.name, "LAB_HOSTS": "p d"}
        done = subprocess.run(
            [str(LAB_SH), *args], capture_output=True, text=True, timeout=60, env=env, check=False
        )
        if check and done.returncode:
            pytest.fail(f"lab.sh {' '.join(args)}: {done.stderr}")
        return done

    def ip(self, host: str) -> str:
        return self.run("ip", host).stdout.strip()

    def argv(self, host: str, *command: str) -> list[str]:
        """Command line that runs `command` on `host`; host `root` is this machine."""
        enter = [] if host == "root" else ["ip", "netns", "exec", f"{self.name}-{host}"]
        return [*enter, sys.executable, "-c", *command]

    def mbit(self, source: str, target: str, size: int) -> float:
        """Throughput of one TCP connection that carries `size` bytes, in Mbit/s."""
        address = self.ip(target)
        with subprocess.Popen(
            self.argv(target, RECEIVER, address), stdout=subprocess.PIPE, text=True
        ) as receiver:
            assert receiver.stdout
            try:
                port = receiver.stdout.readline().strip()
                send = self.argv(source, SENDER, address, port, str(size))
                subprocess.run(send, timeout=60, check=True)
                return float(receiver.communicate(timeout=30)[0])
            finally:
                receiver.kill()


def traces() -> set[str]:
    """Namespaces and interfaces of this machine (names)."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True)
    lines = (spaces.stdout + links.stdout).splitlines()
    return {line.split()[0].partition("@")[0] for line in lines if line.strip()}


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab(f"t{os.getpid() % 10**6}")
    lab.run("up")
    yield lab
    lab.run("down")


@pytest.mark.timeout(120)
def test_hosts_reach_each_other_and_this_machine(lab: Lab) -> None:
    lab.run("up")  # a second time changes nothing
    for source, target in (("p", "d"), ("d", "p"), ("root", "p"), ("p", "root")):
        assert lab.mbit(source, target, 4_000_000) > 300, (source, target)
    assert lab.run("exec", "p", "cat", "/proc/net/dev").stdout.count("eth0") == 1
    status = lab.run("status").stdout
    assert all(lab.ip(host) in status for host in ("p", "d", "root"))


@pytest.mark.timeout(120)
def test_rate_limits_each_direction_until_switched_off(lab: Lab) -> None:
    lab.run("rate", "100")
    for source, target in (("p", "d"), ("d", "p"), ("root", "d")):
        assert 60 < lab.mbit(source, target, 6_000_000) < 112, (source, target)
    lab.run("rate", "40")
    assert 25 < lab.mbit("p", "d", 3_000_000) < 46
    lab.run("rate", "off")
    lab.run("rate", "off")
    assert lab.mbit("p", "d", 6_000_000) > 300


@pytest.mark.timeout(120)
def test_down_removes_what_up_made_and_nothing_else() -> None:
    lab, other = Lab(f"a{os.getpid() % 10**6}"), Lab(f"b{os.getpid() % 10**6}")
    stranger = f"{lab.name}-mine"  # looks like a host's, but lab.sh did not make it
    subprocess.run(["ip", "netns", "add", stranger], check=True)
    try:
        before = traces()
        lab.run("down")  # of what is not there
        lab.run("up")
        other.run("up")
        assert lab.ip("p") != other.ip("p")
        subprocess.run(["ip", "netns", "del", f"{lab.name}-d"], check=True)  # half of it is gone
        lab.run("down")
        assert other.mbit("p", "d", 1_000_000) > 100
        other.run("down")
        assert traces() == before
        assert lab.run("status", check=False).returncode == 3
    finally:
        lab.run("down")
        other.run("down")
        subprocess.run(["ip", "netns", "del", stranger], check=True)


@pytest.mark.timeout(60)
def test_up_mends_what_is_missing(lab: Lab) -> None:
    for gone in ("p", "sw"):
        subprocess.run(["ip", "netns", "del", f"{lab.name}-{gone}"], check=True)
        lab.run("up")
        assert lab.mbit("p", "d", 1_000_000) > 100


@pytest.mark.timeout(60)
def test_mistakes_are_told_in_a_sentence(lab: Lab) -> None:
    for args, told in (
        (("ip", "q"), "has no host 'q': it has p d"),
        (("rate", "fast"), "'fast' is no rate"),
        (("exec", "p"), "exec needs a host and a command"),
        (("dance",), "unknown command 'dance'"),
    ):
        done = lab.run(*args, check=False)
        assert done.returncode == 1
        assert told in done.stderr
    assert "is no id for a network" in Lab("NP!").run("up", check=False).stderr
