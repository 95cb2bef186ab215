"""What a NIXL log says about rails.

The log of a server is a stream of several workers, each with one or more NIXL agents. Lines are
told apart by thread id (the prefix carries no process id) and by whatever stands before the prefix.
A new agent begins at `Creating rail manager` or `Created rail 0`. The absence of a line means
'unknown': INFO shows the map of GPUs and the number of rails per registration, DEBUG also their
names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from . import bdf
from .errors import RailsError
from .log_patterns import ALARM_WORDS, PATTERNS, Pattern

_PREFIX = re.compile(r"\b[IWEF]\d{4} [\d:.]+\s+(?P<thread>\d+) [\w.]+:\d+\] ?(?P<text>.*)")
_VERSION = re.compile(r"NIXL version: (\S+)")
_DISCOVERED = re.compile(r"Discovered (\d+) (EFA|CXI|tcp|sockets) devices")
_MANAGER = re.compile(r"Creating rail manager")
_RAIL = re.compile(r"Created rail (\d+) \(device=([^,]*), provider=([^)]*)\)")
_RAILS = re.compile(r"Created (\d+) rails using provider=(\S+)")
_MAPPED = re.compile(r"(?:Accelerator|GPU)-PCI (\S+) \S+ \[(.*?)\]")
_VRAM_RAIL = re.compile(
    r"VRAM memory \S+ on device PCI (\S*) ?mapped to rail (\d+) \(EFA device=([^)]*)\)"
)
_VRAM_COUNT = re.compile(r"VRAM memory \S+ on device PCI (\S*) ?will use (\d+) rails")
_ONE_RAIL = re.compile(r"Registered memory on rail (\d+) \(")
_REGISTERED = re.compile(r"Registered memory on (\d+) rails, mem_type=(\d+) device=(-?\d+)")
_QUERIED = re.compile(r"Queried PCI bus ID: (\S+) for (GPU|Neuron device) (-?\d+)")
_UNSOLICITED_OFF = re.compile(r"Successfully disabled unsolicited write recv for rail")
_NO_HMEM = re.compile(r"Using provider without FI_HMEM support for rail (\d+)")
_DRAM_NUMA = re.compile(r"Using NUMA-aware rail selection policy for DRAM")

MEMORY_TYPES = {0: "host", 1: "device"}
MAX_EXAMPLE = 400


class Registration(msgspec.Struct):
    """One registration of memory. `nics` is empty where only the number of rails is known."""

    memory: str
    device: int
    num_rails: int
    rails: list[int] = []
    nics: list[str] = []
    pci_address: str | None = None
    """Of the device's memory; for Neuron the attached NIC's, as NIXL prints it."""


class AgentLog(msgspec.Struct):
    """One NIXL agent."""

    thread: str
    nixl_version: str | None = None
    provider: str | None = None
    num_rails: int | None = None
    rails: dict[int, str] = {}
    """Rail number to NIC name."""
    accelerator_map: dict[str, list[str]] = {}
    """PCI address of a GPU to NIC names."""
    registrations: list[Registration] = []
    unsolicited_write_recv_off: bool = False
    rails_without_hmem: list[int] = []
    host_memory_policy: str | None = None


class Trouble(msgspec.Struct):
    """A kind of alarming line: how often, and the first one."""

    check: str
    level: str
    meaning: str
    mend: str
    count: int
    first_line: int
    example: str


class LogReport(msgspec.Struct):
    """All that was understood."""

    num_lines: int
    num_nixl_lines: int
    agents: list[AgentLog]
    troubles: list[Trouble]
    nixl_version: str | None = None

    @property
    def has_failures(self) -> bool:
        return any(trouble.level == "fail" for trouble in self.troubles)


def read_log(path: Path) -> LogReport:
    """Parse a log file; undecodable bytes are replaced. RailsError if it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return parse_log(file)
    except OSError as error:
        raise RailsError(f"{path} cannot be read: {error.strerror or error}") from None


def parse_log(lines: Iterable[str]) -> LogReport:
    """Parse the lines of a log."""
    parser = _Parser()
    for number, line in enumerate(lines, start=1):
        parser.line(number, line.rstrip("\n"))
    return parser.report()


def nic_name(domain: str) -> str:
    """libfabric's domain name to the RDMA device: `rdmap85s0-rdm` to `rdmap85s0`."""
    return domain.strip().removesuffix("-rdm")


class _Pending(msgspec.Struct):
    """What was said since the last registration of a thread."""

    rails: list[int] = []
    nics: list[str] = []
    pci_address: str | None = None


