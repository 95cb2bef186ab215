"""How long the KV of one prompt takes over the chosen rails, with bytes and operations counted.

Each rank sends its share over its device's rails; ranks that share a NIC share its rate. The line
time is the bound that no software beats; the expected time divides it by the share of the line rate
that one device has been seen to reach.
"""

from __future__ import annotations

import msgspec

from .errors import RailsError
from .kv_sizes import KvShape
from .select import Choice, Selection

STRIPING_THRESHOLD_BYTES = 131072
# 19.3 of 25 GB/s over one 200 Gb/s NIC of a Trainium2 device, published in mooncake PR #3888.
SEEN_SHARE_OF_LINE_RATE = 0.77
BUFFER_BYTES_PER_RAIL = 32 * 2**20


class RankPrediction(msgspec.Struct):
    """One rank. Descriptors and operations are given for the best case (blocks contiguous on both
    sides) and the worst (no two neighbours)."""

    rank: int
    pci_address: str
    num_rails: int
    rate_gbps: float
    bytes_sent: int
    descriptors: tuple[int, int]
    operations: tuple[int, int]


class Prediction(msgspec.Struct):
    """The whole prompt. Times in seconds; None where no rail carries it."""

    bytes_total: int
    block_bytes: int
    ranks: list[RankPrediction]
    busiest_nic: str
    busiest_nic_bytes: int
    line_time_s: float | None
    expected_time_s: float | None
    nixl_line_time_s: float | None
    """With the rails that NIXL would take on its own."""
    registered_buffer_bytes: int
    """Control buffers that NIXL registers: 32 MiB per visible rail and process, all ranks."""


def predict(
    selection: Selection,
    model: KvShape,
    *,
    num_tokens: int,
    tensor_parallel: int,
    block_tokens: int = 16,
    element_bytes: int = 2,
) -> Prediction:
    """Predict the push of one prompt. RailsError where the box has too few devices."""
    for name, value in (("tokens", num_tokens), ("tp", tensor_parallel), ("block", block_tokens)):
        if not 0 < value <= 10**9:
            raise RailsError(f"--{name} is {value}; expected a positive number")
    choices = _device_of_rank(selection, tensor_parallel)
    heads_per_rank = max(1, -(-model.kv_heads // tensor_parallel))
    num_blocks = -(-num_tokens // block_tokens)
    block_bytes = block_tokens * heads_per_rank * model.elements_per_head * element_bytes
    regions = model.layers * model.regions_per_layer
    rank_bytes = regions * num_blocks * block_bytes
    rates = {nic.pci_address: nic.rate_gbps for nic in selection.box.nics}
    ranks = [
        RankPrediction(
            rank=rank,
            pci_address=choice.pci_address,
            num_rails=len(choice.rails),
            rate_gbps=sum(rates.get(rail.pci_address, 0.0) for rail in choice.rails),
            bytes_sent=rank_bytes,
            descriptors=(regions, regions * num_blocks),
            operations=(
                regions * _pieces(num_blocks * block_bytes, len(choice.rails)),
                regions * num_blocks * _pieces(block_bytes, len(choice.rails)),
            ),
        )
        for rank, choice in enumerate(choices)
    ]
    load = _load(choices, rank_bytes, nixl=False)
    busiest = max(load, key=lambda nic: load[nic], default="")
    line_time_s = _time_s(load, rates, choices, nixl=False)
    names = {nic.pci_address: nic.name for nic in selection.box.nics}
    return Prediction(
        bytes_total=rank_bytes * tensor_parallel,
        block_bytes=block_bytes,
        ranks=ranks,
        busiest_nic=names.get(busiest, ""),
        busiest_nic_bytes=int(load.get(busiest, 0)),
        line_time_s=line_time_s,
        expected_time_s=line_time_s / SEEN_SHARE_OF_LINE_RATE if line_time_s is not None else None,
        nixl_line_time_s=_time_s(_load(choices, rank_bytes, nixl=True), rates, choices, nixl=True),
        registered_buffer_bytes=sum(_visible_rails(one, selection) for one in choices)
        * BUFFER_BYTES_PER_RAIL,
    )


def _device_of_rank(selection: Selection, tensor_parallel: int) -> list[Choice]:
    seen = sorted(
        (choice for choice in selection.choices if choice.process_index >= 0),
        key=lambda choice: choice.process_index,
    )
    if not seen:
        raise RailsError("no accelerator is visible, so there is nothing to predict")
    per_device = 1
    if seen[0].kind == "neuron" and selection.entry is not None:
        per_device = selection.entry.accelerators.logical_cores
    if tensor_parallel > len(seen) * per_device:
        raise RailsError(
            f"--tp {tensor_parallel} needs more than the {len(seen)} visible devices with "
            f"{per_device} rank each" + ("s" if per_device > 1 else "")
        )
    return [seen[rank // per_device] for rank in range(tensor_parallel)]


def _pieces(length_bytes: int, num_rails: int) -> int:
    """NIXL stripes a descriptor over the rails from 128 KiB on."""
    return num_rails if num_rails > 1 and length_bytes >= STRIPING_THRESHOLD_BYTES else 1


def _rails(choice: Choice, nixl: bool) -> list[str]:
    if nixl and choice.verdict != "tie":
        return [rail.pci_address for rail in choice.nixl_rails]
    return [rail.pci_address for rail in choice.rails]


def _load(choices: list[Choice], rank_bytes: int, *, nixl: bool) -> dict[str, float]:
    """Bytes per NIC."""
    load: dict[str, float] = {}
    for choice in choices:
        rails = _rails(choice, nixl)
        for nic in rails:
            load[nic] = load.get(nic, 0.0) + rank_bytes / len(rails)
    return load


def _time_s(
    load: dict[str, float], rates: dict[str, float], choices: list[Choice], *, nixl: bool
) -> float | None:
    if not load or not all(_rails(choice, nixl) for choice in choices):
        return None
    if any(rates.get(nic, 0.0) <= 0 for nic in load):
        return None
    return max(count * 8 / (rates[nic] * 1e9) for nic, count in load.items())


def _visible_rails(choice: Choice, selection: Selection) -> int:
    """A Neuron worker is pinned to its one rail; other processes open every NIC."""
    return 1 if choice.kind == "neuron" else len(selection.box.nics)
