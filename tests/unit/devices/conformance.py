"""What every device backend must do. A third party subclasses this in its own tests.

class TestMine(Conformance):
    @pytest.fixture
    def bench(self) -> Bench: ...
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from neuron_push.core.layout import KvLayout
from neuron_push.devices.base import CacheFacts, DeviceBackend, DeviceError
from neuron_push.devices.checks import Check, Description, first_failure

OUTCOMES = ("ok", "note", "skipped", "failed")


@dataclass
class Bench:
    """A backend on a machine where it works, one layer's cache, and levers.

    finish: let all work submitted to the device so far end; None where it always has.
    no_address: a cache whose tensor has the address 0.
    strange: a cache that nobody could understand.
    read_expected: the bytes at an address; None where only the device could tell.
    """

    device: DeviceBackend
    cache: Any
    facts: CacheFacts
    no_address: Any
    strange: Any
    finish: Callable[[], None] | None = None
    read_expected: Callable[[int, int], bytes] | None = None

    @property
    def caches(self) -> dict[str, Any]:
        return {"model.layers.0.self_attn.attn": self.cache}


class Conformance:
    @pytest.fixture
    def bench(self) -> Bench:
        raise NotImplementedError

    def test_it_says_what_it_is(self, bench: Bench) -> None:
        device = bench.device
        assert device.name
        assert device.memory_type in ("DRAM", "VRAM")
        assert device.nixl_backends
        assert set(device.nixl_backends) <= {"UCX", "LIBFABRIC"}
        assert device.buffer_device
        assert all(device.accepts(name) for name in device.torch_types)
        assert not device.accepts("abacus")
        assert device.consumer_can_recompute in (True, False)

    def test_preflight_passes_here_and_never_raises(self, bench: Bench) -> None:
        without = bench.device.preflight()
        with_caches = bench.device.preflight(bench.caches)
        assert first_failure(with_caches) is None, first_failure(with_caches)
        assert with_caches
        assert [c.name for c in without] == [c.name for c in with_caches], "always the same order"
        for check in (*without, *with_caches):
            assert check.outcome in OUTCOMES
            assert check.says
            assert check.mend or check.outcome != "failed"

    def test_preflight_refuses_a_tensor_without_an_address(self, bench: Bench) -> None:
        caches = {"model.layers.0.self_attn.attn": bench.no_address}
        failure = first_failure(bench.device.preflight(caches))
        assert failure is not None
        assert failure.mend

    def test_environment_is_text_and_changes_nothing_by_itself(self, bench: Bench) -> None:
        bench.device.preflight(bench.caches)
        for caches in (None, bench.caches):
            for name, value in bench.device.environment(caches).items():
                assert isinstance(name, str)
                assert isinstance(value, str)
                assert value, "an empty FI_EFA_IFACE aborts the process"

    def test_regions_make_a_valid_layout(self, bench: Bench) -> None:
        device = bench.device
        device.prepare()
        device.preflight(bench.caches)
        regions = device.regions(bench.cache, bench.facts)
        assert {region.part for region in regions} in ({"k", "v"}, {"kv"})
        for region in regions:
            assert region.base_address > 0
            assert region.layer == bench.facts.layer
        layout = KvLayout(
            0, 0, bench.facts.num_heads, device.element_type("bfloat16"), device.memory_type,
            device.allocations(bench.cache), regions,
        )  # fmt: skip
        layout.validate()

    def test_no_address_or_strange_strides_are_refused(self, bench: Bench) -> None:
        for cache in (bench.no_address, bench.strange):
            with pytest.raises(DeviceError) as caught:
                bench.device.regions(cache, bench.facts)
            assert bench.facts.layer in str(caught.value)

    def test_element_types_have_names(self, bench: Bench) -> None:
        assert bench.device.element_type("bfloat16") == "bfloat16"
        assert bench.device.element_type("float8_e4m3fn")

    def test_locality_never_raises_and_has_a_reason(self, bench: Bench) -> None:
        bench.device.preflight(bench.caches)
        for region in bench.device.regions(bench.cache, bench.facts):
            where = bench.device.locality(region)
            assert where.reason
            assert all(isinstance(rail, str) for rail in where.rails)

    def test_a_backend_without_its_memory_type_is_refused(self, bench: Bench) -> None:
        device = bench.device
        checks = device.confirm([device.memory_type], b"not metadata")
        assert first_failure(checks) is None
        other = "VRAM" if device.memory_type == "DRAM" else "DRAM"
        failure = first_failure(device.confirm([other], b"not metadata"))
        assert failure is not None
        assert failure.mend

    def test_marks_tell_the_truth_and_waiting_lets_others_run(self, bench: Bench) -> None:
        device = bench.device
        device.preflight(bench.caches)
        began_s = time.thread_time()
        mark = device.marker()
        assert time.thread_time() - began_s < 0.05, "marker() does no work"
        if bench.finish is not None:
            assert not mark.done()
            assert mark.wait(0.01) is False
            # Ends only if wait() lets the other thread have the interpreter.
            other = threading.Thread(target=bench.finish)
            other.start()
            assert mark.wait(10.0) is True
            other.join()
        assert mark.wait(10.0) is True
        assert mark.done()
        assert mark.done(), "asking twice changes nothing"

    def test_memory_reads_back(self, bench: Bench) -> None:
        if bench.read_expected is None:
            pytest.skip("only the device could tell what its memory holds")
        bench.device.preflight(bench.caches)
        for region in bench.device.regions(bench.cache, bench.facts):
            for offset in (0, region.block_stride * (region.num_blocks - 1)):
                address = region.base_address + offset
                got = bench.device.read_memory(address, region.item_bytes)
                assert got == bench.read_expected(address, region.item_bytes)

    def test_explain_answers_text_or_nothing(self, bench: Bench) -> None:
        assert bench.device.explain("the moon is full") is None

    def test_describe_is_for_people(self, bench: Bench) -> None:
        said = bench.device.describe()
        assert isinstance(said, Description)
        assert said.name == bench.device.name
        assert said.available
        assert said.reason
        assert all(isinstance(check, Check) for check in said.checks)
