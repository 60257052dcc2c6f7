"""Tuning choices of the prefill, all of them.

``python -m gdn_multi.backends.triton.tune`` times the candidates on a GPU and prints the table to put here.
The estimates of what cutting costs are fitted to a table of whole calls on an H200; the tiles come from arithmetic and
from what the compiler makes of them (registers, spills), and are marked so until they are measured.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from .launch import supports_dependent_launch


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


#: For tests and the tuning script: fields of Tiles, "segment_chunks", "prepare_programs", "dependent" or
#: "early", that replace the choice.
#: ``prefill.forget_plans`` after a change.
OVERRIDES: dict[str, Any] = {}

#: (kind of GPU, 16-bit inputs, K <= 128) -> tiles. A block of 64 rows is a warpgroup's share on sm_90; elsewhere the
#: state of 32 rows fits in the registers of four warps. With two stages the pipeline asks for a chunk's tiles when it
#: is through with the one before, so two programs of an SM hide each other's waits; with three stages one program does
#: without, but its tiles fill the shared memory.
_TILES = {
    ("sm_90", True, True): Tiles(4, 168, 4, 64, 4, 2, 3, 3, 16, 8, 2),  # not yet measured
    ("sm_90", True, False): Tiles(4, 0, 1, 64, 8, 1, 1, 1, 16, 8, 1),  # not yet measured
    ("other", True, True): Tiles(4, 0, 4, 32, 4, 2, 2, 2, 16, 8, 1),  # not yet measured
    ("other", True, False): Tiles(4, 0, 1, 32, 8, 1, 1, 1, 16, 8, 1),  # not yet measured
    ("sm_90", False, True): Tiles(4, 0, 1, 16, 4, 1, 1, 1, 16, 8, 1),  # not yet measured
    ("sm_90", False, False): Tiles(8, 0, 1, 16, 8, 1, 1, 1, 16, 8, 1),  # not yet measured
}
_TILES.update({("other", *key[1:]): _TILES[key] for key in (("sm_90", False, True), ("sm_90", False, False))})

#: Sequences are cut where that shortens the estimated time of a call to less than this fraction, should one sequence
#: be as long as the bound says, and to no more than the second, should all be alike; into the segments that are best on
#: the average of both.
_WORTH_CUTTING, _BEARABLE = 0.92, 1.04
_SEGMENT_CHUNKS = (8, 16, 32, 64, 128)
#: Programs of recur that an SM runs side by side.
_PROGRAMS_PER_SM = 2
#: prepare takes several heads a program where that leaves so many programs an SM. Where it normalises, each program does
#: so for itself, and still 4 beat 2: 64.7 against 66.8 us on an H200, `bench --rows 2/8:1024x8 --ours triton --variants model`.
_PREPARE_PROGRAMS = 4


class Costs(NamedTuple):
    """Estimated microseconds of the parts of a call."""

    alone: float  #: a chunk of recur where an SM runs one program
    shared: float  #: where it runs two
    local: float  #: what a pass without output takes of that
    round: float  #: the start of a round of programs
    scan: float  #: a segment of scan
    launch: float  #: the launches that cutting adds
    prepare: float  #: a chunk and head of prepare
    call: float  #: a call


#: Fitted to whole calls of the table on an H200, which come out within 12%, before the present kernels.
#: ``tune segments`` measures and fits anew.
COSTS = Costs(alone=2.2, shared=2.75, local=0.8, round=4.0, scan=1.5, launch=10.0, prepare=0.02, call=10.0)


@cache
def num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _dependent(device: torch.device) -> bool:
    return supports_dependent_launch(device)


def dependent(device: torch.device) -> bool:
    """Whether the kernels behind the first are launched so that they may start before it has ended."""
    return OVERRIDES.get("dependent", True) and _dependent(device)


def early(programs: int, exclusive: bool, sms: int) -> bool:
    """Whether the programs of a dependent kernel should take their places as soon as there is room for any.

    They look up their sequence and read its first state meanwhile. But where an SM has room for two and most SMs are
    still taken, two would share one while others are left idle: so only where two must share, or cannot.
    """
    return OVERRIDES.get("early", exclusive or programs > sms)


@cache
def _kind(device: torch.device) -> str:
    if device.type != "cuda" or torch.version.hip is not None:
        return "other"
    return "sm_90" if torch.cuda.get_device_capability(device)[0] == 9 else "other"


def tiles(device: torch.device, itemsize: int, block_k: int, block_v: int) -> Tiles:
    """Tiles for inputs of ``itemsize`` bytes and head sizes padded to powers of two."""
    chosen = _TILES[_kind(device), itemsize == 2, block_k <= 128]
    chosen = chosen._replace(**{name: value for name, value in OVERRIDES.items() if name in Tiles._fields})
    return chosen._replace(block_v=min(chosen.block_v, block_v), scan_block=min(chosen.scan_block, block_v))


def heads_per_program(tiles: Tiles, group: int, chunks: int, heads: int, sms: int, batch_invariant: bool) -> int:
    """State heads of one prepare program: a divisor of the group that leaves programs enough for every SM."""
    enough = sms * OVERRIDES.get("prepare_programs", _PREPARE_PROGRAMS)
    best = 1
    for count in range(2, min(tiles.prepare_heads, group) + 1):
        if group % count == 0 and (batch_invariant or chunks * heads // count >= enough):
            best = count
    return best


def estimate(
    sequences: list[tuple[int, int]], size: int, num_heads: int, v_blocks: int, k_blocks: int, sms: int, costs: Costs
) -> float:
    """Microseconds of a call with these (number of sequences, chunks of each), cut into segments of ``size`` chunks, or
    whole where none is longer."""

    def passes(programs: int, length: int) -> float:
        if programs <= sms:
            return length * costs.alone + costs.round
        return -(-programs // max(1, sms * _PROGRAMS_PER_SM)) * (length * costs.shared + costs.round)

    fixed = sum(n * length for n, length in sequences) * num_heads * costs.prepare + costs.call
    most = max(length for _, length in sequences)
    if size >= most:
        # Programs of different lengths: as long as the longest, or as all of them take together.
        programs = num_heads * v_blocks * sum(n for n, _ in sequences)
        together = sum(n * length for n, length in sequences) * num_heads * v_blocks / max(1, sms)
        return fixed + max(passes(min(programs, 2 * sms), most), together / _PROGRAMS_PER_SM * costs.shared)
    counts = [(n, -(-length // size)) for n, length in sequences]
    segments = sum(n * count for n, count in counts)
    states = sum(n * max(0, count - 1) for n, count in counts)
    transitions = sum(n * max(0, count - 2) for n, count in counts)
    return (
        fixed
        + costs.launch
        + passes(num_heads * v_blocks * segments, size)
        + passes(num_heads * (v_blocks * states + k_blocks * transitions), size) * costs.local
        + most / size * costs.scan
    )


def segment_chunks(
    chunks: int, longest: int, num_seqs: int, num_heads: int, v_blocks: int, k_blocks: int, sms: int, demanded: bool
) -> int:
    """Chunks of one segment, or 0 to leave sequences whole.

    ``chunks`` bounds the chunks of all sequences and ``longest`` those of one of them.
    """
    if "segment_chunks" in OVERRIDES:
        return OVERRIDES["segment_chunks"]
    if longest <= _SEGMENT_CHUNKS[0]:
        return _SEGMENT_CHUNKS[0] if demanded else 0
    # The lengths are on the device. All are alike, or one is at the bound (or, where the bound says nothing, a little
    # below) and the others share the rest:
    alike = [(num_seqs, -(-chunks // num_seqs))]
    uneven = []
    for long in (longest, longest * 7 // 8) if num_seqs > 1 and longest >= chunks else (longest,):
        uneven.append([(1, long), (num_seqs - 1, -(-max(0, chunks - long) // max(1, num_seqs - 1)))])

    def us(sequences: list[tuple[int, int]], size: int) -> float:
        return estimate(sequences, size, num_heads, v_blocks, k_blocks, sms, COSTS)

    whole = us(alike, longest)
    best, best_score = 0, float("inf")
    programs = num_heads * v_blocks * num_seqs
    for size in _SEGMENT_CHUNKS:
        if size >= longest:
            continue
        ratio = max(us(one, size) / us(one, longest) for one in uneven)
        together = us(alike, size)
        if size >= alike[0][1]:
            # Whole after all: then launches were added for nothing, and where the programs were alone on their SMs,
            # those of the empty slots choose the pipeline for two.
            together += COSTS.launch
            if programs <= sms < num_heads * v_blocks * (chunks // size + num_seqs):
                together += alike[0][1] * (COSTS.shared - COSTS.alone)
        score = ratio + together / whole
        if score < best_score and (demanded or (ratio < _WORTH_CUTTING and together <= _BEARABLE * whole)):
            best, best_score = size, score
    if demanded:
        return best or _SEGMENT_CHUNKS[0]
    return best if sms else 0
