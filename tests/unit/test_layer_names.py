"""One name per layer on every engine, and a refusal where that would be ambiguous."""

from __future__ import annotations

import pytest

from neuron_push.layer_names import LayerNameError, canonical_name, canonical_names, layer_index


@pytest.mark.parametrize(
    ("name", "canonical", "index"),
    [
        ("layers.0.self_attn", "layers.0", 0),  # vllm-neuron
        ("model.layers.0.self_attn.attn", "layers.0", 0),  # vLLM on a GPU
        ("model.layers.17.attn", "layers.17", 17),
        ("language_model.model.layers.7.self_attn.attn", "layers.7", 7),
        ("transformer.h.3.attn", "layers.3", 3),
        ("model.decoder.layers.2.self_attn.attn", "layers.2", 2),
        ("model.decoder.layers.2.encoder_attn.attn", "layers.2/encoder_attn", 2),
        ("model.layers.3.self_attn.indexer.k_cache", "layers.3/indexer.k_cache", 3),
        ("model.layers.61.mtp_block.self_attn.attn", "layers.61/mtp_block", 61),
        ("draft.layers.0.self_attn", "layers.0/draft", 0),
        ("model.layers.4.block.1.attn", "layers.4/block.1", 4),
        ("some.cache", "some.cache", -1),
        ("layers", "layers", -1),
        ("12.layers", "12.layers", -1),
    ],
)
def test_canonical_names(name: str, canonical: str, index: int) -> None:
    assert canonical_name(name) == canonical
    assert layer_index(name) == index


def test_both_engines_of_a_pair_come_to_the_same() -> None:
    neuron = [f"layers.{n}.self_attn" for n in range(40)]
    gpu = [f"model.layers.{n}.self_attn.attn" for n in range(40)]
    assert list(canonical_names(neuron).values()) == list(canonical_names(gpu).values())


def test_two_caches_of_one_layer_keep_apart() -> None:
    names = ["model.layers.0.self_attn.attn", "model.layers.0.self_attn.indexer.k_cache"]
    assert canonical_names(names) == {
        names[0]: "layers.0",
        names[1]: "layers.0/indexer.k_cache",
    }


@pytest.mark.parametrize(
    "names",
    [
        ("model.layers.0.self_attn", "layers.0.attn"),
        ("model.layers.1.attn", "model.layers.01.attn"),
        ("model.layers.0.attn", "transformer.h.0.attn"),
    ],
)
def test_ambiguous_names_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(LayerNameError) as caught:
        canonical_names(names)
    assert all(repr(name) in str(caught.value) for name in names)


def test_a_name_listed_twice_is_one_layer() -> None:
    assert canonical_names(["layers.0.attn", "layers.0.attn"]) == {"layers.0.attn": "layers.0"}
