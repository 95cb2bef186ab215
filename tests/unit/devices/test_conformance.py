"""Every backend passes the conformance suite: host for real, the others on stand-ins."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from neuron_push_gpu.device import CudaDevice

from neuron_push.devices.base import DeviceBackend, DeviceError, find_backend
from neuron_push.devices.host import HostDevice
from neuron_push.devices.neuron import NeuronDevice
from tests.unit.devices import fakes
from tests.unit.devices.conformance import Bench, Conformance
from tests.unit.devices.sample_backend import AbacusDevice

torch = pytest.importorskip("torch")

BLOCKS = 5


def random(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)


def host_bench(device: DeviceBackend) -> Bench:
    tensor = random(2, BLOCKS, fakes.HEADS, fakes.TOKENS, fakes.DIM)
    return Bench(
        device=device,
        cache=tensor,
        facts=fakes.facts(BLOCKS),
        no_address=fakes.Shape(tensor.shape, address=0),
        strange=random(BLOCKS + 1, 3),
        read_expected=ctypes.string_at,
    )


class TestHost(Conformance):
    @pytest.fixture
    def bench(self) -> Bench:
        return host_bench(HostDevice())


class TestThirdParty(Conformance):
    @pytest.fixture
    def bench(self) -> Bench:
        device = AbacusDevice()
        bench = host_bench(device)
        bench.finish = lambda: [mark.ended.set() for mark in device.marks] and None
        return bench


class TestNeuron(Conformance):
    """On a fake tree, a fake libnrt and fake tensors over host memory."""

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Bench:
        nrt = fakes.open_libnrt(fakes.build_libnrt(tmp_path / "lib"))
        device = NeuronDevice(fakes.trainium(tmp_path / "root", nrt))
        tensor = random(2, BLOCKS, fakes.HEADS, fakes.TOKENS, fakes.DIM)
        ended = threading.Event()

        class Cache(fakes.FakeTensor):
            def __getitem__(self, index):  # the copy waits for the graph that makes the tensor
                ended.wait(10)
                return super().__getitem__(index)

        return Bench(
            device=device,
            cache=Cache(tensor, "neuron", 3),
            facts=fakes.facts(BLOCKS),
            no_address=fakes.FakeTensor(tensor, "neuron", 3, address=0),
            strange=fakes.FakeTensor(random(BLOCKS, 2 * fakes.HEADS * fakes.TOKENS, 8), "neuron"),
            finish=ended.set,
        )


class TestCuda(Conformance):
    """On a fake tree, a fake NVML, and an event that ends when told."""

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Bench:
        cuda = fakes.FakeCuda()
        device = CudaDevice(fakes.gpu_box(tmp_path), torch=cuda)
        tensor = random(BLOCKS, fakes.HEADS, fakes.TOKENS, 2 * fakes.DIM)

        def finish() -> None:
            cuda.finished = cuda.recorded

        return Bench(
            device=device,
            cache=fakes.FakeTensor(tensor, "cuda"),
            facts=fakes.facts(BLOCKS),
            no_address=fakes.FakeTensor(tensor, "cuda", address=0),
            strange=fakes.FakeTensor(random(BLOCKS + 1, 3), "cuda"),
            finish=finish,
        )


# ------------------------------------------------------------ finding them


INSTALL = """
import sys
sys.path.insert(0, {folder!r})
"""


@pytest.fixture
def installed_sample(tmp_path: Path) -> str:
    """A folder that, on sys.path, is the sample backend's installation."""
    info = tmp_path / "abacus-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: abacus\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[neuron_push.devices]\nabacus = tests.unit.devices.sample_backend:AbacusDevice\n"
        "broken = no_such_module:Device\n"
    )
    return str(tmp_path)


def test_a_third_party_is_found_by_its_entry_point(
    installed_sample: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed_sample)
    assert find_backend("abacus-v1").name == "abacus"
    assert find_backend("cpu").name == "host"
    assert find_backend("neuron").name == "neuron"
    assert find_backend("privateuseone").name == "neuron"
    assert find_backend("cuda").name == "cuda"
    with pytest.raises(DeviceError, match=r"'broken' .* does not load"):
        find_backend("slide rule")
    with pytest.raises(DeviceError, match=r"value 'x' is not allowed: one of \['auto'"):
        find_backend("cpu", "x")


def test_a_package_that_does_not_load_is_named_even_where_another_serves(
    installed_sample: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entries = Path(installed_sample) / "abacus-1.0.dist-info" / "entry_points.txt"
    entries.write_text(entries.read_text().replace("broken", "aaa"))
    monkeypatch.syspath_prepend(installed_sample)
    assert find_backend("abacus-v1").name == "abacus"
    assert "device backend 'aaa' (no_such_module:Device) does not load" in caplog.text


def test_xla_tensors_are_refused_with_the_reason() -> None:
    with pytest.raises(DeviceError, match="no stable address"):
        find_backend("xla")


def test_the_command_lists_all_with_what_each_says(installed_sample: str) -> None:
    code = f"import sys; sys.path.insert(0, {installed_sample!r}); sys.argv[0] = 'neuron-push'\n"
    code += "from neuron_push.cli import main; main()"
    command = [sys.executable, "-c", code, "devices"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    found = {one["name"]: one for one in json.loads(done.stdout)["devices"]}
    assert found["host"]["available"]
    assert found["abacus"]["available"]
    assert "does not load" in found["broken"]["reason"]
    for name, lacks in (("neuron", "no /dev/neuron*"), ("cuda", "no NVIDIA driver")):
        if found[name]["available"]:
            continue  # a machine that has one
        assert lacks in found[name]["reason"]
        assert found[name]["checks"][0]["outcome"] == "failed"
        assert {check["outcome"] for check in found[name]["checks"][1:]} == {"skipped"}
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "host: available" in text
    assert "Traceback" not in text
