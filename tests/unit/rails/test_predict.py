"""Host memory, bandwidth, environment: arithmetic against published and computed figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neuron_push.rails.dram import predict_host_memory
from neuron_push.rails.environment import actuate
from neuron_push.rails.errors import RailsError
from neuron_push.rails.kv_sizes import KNOWN_MODELS, KvShape, find_model
from neuron_push.rails.model import Box
from neuron_push.rails.predict import predict
from neuron_push.rails.select import select
from neuron_push.rails.topology import Topology

from .conftest import load
from .test_select import open_only


def host_memory(box: Box) -> tuple[str, int]:
    found = predict_host_memory(box, Topology(box))
    assert found.reason
    return found.policy, found.rails_per_buffer


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("p5.48xlarge", ("numa", 4)),
        ("p5en.48xlarge", ("numa", 4)),
        ("p6-b200.48xlarge", ("numa", 2)),
        ("p4d.24xlarge", ("all", 4)),
        ("trn2.48xlarge", ("all", 16)),
        ("g5.48xlarge", ("all", 1)),
        ("g6.48xlarge", ("all", 1)),
        ("trn2.3xlarge", ("tcp", 0)),
    ],
)
def test_host_memory_of_whole_machines(name: str, expected: tuple[str, int]) -> None:
    assert host_memory(load(name)) == expected


@pytest.mark.parametrize(
    ("buses", "expected"),
    [
        (("55", "56"), ("all", 2)),  # two NICs are all that a node could feed
        (("87", "88"), ("all", 2)),  # node 0 has no NIC, so the policy does not load
        (("55", "56", "57", "58"), ("numa", 2)),
        (("55",), ("all", 1)),
    ],
)
def test_host_memory_in_containers(buses: tuple[str, ...], expected: tuple[str, int]) -> None:
    box = open_only(load("p5en.48xlarge"), *buses)
    assert host_memory(box) == expected


def test_buffers_on_a_node_without_nics_use_all() -> None:
    box = open_only(load("p5en.48xlarge"), "55", "56", "57", "58")
    assert len(predict_host_memory(box, Topology(box)).nics_by_node[1]) == 4


def test_host_memory_stays_on_its_node() -> None:
    box = load("p5en.48xlarge")
    found = predict_host_memory(box, Topology(box))
    topology = Topology(box)
    assert set(found.nics_by_node) == {0, 1}
    for node, nics in found.nics_by_node.items():
        assert {topology.numa_node(nic) for nic in nics} == {node}


@pytest.mark.parametrize(
    ("value", "expected"),
    [("400", ("numa", 2)), ("100", ("numa", 1)), ("99999", ("all", 16)), ("x", ("numa", 4))],
)
def test_limit_of_host_memory_bandwidth(value: str, expected: tuple[str, int]) -> None:
    box = load("p5en.48xlarge")
    box.env["NIXL_LIBFABRIC_MAX_BW_PER_DRAM_SEG"] = value
    assert host_memory(box) == expected


def test_time_of_a_prompt_on_p5en() -> None:
    found = predict(
        select(load("p5en.48xlarge")),
        find_model("Qwen/Qwen3-32B"),
        num_tokens=16384,
        tensor_parallel=8,
    )
    assert found.bytes_total == 2 * 64 * 8 * 128 * 2 * 16384  # K and V, layers, heads, size, bf16
    assert found.block_bytes == 16 * 1 * 128 * 2
    first = found.ranks[0]
    assert first.bytes_sent == found.bytes_total // 8
    assert first.rate_gbps == 400
    assert first.descriptors == (128, 128 * 1024)
    assert first.operations == (256, 128 * 1024)  # long runs are striped over two rails
    assert found.line_time_s == pytest.approx(first.bytes_sent * 8 / 400e9)
    assert found.nixl_line_time_s == found.line_time_s
    assert found.registered_buffer_bytes == 16 * 8 * 32 * 2**20


def test_ranks_of_one_neuron_device_share_its_rail() -> None:
    found = predict(
        select(load("trn2.48xlarge")),
        find_model("qwen3-32b"),
        num_tokens=16384,
        tensor_parallel=8,
    )
    assert len({rank.pci_address for rank in found.ranks}) == 2  # four logical cores per device
    assert found.busiest_nic_bytes == 4 * found.ranks[0].bytes_sent
    assert found.line_time_s == pytest.approx(found.busiest_nic_bytes * 8 / 200e9)
    assert found.ranks[0].operations[0] == found.ranks[0].descriptors[0]  # one rail: no striping


def test_a_shared_nic_is_slow() -> None:
    fast = predict(
        select(load("p5en.48xlarge")), KNOWN_MODELS["qwen3-8b"], num_tokens=1000, tensor_parallel=8
    )
    slow = predict(
        select(load("g5.48xlarge")), KNOWN_MODELS["qwen3-8b"], num_tokens=1000, tensor_parallel=8
    )
    assert fast.line_time_s is not None
    assert slow.line_time_s == pytest.approx(fast.line_time_s * 32)


def test_heads_are_copied_where_ranks_outnumber_them() -> None:
    found = predict(
        select(load("p5en.48xlarge")), KvShape(10, 2, 64), num_tokens=16, tensor_parallel=8
    )
    assert found.ranks[0].bytes_sent == 10 * 2 * 16 * 64 * 2


def test_no_time_without_rails() -> None:
    found = predict(
        select(load("trn2.48xlarge-no-efa")), KvShape(10, 2, 64), num_tokens=16, tensor_parallel=4
    )
    assert found.line_time_s is None


@pytest.mark.parametrize(
    ("tokens", "tp", "words"),
    [(0, 1, "--tokens is 0"), (16, 0, "--tp is 0"), (16, 99, "needs more than the 8 visible")],
)
def test_predictions_that_make_no_sense(tokens: int, tp: int, words: str) -> None:
    with pytest.raises(RailsError, match=words):
        predict(
            select(load("p5en.48xlarge")), KvShape(1, 1, 1), num_tokens=tokens, tensor_parallel=tp
        )


def test_models_from_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512})
    )
    assert find_model(str(path)) == KvShape(4, 8, 64)
    assert find_model(str(tmp_path)) == KvShape(4, 8, 64)
    path.write_text(
        json.dumps({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    )
    assert find_model(str(path)) == KNOWN_MODELS["deepseek-v3"]
    path.write_text("{}")
    with pytest.raises(RailsError, match="no model configuration"):
        find_model(str(path))
    with pytest.raises(RailsError, match="cannot be read"):
        find_model(str(tmp_path / "absent.json"))
    with pytest.raises(RailsError, match="known are deepseek"):
        find_model("gpt-17")


# The environment of a worker.


def env_of(box: Box, device: int, current: dict[str, str] | None = None, **more: bool):
    selection = select(box)
    return actuate(selection, selection.of_process_device(device), current or {}, **more)


def test_environment_of_a_neuron_worker(trn2: Box) -> None:
    found = env_of(trn2, 1)
    assert found.as_dict() == {
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_UNSOLICITED_WRITE_RECV": "0",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "FI_EFA_ENABLE_SHM_TRANSFER": "0",
        "FI_EFA_IFACE": "rdmap180s0",
    }
    assert found.backend == "LIBFABRIC"
    assert all(setting.reason for setting in found.settings)


def test_what_is_set_already_stays(trn2: Box) -> None:
    found = env_of(trn2, 1, {"FI_EFA_IFACE": "rdmap201s0", "FI_PROVIDER": "efa"})
    assert "FI_EFA_IFACE" not in found.as_dict()
    assert [kept.name for kept in found.kept] == ["FI_EFA_IFACE"]
    assert "rdmap180s0" in found.kept[0].reason


def test_pinning_can_be_switched_off(trn2: Box) -> None:
    found = env_of(trn2, 1, {"NEURON_SKIP_EFA_AFFINITY": "1"})
    assert "FI_EFA_IFACE" not in found.as_dict()
    assert found.notes


def test_a_tie_is_not_pinned() -> None:
    found = env_of(load("trn1.32xlarge"), 0)
    assert "FI_EFA_IFACE" not in found.as_dict()
    assert "undecided" in found.notes[0]


def test_environment_of_a_gpu_worker(p5en: Box) -> None:
    assert set(env_of(p5en, 0).as_dict()) == {
        "FI_PROVIDER",
        "FI_EFA_USE_UNSOLICITED_WRITE_RECV",
        "FI_EFA_USE_DEVICE_RDMA",
    }
    assert env_of(p5en, 0, same_host=True).as_dict()["FI_EFA_ENABLE_SHM_TRANSFER"] == "0"


def test_old_kernel_and_old_nics(p5en: Box) -> None:
    p5en.host.kernel = "5.10.0-30-cloud"
    assert env_of(p5en, 0).as_dict()["FI_EFA_FORK_SAFE"] == "1"
    p5en.host.kernel = "odd"
    assert "FI_EFA_FORK_SAFE" not in env_of(p5en, 0).as_dict()
    found = env_of(load("p4d.24xlarge"), 0)
    assert "FI_EFA_USE_DEVICE_RDMA" not in found.as_dict()
    assert "emulated" in found.notes[0]


def test_a_gpu_in_a_pod_is_told_what_helps(p5en: Box) -> None:
    found = env_of(open_only(p5en, "55", "56"), 0)
    assert "HWLOC_XMLFILE" in found.notes[0]


def test_environment_without_efa(p5en: Box) -> None:
    for device in p5en.pci:
        if device.is_efa:
            device.vendor_id = 0x15B3
    for nic in p5en.nics:
        nic.driver = "mlx5_core"
    found = env_of(p5en, 0)
    assert found.backend == "UCX"
    assert found.as_dict() == {"UCX_NET_DEVICES": "rdmap85s0:1,rdmap86s0:1"}
    bare = env_of(load("trn2.3xlarge"), 0)
    assert bare.as_dict() == {}
    assert "TCP" in bare.notes[0]
