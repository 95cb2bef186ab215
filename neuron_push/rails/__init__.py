"""Rails: the NICs near a device that carry its KV memory. Known, chosen, checked, explained.

For the command line see `cli.py` (`rails_app`, `doctor`). For the connector there are plain
functions; each is loaded on first use, so importing this package costs nothing:

    from neuron_push import rails

    selection = rails.select_here()                  # look at this machine, choose rails
    choice = rails.choice_for(selection, device)     # device: process-local number or PCI address;
                                                     # None is host memory
    os.environ |= rails.environment_for(device, selection=selection)
                                                     # before NIXL (and NCCL) start in this process
    ...                                              # make the agent, register KV memory
    checks = rails.compare_metadata(agent.get_agent_metadata(), selection)
    bad = [check for check in checks if check.is_bad]
    card = rails.encode_card(rails.card_for(selection, device, backend="LIBFABRIC"))
                                                     # for the other end: compare_cards

`rails.actuation_for(...)` also gives the backend's name and parameters and the reason of every
setting. `rails.compare_log(lines)` checks a NIXL log instead of metadata. What follows from a bad
check, `rail_policy` decides: `neuron_push.devices.start.confirm_device`.

This package imports the standard library, msgspec, typer and rich only, and never NIXL: `verify`
starts it in a child process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import (
        actuation_for,
        card_for,
        choice_for,
        compare_log,
        compare_metadata,
        environment_for,
        nics_by_gid,
        select_here,
        start_line,
    )
    from .card import compare_cards, decode_card, encode_card
    from .errors import RailsError

__all__ = [
    "RailsError",
    "actuation_for",
    "card_for",
    "choice_for",
    "compare_cards",
    "compare_log",
    "compare_metadata",
    "decode_card",
    "encode_card",
    "environment_for",
    "nics_by_gid",
    "select_here",
    "start_line",
]

_HOME_BY_NAME = {
    "RailsError": "errors",
    "compare_cards": "card",
    "decode_card": "card",
    "encode_card": "card",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME_BY_NAME.get(name, 'api')}", __name__), name)
