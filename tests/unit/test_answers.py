"""The comparison of two engines' answers lets only near ties pass."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.answers import assert_same_answer


def answer(*words: dict[str, float]) -> dict[str, Any]:
    """Of each word's alternatives the first one named was chosen."""
    chosen = [next(iter(scored)) for scored in words]
    return {
        "choices": [
            {
                "logprobs": {
                    "tokens": chosen,
                    "token_logprobs": [
                        scored[word] for word, scored in zip(chosen, words, strict=True)
                    ],
                    "top_logprobs": list(words),
                }
            }
        ]
    }


def test_the_same_words_with_all_but_equal_scores() -> None:
    assert_same_answer(answer({"a": -1.0}, {"b": -2.0}), answer({"a": -1.05}, {"b": -2.1}))


def test_a_near_tie_and_anything_after_it() -> None:
    assert_same_answer(
        answer({"on": -3.49, "ass": -3.49}, {"n": -4.0}),
        answer({"ass": -3.41, "on": -3.53}, {"ins": -2.0}),
    )


@pytest.mark.parametrize(
    "theirs",
    [
        answer({"a": -1.0}, {"c": -2.0}),  # ours is not among the alternatives
        answer({"a": -1.0}, {"c": -2.0, "b": -2.5}),  # it is, far behind
        answer({"a": -1.4}, {"b": -2.0}),  # the same words, scored differently
        answer({"a": -1.0}, {"b": -2.0}, {"d": -1.0}),  # a longer answer
    ],
)
def test_anything_else_is_another_answer(theirs: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        assert_same_answer(answer({"a": -1.0}, {"b": -2.0, "c": -2.01}), theirs)


def test_a_tie_for_one_engine_only_is_not_enough() -> None:
    with pytest.raises(AssertionError):
        assert_same_answer(answer({"a": -1.0, "b": -1.0}), answer({"b": -0.1, "a": -4.0}))
