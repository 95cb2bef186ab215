"""The fault cases of our connector's tests, told to vLLM's: the same names, the same order.

Left out: what it has no part for (a bound on open registrations, NIXL replaced), what needs three
engines, and everything that needs a network namespace.
"""

from __future__ import annotations

import functools
import itertools
import signal
from collections.abc import Callable

from tests.faults.harness.upstream import TARGET, Upstream, UpstreamTransfer

HOLD_S = 2.0
"""How long a process is stopped, as in test_real_processes.py."""
BEYOND_LEASE_S = 10.0

PHASES = (
    "first contact",
    "before registration",
    "registered",
    "mid-transfer",
    "after last segment",
    "while cancelling",
)


def process_case(
    pair: Upstream, case: str, fault: str, victim: str, phase: str, hold_s: float = HOLD_S
) -> None:
    """As run_case of test_real_processes.py."""
    one = UpstreamTransfer(pair, case)
    if phase != "first contact":
        assert pair.serve(), f"{case}: the pair does not work before the fault"
    _bring_to(phase, pair, one, victim)
    other = "d" if victim == "p" else "p"
    one.now()
    pair.signal(victim, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    pair.signal(other, signal.SIGCONT)
    if fault == "killed":
        pair.kill(victim)  # reaped, too
    if phase == "before registration" and victim == "p":
        one.load()
    if phase == "registered" and victim == "d":
        one.prefill()
    if fault == "killed":
        one.watch(other)
        pair.start(victim)
        pair.wait_up(victim)
    else:
        pair.sleep(hold_s)
        pair.signal(victim, signal.SIGCONT)
        if phase == "before registration" and victim == "d":
            one.load()
        if phase == "registered" and victim == "p":
            one.prefill()
        one.watch()
    pair.serve(case)


def _bring_to(phase: str, pair: Upstream, one: UpstreamTransfer, victim: str) -> None:
    if phase == "first contact":
        pair.tell(victim, "break", "add_remote_agent", 1.0, False, 1)
        one.load()
        one.prefill()
        one.prefill_finishes()
        pair.sleep(0.1)
    elif phase == "before registration":
        one.prefill()
        one.prefill_finishes()
        pair.sleep(0.1)
    elif phase == "registered":
        one.register()
    elif phase == "mid-transfer":
        one.write_in_flight()
    elif phase == "after last segment":
        one.load()
        one.prefill()
        assert pair.wait("d", one.consumer, {"runnable"}, 20)
    elif phase == "while cancelling":
        one.write_in_flight()
        pair.signal("p", signal.SIGSTOP)
        pair.signal("d", signal.SIGCONT)
        one.abort()
        pair.sleep(0.1)


def d_aborts(pair: Upstream, case: str) -> None:
    """D's client leaves in mid-transfer; nothing else goes wrong."""
    pair.serve()
    one = UpstreamTransfer(pair, case)
    one.write_in_flight()
    pair.signal("d", signal.SIGCONT)
    one.now()
    one.abort()
    one.watch()
    pair.serve(case)


def p_aborted(pair: Upstream, case: str, when: str) -> None:
    pair.serve()
    one = UpstreamTransfer(pair, case)
    if when == "after":
        one.register()
    one.prefill()
    pair.sleep(0.2)  # of 0.8 s
    one.now()
    pair.tell("p", "abort", one.producer)
    if when == "before":
        pair.sleep(0.1)
        one.now()
        one.load()
    one.watch()


def prefill_never_comes(pair: Upstream, case: str) -> None:
    pair.serve()
    one = UpstreamTransfer(pair, case)
    one.now()
    one.load()
    one.watch("d")


def lease_ends(pair: Upstream, case: str) -> None:
    """Nobody registers; then somebody does, after the lease."""
    pair.serve()
    unwanted = UpstreamTransfer(pair, "nobody registers")
    unwanted.prefill()
    unwanted.fault_s = unwanted.prefill_finishes()
    unwanted.watch("p")
    late = UpstreamTransfer(pair, case, key=unwanted.key)
    late.now()
    late.load()
    late.watch("d")


def retry_with_the_same_id(pair: Upstream, case: str) -> None:
    """The first attempt was served and is over."""
    first = UpstreamTransfer(pair, "")
    first.load()
    first.prefill()
    assert pair.wait("d", first.consumer, {"runnable"}, 20)
    assert pair.wait("p", first.producer, {"sent"}, 20)
    again = UpstreamTransfer(pair, case, key=first.key, attempt="eeeeeeee")
    again.now()
    again.load()
    again.watch("d")


def two_registrations(pair: Upstream, case: str) -> None:
    """The first is served; recorded is the end of the second."""
    pair.serve()
    first = UpstreamTransfer(pair, "")
    second = UpstreamTransfer(pair, case, key=first.key, attempt="eeeeeeee", target=pair.small())
    first.register()
    second.now()
    second.register(2)
    first.prefill()
    second.watch("d")


def stale_registration(pair: Upstream, case: str) -> None:
    """D gave up attempt one; attempt two has the same id, and its own prefill."""
    pair.serve()
    source = pair.small()
    first = UpstreamTransfer(pair, "", source=source, target=pair.small())
    second = UpstreamTransfer(
        pair, case, key=first.key, attempt="eeeeeeee", source=source, target=pair.small()
    )
    first.register()
    first.abort()
    second.now()
    second.register(2)
    second.prefill()
    second.watch()


def prompts_differ(pair: Upstream, case: str) -> None:
    """D's prompt is a block shorter: which of P's blocks it gets nobody has said."""
    pair.serve()
    one = UpstreamTransfer(pair, case, target=TARGET[:-1])
    one.prefill()
    one.prefill_finishes()
    one.now()
    one.load()
    one.watch()


def d_has_the_prompt(pair: Upstream, case: str) -> None:
    pair.serve()
    one = UpstreamTransfer(pair, case)
    one.prefill()
    one.prefill_finishes()
    one.now()
    one.has_it_all()
    one.watch("p")


def p_unreachable(pair: Upstream, case: str) -> None:
    pair.kill("p")
    one = UpstreamTransfer(pair, case)
    one.now()
    one.load()
    one.watch("d")


def p_gone(pair: Upstream, case: str) -> None:
    """In good order, with a registration open; D's NIXL cannot remove it."""
    pair.serve()
    pair.tell("d", "break", "remove_remote_agent", 0.0, True, 10)
    one = UpstreamTransfer(pair, case)
    one.register()
    pair.end("p")
    one.now()
    one.watch("d")


def nixl_call(
    pair: Upstream, case: str, *, side: str, method: str, delay_s: float, raises: bool,
    is_known: bool,
) -> None:  # fmt: skip
    """One call of this side's NIXL fails, or takes ``delay_s``."""
    if is_known:
        pair.serve()
    one = UpstreamTransfer(pair, case)
    if side == "p" or not is_known:
        pair.tell(side, "break", method, delay_s, raises, 1)
    one.now()
    one.load()
    if side == "d" and is_known:
        pair.wait_open("registrations")
        pair.tell(side, "break", method, delay_s, raises, 1)
        one.now()
        pair.sleep(0.2)
    one.prefill()
    if side == "p":
        one.fault_s = one.prefill_finishes()
    one.watch()
    if delay_s:
        pair.serve(case)


Case = Callable[[Upstream, str], None]


def cases() -> dict[str, Case]:
    """By the names they have in the report. Each wants a pair of its own."""
    names = {"p": "P", "d": "D"}
    found: dict[str, Case] = {
        f"UCX: {names[victim]} {fault}, {phase}": functools.partial(
            process_case, fault=fault, victim=victim, phase=phase
        )
        for fault, victim, phase in itertools.product(("killed", "stopped"), "pd", PHASES)
    }
    broken = functools.partial(nixl_call, delay_s=0.0, raises=True, is_known=True)
    return found | {
        "D aborts, mid-transfer": d_aborts,
        "D stopped for longer than the lease, mid-transfer": functools.partial(
            process_case, fault="stopped", victim="d", phase="mid-transfer", hold_s=BEYOND_LEASE_S
        ),
        "P aborted before registration": functools.partial(p_aborted, when="before"),
        "P aborted after registration": functools.partial(p_aborted, when="after"),
        "prefill never comes": prefill_never_comes,
        "lease over": lease_ends,
        "retry with the same id": retry_with_the_same_id,
        "retry after D gave up the first attempt": stale_registration,
        "two registrations for one key": two_registrations,
        "prompts of P and D differ": prompts_differ,
        "D has the whole prompt": d_has_the_prompt,
        "P unreachable before registration": p_unreachable,
        "P gone, NIXL does not forget it": p_gone,
        "P's NIXL refuses D": functools.partial(
            broken, side="p", method="add_remote_agent", is_known=False
        ),
        "D's NIXL refuses P": functools.partial(
            broken, side="d", method="add_remote_agent", is_known=False
        ),
        "WRITE cannot be posted": functools.partial(broken, side="p", method="transfer"),
        "NIXL call of P does not return": functools.partial(
            broken, side="p", method="transfer", delay_s=4.0, raises=False
        ),
        "NIXL call of D does not return": functools.partial(
            broken, side="d", method="get_new_notifs", delay_s=4.0, raises=False
        ),
    }
