"""KV caches of known models as one rank sees them, and block tables over them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

BLOCK_TOKENS: Final = 32
ITEM_BYTES: Final = 2


@dataclass(frozen=True)
class Geometry:
    """Per rank: ``kv_heads`` are this rank's. ``num_blocks`` keeps two pools below 6 GiB."""

    name: str
    num_layers: int
    kv_heads: int
    head_size: int
    num_blocks: int

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.kv_heads * self.head_size * ITEM_BYTES

    @property
    def page_bytes(self) -> int:
        """One block of one layer, keys and values."""
        return 2 * self.kv_heads * self.head_size * ITEM_BYTES * BLOCK_TOKENS

    @property
    def pool_bytes(self) -> int:
        return self.num_layers * self.page_bytes * self.num_blocks

    def write_config(self, folder: Path) -> None:
        """A checkpoint folder without weights: vLLM's configuration needs no more."""
        heads = self.kv_heads * 4
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 32_000,
            "hidden_size": heads * self.head_size,
            "intermediate_size": 1024,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "max_position_embeddings": 32_768,
            "torch_dtype": "bfloat16",
        }
        (folder / "config.json").write_text(json.dumps(config))


GEOMETRIES: Final = {
    geometry.name: geometry
    for geometry in (
        Geometry("qwen3-32b-tp8", num_layers=64, kv_heads=1, head_size=128, num_blocks=1600),
        Geometry("llama-3.1-8b-tp1", num_layers=32, kv_heads=8, head_size=128, num_blocks=560),
        Geometry("smollm2", num_layers=30, kv_heads=3, head_size=64, num_blocks=1600),
    )
}


class Tables:
    """Hands out block tables. Block 0 is vLLM's null block, and never given."""

    def __init__(self, num_blocks: int, run: int | None, seed: int) -> None:
        """run: blocks that lie side by side; None: each table is one run where possible."""
        self._free = list(range(1, num_blocks))
        if run is not None:
            runs = [self._free[i : i + run] for i in range(0, len(self._free), run)]
            random.Random(seed).shuffle(runs)
            self._free = [block for one in runs for block in one]

    def take(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // BLOCK_TOKENS)
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} are free")
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give(self, blocks: list[int]) -> None:
        """To the front: the next table gets what was free longest in the same order."""
        self._free = blocks + self._free
