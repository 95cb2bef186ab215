"""Producer and consumer sessions against each other, over a wire that does its worst.

The world below is small but whole: engines that begin, compute, preempt, finish and abort;
memory that is freed and overwritten; WRITEs that land late or fail; notifications that are lost,
doubled, delayed and reordered; connections and ranks that die; a second engine that uses the
same key. Hypothesis draws what happens; the assertions say what must never happen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from neuron_push.core.consumer import ConsumerSession
from neuron_push.core.messages import Cancel, CancelAck, Message, Nack, Reason, Register, Segment
from neuron_push.core.producer import ProducerSession
from neuron_push.core.session import Action, Outcome, Prompt, Report, Send, Write

NUM_TOKENS = 6
LEASE_S = 8.0
PATIENCE_S = 12.0
QUARANTINE_S = 3.0
STRANGER = "x0"


@dataclass(eq=False)
class Source:
    """A request on one producer rank, and the memory of its blocks."""

    rank: str
    key: str
    session: ProducerSession
    engine: str = "waiting"  # computing, preempted, finished, failed
    held: bool = False
    computed: int = 0  # KV of tokens [0, computed) is in memory, until freed or overwritten
    markers: list[int] = field(default_factory=list)  # progress not yet told to the session
    sent: bool = False
    acknowledged: set[int] = field(default_factory=set)

    def kv(self, token: int) -> tuple[str, str, int] | None:
        return (self.key, self.rank, token) if token < self.computed else None


@dataclass(eq=False)
class Dest:
    """One attempt of a consumer rank to get a prompt, and the memory of its blocks."""

    rank: str
    key: str
    session: ConsumerSession
    wanted: dict[str, Register] = field(default_factory=dict)
    cells: dict[tuple[str, int], object] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    aborted: bool = False

    @property
    def is_free(self) -> bool:
        return self.session.is_over

    @property
    def is_engaged(self) -> bool:
        return bool(self.wanted) and not self.session.is_over


@dataclass(eq=False)
class Flight:
    """A WRITE that its producer has posted and not seen the end of."""

    source: Source
    dest: Dest
    write_id: int
    segment: Segment
    has_landed: bool = False


@dataclass(eq=False)
class Link:
    """The connection of one producer rank and one consumer rank."""

    is_up: bool = True
    unaware: set[str] = field(default_factory=set)  # ends that are to be told of its loss
    torn_s: float = float("inf")  # when the consumer's end was torn down

    def carries_writes(self, now_s: float) -> bool:
        return now_s < self.torn_s + QUARANTINE_S


class World:
    def __init__(
        self, num_producers: int, num_consumers: int, num_keys: int, *, stranger: bool
    ) -> None:
        self.producers = [f"p{i}" for i in range(num_producers)]
        ours = [f"d{i}" for i in range(num_consumers)]
        self.engine_size = dict.fromkeys(ours, num_consumers)
        if stranger:
            self.engine_size[STRANGER] = 1
        self.consumers = list(self.engine_size)
        self.keys = [f"k{i}" for i in range(num_keys)]
        self.now_s = 0.0
        self.sources = {
            (rank, key): Source(
                rank, key, ProducerSession(key, lease_s=LEASE_S, patience_s=PATIENCE_S)
            )
            for rank in self.producers
            for key in self.keys
        }
        self.dests: dict[int, Dest] = {}
        self.flights: list[Flight] = []
        self.packets: list[tuple[str, str, Message]] = []
        self.links = {(p, d): Link() for p in self.producers for d in self.consumers}
        self.dead: set[str] = set()
        self.units = {rank: 1 + i * 2 for i, rank in enumerate(self.consumers)}

    # -------------------------------------------------------- what sessions ask for

    def source_does(self, source: Source, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                link = self.link(source.rank, action.peer)
                assert link.is_up or source.rank in link.unaware, "a word to a peer known lost"
                if isinstance(action.message, CancelAck):
                    nonce = action.message.nonce
                    source.acknowledged.add(nonce)
                    late = [f for f in self._flights_of(source) if f.segment.nonce == nonce]
                    assert not late, "acknowledged a cancel with WRITEs in flight"
                self._send(source.rank, action.peer, action.message)
            elif isinstance(action, Write):
                self._post(source, action)
            else:
                assert action.outcome is Outcome.SENT
                assert not source.sent, "SENT twice"
                assert source.held, "SENT of blocks that nobody holds"
                assert not self._flights_of(source), "SENT while a WRITE reads the blocks"
                source.sent = True
                source.computed = 0  # freed, and overwritten by somebody else

    def _post(self, source: Source, action: Write) -> None:
        segment = action.segment
        assert segment.nonce not in source.acknowledged, "WRITE after the acknowledgement"
        assert segment.end_token <= source.computed, "WRITE of KV that is not in memory"
        dest = self.dests[segment.nonce]
        assert (dest.rank, dest.key) == (action.peer, source.key)
        self.flights.append(Flight(source, dest, action.write_id, segment))

    def dest_does(self, dest: Dest, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(dest.rank, action.peer, action.message)
                continue
            assert isinstance(action, Report)
            outcome = action.outcome
            assert outcome not in dest.outcomes, f"{outcome} twice"
            if outcome is Outcome.FAILED:
                assert not dest.outcomes
                assert not dest.aborted, "FAILED after the engine's own abort"
            elif outcome is Outcome.RELEASED:
                assert dest.aborted or dest.outcomes == [Outcome.FAILED]
            else:
                assert outcome is Outcome.RECEIVED
                assert not dest.outcomes
                self._check_content(dest)
            dest.outcomes.append(outcome)

    def _check_content(self, dest: Dest) -> None:
        for rank, message in dest.wanted.items():
            assert message.num_prompt_tokens == NUM_TOKENS or message.first_token == (
                message.end_token
            ), "received another prompt's KV"
            for token in range(message.first_token, message.end_token):
                assert dest.cells.get((rank, token)) == (dest.key, rank, token)

    def _send(self, sender: str, receiver: str, message: Message) -> None:
        if self.link(sender, receiver).is_up:
            self.packets.append((sender, receiver, message))

    # -------------------------------------------------------- the wire

    def link(self, a: str, b: str) -> Link:
        return self.links.get((a, b)) or self.links[b, a]

    def deliver(self, sender: str, receiver: str, message: Message) -> None:
        if receiver in self.engine_size:
            self._deliver_to_dest(sender, message)
            return
        assert isinstance(message, Register | Cancel)
        source = self.sources[receiver, message.key]
        size = self.engine_size[sender]
        if isinstance(message, Register):
            actions = source.session.on_register(
                sender,
                message,
                unit_tokens=self.units[sender],
                num_consumers=size,
                now_s=self.now_s,
                engine=sender[0],
            )
        else:
            actions = source.session.on_cancel(
                sender, message, num_consumers=size, now_s=self.now_s, engine=sender[0]
            )
        self.source_does(source, actions)

    def _deliver_to_dest(self, sender: str, message: Message) -> None:
        assert isinstance(message, Segment | Nack | CancelAck)
        dest = self.dests[message.nonce]
        if isinstance(message, Segment):
            actions = dest.session.on_segment(sender, message, self.now_s)
        elif isinstance(message, Nack):
            actions = dest.session.on_nack(sender, message, self.now_s)
        else:
            actions = dest.session.on_cancel_ack(sender, message, self.now_s)
        self.dest_does(dest, actions)

    def land(self, flight: Flight) -> None:
        """Bytes arrive, and with them the notification; the producer does not know it yet."""
        link = self.link(flight.source.rank, flight.dest.rank)
        dest, segment = flight.dest, flight.segment
        if flight.has_landed or dest.rank in self.dead or not link.carries_writes(self.now_s):
            return
        assert not dest.is_free, "WRITE into blocks that were given back"
        flight.has_landed = True
        for token in range(segment.first_token, segment.end_token):
            dest.cells[flight.source.rank, token] = flight.source.kv(token)
        self._send(flight.source.rank, dest.rank, segment)

    def end(self, flight: Flight, *, well: bool) -> None:
        """The producer sees the end of a WRITE."""
        if well:
            self.land(flight)
        self.flights.remove(flight)
        source, peer = flight.source, flight.dest.rank
        if source.rank in self.dead:
            return
        if flight.has_landed and well:
            actions = source.session.on_write_done(peer, flight.write_id)
        else:
            actions = source.session.on_write_failed(peer, flight.write_id, "error")
        self.source_does(source, actions)

    def _flights_of(self, source: Source) -> list[Flight]:
        return [f for f in self.flights if f.source is source]

    def lose(self, p: str, d: str) -> None:
        link = self.links[p, d]
        if not link.is_up:
            return
        link.is_up = False
        link.unaware = {p, d} - self.dead
        self.packets = [x for x in self.packets if {x[0], x[1]} != {p, d}]

    def notice_loss(self, p: str, d: str, who: str) -> None:
        link = self.links[p, d]
        link.unaware.remove(who)
        if who == p:
            for source in self.living_sources():
                if source.rank == p:
                    self.source_does(source, source.session.on_peer_lost(d, self.now_s))
            return
        link.torn_s = self.now_s
        for dest in self.living_dests():
            if dest.rank == d:
                self.dest_does(dest, dest.session.on_peer_lost(p, self.now_s))

    def kill(self, rank: str) -> None:
        self.dead.add(rank)
        for link in self.links.values():
            link.unaware.discard(rank)
        for p, d in self.links:
            if rank in (p, d):
                self.lose(p, d)

    # -------------------------------------------------------- engines and time

    def living_sources(self) -> list[Source]:
        return [s for s in self.sources.values() if s.rank not in self.dead]

    def living_dests(self) -> list[Dest]:
        return [d for d in self.dests.values() if d.rank not in self.dead]

    def begin(self, source: Source) -> None:
        source.engine = "computing"
        source.markers.clear()
        prompt = Prompt(NUM_TOKENS, b"h" * 16)
        self.source_does(source, source.session.on_begin(prompt, self.now_s))

    def tell_progress(self, source: Source) -> None:
        actions = source.session.on_progress(source.markers.pop(0), self.now_s)
        self.source_does(source, actions)

    def preempt(self, source: Source, *, writes_end_well: bool) -> None:
        source.engine = "preempted"
        source.session.on_suspend()
        for flight in self._flights_of(source):
            self.end(flight, well=writes_end_well)
        assert source.session.num_in_flight == 0
        source.computed = 0  # overwritten

    def finish(self, source: Source) -> None:
        source.engine, source.held = "finished", True
        self.source_does(source, source.session.on_finish(self.now_s))

    def fail(self, source: Source, reason: Reason = Reason.PRODUCER_ABORTED) -> None:
        held = source.engine != "waiting"
        source.engine, source.held = "failed", held
        actions = source.session.on_fail(reason, "", held=held, now_s=self.now_s)
        self.source_does(source, actions)

    def start_again(self, source: Source) -> None:
        """Another request of the engine carries the same key."""
        assert source.sent == source.held
        source.engine, source.held, source.sent = "waiting", False, False
        source.computed = 0
        source.markers.clear()

    def new_dest(self, rank: str, key: str) -> Dest:
        nonce = len(self.dests) + 1
        session = ConsumerSession(key, nonce, patience_s=PATIENCE_S, quarantine_s=QUARANTINE_S)
        dest = self.dests[nonce] = Dest(rank, key, session)
        session.on_announce(tuple(self.producers))
        return dest

    def register(self, dest: Dest, first: int, end: int, *, lie: str) -> None:
        tokens = NUM_TOKENS + (lie == "count")
        digest = (b"l" if lie == "hash" else b"h") * 16
        dest.wanted = {
            p: Register(dest.key, dest.session.nonce, tokens, digest, first, end, 0, ())
            for p in self.producers
        }
        self.dest_does(dest, dest.session.on_register(dest.wanted, self.now_s))
        for (p, d), link in self.links.items():
            if d == dest.rank and link.torn_s <= self.now_s:  # a connection that is no more
                self.dest_does(dest, dest.session.on_peer_lost(p, self.now_s))

    def abort(self, dest: Dest) -> None:
        dest.aborted = dest.aborted or dest.session.outcome is None
        self.dest_does(dest, dest.session.on_abort(self.now_s))

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        for source in self.living_sources():
            if source.session.deadline_s <= self.now_s:
                self.source_does(source, source.session.on_tick(self.now_s))
            assert source.session.deadline_s > self.now_s, "on_tick did not help"
        for dest in self.living_dests():
            if dest.session.deadline_s <= self.now_s:
                self.dest_does(dest, dest.session.on_tick(self.now_s))
            assert dest.session.deadline_s > self.now_s, "on_tick did not help"

    # -------------------------------------------------------- and in the end

    def pump(self) -> None:
        """Everything that is under way arrives, in order."""
        while self.packets or self.flights:
            if self.packets:
                self.deliver(*self.packets.pop(0))
            else:
                self.end(self.flights[0], well=True)

    def settle(self) -> None:
        for _ in range(60):
            for (p, d), link in self.links.items():
                for who in sorted(link.unaware):
                    self.notice_loss(p, d, who)
            for source in self.living_sources():
                while source.markers:
                    self.tell_progress(source)
            self.pump()
            deadlines = [s.session.deadline_s for s in self.living_sources()]
            deadlines += [d.session.deadline_s for d in self.living_dests()]
            soonest = min(deadlines, default=float("inf"))
            if soonest == float("inf"):
                return
            self.advance(max(0.0, soonest - self.now_s))
        raise AssertionError("time does not settle it")

    def check_ends(self) -> None:
        for dest in self.living_dests():
            assert dest.session.is_over
            assert dest.session.open_peers() == []
            assert dest.outcomes in (
                [Outcome.RECEIVED],
                [Outcome.RELEASED] if dest.aborted else [Outcome.FAILED, Outcome.RELEASED],
            )
        for source in self.living_sources():
            assert source.sent == source.held, "the engine waits for its blocks for ever"
            assert source.session.num_in_flight == 0
            assert source.session.open_peers() == []


LIFE = ["producer"] * 4 + ["consumer"] * 3 + ["packet"] * 3 + ["write"] * 2
LIFE += ["all arrives", "heartbeat", "a moment passes", "loss noticed"]
MISHAPS = [
    "preempted",
    "producer aborts",
    "key used again",
    "consumer aborts",
    "consumer fails",
    "packet lost",
    "packet doubled",
    "write lands early",
    "write fails",
    "long time passes",
    "connection breaks",
    "rank dies",
]
RANGES = [(0, NUM_TOKENS)] * 4 + [(1, NUM_TOKENS), (4, NUM_TOKENS), (0, 4), (NUM_TOKENS,) * 2]
LIES = ["no"] * 10 + ["count", "hash"]

Step = tuple[str, int, int, tuple[int, int], str]
"""What happens, two numbers to pick whom it happens to, and what a registration says."""


class Life:
    """Plays steps in a world. A step that cannot happen there does nothing."""

    def __init__(self, world: World) -> None:
        self.world = world

    def source(self, pick: int, *engine: str) -> Source | None:
        found = [s for s in self.world.living_sources() if s.engine in engine]
        return found[pick % len(found)] if found else None

    def dest(self, pick: int) -> Dest | None:
        found = [d for d in self.world.living_dests() if not d.session.is_over]
        return found[pick % len(found)] if found else None

    def play(self, step: Step) -> None:
        what, pick, other, tokens, lie = step
        if what == "consumer":
            self.consumer_goes_on(pick, other, tokens, lie)
        elif what in LIFE:
            self.go_on(what, pick, other)
        else:
            self.go_astray(what, pick)
            self.go_wrong(what, pick, other)

    def go_on(self, what: str, pick: int, other: int) -> None:
        world = self.world
        unaware = [(*pd, who) for pd, x in world.links.items() for who in sorted(x.unaware)]
        if what == "producer":
            if source := self.source(pick, "waiting", "preempted", "computing"):
                self.producer_goes_on(source, other)
        elif what == "packet" and world.packets:
            world.deliver(*world.packets.pop(pick % len(world.packets)))
        elif what == "write" and world.flights:
            world.end(world.flights[pick % len(world.flights)], well=True)
        elif what == "all arrives" and other % 2:
            world.pump()
        elif what == "heartbeat" and (dest := self.dest(pick)):
            source = world.sources[world.producers[other % len(world.producers)], dest.key]
            if source.rank not in world.dead and world.link(source.rank, dest.rank).is_up:
                actions = source.session.on_renew(dest.rank, world.now_s)
                world.source_does(source, actions)
        elif what == "a moment passes":
            world.advance(0.2 * (1 + pick))
        elif what == "loss noticed" and unaware:
            world.notice_loss(*unaware[pick % len(unaware)])

    def producer_goes_on(self, source: Source, chance: int) -> None:
        if source.markers and chance % 3:
            self.world.tell_progress(source)
        elif source.engine != "computing":
            self.world.begin(source)
        elif source.computed == NUM_TOKENS:
            self.world.finish(source)
        else:
            source.computed = min(NUM_TOKENS, source.computed + 1 + chance % 4)
            source.markers.append(source.computed)

    def consumer_goes_on(self, pick: int, other: int, tokens: tuple[int, int], lie: str) -> None:
        world = self.world
        rank = world.consumers[pick % len(world.consumers)]
        key = world.keys[other % len(world.keys)]
        mine = [x for x in world.dests.values() if (x.rank, x.key) == (rank, key)]
        if rank in world.dead:
            return
        if not mine or (mine[-1].session.is_over and len(mine) < 3):
            world.new_dest(rank, key)
        elif not mine[-1].wanted:
            world.register(mine[-1], *tokens, lie=lie)

    def go_astray(self, what: str, pick: int) -> None:
        packets, flights = self.world.packets, self.world.flights
        if what == "packet lost" and packets:
            packets.pop(pick % len(packets))
        elif what == "packet doubled" and packets:
            self.world.deliver(*packets[pick % len(packets)])
        elif what == "write lands early" and flights:
            self.world.land(flights[pick % len(flights)])
        elif what == "write fails" and flights:
            self.world.end(flights[pick % len(flights)], well=False)

    def go_wrong(self, what: str, pick: int, other: int) -> None:
        world = self.world
        if what == "preempted" and (source := self.source(pick, "computing")):
            world.preempt(source, writes_end_well=bool(other % 2))
        elif what == "producer aborts":
            if source := self.source(pick, "waiting", "computing", "preempted", "finished"):
                world.fail(source)
        elif what == "key used again":
            source = self.source(pick, "finished", "failed")
            if source and source.session.is_over:
                world.start_again(source)
        elif what == "consumer aborts" and (dest := self.dest(pick)):
            world.abort(dest)
        elif what == "consumer fails" and (dest := self.dest(pick)):
            actions = dest.session.on_fail(Reason.DIGEST_MISMATCH, "", world.now_s)
            world.dest_does(dest, actions)
        elif what == "long time passes":
            world.advance([QUARANTINE_S, LEASE_S, PATIENCE_S][pick % 3])
        elif what == "connection breaks":
            producer = world.producers[pick % len(world.producers)]
            world.lose(producer, world.consumers[other % len(world.consumers)])
        elif what == "rank dies" and not world.dead:
            ranks = world.producers + world.consumers
            world.kill(ranks[pick % len(ranks)])

    def end(self) -> None:
        """The wire is well again and time passes: everything has to come to its end."""
        world = self.world
        world.settle()
        for source in world.living_sources():  # no engine computes for ever
            if source.engine in ("computing", "preempted"):
                world.fail(source)
        for dest in world.living_dests():  # nor does a request wait for blocks for ever
            if not dest.wanted and not dest.session.is_over:
                world.abort(dest)
        world.settle()
        world.check_ends()


# ------------------------------------------------------------ hypothesis plays

FEW = st.sampled_from([1, 1, 2])
PICK = st.integers(0, 11)
LIE = st.sampled_from(LIES)
RANGE = st.sampled_from(RANGES)


class Sessions(RuleBasedStateMachine):
    """Only few kinds of mishaps in one example: all of them would keep it from going anywhere."""

    life: Life
    mishaps: list[str]

    @initialize(
        p=FEW,
        d=FEW,
        keys=FEW,
        stranger=st.booleans(),
        mishaps=st.lists(st.sampled_from(MISHAPS), min_size=1, max_size=4, unique=True),
    )
    def start(self, p: int, d: int, keys: int, stranger: bool, mishaps: list[str]) -> None:
        self.life = Life(World(p, d, keys, stranger=stranger))
        self.mishaps = mishaps

    @rule(
        steps=st.lists(
            st.tuples(st.sampled_from(LIFE), PICK, PICK, RANGE, LIE), min_size=1, max_size=8
        )
    )
    def all_goes_well(self, steps: list[Step]) -> None:
        for step in steps:
            self.life.play(step)

    @rule(which=PICK, pick=PICK, other=PICK)
    def something_goes_wrong(self, which: int, pick: int, other: int) -> None:
        what = self.mishaps[which % len(self.mishaps)]
        self.life.play((what, pick, other, (0, 0), "no"))

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.end()
            for dest in self.life.world.living_dests():
                event(f"{dest.outcomes[-1].value}, {dest.session.reason}")


@pytest.mark.slow
class TestSessions(Sessions.TestCase):  # type: ignore[valid-type, misc]
    settings = settings(
        max_examples=300,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


@pytest.mark.soak
@pytest.mark.timeout(7200)
class TestSessionsForLong(Sessions.TestCase):  # type: ignore[valid-type, misc]
    settings = settings(TestSessions.settings, max_examples=20_000)


# ------------------------------------------------------------ chance plays

Walk = tuple[tuple[int, int, int, bool], list[Step]]


def random_walk(seed: int) -> Walk:
    """Many more steps a second than hypothesis plays, and evenly spread over what can happen."""
    rng = random.Random(seed)
    size = (rng.choice([1, 1, 2]), rng.choice([1, 1, 2]), rng.choice([1, 1, 2]), rng.random() < 0.2)
    mishaps = rng.sample(MISHAPS, rng.randint(1, 5))
    rate = rng.choice([0.05, 0.2, 0.4])
    steps: list[Step] = []
    for _ in range(rng.randint(10, 60) * (size[0] + size[1]) * size[2] // 2):
        what = rng.choice(mishaps if rng.random() < rate else LIFE)
        pick, other = rng.randrange(12), rng.randrange(12)
        steps.append((what, pick, other, rng.choice(RANGES), rng.choice(LIES)))
    return size, steps


def what_goes_wrong(walk: Walk) -> str:
    """An assertion's text, or nothing."""
    (p, d, keys, stranger), steps = walk
    life = Life(World(p, d, keys, stranger=stranger))
    try:
        for step in steps:
            life.play(step)
        life.end()
    except (AssertionError, KeyError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


def shortest(walk: Walk) -> Walk:
    """The same failure with as few steps as leaving some out can reach."""
    size, steps = walk
    error = what_goes_wrong(walk)
    length = len(steps)
    while length:
        start = 0
        while start < len(steps):
            fewer = steps[:start] + steps[start + length :]
            if what_goes_wrong((size, fewer)) == error:
                steps = fewer
            else:
                start += length
        length //= 2
    return size, steps


def walk_all(seeds: range) -> None:
    for seed in seeds:
        walk = random_walk(seed)
        if error := what_goes_wrong(walk):
            size, steps = shortest(walk)
            story = "\n".join(str(step) for step in steps)
            pytest.fail(f"seed {seed}, size {size}: {error}, after\n{story}")


def test_random_walks() -> None:
    walk_all(range(6000))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_random_walks_for_long() -> None:
    walk_all(range(6000, 1_000_000))
