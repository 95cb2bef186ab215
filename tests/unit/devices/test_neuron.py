"""Trainium without Trainium: the order of preflight, layouts, fences, and known failures."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neuron_push.core.layout import KvLayout
from neuron_push.devices import near
from neuron_push.devices.base import DeviceError
from neuron_push.devices.checks import Check, first_failure
from neuron_push.devices.neuron import NeuronDevice
from neuron_push.devices.neuron_fence import MAX_QUEUED, NUM_TRIALS, Fence, SequenceMark, Sequences
from neuron_push.devices.neuron_parallel import MODULE, check_ranks, replicated_head
from neuron_push.devices.neuron_symptoms import SYMPTOMS, explain
from neuron_push.devices.nrt import Nrt, NrtError
from neuron_push.devices.start import confirm_device, explained, start_device
from tests.unit.devices import fakes
from tests.unit.devices.fakes import DIM, HEADS, ITEM, TOKENS, Shape, facts

ORDER = [
    "device_nodes",
    "runtime",
    "address",
    "libnrt",
    "shared_memory",
    "efa_interface",
    "instance",
    "device_rdma",
    "nixl_libraries",
]
BLOCKS = 6


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.build_libnrt(tmp_path_factory.mktemp("nrt"))


@pytest.fixture
def nrt(library: Path) -> Nrt:
    found = fakes.open_libnrt(library)
    fakes.knob(found, "fake_status", ctypes.c_int).value = 0
    fakes.knob(found, "fake_completed").value = fakes.knob(found, "fake_submitted").value = 7 << 48
    return found


def caches(**changes: Any) -> dict[str, Any]:
    shape = (2, BLOCKS, HEADS, TOKENS, DIM)
    return {"layers.0.self_attn": Shape(shape, device_type="neuron", index=3, **changes)}


# ------------------------------------------------------------ preflight


def test_the_order_of_checks_and_that_all_pass(tmp_path: Path, nrt: Nrt) -> None:
    checks = NeuronDevice(fakes.trainium(tmp_path, nrt)).preflight(caches())
    assert [check.name for check in checks] == ORDER
    assert [check.outcome for check in checks] == ["ok"] * len(ORDER)


def broken(name: str, root: Path, nrt: Nrt) -> tuple[Any, Any]:
    """(machine, caches) on which everything fails from `name` on, and nothing before."""
    at = ORDER.index(name)
    environ: dict[str, str] = {}

    def bad(check: str) -> bool:
        return ORDER.index(check) >= at

    if bad("shared_memory"):
        environ["FI_EFA_ENABLE_SHM_TRANSFER"] = "1"
    if bad("efa_interface"):
        environ["FI_EFA_IFACE"] = "gone0"
    if bad("device_rdma"):
        environ["FI_HMEM_DISABLE_P2P"] = "1"
    machine = fakes.trainium(
        root, nrt, environ,
        product="trn2.3xlarge" if bad("instance") else "trn2.48xlarge",
        num_devices=0 if bad("device_nodes") else 2,
        missing_libraries=["libfabric.so.1"] if bad("nixl_libraries") else [],
    )  # fmt: skip
    if bad("libnrt"):

        def none() -> Nrt:
            raise NrtError("the Neuron runtime library libnrt.so.1 cannot be loaded: install it")

        machine.load_nrt = none
    if bad("runtime"):
        (root / "proc/self/maps").write_text("")
    return machine, caches(address=0 if bad("address") else 1 << 40)


@pytest.mark.parametrize("name", ORDER)
def test_a_failure_is_named_before_those_that_rest_on_it(
    name: str, tmp_path: Path, nrt: Nrt
) -> None:
    machine, tensors = broken(name, tmp_path, nrt)
    checks = NeuronDevice(machine).preflight(tensors)
    at = ORDER.index(name)
    assert [c.name for c in checks] == ORDER
    assert {c.outcome for c in checks[:at]} <= {"ok"}
    assert checks[at].outcome == "failed"
    assert checks[at].says
    assert {c.outcome for c in checks[at + 1 :]} <= {"skipped"}


def test_preflight_then_environment_then_agent(tmp_path: Path, nrt: Nrt) -> None:
    """The order of bringing up, as the connector does it."""
    events: list[str] = []

    class Recording(NeuronDevice):
        def prepare(self) -> None:
            events.append("prepare")

        def preflight(self, caches: Any = None) -> Any:
            events.append("preflight")
            return super().preflight(caches)

        def environment(self, caches: Any = None) -> Any:
            events.append("environment")
            return super().environment(caches)

        def confirm(self, memory_types: Any, metadata: bytes) -> Any:
            events.append("confirm")
            return super().confirm(memory_types, metadata)

    environ: dict[str, str] = {"NEURON_RT_MAP_HBM": "1"}
    device = Recording(fakes.trainium(tmp_path, nrt, environ))
    start_device(device, caches(), "LIBFABRIC", environ)
    events.append("agent")
    assert environ["FI_EFA_ENABLE_SHM_TRANSFER"] == "0"
    agent = SimpleNamespace(memory_types=lambda: ["DRAM", "VRAM"], metadata=lambda: b"")
    confirm_device(device, agent)
    assert events == ["prepare", "preflight", "environment", "agent", "confirm"]


def test_nothing_is_set_when_a_check_fails(tmp_path: Path, nrt: Nrt) -> None:
    machine, tensors = broken("address", tmp_path, nrt)
    environ: dict[str, str] = {}
    with pytest.raises(DeviceError, match="NEURON_RT_MAP_HBM=1 before the process makes its first"):
        start_device(NeuronDevice(machine), tensors, "LIBFABRIC", environ)
    assert not environ


def test_only_libfabric(tmp_path: Path, nrt: Nrt) -> None:
    device = NeuronDevice(fakes.trainium(tmp_path, nrt))
    with pytest.raises(DeviceError, match=r"UCX cannot register neuron memory: .*\['LIBFABRIC'\]"):
        start_device(device, caches(), "UCX", {})


def test_what_is_set_already_is_respected(tmp_path: Path, nrt: Nrt) -> None:
    environ = {"FI_EFA_ENABLE_SHM_TRANSFER": "0", "FI_EFA_IFACE": "rdmap202s0"}
    device = NeuronDevice(fakes.trainium(tmp_path, nrt, environ))
    by_name = {check.name: check for check in device.preflight(caches())}
    assert by_name["efa_interface"].says == "FI_EFA_IFACE=rdmap202s0 is respected"
    assert device.environment() == {"NEURON_RT_MAP_HBM": "1"}


def test_the_rails_choice_is_set(tmp_path: Path, nrt: Nrt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "environment_of", lambda _: {"FI_EFA_IFACE": "rdmap201s0"})
    device = NeuronDevice(fakes.trainium(tmp_path, nrt, {}))
    assert device.environment()["FI_EFA_IFACE"] == "rdmap201s0"
    checks = {c.name: c for c in device.preflight(caches())}
    assert checks["efa_interface"].says == "FI_EFA_IFACE will be set to rdmap201s0"


def test_nobody_knows_the_nic(tmp_path: Path, nrt: Nrt) -> None:
    """Undecided is fine while NIXL can ask the runtime, and a failure where it cannot."""
    checks = NeuronDevice(fakes.trainium(tmp_path / "a", nrt, near_nic=None)).preflight(caches())
    assert checks[5].outcome == "note"
    old = fakes.open_libnrt(fakes.build_libnrt(tmp_path / "lib", minor=30))
    checks = NeuronDevice(fakes.trainium(tmp_path / "b", old, near_nic=None)).preflight(caches())
    assert checks[5].outcome == "failed"
    assert "NIXL would use all of them" in checks[5].says
    assert "upgrade aws-neuronx-runtime-lib" in checks[5].mend


def test_cpu_mode_and_several_cores_are_refused(tmp_path: Path, nrt: Nrt) -> None:
    device = NeuronDevice(fakes.trainium(tmp_path, nrt))
    two = caches() | {"layers.1.self_attn": Shape((2, BLOCKS, 1, 1, 1), device_type="neuron")}
    assert "several cores: [0, 3]" in first_failure(device.preflight(two)).says  # type: ignore[union-attr]
    host = {"layers.0.self_attn": Shape((2, BLOCKS, 1, 1, 1), device_type="cpu")}
    assert "expected 'neuron'" in first_failure(device.preflight(host)).says  # type: ignore[union-attr]


def test_the_runtime_with_the_export_fault_is_noted(tmp_path: Path) -> None:
    faulty = fakes.open_libnrt(fakes.build_libnrt(tmp_path / "lib", minor=32, patch=31))
    checks = NeuronDevice(fakes.trainium(tmp_path / "root", faulty)).preflight(caches())
    assert checks[3].outcome == "note"
    assert "2.x.9372" in checks[3].mend


@pytest.mark.parametrize(
    "product", ["trn2.3xlarge", "trn1.2xlarge", "inf2.48xlarge", "trn3.3xlarge"]
)
def test_instances_that_cannot(product: str, tmp_path: Path, nrt: Nrt) -> None:
    checks = NeuronDevice(fakes.trainium(tmp_path, nrt, product=product)).preflight(caches())
    failure = first_failure(checks)
    assert failure is not None
    assert failure.name == "instance"
    assert product in failure.says


def test_fewer_nics_than_devices_is_noted(tmp_path: Path, nrt: Nrt) -> None:
    checks = NeuronDevice(fakes.trainium(tmp_path, nrt, num_efa=1)).preflight(caches())
    assert checks[6].outcome == "note"


# ------------------------------------------------------------ layouts


def test_keys_and_values_outermost(tmp_path: Path, nrt: Nrt) -> None:
    """K of block b at base + b * L, V at base + (blocks + b) * L."""
    device = NeuronDevice(fakes.trainium(tmp_path, nrt))
    cache = caches()["layers.0.self_attn"]
    k, v = device.regions(cache, facts(BLOCKS))
    block = HEADS * TOKENS * DIM * ITEM
    assert (k.base_address, v.base_address) == (1 << 40, (1 << 40) + BLOCKS * block)
    assert (k.block_stride, k.head_stride, k.token_stride) == (
        block, TOKENS * DIM * ITEM, DIM * ITEM,
    )  # fmt: skip
    assert k.device_id == v.device_id == 3
    assert device.allocations(cache)[0].num_bytes == 2 * BLOCKS * block


def test_layers_that_share_an_allocation_register_it_once() -> None:
    storage = SimpleNamespace(data_ptr=lambda: 1 << 40, nbytes=lambda: 1 << 20)
    first, second = caches()["layers.0.self_attn"], caches()["layers.0.self_attn"]
    for tensor in (first, second):
        tensor.untyped_storage = lambda: storage
    device = NeuronDevice()
    assert device.allocations(first) == device.allocations(second)


NXDI = {
    "prefix caching, one spare block": (BLOCKS + 1, TOKENS, HEADS, DIM),
    "prefix caching, tokens in tiles": (BLOCKS + 1, 2, TOKENS // 2, HEADS, DIM),
    "chunked prefill": (BLOCKS, HEADS, TOKENS, DIM),
}


@pytest.mark.parametrize("kind", NXDI)
def test_neuronx_distributed_inference_keeps_keys_and_values_apart(kind: str) -> None:
    shape = NXDI[kind]
    pair = [Shape(shape, device_type="neuron", address=a << 40) for a in (1, 2)]
    device = NeuronDevice()
    k, v = device.regions(pair, facts(BLOCKS))
    assert (k.base_address, v.base_address) == (1 << 40, 2 << 40)
    assert k.block_stride == HEADS * TOKENS * DIM * ITEM
    hnd = kind == "chunked prefill"
    assert k.token_stride == (DIM if hnd else HEADS * DIM) * ITEM
    assert k.head_stride == (TOKENS * DIM if hnd else DIM) * ITEM
    layout = KvLayout(0, 0, HEADS, "bfloat16", "VRAM", device.allocations(pair), (k, v))
    layout.validate()


def test_heads_or_tokens_is_not_guessed() -> None:
    pair = [Shape((BLOCKS, 4, 4, DIM), device_type="neuron", address=a << 40) for a in (1, 2)]
    with pytest.raises(DeviceError, match="4 heads and as many tokens"):
        NeuronDevice().regions(pair, facts(BLOCKS, num_heads=4, tokens_per_block=4))


@pytest.mark.parametrize("shape", [(BLOCKS, HEADS, TOKENS, DIM), (BLOCKS, HEADS * TOKENS, 2 * DIM)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DeviceError, match=r"layer 'layers\.0'"):
        NeuronDevice().regions(Shape(shape, device_type="neuron"), facts(BLOCKS))


def test_eight_bit_floats_of_trn2_are_not_those_of_others(tmp_path: Path) -> None:
    trn2 = NeuronDevice(fakes.trainium(tmp_path / "a", product="trn2.48xlarge"))
    trn3 = NeuronDevice(fakes.trainium(tmp_path / "b", product="trn3pds.48xlarge"))
    assert trn2.element_type("float8_e4m3fn") == "float8_e4m3fn up to 240"
    assert trn3.element_type("float8_e4m3fn") == "float8_e4m3fn"
    assert trn2.element_type("bfloat16") == "bfloat16"


# ------------------------------------------------------------ neuronx-distributed


def parallel_state(rank: int, size: int, groups: list[list[int]] | None = None) -> dict[str, Any]:
    def shared(as_list: bool = False) -> list[list[int]]:
        assert groups is not None
        return groups

    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_rank=lambda: rank,
        get_tensor_model_parallel_size=lambda: size,
        get_kv_shared_group=shared,
    )
    return {MODULE: state}


def test_ranks_are_compared_with_vllms() -> None:
    check_ranks(1, 4, {})
    check_ranks(1, 4, parallel_state(1, 4))
    with pytest.raises(DeviceError, match="rank 2 of 4, vLLM as rank 1 of 4"):
        check_ranks(1, 4, parallel_state(2, 4))


def test_replicated_heads_follow_the_librarys_groups() -> None:
    apart = [[0, 2], [1, 3], [4, 6], [5, 7]]  # two tensor-parallel groups of four
    assert [replicated_head(r, 4, 2, parallel_state(r, 4, apart)) for r in range(4)] == [0, 1, 0, 1]
    beside = [[0, 1], [2, 3]]
    assert [replicated_head(r, 4, 2, parallel_state(r, 4, beside)) for r in range(4)] == [
        0, 0, 1, 1,
    ]  # fmt: skip
    assert replicated_head(1, 4, 2, parallel_state(1, 4)) is None  # no groups were made
    assert replicated_head(1, 4, 8, parallel_state(1, 4, apart)) is None
    assert replicated_head(1, 4, 2, {}) is None
    with pytest.raises(DeviceError, match="set kv_shared_group_size to 4"):
        replicated_head(1, 4, 1, parallel_state(1, 4, apart))


# ------------------------------------------------------------ fences


class Graphs:
    """A core: graphs end in order when told, and a read waits for all that were submitted."""

    def __init__(self, nrt: Nrt) -> None:
        self._submitted = fakes.knob(nrt, "fake_submitted")
        self._completed = fakes.knob(nrt, "fake_completed")
        self._changed = threading.Condition()
        self.reads = 0
        self.lies = False

    def submit(self) -> None:
        with self._changed:
            self._submitted.value += 1

    def end(self) -> None:
        with self._changed:
            self._completed.value = self._submitted.value
            self._changed.notify_all()

    def read(self) -> None:
        self.reads += 1
        with self._changed:
            until = self._submitted.value
            if not self.lies:
                assert self._changed.wait_for(lambda: self._completed.value >= until, 10)


@pytest.fixture
def graphs(nrt: Nrt) -> Iterator[Graphs]:
    made = Graphs(nrt)
    yield made
    made.end()


def test_the_copy_is_made_on_a_thread_of_its_own(graphs: Graphs) -> None:
    threads: list[str] = []

    def read() -> None:
        threads.append(threading.current_thread().name)
        graphs.read()

    fence = Fence(read)
    graphs.submit()
    first, second = fence.mark(), fence.mark()
    assert not first.wait(0.01)
    assert not second.done()
    graphs.end()
    assert first.wait(10)
    assert second.wait(10)
    assert set(threads) == {"np-neuron-fence"}


def test_a_failed_copy_never_counts_as_done(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuron_push.devices.neuron_fence.RETRY_S", 0.01)
    state = {"fails": True}

    def read() -> None:
        if state["fails"]:
            raise RuntimeError("NRT_EXEC_HW_ERR")

    mark = Fence(read).mark()
    assert not mark.wait(0.1)
    state["fails"] = False
    assert mark.wait(10)


def step(fence: Fence, graphs: Graphs) -> Any:
    graphs.submit()
    mark = fence.mark()
    graphs.end()
    assert mark.wait(10)
    return mark


def test_sequences_are_used_after_they_have_agreed(graphs: Graphs, nrt: Nrt) -> None:
    fence = Fence(graphs.read, Sequences(nrt))
    for _ in range(NUM_TRIALS):
        assert not isinstance(step(fence, graphs), SequenceMark)
    reads = graphs.reads
    graphs.submit()
    graphs.submit()
    early = fence.mark()
    assert isinstance(early, SequenceMark)
    graphs.submit()  # after the mark: it must not wait for this one
    assert not early.done()
    assert not early.wait(0.01)
    fakes.knob(nrt, "fake_completed").value += 1
    assert not early.done()
    fakes.knob(nrt, "fake_completed").value += 1
    assert early.done()
    assert graphs.reads == reads


def test_marks_without_new_work_prove_nothing(graphs: Graphs, nrt: Nrt) -> None:
    sequences = Sequences(nrt)
    fence = Fence(graphs.read, sequences)
    step(fence, graphs)
    for _ in range(2 * NUM_TRIALS):
        assert fence.mark().wait(10)
    assert sequences.usable
    assert not sequences.trusted


def test_a_runtime_that_contradicts_the_copy_is_not_believed(graphs: Graphs, nrt: Nrt) -> None:
    """Work that does not go through the asynchronous interface, or a read that does not wait."""
    graphs.lies = True
    sequences = Sequences(nrt)
    fence = Fence(graphs.read, sequences)
    graphs.submit()
    assert fence.mark().wait(10)
    assert not sequences.usable


def test_a_runtime_that_knows_every_number_is_not_believed(nrt: Nrt) -> None:
    fakes.knob(nrt, "fake_submitted").value += MAX_QUEUED + 10
    sequences = Sequences(nrt)
    assert sequences.last_submitted() is None
    assert not sequences.usable


def test_an_older_runtime_has_no_sequences(tmp_path: Path) -> None:
    old = fakes.open_libnrt(fakes.build_libnrt(tmp_path, minor=20))
    assert not Sequences(old).usable
    assert Sequences(old).last_submitted() is None


def test_the_last_layers_tensor_is_read(tmp_path: Path, nrt: Nrt) -> None:
    torch = pytest.importorskip("torch")
    layers = {
        f"layers.{n}.self_attn": fakes.FakeTensor(torch.zeros(2, 3, 1, 1, 1), "neuron")
        for n in (0, 10, 9)
    }
    device = NeuronDevice(fakes.trainium(tmp_path, nrt))
    with pytest.raises(DeviceError, match="preflight has not seen"):
        device.marker()
    device.preflight(layers)
    assert device.marker().wait(10)
    assert [tensor.num_reads for tensor in layers.values()] == [0, 1, 0]


# ------------------------------------------------------------ known failures


FAILURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "no_address": (
        "E0821 Failed to retrieve placement for VA: (nil)",
        ("NEURON_RT_MAP_HBM=1",),
    ),
    "no_efa": (
        "registerMem: fi_mr_regattr failed: -22 (Invalid argument)",
        ("trn2.3xlarge", "EFA interfaces"),
    ),
    "host_iface": (
        "W libfabric_rail.cpp: retrying without FI_HMEM support for rail 0",
        ("before", "libnrt"),
    ),
    "no_system_call": (
        "fi_mr_regattr failed: Function not implemented (-38)",
        ("/opt/aws/neuron/lib", "LD_LIBRARY_PATH"),
    ),
    "old_runtime": (
        "E Could not resolve libnrt symbol: nrt_get_attached_efa_bdf",
        ("2.31", "FI_EFA_IFACE"),
    ),
    "dmabuf": ("nrt_get_dmabuf_fd answered NRT_INVALID (2)", ("aws-neuronx-dkms", "9372")),
    "shared_memory": (
        "efa: shm transfer of HMEM buffer never completes",
        ("FI_EFA_ENABLE_SHM_TRANSFER=0",),
    ),
    "no_plugin": (
        "createBackend: unsupported backend 'LIBFABRIC'",
        ("libfabric.so.1", "libcuda.so.1"),
    ),
    "stock_handshake": (
        "AssertionError: Number of KV layers must match",
        ("NeuronPushConnector",),
    ),
    "slow_close": ("nrt_close took 25 s", ("SIGTERM",)),
    "prefix_tail": ("wrong tokens after a prefix-cache hit", ("verify_kv",)),
    "context_parallel": (
        "decode_context_parallel_size > 1 needs NeuronNixlConnector",
        ("decode_context_parallel_size 1",),
    ),
    "heartbeat_loop": (
        "RuntimeError: dictionary changed size during iteration",
        ("heartbeat",),
    ),
    "recompile": ("Detected recompile of prefill graph, fail_on_recompile is set", ("router",)),
    "failed_transfer": (
        "IndexError: list index out of range in _handle_failed_transfer",
        ("0.24",),
    ),
    "bootstrap": ("collective bootstrap timed out", ("NEURON_RT_ROOT_COMM_ID", "port")),
    "pingpong": ("fi_pingpong -p efa -S 16384 hangs", ("rails verify",)),
}


def test_every_known_failure_has_a_test() -> None:
    assert [symptom.name for symptom in SYMPTOMS] == list(FAILURES)


@pytest.mark.parametrize("name", FAILURES)
def test_symptom_in_sentence_out(name: str) -> None:
    text, words = FAILURES[name]
    sentence = explain(text)
    assert sentence == next(s.sentence for s in SYMPTOMS if s.name == name), "another one matched"
    for word in words:
        assert word in sentence
    error = explained(NeuronDevice(), RuntimeError(text))
    assert error.startswith(text)
    assert error.endswith(sentence)


def test_an_unknown_text_is_left_alone() -> None:
    assert explain("all is well") is None
    assert explained(NeuronDevice(), RuntimeError("all is well")) == "all is well"


def test_device_memory_taken_for_host_memory_stops_the_start(tmp_path: Path, nrt: Nrt) -> None:
    device = NeuronDevice(fakes.trainium(tmp_path, nrt))
    agent = SimpleNamespace(memory_types=lambda: ["DRAM"], metadata=lambda: b"")
    with pytest.raises(DeviceError, match="would have gone on with host memory"):
        confirm_device(device, agent)


# ------------------------------------------------------------ locality


def selection(choices: list[Any]) -> Callable[[], Any]:
    nics = [
        SimpleNamespace(pci_address="0000:c9:00.0", name="rdmap201s0"),
        SimpleNamespace(pci_address="0000:ca:00.0", name="rdmap202s0"),
    ]
    return lambda: SimpleNamespace(box=SimpleNamespace(nics=nics), choices=choices)


def choice(address: str, nic: str, process_index: int = 0, candidates: tuple[str, ...] = ()) -> Any:
    rails = [] if candidates else [SimpleNamespace(pci_address=nic, name="rdmap201s0")]
    return SimpleNamespace(
        pci_address=address, numa_node=1, process_index=process_index, rails=rails,
        candidates=candidates, reason="table, device 0",
    )  # fmt: skip


def test_the_runtimes_word_on_the_nic_wins(
    tmp_path: Path, nrt: Nrt, monkeypatch: pytest.MonkeyPatch
) -> None:
    near_choice = choice("0000:cc:00.0", "0000:c9:00.0")
    monkeypatch.setattr(near, "select", selection([near_choice]))
    device = NeuronDevice(fakes.trainium(tmp_path, nrt))
    device.preflight(caches())
    region = device.regions(caches()["layers.0.self_attn"], facts(BLOCKS))[0]
    where = device.locality(region)
    assert (where.pci_address, where.numa_node) == ("0000:cc:00.0", 1)
    assert where.rails == ("rdmap201s0",)
    assert "the Neuron runtime names 0000:c9:00.0" in where.reason


def test_a_tie_is_told_as_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    tie = choice("0000:1b:00.0", "", candidates=("0000:c9:00.0", "0000:ca:00.0"))
    monkeypatch.setattr(near, "select", selection([tie]))
    where = near.locality_of(None, None, "the Neuron runtime was not asked")
    assert where.rails == ()
    assert "undecided between rdmap201s0 or rdmap202s0" in where.reason


# ------------------------------------------------------------ rail policy


class Elsewhere(NeuronDevice):
    """Its memory is registered on a NIC that is not its own."""

    def confirm(self, memory_types: Any, metadata: bytes) -> Any:
        return (
            Check("memory_type", "ok", "device memory"),
            Check("rails", "note", "registered on all 16 rails", "run neuron-push doctor"),
        )


def test_rail_policy(caplog: pytest.LogCaptureFixture) -> None:
    agent = SimpleNamespace(memory_types=lambda: ["VRAM"], metadata=lambda: b"")
    with pytest.raises(DeviceError, match=r"rail_policy strict.*all 16 rails"):
        confirm_device(Elsewhere(), agent, "strict")
    confirm_device(Elsewhere(), agent, "off")
    assert "16 rails" not in caplog.text
    confirm_device(Elsewhere(), agent, "warn")
    assert "16 rails" in caplog.text
