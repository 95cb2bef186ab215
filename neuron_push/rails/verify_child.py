"""The process in which `rails verify` starts NIXL: make an agent, register memory, hand over facts.

Run as `python -m neuron_push.rails.verify_child OPTIONS_JSON RESULT_FILE`. NIXL's log goes to
stderr, where the parent reads it; the result is a JSON file. NIXL is imported by name here, so that
the package itself never depends on it.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import json
import mmap
import sys
from pathlib import Path
from typing import Any

from .machine import LIBNRT_NAMES

NRT_NO_FRAMEWORK = 1
NRT_DEVICE_PLACEMENT = 0


class NoDeviceMemoryError(Exception):
    """Memory of the device could not be had; the message says why."""


def main() -> int:
    """Do what the options ask; the result file is written in any case."""
    options = json.loads(sys.argv[1])
    result: dict[str, Any] = {"stage": "import"}
    try:
        _run(options, result)
        result["stage"] = "done"
    except Exception as error:  # the parent turns it into a sentence
        result["error"] = f"{type(error).__name__}: {error}"
    Path(sys.argv[2]).write_text(json.dumps(result))
    return 0 if result["stage"] == "done" else 1


def _run(options: dict[str, Any], result: dict[str, Any]) -> None:
    nixl = importlib.import_module("nixl._api")
    result["stage"] = "memory"
    address, memory_type, keep = _memory(options, result)
    result["stage"] = "agent"
    agent = nixl.nixl_agent("neuron-push-verify", nixl.nixl_agent_config(backends=[]))
    result["stage"] = "backend"
    backend = options["backend"]
    agent.create_backend(backend, options["backend_params"])
    result["memory_types"] = list(agent.get_backend_mem_types(backend))
    result["stage"] = "register"
    descriptors = [(address, options["num_bytes"], options["device"], "")]
    agent.register_memory(descriptors, memory_type, backends=[backend])
    result["stage"] = "metadata"
    result["metadata"] = base64.b64encode(agent.get_agent_metadata()).decode()
    result["address"] = address
    del keep


def _memory(options: dict[str, Any], result: dict[str, Any]) -> tuple[int, str, object]:
    """Address and NIXL type of memory, and what keeps it alive."""
    if options["kind"] == "cuda":
        return _cuda_memory(options), "VRAM", None
    if options["kind"] == "neuron":
        return _neuron_memory(options, result), "VRAM", None
    buffer = mmap.mmap(-1, options["num_bytes"])
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)), "DRAM", buffer


def _cuda_memory(options: dict[str, Any]) -> int:
    cuda = ctypes.CDLL("libcuda.so.1")
    device = ctypes.c_int()
    context = ctypes.c_void_p()
    pointer = ctypes.c_uint64()
    for name, code in (
        ("cuInit", lambda: cuda.cuInit(0)),
        ("cuDeviceGet", lambda: cuda.cuDeviceGet(ctypes.byref(device), options["device"])),
        (
            "cuDevicePrimaryCtxRetain",
            lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        ),
        ("cuCtxSetCurrent", lambda: cuda.cuCtxSetCurrent(context)),
        (
            "cuMemAlloc",
            lambda: cuda.cuMemAlloc_v2(
                ctypes.byref(pointer), ctypes.c_size_t(options["num_bytes"])
            ),
        ),
    ):
        status = code()
        if status != 0:
            raise NoDeviceMemoryError(f"{name} failed with CUDA error {status}")
    return pointer.value


def _neuron_memory(options: dict[str, Any], result: dict[str, Any]) -> int:
    """One tensor on the first visible core. The parent narrowed the visible cores to one."""
    library = _libnrt()
    status = library.nrt_init(NRT_NO_FRAMEWORK, b"", b"")
    if status != 0:
        raise NoDeviceMemoryError(f"nrt_init failed with status {status}: is the core in use?")
    tensor = ctypes.c_void_p()
    size = ctypes.c_size_t(options["num_bytes"])
    status = library.nrt_tensor_allocate(
        NRT_DEVICE_PLACEMENT, 0, size, b"verify", ctypes.byref(tensor)
    )
    if status != 0:
        raise NoDeviceMemoryError(f"nrt_tensor_allocate failed with status {status}")
    library.nrt_tensor_get_va.restype = ctypes.c_void_p
    address = library.nrt_tensor_get_va(tensor)
    if not address:
        raise NoDeviceMemoryError("the tensor has no address: NEURON_RT_MAP_HBM must be on")
    if hasattr(library, "nrt_get_attached_efa_bdf"):
        text = ctypes.create_string_buffer(64)
        length = ctypes.c_size_t(64)
        status = library.nrt_get_attached_efa_bdf(
            ctypes.c_void_p(address), text, ctypes.byref(length)
        )
        if status == 0:
            result["attached_nic"] = text.value.decode(errors="replace")
    return int(address)


def _libnrt() -> ctypes.CDLL:
    for name in LIBNRT_NAMES:
        try:
            return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    raise NoDeviceMemoryError(
        "libnrt.so.1 cannot be loaded: add /opt/aws/neuron/lib to LD_LIBRARY_PATH"
    )


if __name__ == "__main__":
    sys.exit(main())
