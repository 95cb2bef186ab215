"""What a producer and a consumer must both have been asked: the prompt, as one digest."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

from neuron_push.core.session import Prompt

if TYPE_CHECKING:
    from vllm.v1.request import Request

_encoder = msgspec.msgpack.Encoder()

NO_HANDOVER_BYTES = 2047
"""hashlib gives the interpreter lock away for more at once, and to get it back can take the
engine's thread milliseconds."""


def prompt_of(request: Request) -> Prompt:
    """The prompt's length and a digest of everything its KV depends on.

    Token ids, images and the like by their identifiers, the adapter, and the cache salt.
    Prompts given as embeddings have no digest: their length alone is compared.
    """
    ids = request.prompt_token_ids
    if ids is None:
        return Prompt(request.num_prompt_tokens, b"")
    try:
        blob = _encoder.encode(ids)
    except (OverflowError, TypeError):  # ids that no vocabulary has, if vLLM lets them through
        blob = repr(ids).encode()
    digest = hashlib.blake2b(digest_size=16)
    for at in range(0, len(blob), NO_HANDOVER_BYTES):
        digest.update(blob[at : at + NO_HANDOVER_BYTES])
    extras: list[Any] = [f.identifier for f in getattr(request, "mm_features", None) or ()]
    lora = getattr(request, "lora_request", None)
    if lora is not None:
        extras.append(("lora", lora.lora_name))
    salt = getattr(request, "cache_salt", None)
    if salt:
        extras.append(("salt", salt))
    if extras:
        digest.update(repr(extras).encode())
    return Prompt(request.num_prompt_tokens, digest.digest())
