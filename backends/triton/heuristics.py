"""Tuning choices of the prefill, all of them.

``python -m gdn_multi.backends.triton.tune`` times the candidates on a GPU and prints the table to put here.
Nothing in this file has been measured yet: the numbers come from arithmetic.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Dict, NamedTuple, Optional

import torch


class Tiles(NamedTuple):
    """How the kernels are cut and compiled for one head size and dtype; a sequence's bits may depend on it."""

    prepare_warps: int
    prepare_regs: int  #: registers of a thread of it, at most; 0: as the assembler likes
    prepare_heads: int  #: state heads of one prepare program, at most; they share K K^T and Q K^T
    block_v: int  #: rows of the state of one recur program
    recur_warps: int
    recur_stages: int  #: of the tiles' pipeline, where two programs share an SM
    alone_stages: int  #: where there are no more programs than SMs
    local_stages: int  #: of the pass that finds the segments' transitions
    scan_block: int
    scan_warps: int
    scan_stages: int


#: For tests and the tuning script: fields of Tiles, or "segment_chunks", that replace the choice. Clear
#: ``prefill.plans`` after a change.
OVERRIDES: Dict[str, Any] = {}

#: (kind of GPU, 16-bit inputs, K <= 128) -> tiles. A block of 64 rows is a warpgroup's share on sm_90; elsewhere the
#: state of 32 rows fits in the registers of four warps. With two stages the pipeline asks for a chunk's tiles when it
#: is through with the one before, so two programs of an SM hide each other's waits; with three stages one program does
#: without, but its tiles fill the shared memory.
_TILES = {
    ("sm_90", True, True): Tiles(4, 168, 1, 64, 4, 2, 3, 3, 16, 8, 2),  # not yet measured
    ("sm_90", True, False): Tiles(4, 0, 1, 64, 8, 1, 1, 1, 16, 8, 1),  # not yet measured
    ("other", True, True): Tiles(4, 0, 1, 32, 4, 2, 2, 2, 16, 8, 1),  # not yet measured
    ("other", True, False): Tiles(4, 0, 1, 32, 8, 1, 1, 1, 16, 8, 1),  # not yet measured
    ("sm_90", False, True): Tiles(4, 0, 1, 16, 4, 1, 1, 1, 16, 8, 1),  # not yet measured
    ("sm_90", False, False): Tiles(8, 0, 1, 16, 8, 1, 1, 1, 16, 8, 1),  # not yet measured
}
_TILES.update({("other", *key[1:]): _TILES[key] for key in (("sm_90", False, True), ("sm_90", False, False))})

#: A sequence is cut where that shortens the estimated time of the recurrence to less than this fraction.
_WORTH_CUTTING = 0.8
_SEGMENT_CHUNKS = (8, 16, 32, 64)
#: Programs of recur that an SM runs side by side.
_PROGRAMS_PER_SM = 2
#: Estimated us: a chunk of recur with output, a chunk without, a segment of scan, the two launches more.
_FINAL_US, _LOCAL_US, _SCAN_US, _LAUNCH_US = 1.4, 1.1, 1.0, 6.0  # not yet measured


@lru_cache(maxsize=None)
def num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=None)
def _kind(device: torch.device) -> str:
    if device.type != "cuda" or torch.version.hip is not None:
        return "other"
    return "sm_90" if torch.cuda.get_device_capability(device)[0] == 9 else "other"


def tiles(device: torch.device, itemsize: int, block_k: int, block_v: int) -> Tiles:
    """Tiles for inputs of ``itemsize`` bytes and head sizes padded to powers of two."""
    chosen = _TILES[_kind(device), itemsize == 2, block_k <= 128]
    chosen = chosen._replace(**{name: value for name, value in OVERRIDES.items() if name in Tiles._fields})
    return chosen._replace(block_v=min(chosen.block_v, block_v), scan_block=min(chosen.scan_block, block_v))


def heads_per_program(tiles: Tiles, group: int, chunks: int, heads: int, sms: int) -> int:
    """State heads of one prepare program: a divisor of the group that leaves programs enough for every SM."""
    best = 1
    for count in range(2, min(tiles.prepare_heads, group) + 1):
        if group % count == 0 and chunks * heads // count >= 4 * sms:
            best = count
    return best


def segment_chunks(
    chunks: int, longest: int, num_seqs: int, num_heads: int, v_blocks: int, k_blocks: int, sms: int, demanded: bool
) -> int:
    """Chunks of one segment, or 0 to leave sequences whole.

    ``chunks`` bounds the chunks of all sequences and ``longest`` those of one of them; what is likely lies between
    the mean and that bound.
    """
    if "segment_chunks" in OVERRIDES:
        return OVERRIDES["segment_chunks"]
    capacity = max(1, sms * _PROGRAMS_PER_SM)
    likely = min(longest, max(1.0, (longest * max(1, chunks / num_seqs)) ** 0.5))

    def rounds(programs: int) -> int:
        return -(-programs // capacity)

    whole = max(likely, likely * num_seqs * num_heads * v_blocks / capacity) * _FINAL_US
    best: Optional[int] = None
    best_us = float("inf")
    for size in _SEGMENT_CHUNKS:
        if size >= longest:
            continue
        segments = num_heads * (chunks // size + num_seqs)
        us = size * (rounds(segments * v_blocks) * _FINAL_US + rounds(segments * (v_blocks + k_blocks)) * _LOCAL_US)
        us += likely / size * _SCAN_US + _LAUNCH_US
        if us < best_us:
            best, best_us = size, us
    if demanded:
        return best or _SEGMENT_CHUNKS[0]
    return best if best is not None and sms and best_us < _WORTH_CUTTING * whole else 0
