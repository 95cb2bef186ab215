"""Bytes from strangers, files of a machine, options of an operator: whatever they hold, readers
raise what they declare and nothing else, and keep no memory.

20,000 inputs in all; NEURON_PUSH_FUZZ_INPUTS=1000000, or the soak, for more.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuron_push.config import ConfigError, PushConfig
from neuron_push.core.link import decode_up
from neuron_push.core.messages import (
    _MAGIC,
    Cancel,
    CancelAck,
    Heartbeat,
    Hello,
    MessageError,
    Nack,
    Reason,
    Register,
    Seal,
    Segment,
    _mac,
    decode_side,
    encode_side,
)
from neuron_push.params import parse_params
from neuron_push.rails.discover_hwloc import box_from_hwloc_xml
from neuron_push.rails.discover_sysfs import pci_and_nics
from neuron_push.rails.errors import RailsError
from neuron_push.rails.log_parser import parse_log
from tests.unit.test_messages import card as make_card

NUM_INPUTS = int(os.environ.get("NEURON_PUSH_FUZZ_INPUTS", "20000"))
SOAK_INPUTS = 1_000_000
MAX_GROWTH_BYTES = 4 << 20

KEY = b"k" * 32

MESSAGES = [
    Register("k", 1, 64, b"h" * 16, 0, 63, 0, (b"\1\0\0\0" * 4,)),
    Segment(1, 0, 1, 0, 63),
    Nack(1, Reason.TIMEOUT, "x"),
    Cancel("k", 1),
    CancelAck(1),
    Heartbeat(("a", "b")),
]
SIDE = [encode_side(Hello(make_card(), b"s" * 32))]
XML = (
    b'<?xml version="1.0"?><topology version="2.0"><object type="Machine" os_index="0">'
    b'<object type="NUMANode" os_index="0"/><object type="Bridge" bridge_type="0-1" depth="0" '
    b'bridge_pci="0000:[00-01]"><object type="PCIDev" pci_busid="0000:00:1e.0" '
    b'pci_type="0200 [1d0f:efa1] [0:0] 00" pci_link_speed="1.0">'
    b'<object type="OSDev" name="rdmap0s30" osdev_type="3"/></object></object></object></topology>'
)
LOG = [
    "I1201 17:12:51.882710   28303 a.cpp:1] Creating rail manager",
    "I1201 17:12:51.882710   28303 a.cpp:1] Created rail 0 (device=rdmap0s30, provider=efa)",
    "I1201 17:12:51.882710   28303 a.cpp:1] Registered memory on 4 rails, mem_type=1 device=0",
    "I1201 17:12:51.882710   28303 a.cpp:1] GPU-PCI 0000:59:00.0 -> [rdmap0s30]",
]


def mutated(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    """Seeds with bytes changed, cut out or put in, and bytes of no origin."""

    def apply(seed: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
        for where, gone, new in edits:
            at = where % (len(seed) + 1)
            seed = seed[:at] + new + seed[at + gone :]
        return seed

    edit = st.tuples(st.integers(0, 1 << 16), st.integers(0, 8), st.binary(max_size=8))
    return st.one_of(
        st.binary(max_size=200),
        st.builds(apply, st.sampled_from(seeds), st.lists(edit, min_size=1, max_size=4)),
    )


def wire(body: bytes) -> None:
    """Sealed by somebody who has the key, so that the body is looked at."""
    seal = Seal(KEY, KEY)
    counter = (1).to_bytes(8, "little")
    for blob in (body, _MAGIC + counter + _mac(KEY, counter, body) + body):
        with contextlib.suppress(MessageError):
            seal.open(blob)


def side(blob: bytes) -> None:
    for bytes_ in (blob, b"NPS\x01" + blob):
        for decode in (decode_side, decode_up):
            with contextlib.suppress(MessageError):
                decode(bytes_)


def hwloc(raw: bytes) -> None:
    with contextlib.suppress(RailsError):
        box_from_hwloc_xml(raw, "fuzz")


def log(raw: bytes) -> None:
    parse_log(raw.decode(errors="replace").splitlines())


def config(options: object) -> None:
    with contextlib.suppress(ConfigError):
        PushConfig.load(options, {})  # type: ignore[arg-type]


def params(value: object) -> None:
    parse_params(value, "cmpl-abc-0-0123abcd")


def sysfs(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        base = root / "sys/devices/pci0000:00"
        for place in ("", "0000:00:1e.0", "0000:00:1e.0/infiniband/rdmap0s30"):
            (base / place).mkdir(parents=True, exist_ok=True)
        bus = root / "sys/bus/pci/devices"
        bus.mkdir(parents=True)
        (bus / "0000:00:1e.0").symlink_to(base / "0000:00:1e.0")
        for name, content in files.items():
            (base / "0000:00:1e.0" / name).write_bytes(content)
        with contextlib.suppress(RailsError):
            pci_and_nics(root)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)
OPTIONS = st.sampled_from([*PushConfig.__struct_fields__, "nonsense"])
PARAMS = st.sampled_from(
    [
        *("do_remote_prefill", "do_remote_decode", "transfer_id", "remote_request_id"),
        *("remote_host", "remote_port", "remote_engine_id", "tp_size"),
    ]
)
SYSFS = st.sampled_from(
    [
        "class",
        "vendor",
        "device",
        "numa_node",
        "max_link_speed",
        "max_link_width",
        "current_link_speed",
    ]
)

# The reader, what it is fed, and its share of the inputs.
READERS: dict[str, tuple[Callable[..., None], st.SearchStrategy[object], float]] = {
    "wire": (wire, mutated([msgspec.msgpack.encode(message) for message in MESSAGES]), 0.3),
    "side channel and cards": (side, mutated([*SIDE, SIDE[0][4:]]), 0.25),
    "hwloc": (hwloc, mutated([XML]), 0.15),
    "NIXL log": (log, mutated(["\n".join(LOG).encode()]), 0.1),
    "config": (config, st.dictionaries(OPTIONS, JSON, max_size=4), 0.1),
    "params": (params, JSON | st.dictionaries(PARAMS, JSON, max_size=8), 0.08),
    "sysfs": (sysfs, st.dictionaries(SYSFS, st.binary(max_size=24), max_size=7), 0.02),
}


def feed(name: str, num_inputs: int) -> None:
    read, inputs, share = READERS[name]
    count = 0

    @settings(
        max_examples=max(1, int(num_inputs * share)),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs)
    def run(value: object) -> None:
        nonlocal count
        count += 1
        read(value)

    run()
    assert count > 0
    keeps_no_memory(read, inputs)


def keeps_no_memory(read: Callable[..., None], inputs: st.SearchStrategy[object]) -> None:
    """The same inputs, over and over: memory stays where it was."""
    values: list[object] = []

    @settings(
        max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(inputs)
    def collect(value: object) -> None:
        values.append(value)

    collect()
    for value in values:
        read(value)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10):
            for value in values:
                read(value)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < MAX_GROWTH_BYTES, f"{grown} bytes more"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", READERS)
def test_fuzz(name: str) -> None:
    feed(name, NUM_INPUTS // len(READERS))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", READERS)
def test_fuzz_at_length(name: str) -> None:
    feed(name, SOAK_INPUTS // len(READERS))
