"""What two ends tell each other."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_push.rails import api
from neuron_push.rails.card import (
    RailCard,
    compare_cards,
    decode_card,
    encode_card,
    expected_card,
    host_token,
)
from neuron_push.rails.errors import RailsError
from neuron_push.rails.model import Box
from neuron_push.rails.select import select

from .conftest import load, put


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
    assert [(item.check, item.level) for item in found] == [("D23", "warn"), ("R26", "warn")]


def test_card_of_a_rank() -> None:
    selection = select(load("trn2.48xlarge"))
    selection.box.env["FI_EFA_USE_UNSOLICITED_WRITE_RECV"] = "0"
    made = api.card_for(selection, 0)
    assert made.rails == ["0000:c9:00.0"]
    assert made.num_nics == 16
    assert made.unsolicited_write_recv is False
    assert made.device == "0000:cc:00.0"
    assert made.same_host_token == host_token()
    assert decode_card(encode_card(made)) == made


def test_fields_of_a_newer_version_are_ignored() -> None:
    document = msgspec.to_builtins(card()) | {"colour": "red", "version": 2}
    assert msgspec.convert(document, RailCard).num_nics == 16


def test_cards_on_the_wire() -> None:
    assert decode_card(encode_card(card())) == card()
    assert len(encode_card(card(rails=["0000:55:00.0"] * 32))) < 1000


@pytest.mark.parametrize(
    ("blob", "words"),
    [
        (b"", "no rails card"),
        (b"\xc1", "does not decode"),
        (b"\x81\xa1x" + b"\x91" * 100_000 + b"\x00", "does not decode"),
        (encode_card(card(rails=["x"] * 65)), "more than 64"),
        (encode_card(card(provider="x" * 101)), "too long or not printable"),
        (encode_card(card(nixl_version="1\x1b[2J")), "too long or not printable"),
        (encode_card(card(time_s=float("nan"))), "no sound time"),
    ],
)
def test_cards_that_cannot_be_are_refused(blob: bytes, words: str) -> None:
    with pytest.raises(RailsError, match=words):
        decode_card(blob)


@given(st.binary(max_size=100))
def test_any_bytes_are_a_card_or_refused(blob: bytes) -> None:
    with contextlib.suppress(RailsError):
        assert isinstance(decode_card(blob), RailCard)


def test_every_difference_names_both_values_why_and_mend() -> None:
    other = card(
        nixl_version="1.5.1",
        libfabric_version="1.22",
        unsolicited_write_recv=True,
        device_rdma=False,
        num_nics=8,
        rails=["0000:55:00.0"],
    )
    found = compare_cards(card(), other)
    assert [one.check for one in found] == ["R26", "D23", "D24", "D09", "R21", "R42"]
    for one in found:
        assert " here" in one.words or "this end" in one.words
        assert " there" in one.words or "the other" in one.words
        assert one.why
        assert one.mend


def test_the_fabric_is_compared_for_libfabric_only() -> None:
    ucx = card(backend="UCX", provider="tcp", num_nics=0, rails=[], unsolicited_write_recv=None)
    assert checks(ucx, ucx) == []
    assert checks(ucx, card(backend="UCX", provider="tcp", unsolicited_write_recv=True)) == []
    assert checks(card(), card(backend="UCX", unsolicited_write_recv=True)) == ["R10"]


def test_what_an_engine_here_would_tell(trn2: Box) -> None:
    selection = select(trn2)
    choice = selection.of_process_device(1)
    assert choice is not None
    made = expected_card(selection, choice.pci_address)
    assert made.unsolicited_write_recv is False  # the connector sets it
    assert (made.num_nics, made.rails) == (1, ["0000:b4:00.0"])  # and pins the worker to its NIC
    assert expected_card(selection, "0000:01:00.0").device == "0000:cc:00.0"
    assert expected_card(selection, None).unsolicited_write_recv is None
    assert trn2.env.get("FI_EFA_IFACE") is None


def test_host_token(tmp_path: Path) -> None:
    assert host_token(tmp_path) == ""
    put(tmp_path / "proc/sys/kernel/random/boot_id", "a-b-c")
    assert host_token(tmp_path) == host_token(tmp_path) != ""
    assert "a-b-c" not in host_token(tmp_path)
