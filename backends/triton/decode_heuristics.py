"""Tile shapes of the decode kernel.

A program owns ``block_v`` rows of one state head, so a tile is ``block_v * K`` contiguous elements that are read once
and written once. The reasoning, not yet a measurement: one warp with four to eight loads of 16 bytes a thread in
flight, and by their registers 16 to 25 such programs on an SM, is 60 to 100 KB in flight; and a tile that small gives
every SM programs even when the batch is small. So nothing here depends on the batch, and a sequence's bits cannot
either.

``python -m gdn_multi.backends.triton.tune_decode`` times the candidates.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple


class Tile(NamedTuple):
    block_v: int  #: rows of a state head for one program, a power of two
    num_warps: int
    load_policy: str  #: L2 eviction policy of the state's loads: "", "evict_first" or "evict_last"
    store_policy: str  #: likewise of its stores


@cache
def tile(block_k: int, head_size_v: int, itemsize: int) -> Tile:
    """The tile for states of ``itemsize`` bytes an element with K padded to ``block_k``."""
    # Four loads of 16 bytes a thread for 16-bit states, eight for float32: 32 to 64 float32 registers of state.
    elements = 1024 if itemsize == 4 else 2048
    block_v = max(1, elements // block_k)
    while block_v > head_size_v:
        block_v //= 2
    return Tile(block_v=block_v, num_warps=1, load_policy="", store_policy="")
