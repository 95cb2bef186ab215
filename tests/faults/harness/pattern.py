"""What the blocks of an engine under test hold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def pattern(seed: int, block: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """What a block of this number holds under this seed: never twice the same, never zero."""
    size = int(np.prod(shape))
    at = np.arange(size // 4, dtype=np.uint32)
    words = (at * np.uint32(2654435761)) ^ np.uint32((seed * 40503 + block * 9176 + 1) & 0xFFFFFFFF)
    return words.view(np.uint8).reshape(shape)
