"""Checks that need more than this host at rest: the other end, a server's log, counters."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path

from .card import RailCard, compare_cards
from .compare import compare_log
from .doctor_base import Check, Finding, Peer, PeerRails, Reach, Situation, some
from .errors import RailsError

CONNECT_TIMEOUT_S = 3.0
GREETING_TIMEOUT_S = 1.0
# How ZMTP 3.0 begins: signature, version, then the mechanism in 20 bytes.
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_VERSION = b"\x03\x00"
SECURITY_GROUP = (
    "the security group must allow all protocols from and to itself, ingress and egress "
    "(0.0.0.0/0 does not cover EFA), and both hosts must be in one subnet"
)


def split_peer(text: str) -> tuple[str, int]:
    """`HOST:PORT` to its parts. RailsError if it is not that."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise RailsError(f"--peer {text!r} is no HOST:PORT, for example 10.0.0.7:5600")
    return host.strip("[]"), int(port)


def try_peer(text: str) -> Reach:
    """Connect to the other end's side channel, and hear what it speaks."""
    try:
        with socket.create_connection(split_peer(text), timeout=CONNECT_TIMEOUT_S) as sock:
            address = str(sock.getpeername()[0])
            is_here = address == sock.getsockname()[0]
            try:
                heard = _greet(sock)
            except OSError:
                heard = b""
    except OSError as error:
        return Reach(error=error.strerror or str(error))
    if heard.startswith(b"\xff") and heard[9:10] == b"\x7f":
        wants_keys = heard[12:32].startswith(b"CURVE")
        return Reach(None, "zmq", wants_keys, address, is_here)
    return Reach(
        None, ascii(heard[:40].decode("latin-1")) if heard else "nothing", False, address, is_here
    )


def _greet(sock: socket.socket) -> bytes:
    """ZeroMQ's first 32 bytes, or whatever else comes within a second of each of ours.

    We name no mechanism: a side channel with keys hangs up on the wrong one before it has named
    its own.
    """
    sock.settimeout(GREETING_TIMEOUT_S)
    heard = b""
    for ours, enough in ((_SIGNATURE, 10), (_VERSION, 32)):
        sock.sendall(ours)
        while len(heard) < enough:
            try:
                more = sock.recv(enough - len(heard))
            except TimeoutError:
                return heard
            if not more:
                return heard
            heard += more
        if not heard.startswith(b"\xff"):
            break
    return heard


def has_gateway(root: Path, address: str | None) -> bool | None:
    """Whether the way to an IPv4 address leads over a gateway, by the kernel's routes."""
    try:
        target = ipaddress.IPv4Address(address or "")
        lines = (root / "proc/net/route").read_text().splitlines()[1:]
    except (OSError, ValueError):
        return None
    best, answer = -1, None
    for line in lines:
        fields = line.split()
        try:
            network, gateway, mask = (
                int.from_bytes(bytes.fromhex(fields[at]), "little") for at in (1, 2, 7)
            )
        except (ValueError, IndexError):
            continue
        if int(target) & mask == network and mask.bit_count() > best:
            best, answer = mask.bit_count(), gateway != 0
    return answer


def peer_reachable(situation: Situation) -> Iterator[Finding]:
    peer = situation.peer
    if peer is None:
        return
    if peer.reach.error is not None:
        yield Finding(
            "D19",
            "fail",
            f"{peer.name} cannot be reached: {peer.reach.error}",
            "without the side channel no transfer can be agreed on",
            "start the other engine, compare HOST:PORT with its side_channel_host and "
            "side_channel_port (an engine on loopback hears only its own host); " + SECURITY_GROUP,
        )
    elif peer.reach.speaks != "zmq":
        says = "says nothing" if peer.reach.speaks == "nothing" else f"says {peer.reach.speaks}"
        yield Finding(
            "D19",
            "fail",
            f"{peer.name} accepts connections and is no side channel: it {says}",
            "a port of something else, such as vLLM's HTTP server, knows nothing of rails",
            "give the port that the engine logs as 'side channel on HOST:PORT'",
        )
    elif peer.rails is None:
        yield _silence(peer)
    else:
        yield from _answer(peer.name, peer.rails)


def _silence(peer: Peer) -> Finding:
    kind, sentence = peer.silence or ("unasked", "this command cannot ask a side channel")
    if kind == "silent" and peer.reach.wants_keys:
        return Finding(
            "D19",
            "fail",
            f"{peer.name} is a side channel with keys, and does not answer this key",
            "engines and routers of one deployment hold the same key file; nobody else is heard",
            f"neuron-push doctor --peer {peer.name} --key-file FILE, with the engine's key_file",
        )
    why = "rail counts, versions and write settings of both ends must agree"
    mend = {
        "starting": "wait until the engine's log says that all ranks are up, then ask again",
        "old": "install the same neuron-push on both ends; meanwhile neuron-push rails capture > "
        "peer.json there, and neuron-push doctor --peer-box peer.json here",
        "unasked": f"neuron-push doctor --peer {peer.name}, with the main command",
        "silent": "leave --key-file out if the engine has none; see that HOST:PORT is a "
        "neuron_push engine's side channel; else look into its log",
    }[kind]
    level = "fail" if kind == "silent" else "unknown"
    check = "D19" if kind == "silent" else "D20"
    return Finding(check, level, f"{peer.name}: its cards were not compared: {sentence}", why, mend)


