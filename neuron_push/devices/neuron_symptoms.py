"""Known failures on Neuron: what an error text or a log line means, and how to mend it.

Gathered from public sources (NIXL, libfabric, the Neuron SDK's documentation and issue trackers);
docs/trainium.md holds the same as a table. Nothing here was seen on hardware by this project.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Symptom(NamedTuple):
    """pattern: searched for in a text, without regard to case. sentence: cause, then mend."""

    name: str
    pattern: str
    sentence: str


SYMPTOMS: tuple[Symptom, ...] = (
    Symptom(
        "no_address",
        r"failed to retrieve placement for va: *\(?nil|data_ptr.{0,20}\b(is|was) 0\b",
        "Device tensors have no address because NEURON_RT_MAP_HBM was not on when this process "
        "made its first device tensor: set NEURON_RT_MAP_HBM=1 in the environment that starts "
        "the engine.",
    ),
    Symptom(
        "no_efa",
        r"fi_mr_reg(attr)?\b.{0,80}(-22\b|einval|invalid argument)",
        "This instance cannot register Neuron memory: trn2.3xlarge and instances launched without "
        "EFA interfaces cannot. Launch trn2.48xlarge (or larger) with all its EFA interfaces "
        "attached; neuron-push doctor counts them.",
    ),
    Symptom(
        "host_iface",
        r"fi_hmem_system|without fi_hmem support|vram.{0,40}(not|un)[ -]?supported"
        r"|memory type 1 is not supported",
        "NIXL treats device memory as host memory or refuses it, because libfabric found no Neuron "
        "support when the first agent was made: the runtime must be up and libnrt loaded before "
        "it. Start the engine through the connector, which sees to the order, and use the EFA "
        "installer's libfabric (2.5 or newer needs no running runtime).",
    ),
    Symptom(
        "no_system_call",
        r"fi_mr_regattr.{0,80}(-38\b|enosys|not implemented)",
        "libfabric could not load libnrt when it looked for it: put /opt/aws/neuron/lib into "
        "LD_LIBRARY_PATH before the process starts.",
    ),
    Symptom(
        "old_runtime",
        r"could not resolve libnrt symbol|could not query efa device from memory",
        "The Neuron runtime cannot name a buffer's NIC (it needs 2.31, SDK 2.29), so NIXL uses all "
        "of them: upgrade aws-neuronx-runtime-lib, or set FI_EFA_IFACE to the device's NIC.",
    ),
    Symptom(
        "dmabuf",
        r"nrt_get_dmabuf_fd.{0,60}(invalid|\b2\b)",
        "Runtime 2.32.31.0 needs a driver aws-neuronx-dkms 2.x.9372 or newer to export device "
        "memory, and trn1 cannot export it: upgrade the driver and the runtime together, or use "
        "libfabric 2.5 or newer, which falls back to another way.",
    ),
    Symptom(
        "shared_memory",
        r"\bshm\b.{0,60}(neuron|hmem|transfer)|fi_efa_enable_shm_transfer",
        "libfabric's shared memory path does not know Neuron memory and gives wrong output or a "
        "hang between engines of one host: set FI_EFA_ENABLE_SHM_TRANSFER=0 on both.",
    ),
    Symptom(
        "no_plugin",
        r"unsupported backend '?libfabric|nixlnotfounderror",
        "NIXL's LIBFABRIC plugin does not load because a library it needs is missing: "
        "libfabric.so.1 (EFA installer, /opt/amazon/efa/lib), libhwloc.so.15, libcudart.so.12 or "
        "libcuda.so.1 (a stub does; the Neuron image holds one). Put them on LD_LIBRARY_PATH.",
    ),
    Symptom(
        "stock_handshake",
        r"number of kv layers must match",
        "That is vLLM's own NIXL connector refusing a Neuron peer, whose K and V are registered "
        "apart: use NeuronPushConnector on both sides, which compares layouts layer by layer.",
    ),
    Symptom(
        "slow_close",
        r"nrt_close.{0,60}(slow|took|timed? ?out|\d+ ?s\b)|dereg.{0,40}(slow|took)",
        "Closing the runtime is slow while many memory registrations are alive: shut the engine "
        "down by SIGTERM, so that the connector deregisters first; it keeps one registration per "
        "allocation.",
    ),
    Symptom(
        "prefix_tail",
        r"(wrong|garbled|different) (tokens|output).{0,60}prefix",
        "Blocks of a prefix hit were paired from the front, which happens with connectors that "
        "count blocks: NeuronPushConnector pairs by token positions. Run both sides with it, and "
        "once with verify_kv: true to prove the bytes.",
    ),
    Symptom(
        "context_parallel",
        r"decode_context_parallel|\bdcp\b",
        "vllm-neuron allows decode context parallelism with its own NeuronNixlConnector only: "
        "start with decode_context_parallel_size 1.",
    ),
    Symptom(
        "heartbeat_loop",
        r"dictionary changed size during iteration|dict.{0,10} changed.{0,20}iteration",
        "That is a race in vllm-neuron's own NeuronNixlConnector between its heartbeat and its "
        "handshake: NeuronPushConnector has one thread for both.",
    ),
    Symptom(
        "recompile",
        r"fail_on_recompile|detected recompile",
        "The engine met a shape that it had not compiled at start. A pure consumer has no prefill "
        "graphs, so it cannot compute a prompt whose transfer failed: keep kv_load_failure_policy "
        "at fail and let the router try elsewhere. On a producer, restart it (a fault of the "
        "plugin).",
    ),
    Symptom(
        "failed_transfer",
        r"indexerror.{0,200}_handle_failed_transfer|_handle_failed_transfer.{0,200}indexerror",
        "That is a fault of vLLM 0.24's own NIXL connector after a failed handshake: use "
        "NeuronPushConnector, or mend what made the handshake fail.",
    ),
    Symptom(
        "bootstrap",
        r"neuron_rt_root_comm_id|collective.{0,40}bootstrap.{0,40}(hang|time|deadlock)",
        "Two engines on one host use the same rendezvous: give each its own port in "
        "NEURON_RT_ROOT_COMM_ID.",
    ),
    Symptom(
        "pingpong",
        r"fi_pingpong",
        "fi_pingpong is known to stop at 16 KiB on these NICs and says nothing about bandwidth: "
        "use neuron-push rails verify and scripts/check_trainium.sh.",
    ),
)


def explain(symptom: str) -> str | None:
    """The sentence for the first known failure in a text, or None."""
    for known in SYMPTOMS:
        if re.search(known.pattern, symptom, re.IGNORECASE | re.DOTALL):
            return known.sentence
    return None
