"""PCI addresses, in one spelling.

sysfs writes `0000:59:00.0`, NIXL `0:59:00.0`, CUDA may use upper case, nvidia-smi
`00000000:59:00.0`, neuron-ls leaves the domain out (`59:00.0`). Inside this package an address is
always `domain:bus:device.function` as `%04x:%02x:%02x.%x`.
"""

from __future__ import annotations

import re

from .errors import RailsError

_ADDRESS = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])")

PciNumbers = tuple[int, int, int, int]


def numbers(address: str) -> PciNumbers:
    """(domain, bus, device, function) of any spelling. RailsError if it is no PCI address."""
    match = _ADDRESS.fullmatch(address.strip().lower())
    if match is None:
        raise RailsError(
            f"{address[:60]!r} is not a PCI address; expected domain:bus:device.function, "
            "for example 0000:59:00.0"
        )
    domain, bus, device, function = match.groups()
    if int(device, 16) > 0x1F:
        raise RailsError(f"{address[:60]!r} is not a PCI address: device {device} is above 1f")
    return int(domain or "0", 16), int(bus, 16), int(device, 16), int(function, 16)


def normalise(address: str) -> str:
    """The spelling used inside this package."""
    domain, bus, device, function = numbers(address)
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def is_address(text: str) -> bool:
    """Whether the text is a PCI address in any of the known spellings."""
    try:
        numbers(text)
    except RailsError:
        return False
    return True


def nixl_form(address: str) -> str:
    """NIXL's own spelling, with an unpadded domain: 0:59:00.0."""
    domain, bus, device, function = numbers(address)
    return f"{domain:x}:{bus:02x}:{device:02x}.{function:x}"


def short(address: str) -> str:
    """For people: the bus alone where that says it all, else without a zero domain."""
    domain, bus, device, function = numbers(address)
    tail = f"{bus:02x}:{device:02x}.{function:x}"
    return tail if domain == 0 else f"{domain:04x}:{tail}"