def _answer(name: str, told: PeerRails) -> Iterator[Finding]:
    if told.gaps:
        rank, words = next(iter(told.gaps.items()))
        yield Finding(
            "D20",
            "unknown",
            f"{len(told.gaps)} of {len(told.gaps) + len(told.cards)} ranks of engine "
            f"{told.engine} at {name} told nothing of their rails; rank {rank}: {words}",
            "what was not told was not compared",
            "install the same neuron-push on both ends, and look for 'tells other engines nothing' "
            "in the engine's log",
        )
    for card in list(told.cards.values())[:1]:
        yield Finding(
            "D20",
            "info",
            f"engine {told.engine} at {name} has {_count(told.cards)}: NIXL "
            f"{card.nixl_version or '?'} with {card.backend or '?'}, libfabric "
            f"{card.libfabric_version or 'not loaded'}, provider {card.provider}, "
            f"{card.num_nics} NICs",
            "the engine itself saw this when it started; it was compared with this machine",
            "nothing",
        )


def _count(cards: dict[int, RailCard]) -> str:
    return "1 rank" if len(cards) == 1 else f"{len(cards)} ranks"


def subnet(situation: Situation) -> Iterator[Finding]:
    peer = situation.peer
    if peer is None or peer.reach.is_here or not peer.has_gateway:
        return
    in_container = situation.selection.box.host.container is not None
    yield Finding(
        "R24",
        "info" if in_container else "warn",
        f"the way to {peer.reach.address} leads over a gateway"
        + (", as it may from inside a container" if in_container else ""),
        "EFA reaches hosts of its own subnet only: the first transfer would wait 60 s and fail",
        "launch both hosts in one subnet (and so in one availability zone); from the host itself, "
        f"ip route get {peer.reach.address} must not say via",
    )


def cards(situation: Situation) -> Iterator[Finding]:
    told = set()
    for own, theirs in situation.pairs:
        for one in compare_cards(own, theirs):
            if (one.check, one.words) not in told:
                told.add((one.check, one.words))
                yield Finding(one.check, one.level, one.words, one.why, one.mend)


def log_lines(situation: Situation) -> Iterator[Finding]:
    if situation.log is None:
        return
    for trouble in situation.log.troubles:
        yield Finding(
            trouble.check,
            trouble.level,
            f"log line {trouble.first_line}, {trouble.count} times: {trouble.example[:160]}",
            trouble.meaning,
            trouble.mend,
        )
    bad = [check for check in compare_log(situation.selection, situation.log) if check.is_bad]
    for check in bad[:8]:
        if check.verdict != "tcp":
            yield Finding(
                "R14",
                "fail",
                f"{check.what}: {check.words}",
                "other rails were chosen",
                "compare with neuron-push rails show",
            )
    if not situation.log.num_nixl_lines:
        yield Finding(
            "D21",
            "unknown",
            "the log holds no line of NIXL's",
            "nothing can be told from it",
            "start the server with NIXL_LOG_LEVEL=DEBUG and keep its stderr",
        )


def counters(situation: Situation) -> Iterator[Finding]:
    if situation.counters is None:
        return
    lost = [
        name
        for name, values in situation.counters.items()
        if values.get("unresponsive_remote_events", 0) > 0
    ]
    if lost:
        yield Finding(
            "R23",
            "warn",
            f"{some(lost)} met peers that did not answer",
            "packets left and nothing came back: a security group, a subnet, or a dead peer",
            SECURITY_GROUP,
        )
    noisy = [
        name
        for name, values in situation.counters.items()
        if values.get("retrans_timeout_events", 0) + values.get("rx_drops", 0) > 0
    ]
    if noisy:
        yield Finding(
            "R51",
            "info",
            f"{some(noisy)} had retransmissions or drops since the driver came up",
            "congestion or a bad path costs bandwidth",
            "watch while KV moves: neuron-push rails watch --seconds 10",
        )
    writers = {
        name: values["rdma_write_bytes"]
        for name, values in situation.counters.items()
        if "rdma_write_bytes" in values
    }
    busy = [name for name, count in writers.items() if count > 1 << 30]
    if len(busy) == 1 and len(writers) > 1:
        yield Finding(
            "R41",
            "info",
            f"all writes of this host so far left by {busy[0]}",
            "one device has one NIC: the other NICs stay idle unless other devices send too",
            "spread producer ranks over the devices",
        )


CHECKS: tuple[Check, ...] = (peer_reachable, subnet, cards, log_lines, counters)
