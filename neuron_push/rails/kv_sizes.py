"""How much KV a model has, from its published configuration."""

from __future__ import annotations

from pathlib import Path

import msgspec

from .errors import RailsError


class KvShape(msgspec.Struct, frozen=True):
    """KV of one model. Sizes are in elements."""

    layers: int
    kv_heads: int
    elements_per_head: int
    """Per token and region: the head size, or the latent width where KV is compressed."""
    regions_per_layer: int = 2
    """K and V apart; 1 where they are one tensor."""

    def bytes_per_token(self, element_bytes: int) -> int:
        """Of all heads and layers together."""
        per_layer = self.regions_per_layer * self.kv_heads * self.elements_per_head
        return self.layers * per_layer * element_bytes


# num_hidden_layers, num_key_value_heads and head_dim of each model's public config.json.
KNOWN_MODELS = {
    "deepseek-v3": KvShape(61, 1, 576, regions_per_layer=1),
    "llama-3.1-405b": KvShape(126, 8, 128),
    "llama-3.1-70b": KvShape(80, 8, 128),
    "llama-3.1-8b": KvShape(32, 8, 128),
    "llama-3.2-1b": KvShape(16, 8, 64),
    "mistral-7b": KvShape(32, 8, 128),
    "mixtral-8x7b": KvShape(32, 8, 128),
    "qwen3-0.6b": KvShape(28, 8, 128),
    "qwen3-1.7b": KvShape(28, 8, 128),
    "qwen3-4b": KvShape(36, 8, 128),
    "qwen3-8b": KvShape(36, 8, 128),
    "qwen3-14b": KvShape(40, 8, 128),
    "qwen3-32b": KvShape(64, 8, 128),
    "qwen3-30b-a3b": KvShape(48, 4, 128),
    "qwen3-235b-a22b": KvShape(94, 4, 128),
}


def find_model(name: str) -> KvShape:
    """A known model by name, or any model by the path of its config.json."""
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        return _from_config(path / "config.json" if path.is_dir() else path)
    key = name.rsplit("/", 1)[-1].lower().removesuffix("-instruct")
    if key in KNOWN_MODELS:
        return KNOWN_MODELS[key]
    raise RailsError(
        f"model {name!r} is not known here; known are {', '.join(sorted(KNOWN_MODELS))}; "
        "for any other give the path of its config.json"
    )


def _from_config(path: Path) -> KvShape:
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict)
        config = config.get("text_config", config)
        layers = int(config["num_hidden_layers"])
        if "kv_lora_rank" in config:
            width = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
            return KvShape(layers, 1, width, regions_per_layer=1)
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_elements = int(config.get("head_dim") or config["hidden_size"] // heads)
        return KvShape(layers, kv_heads, head_elements)
    except OSError as error:
        raise RailsError(f"{path} cannot be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise RailsError(
            f"{path} is no model configuration with num_hidden_layers and attention heads: {error}"
        ) from None
