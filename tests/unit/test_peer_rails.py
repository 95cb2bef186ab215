"""`neuron-push doctor --peer` against a real side channel, as an operator runs it."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from neuron_push.core.keys import SideKeys, make_keys
from neuron_push.core.link import WorkerLink, link_path
from neuron_push.core.messages import (
    WIRE_VERSION,
    EngineCard,
    Identity,
    ModelCard,
    RankCard,
    Refuse,
    encode_side,
)
from neuron_push.core.sidechannel import SideChannel
from neuron_push.fit import explain_cards, remark_on_rails
from neuron_push.rails import api, box_io
from neuron_push.rails.card import RailCard, encode_card, make_card
from neuron_push.rails.select import select
from tests.unit.rails.test_doctor import P5, healthy
from tests.unit.test_messages import layout

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
Said = tuple[int, str, str]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Engine:
    """A side channel with ranks that say what they are told to, and poll when asked."""

    def __init__(self, name: str, rails: list[bytes], keys: SideKeys | None = None) -> None:
        self.port = free_port()
        self.identity = Identity(
            name, secrets.token_hex(4), "127.0.0.1", self.port, max(len(rails), 1), 1, "m", "both"
        )
        path = link_path(name, "127.0.0.1", self.port)

        def make(identity: Identity, ranks: tuple[RankCard, ...]) -> EngineCard:
            return EngineCard(identity, WIRE_VERSION, "push", "none", ModelCard("m", {}), ranks)

        self.side = SideChannel(
            self.identity,
            link_path=path,
            num_ranks=max(len(rails), 1),
            make_card=make,
            judge=explain_cards,
            handshake_timeout_s=3,
            keys=keys,
            remarks=remark_on_rails,
        )
        self._stop = threading.Event()
        self._links = [(rank, WorkerLink(path, rank)) for rank in range(len(rails))]
        for rank, link in self._links:
            link.announce(RankCard(f"{name}/{rank}", "LIBFABRIC", b"", layout(rank), rails[rank]))
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def _poll(self) -> None:
        from neuron_push.core.link import MeetPeer, Polling

        while not self._stop.is_set():
            for rank, link in self._links:
                for message in link.poll(time.monotonic()):
                    if isinstance(message, MeetPeer) and message.ack:
                        link.send(Polling(rank, message.ack))
            time.sleep(0.005)
        for _, link in self._links:
            link.close()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)
        self.side.close()


@contextmanager
def engine(*rails: bytes, name: str = "p-1", keys: SideKeys | None = None) -> Iterator[Engine]:
    one = Engine(name, list(rails), keys)
    try:
        yield one
    finally:
        one.close()


def box_card(change: Callable[[RailCard], object] = lambda card: None) -> bytes:
    """The card of GPU 0's rank on a host like the doctor's."""
    selection = select(healthy(P5))
    card = make_card(selection, selection.of_process_device(0), backend="LIBFABRIC")
    change(card)
    return encode_card(card)


@pytest.fixture
def box(tmp_path: Path) -> Path:
    path = tmp_path / "box.json"
    path.write_bytes(box_io.dump_box(healthy(P5)))
    return path


def doctor(box: Path, port: int, *more: str) -> Said:
    """Exit code, what it said of the peer, and what it said in all."""
    command = [sys.executable, "-m", "neuron_push", "doctor", "--from", str(box)]
    done = subprocess.run(
        [*command, "--peer", f"127.0.0.1:{port}", *more],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "Traceback" not in done.stderr, done.stderr
    head, _, tail = done.stdout.partition("peer, log and counters:")
    return done.returncode, tail, head + tail + done.stderr


def test_an_engine_like_this_machine(box: Path) -> None:
    with engine(box_card(), box_card()) as there:
        code, said, everything = doctor(box, there.port)
    assert "engine p-1 at 127.0.0.1:" in said
    assert "has 2 ranks: NIXL 1.1.0 with LIBFABRIC, libfabric 2.4, provider efa, 16 NICs" in said
    assert "WARN" not in said
    assert "FAIL" not in said
    assert code == 0, everything


def test_differences_are_findings(box: Path) -> None:
    def change(card: RailCard) -> None:
        card.nixl_version, card.libfabric_version = "1.5.1", "1.22"
        card.unsolicited_write_recv = True
        card.num_nics = 8

    with engine(box_card(change), box_card(change)) as there:
        code, said, _ = doctor(box, there.port)
        as_json = doctor(box, there.port, "--json")[2]
    assert code == 1
    for words in (
        "FAIL    R26  FI_EFA_USE_UNSOLICITED_WRITE_RECV is off here and on there",
        "mend: export FI_EFA_USE_UNSOLICITED_WRITE_RECV=0 on both ends",
        "WARN    D23  NIXL is 1.1.0 here and 1.5.1 there",
        "WARN    D24  libfabric is 2.4 here and 1.22 there",
        "WARN    R21  this end sees 16 NICs and the other 8",
    ):
        assert said.count(words) == 1, said  # once, not once for each rank
    checks = [one["check"] for one in json.loads(as_json)["findings"]]
    assert {"R26", "D23", "D24", "R21"} <= set(checks)


def test_with_keys(box: Path, tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys.json")
    make_keys(tmp_path / "others.json")
    with engine(box_card(), keys=keys) as there:
        assert doctor(box, there.port, "--key-file", str(tmp_path / "keys.json"))[0] == 0
        for more in ((), ("--key-file", str(tmp_path / "others.json"))):
            code, said, _ = doctor(box, there.port, *more)
            assert code == 1
            assert "is a side channel with keys, and does not answer this key" in said
            assert "--key-file FILE" in said
    code, _, everything = doctor(box, there.port, "--key-file", str(tmp_path / "absent"))
    assert code == 1  # the port is shut before the key is read
    assert "cannot be reached: Connection refused" in everything


def test_a_key_for_an_engine_without_one(box: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys.json")
    with engine(box_card()) as there:
        code, said, _ = doctor(box, there.port, "--key-file", str(tmp_path / "keys.json"))
        assert code == 1
        assert "leave --key-file out" in said
        code, _, everything = doctor(box, there.port, "--key-file", str(tmp_path / "absent"))
        assert code == 2
        assert "absent" in everything


def test_an_engine_that_starts(box: Path) -> None:
    with engine() as there:
        code, said, _ = doctor(box, there.port)
    assert code == 2
    assert "engine 'p-1' is starting" in said


def test_ranks_that_cannot_tell(box: Path) -> None:
    with engine(box_card(), b"") as there:
        code, said, _ = doctor(box, there.port)
    assert code == 2
    assert "1 of 2 ranks of engine p-1" in said
    assert "rank 1: there is no rails card" in said


def test_a_release_without_rails_cards(box: Path) -> None:
    """It does not know the question, and answers like any side channel that is asked nonsense."""
    stop = threading.Event()
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def serve() -> None:
        while not stop.is_set():
            if router.poll(50):
                caller, *_ = router.recv_multipart()
                words = "this side channel speaks neuron_push: message does not decode"
                router.send_multipart([caller, encode_side(Refuse(words))])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        code, said, _ = doctor(box, port)
    finally:
        stop.set()
        thread.join(5)
        context.destroy(linger=0)
    assert code == 2
    assert "runs a release that has no rails card" in said
    assert "--peer-box peer.json" in said


def test_somebody_else(box: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code, said, _ = doctor(box, server.getsockname()[1])
    assert code == 1
    assert "accepts connections and is no side channel: it says nothing" in said


def test_nobody(box: Path) -> None:
    code, said, _ = doctor(box, free_port())
    assert code == 1
    assert "cannot be reached: Connection refused" in said


def test_engines_that_meet_say_what_slows_them(caplog: pytest.LogCaptureFixture) -> None:
    def change(card: RailCard) -> None:
        card.unsolicited_write_recv = None

    caplog.set_level(logging.WARNING)
    with engine(box_card()) as p, engine(box_card(change), name="d-1") as d:
        d.side.dial("127.0.0.1", p.port, "p-1", keep_trying=True)
        end_s = time.monotonic() + 5
        while len(caplog.records) < 2 and time.monotonic() < end_s:
            time.sleep(0.02)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, said  # each end, once
    for words in ("is off here and not set there", "is not set here and off there"):
        (line,) = [one for one in said if words in one]
        assert "Mend: export FI_EFA_USE_UNSOLICITED_WRITE_RECV=0 on both ends" in line


def test_cards_that_are_missing_or_damaged_are_passed_over() -> None:
    def whole(rails: bytes) -> EngineCard:
        identity = Identity("e", "i", "h", 1, 1, 1, "m", "both")
        rank = RankCard("e/0", "LIBFABRIC", b"", layout(), rails)
        return EngineCard(identity, WIRE_VERSION, "push", "none", ModelCard("m", {}), (rank,))

    for rails in (b"", b"\xc1", encode_card(msgspec.structs.replace(RailCard(), provider="\x1b"))):
        assert remark_on_rails(whole(box_card()), whole(rails)) == []
        assert remark_on_rails(whole(rails), whole(box_card())) == []


def test_a_rank_tells_its_rails(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    from neuron_push.devices import near
    from neuron_push.rails.card import decode_card

    caplog.set_level(logging.INFO)
    selection = select(healthy(P5))
    monkeypatch.setattr(near, "select", lambda: selection)
    card = decode_card(near.rails_card(3, "0000:59:00.0", "LIBFABRIC"))
    assert (card.backend, card.rails) == ("LIBFABRIC", ["0000:55:00.0", "0000:56:00.0"])
    assert "rails rank=3 device=0000:59:00.0" in caplog.text
    assert api.card_for(selection, None).device is None
    monkeypatch.setattr(near, "select", lambda: 1 / 0)
    assert near.rails_card(0, None, "UCX") == b""
    assert "tells other engines nothing of its rails" in caplog.text
