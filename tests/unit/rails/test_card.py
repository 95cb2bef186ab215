"""What two ends tell each other."""

from __future__ import annotations

import msgspec

from neuron_push.rails import api
from neuron_push.rails.card import RailCard, compare_cards
from neuron_push.rails.select import select

from .conftest import load


def card(**changes: object) -> RailCard:
    base = RailCard(
        instance_type="p5en.48xlarge",
        nixl_version="1.4.1",
        libfabric_version="2.4",
        provider="efa",
        num_nics=16,
        rails=["0000:55:00.0", "0000:56:00.0"],
        unsolicited_write_recv=False,
        time_s=1000.0,
    )
    return msgspec.structs.replace(base, **changes)


def checks(one: RailCard, other: RailCard) -> list[str]:
    found = compare_cards(one, other)
    assert all(item.words and item.mend for item in found)
    return [item.check for item in found]


def test_equal_ends_agree() -> None:
    assert checks(card(), card()) == []


def test_differences() -> None:
    assert checks(card(), card(provider="tcp")) == ["R01"]
    assert checks(card(), card(unsolicited_write_recv=True)) == ["R26"]
    assert checks(card(), card(unsolicited_write_recv=None)) == ["R26"]
    assert checks(card(), card(num_nics=8)) == ["R21"]
    assert checks(card(), card(rails=["0000:55:00.0"], instance_type="x")) == ["R42"]
    assert checks(card(), card(rails=["0000:57:00.0", "0000:58:00.0"])) == ["R42"]
    assert checks(card(time_s=1.0), card(time_s=100.0)) == ["D22"]
    assert checks(card(same_host_token="a"), card(same_host_token="a")) == ["R25"]


def test_unset_on_both_ends_matters_only_between_builds() -> None:
    unset = card(unsolicited_write_recv=None)
    assert checks(unset, unset) == []
    newer = card(unsolicited_write_recv=None, nixl_version="1.5.1")
    found = compare_cards(unset, newer)
    assert [(item.check, item.level) for item in found] == [("R26", "warn")]


def test_card_of_a_rank() -> None:
    selection = select(load("trn2.48xlarge"))
    selection.box.env["FI_EFA_USE_UNSOLICITED_WRITE_RECV"] = "0"
    made = api.card_for(selection, 0)
    assert made.rails == ["0000:c9:00.0"]
    assert made.num_nics == 16
    assert made.unsolicited_write_recv is False
    assert made.time_s > 0
    encoded = msgspec.msgpack.encode(made)
    assert msgspec.msgpack.decode(encoded, type=RailCard) == made


def test_fields_of_a_newer_version_are_ignored() -> None:
    document = msgspec.to_builtins(card()) | {"colour": "red", "version": 2}
    assert msgspec.convert(document, RailCard).num_nics == 16
