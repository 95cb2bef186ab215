"""Which environment variables go into a box, with anything private masked."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PREFIXES = ("NIXL_", "FI_", "UCX_", "NEURON_", "NCCL_", "HWLOC_", "RDMAV_", "IBV_", "OFI_")
_NAMES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "NVIDIA_VISIBLE_DEVICES",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "SYSFS_PATH",
        "VLLM_GPU_NIC_PCIE_MAPPING",
        "VLLM_NEURON_EFA_INSTANCE_FAMILY",
        "VLLM_NIC_SELECTION_VARS",
    }
)
_PRIVATE_NAME = re.compile(r"SECRET|TOKEN|PASSWORD|CREDENTIAL|KEY|COMM_ID|HOST|ADDR|ENDPOINT|ETCD")
_NETWORK_ADDRESS = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b(?:[0-9a-f]{1,4}:){4,7}[0-9a-f:]*", re.IGNORECASE
)
_HOME = re.compile(r"(/home/|/Users/)[^/:\s]+")
_UUID = re.compile(r"\b((?:GPU|MIG)-)[0-9a-f]{8}-[0-9a-f-]{20,}(?:/\d+/\d+)?", re.IGNORECASE)
MASK = "<masked>"
MAX_VALUE = 500


def relevant_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that decide about rails, sorted, with private values masked."""
    kept = {}
    for name in sorted(environment):
        if name in _NAMES or name.startswith(_PREFIXES):
            value = environment[name][:MAX_VALUE]
            kept[name] = MASK if _PRIVATE_NAME.search(name) else masked(value)
    return kept


def masked(text: str) -> str:
    """Text without network addresses, home directories and device UUIDs."""
    text = _NETWORK_ADDRESS.sub(MASK, text)
    text = _UUID.sub(r"\1" + MASK, text)
    return _HOME.sub(r"\1<user>", text)
