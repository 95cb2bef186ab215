"""One name per layer, whatever the engine calls it.

Plans pair layers by name, and the same layer is ``layers.0.self_attn`` under vllm-neuron and
``model.layers.0.self_attn.attn`` under vLLM on a GPU. The canonical name keeps the index, and
whatever else distinguishes a layer's caches from each other; words that every model wraps around
them are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_LIST_WORDS = frozenset({"layers", "layer", "h", "blocks", "block"})
_WRAPPERS = frozenset(
    {"model", "language_model", "transformer", "decoder", "backbone", "gpt_neox", "text_model"}
)
_ATTENTION = frozenset({"self_attn", "self_attention", "attn", "attention", "mixer", "impl"})


class LayerNameError(ValueError):
    """Two caches of an engine would have the same canonical name."""


def canonical_name(name: str) -> str:
    """``layers.<i>``, with what remains of the name behind a slash; unknown names as they are.

    ``model.layers.3.self_attn.attn`` is ``layers.3``,
    ``model.layers.3.self_attn.indexer.k_cache`` is ``layers.3/indexer.k_cache``, and
    ``draft.model.layers.0.self_attn`` is ``layers.0/draft``.
    """
    words = name.split(".")
    at = _index_position(words)
    if at is None:
        return name
    before = [w for w in words[: at - 1] if w not in _WRAPPERS]
    after = [w for w in words[at + 1 :] if w not in _ATTENTION]
    rest = ".".join([*before, *after])
    canonical = f"layers.{int(words[at])}"
    return f"{canonical}/{rest}" if rest else canonical


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """name -> canonical name. Raises LayerNameError where two would be the same."""
    taken: dict[str, str] = {}
    for name in names:
        canonical = canonical_name(name)
        other = taken.setdefault(canonical, name)
        if other != name:
            raise LayerNameError(
                f"the layers {other!r} and {name!r} would both be called {canonical!r}: which of "
                "them a peer's layer belongs to is ambiguous, so this model's KV cannot be paired "
                "by layer; report the two names"
            )
    return {name: canonical for canonical, name in taken.items()}


def layer_index(name: str) -> int:
    """The layer's number; -1 for a name without one."""
    words = name.split(".")
    at = _index_position(words)
    return -1 if at is None else int(words[at])


def _index_position(words: list[str]) -> int | None:
    """Where the layer's number stands: the first number behind a word for a list of layers."""
    for at in range(1, len(words)):
        if re.fullmatch(r"\d{1,6}", words[at]) and words[at - 1] in _LIST_WORDS:
            return at
    return None
