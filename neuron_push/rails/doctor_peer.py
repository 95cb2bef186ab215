"""Checks that need more than this host at rest: the other end, a server's log, counters."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from .card import compare_cards
from .compare import compare_log
from .doctor_base import Check, Finding, Situation, some
from .errors import RailsError

CONNECT_TIMEOUT_S = 3.0
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


def try_peer(text: str) -> str | None:
    """Connect to the other end's side channel. The answer is why not, or None."""
    try:
        with socket.create_connection(split_peer(text), timeout=CONNECT_TIMEOUT_S):
            return None
    except OSError as error:
        return str(error)


def peer_reachable(situation: Situation) -> Iterator[Finding]:
    if situation.peer is None:
        return
    if situation.peer_error is not None:
        yield Finding(
            "D19",
            "fail",
            f"{situation.peer} cannot be reached: {situation.peer_error}",
            "without the side channel no transfer can be agreed on",
            "start the other engine, check its side channel's address and port; " + SECURITY_GROUP,
        )
    elif situation.peer_card is None:
        yield Finding(
            "D20",
            "info",
            f"{situation.peer} accepts connections; its card was not compared",
            "rail counts, versions and write settings of both ends must agree",
            "capture a box there (neuron-push rails capture > peer.json) and give it with "
            "--peer-box peer.json",
        )


def cards(situation: Situation) -> Iterator[Finding]:
    if situation.own_card is None or situation.peer_card is None:
        return
    for one in compare_cards(situation.own_card, situation.peer_card):
        yield Finding(
            one.check, one.level, one.words, "the slower or stranger end decides", one.mend
        )


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


CHECKS: tuple[Check, ...] = (peer_reachable, cards, log_lines, counters)
