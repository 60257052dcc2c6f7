"""Which path a prefill takes, from shapes alone: no value on the device is read, so a captured call stays right.

On sm_90a at K = V = 128 there are three (csrc/prefill/sm90_launch.cu): whole heads, V rows split over two CTAs, and either
of them with the sequence split into segments. Everything else takes the portable path.

The choice is the path of the least estimated time. The estimate counts, for each kernel, the longer of two: what the
busiest chain of chunks takes one after another, and what all chunks take spread over the multiprocessors. Lengths are not
known here, only their number, their sum and a bound on the longest; so the estimate is the mean of two guesses, all
sequences alike and one as long as it may be.

The constants are predictions (docs/performance_notes.md) until a sweep on the H200 has replaced them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

CHUNK = 64
HEAD = 128

#: Microseconds. A chunk of one head on a multiprocessor: first kernel; recurrence, both row groups on one multiprocessor or
#: half a head on each; first pass, V rows and transition. Then: a segment of the scan, one more launch, and what a CTA takes
#: to load and store its state.
CHUNKS, WHOLE, HALF, FIRST_PASS = 1.0, 1.8, 1.05, 3.0
SCAN, LAUNCH, STATE = 1.2, 3.0, 5.0
#: fp16 for the operands inside when the inputs are bf16: three more bits of mantissa. Their range is kept by powers of two.
#: Where this is off, GDN_MULTI_PRECISE=1 asks for it.
HALF_OPERANDS = False
SEGMENTS = (8, 16, 32, 64, 128)


class Path(NamedTuple):
    rows: int  #: V rows a CTA, 128 or 64; 0 is the portable path
    segment: int  #: chunks a segment; 0: sequences are not split
    half: bool  #: operands of products in fp16 although the inputs are bf16


PORTABLE = Path(0, 0, False)


def can_split(request, capability: tuple[int, int]) -> bool:
    return capability == (9, 0) and request.head_size_k == HEAD and request.head_size_v == HEAD


def choose(request, capability: tuple[int, int], multiprocessors: int) -> Path:
    if not can_split(request, capability):
        return PORTABLE
    # Only unsplit sequences have bits that do not depend on where a call begins or what else is in it.
    may_split = request.use_cp is not False and not request.batch_invariant
    must_split = request.use_cp is True
    rows, segment = fastest(
        request.num_tokens, request.num_seqs, request.num_heads, request.max_seqlen, multiprocessors, may_split, must_split
    )
    return Path(rows, segment, (HALF_OPERANDS or request.precise) and request.q.dtype == torch.bfloat16)


@functools.lru_cache(maxsize=4096)
def fastest(
    tokens: int, seqs: int, heads: int, longest: int, multiprocessors: int, may_split: bool = True, must_split: bool = False
) -> tuple[int, int]:
    """V rows a CTA, and chunks a segment (0: not split)."""
    options = [] if must_split else [(128, 0), (64, 0)]
    if must_split or (may_split and longest > 2 * SEGMENTS[0] * CHUNK):
        options += [(rows, segment) for segment in SEGMENTS for rows in (128, 64)]
    return min(options, key=lambda option: estimate(tokens, seqs, heads, longest, multiprocessors, *option))


def estimate(tokens: int, seqs: int, heads: int, longest: int, multiprocessors: int, rows: int, segment: int) -> float:
    """Microseconds of a prefill."""
    chunks = -(-tokens // CHUNK)
    longest = -(-max(1, min(longest, tokens)) // CHUNK)
    mean = max(1, -(-chunks // seqs))
    first = chunks * heads * CHUNKS / multiprocessors + LAUNCH
    return first + sum(_recurrence(chunks, length, seqs, heads, multiprocessors, rows, segment) for length in (mean, longest)) / 2


def _recurrence(chunks: int, longest: int, seqs: int, heads: int, multiprocessors: int, rows: int, segment: int) -> float:
    shares = HEAD // rows
    step = WHOLE if rows == HEAD else HALF
    if segment == 0:
        whole = seqs * heads * shares * STATE + chunks * heads * shares * step
        return max(whole / multiprocessors, STATE + longest * step) + LAUNCH
    segments = chunks / segment + seqs / 2
    first = max((chunks * FIRST_PASS + segments * 2 * STATE) * heads / multiprocessors, STATE + min(longest, segment) * FIRST_PASS / 2)
    scan = longest / segment * SCAN
    second = max((segments * STATE + chunks * step) * heads * shares / multiprocessors, STATE + min(longest, segment) * step)
    return first + scan + second + 3 * LAUNCH
