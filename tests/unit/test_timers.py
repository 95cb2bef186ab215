"""Deadlines of many sessions, against a table that looks at all of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_push.core.timers import Timers


def test_each_name_is_due_once_in_the_order_of_deadlines() -> None:
    timers = Timers()
    for name, at_s in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("late", 9.0)):
        timers.set(name, at_s)
    assert list(timers.due(0.5)) == []
    assert list(timers.due(3.0)) == ["a", "b", "c"]  # a deadline is due at its own moment
    assert list(timers.due(3.0)) == []
    assert len(timers) == 1


def test_a_moved_deadline_leaves_nothing_of_the_old_one() -> None:
    timers = Timers()
    timers.set("a", 1.0)
    timers.set("a", 5.0)
    assert list(timers.due(4.0)) == []
    timers.set("a", 2.0)
    assert list(timers.due(4.0)) == ["a"]
    assert list(timers.due(10.0)) == []


def test_infinity_removes_and_an_unknown_name_may_be_removed() -> None:
    timers = Timers()
    timers.set("a", 1.0)
    timers.set("a", math.inf)
    timers.set("b", math.inf)
    assert len(timers) == 0
    assert list(timers.due(1e9)) == []


def test_a_name_may_be_set_again_while_it_is_due() -> None:
    """As sessions do, from inside the loop over what is due."""
    timers = Timers()
    timers.set("a", 1.0)
    timers.set("b", 1.0)
    seen = []
    for name in timers.due(1.0):
        seen.append(name)
        timers.set(name, 2.0)
    assert seen == ["a", "b"]
    assert list(timers.due(2.0)) == ["a", "b"]


def test_names_need_not_be_comparable() -> None:
    timers = Timers()
    timers.set(("c", "x"), 1.0)
    timers.set("x", 1.0)
    timers.set(7, 1.0)
    assert set(timers.due(1.0)) == {("c", "x"), "x", 7}


def test_memory_follows_the_names_not_the_moves() -> None:
    timers = Timers()
    for move in range(100_000):
        timers.set("renewed", float(move))
    assert len(timers._heap) < 100
    assert list(timers.due(1e6)) == ["renewed"]


moves = st.tuples(
    st.sampled_from("abcdefgh"), st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 8.0, math.inf])
)


@given(st.lists(moves | st.floats(0, 10), max_size=60))
def test_like_a_plain_table(steps: list[tuple[str, float] | float]) -> None:
    timers, table = Timers(), dict[str, float]()
    for step in steps:
        if isinstance(step, tuple):
            name, at_s = step
            timers.set(name, at_s)
            table.pop(name, None)
            if not math.isinf(at_s):
                table[name] = at_s
        else:
            due = {name for name, at_s in table.items() if at_s <= step}
            got = list(timers.due(step))
            assert len(got) == len(set(got))
            assert set(got) == due
            assert [table[name] for name in got] == sorted(table[name] for name in got)
            for name in due:
                del table[name]
        assert len(timers) == len(table)


@pytest.mark.parametrize("num_names", [1000])
def test_looking_costs_nothing_while_nothing_is_due(num_names: int) -> None:
    timers = Timers()
    for i in range(num_names):
        timers.set(i, 1e9 + i)
    assert list(timers.due(0.0)) == []
    assert len(timers._heap) == num_names
