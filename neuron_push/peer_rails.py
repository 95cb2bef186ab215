"""How `neuron-push doctor --peer` gets the other engine's rails cards: over its side channel.

Beside the command and not in rails, which knows no side channel. core and ZeroMQ are loaded when
a card is fetched, not before.
"""

from __future__ import annotations

from pathlib import Path

from neuron_push.rails.card import decode_card
from neuron_push.rails.doctor_base import PeerRails, PeerSilence
from neuron_push.rails.doctor_peer import split_peer
from neuron_push.rails.errors import RailsError

ASK_TIMEOUT_S = 5.0


def fetch_peer_rails(address: str, key_file: Path | None) -> PeerRails:
    """The cards of all ranks of the engine at HOST:PORT. Raises PeerSilence with a sentence."""
    import asyncio

    from neuron_push.core.asking import (
        NotReadyError,
        SideChannelError,
        UnknownQuestionError,
        ask_rails,
    )
    from neuron_push.core.keys import KeyFileError, load_keys

    host, port = split_peer(address)
    try:
        keys = load_keys(key_file) if key_file is not None else None
        answer = asyncio.run(ask_rails(host, port, ASK_TIMEOUT_S, keys))
    except KeyFileError as error:
        raise RailsError(str(error)) from None
    except NotReadyError as error:
        raise PeerSilence("starting", str(error)) from None
    except UnknownQuestionError:
        raise PeerSilence(
            "old", f"the engine at {address} runs a release that has no rails card"
        ) from None
    except SideChannelError as error:
        raise PeerSilence("silent", str(error)) from None
    who = answer.identity
    name = who.engine_id if who.engine_id.isprintable() else ascii(who.engine_id)
    told = PeerRails(engine=name[:100], time_s=answer.time_s)
    for rank, blob in enumerate(answer.cards):
        try:
            told.cards[rank] = decode_card(blob)
        except RailsError as error:
            told.gaps[rank] = str(error)
    return told
