"""Whether two engines gave the same answer, as far as bf16 lets them.

Scores are bf16: steps of 0.125 between 16 and 32, so words often tie exactly. Which of them comes
first depends on how the prompt was cut into batches, and the consumer computes the last prompt
token alone. So where two greedy answers part, both engines must hold both words for all but
equal; up to there they must have scored the same words alike. (That the KV arrived is proved by
digests, not by words.)
"""

from __future__ import annotations

from typing import Any

NEAR_TIE = 0.25  # nats; two steps of bf16
ALTERNATIVES = 20  # as many as vLLM gives by default (max_logprobs)


def assert_same_answer(got: dict[str, Any], right: dict[str, Any]) -> None:
    """Both are completions with ``logprobs=ALTERNATIVES``, of one prompt, greedy."""
    ours, theirs = (answer["choices"][0]["logprobs"] for answer in (got, right))
    words = list(zip(ours["tokens"], theirs["tokens"], strict=True))
    assert words
    for place, (word, other) in enumerate(words):
        where = f"word {place} of {words}"
        if word == other:
            scores = [answer["token_logprobs"][place] for answer in (ours, theirs)]
            assert abs(scores[0] - scores[1]) <= NEAR_TIE, f"{where}: scored {scores}"
            continue
        for answer in (ours, theirs):
            scored = answer["top_logprobs"][place]
            best = max(scored.values())
            for candidate in (word, other):
                gap = best - scored.get(candidate, float("-inf"))
                assert gap <= NEAR_TIE, f"{where}: no near tie, {candidate!r} in {scored}"
        print(f"near tie at {where}")
        return  # from here on they answer different texts