class _Parser:
    def __init__(self) -> None:
        self._num_lines = 0
        self._num_nixl_lines = 0
        self._agents: list[AgentLog] = []
        self._current: dict[str, AgentLog] = {}
        self._pending: dict[str, _Pending] = {}
        self._version: dict[str, str] = {}
        self._troubles: dict[int, Trouble] = {}

    def line(self, number: int, line: str) -> None:
        self._num_lines += 1
        match = _PREFIX.search(line)
        if match is None:
            self._search_troubles(number, line, line)
            return
        self._num_nixl_lines += 1
        thread = f"{line[: match.start()].strip()} {match['thread']}".strip()
        text = match["text"]
        self._search_troubles(number, text, line)
        self._setup(thread, text)
        self._registration(thread, text)

    def report(self) -> LogReport:
        troubles = sorted(self._troubles.values(), key=lambda one: (one.level, one.first_line))
        version = next(iter(self._version.values()), None)
        return LogReport(self._num_lines, self._num_nixl_lines, self._agents, troubles, version)

    def _search_troubles(self, number: int, text: str, line: str) -> None:
        if not any(word in text for word in ALARM_WORDS):
            return
        for index, pattern in enumerate(PATTERNS):
            if pattern.text.search(text):
                self._count(index, pattern, number, line)
                return

    def _count(self, index: int, pattern: Pattern, number: int, line: str) -> None:
        known = self._troubles.get(index)
        if known is not None:
            known.count += 1
            return
        self._troubles[index] = Trouble(
            check=pattern.check,
            level=pattern.level,
            meaning=pattern.meaning,
            mend=pattern.mend,
            count=1,
            first_line=number,
            example=line.strip()[:MAX_EXAMPLE],
        )

    def _new_agent(self, thread: str) -> AgentLog:
        agent = AgentLog(thread=thread, nixl_version=self._version.get(thread))
        self._agents.append(agent)
        self._current[thread] = agent
        self._pending.pop(thread, None)
        return agent

    def _agent(self, thread: str) -> AgentLog:
        """The thread's agent; else the last one made, since any thread may register memory."""
        if thread in self._current:
            return self._current[thread]
        if self._agents:
            return self._agents[-1]
        return self._new_agent(thread)

    def _setup(self, thread: str, text: str) -> None:
        if match := _VERSION.search(text):
            self._version[thread] = match[1]
        elif _MANAGER.search(text):
            self._new_agent(thread)
        elif match := _RAIL.search(text):
            rail = int(match[1])
            agent = self._agent(thread)
            if rail == 0 and agent.rails:
                agent = self._new_agent(thread)
            agent.rails[rail] = nic_name(match[2])
            agent.provider = match[3]
        elif match := _RAILS.search(text):
            agent = self._agent(thread)
            agent.num_rails, agent.provider = int(match[1]), match[2]
        elif match := _DISCOVERED.search(text):
            self._agent(thread).provider = match[2].lower()
        elif match := _MAPPED.search(text):
            if bdf.is_address(match[1]):
                names = [nic_name(name) for name in match[2].split(",") if name.strip()]
                self._agent(thread).accelerator_map[bdf.normalise(match[1])] = names
        elif _UNSOLICITED_OFF.search(text):
            self._agent(thread).unsolicited_write_recv_off = True
        elif match := _NO_HMEM.search(text):
            self._agent(thread).rails_without_hmem.append(int(match[1]))
        elif _DRAM_NUMA.search(text):
            self._agent(thread).host_memory_policy = "numa"

    def _registration(self, thread: str, text: str) -> None:
        if match := _QUERIED.search(text):
            self._pending_of(thread).pci_address = _address_or_none(match[1])
        elif match := _VRAM_RAIL.search(text):
            pending = self._pending_of(thread)
            pending.pci_address = _address_or_none(match[1])
            pending.nics.append(nic_name(match[3]))
        elif match := _VRAM_COUNT.search(text):
            self._pending_of(thread).pci_address = _address_or_none(match[1])
        elif match := _ONE_RAIL.search(text):
            self._pending_of(thread).rails.append(int(match[1]))
        elif match := _REGISTERED.search(text):
            self._finish(thread, int(match[1]), int(match[2]), int(match[3]))

    def _pending_of(self, thread: str) -> _Pending:
        return self._pending.setdefault(thread, _Pending())

    def _finish(self, thread: str, num_rails: int, memory_type: int, device: int) -> None:
        pending = self._pending.pop(thread, _Pending())
        agent = self._agent(thread)
        nics = pending.nics
        if not nics and pending.rails and all(rail in agent.rails for rail in pending.rails):
            nics = [agent.rails[rail] for rail in pending.rails]
        agent.registrations.append(
            Registration(
                memory=MEMORY_TYPES.get(memory_type, f"type {memory_type}"),
                device=device,
                num_rails=num_rails,
                rails=pending.rails,
                nics=nics,
                pci_address=pending.pci_address,
            )
        )


def _address_or_none(text: str) -> str | None:
    return bdf.normalise(text) if bdf.is_address(text) else None
