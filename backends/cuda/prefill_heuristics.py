"""Which path a prefill takes, from shapes alone: no value on the device is read, so a captured call stays right.

On sm_90a at K = V = 128 there are three (csrc/prefill/sm90_launch.cu): whole heads, V rows split over two CTAs, and either
of them with the sequence split into segments; and two in one launch, for few short sequences: a pair of CTAs a head
(csrc/prefill/sm90_pairs.cu), and where no sequence has more than 64 tokens, csrc/prefill/fused.cu. Everything else takes the
portable path.

The choice is the path of the least estimated time. A kernel's CTAs stay on their multiprocessors and take units of work (a
sequence's or segment's head, or half of one) as they become free, so its time is that of the fullest multiprocessor; a chunk
takes longer when all of them want memory. Lengths are not known here, only their number, their sum and perhaps a bound on the
longest: see `_kinds`.

The constants are fitted to `python benchmarks/check_sm90.py --release --only times --full` and `python benchmarks/sweeps.py --heuristics`
on an H200, those of split calls then to what both gave with the present first pass and scan. Of the latter's 82 points, up to 200,000
tokens, that do not take one launch the choice is within 5% of the best path in 77 where the longest sequence is known, in 67 of 78 where
it is not (in four more it is a path that was not measured there); 0.7 and 1.8% in the mean. At worst it takes 12% more and 42%. They are
points of the fit. How long a split call takes depends on how many heads remember a segment, which is not known here: 2/8 heads and 32768
tokens take 163 us in one draw of gates and 196 in another with whole heads in segments of 32 chunks, which is the choice, 187 and 188
with half heads in segments of 64.

What one launch takes is fitted to one to 32 sequences of 1 to 1024 tokens with 8 to 64 heads, before the last changes of either way.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

CHUNK = 64
HEAD = 128

#: Microseconds on an H200. Before the first chunk; a chunk and head of the first kernel, on a multiprocessor.
BASE, CHUNKS = 11.87, 0.803


class Unit(NamedTuple):
    """Of a kernel: microseconds that a unit takes besides its chunks, that a chunk takes, and how much more when all
    multiprocessors are busy."""

    fixed: float
    chunk: float
    busy: float


RECURRENCE = {128: Unit(6.05, 1.767, 0.16), 64: Unit(4.1, 0.942, 0.028)}  #: by V rows
FIRST_PASS = Unit(7.8, 0.70, 0.144)
#: With gates as models initialise them: the share of heads that remember a whole segment, whose transition is a unit of the first
#: pass too; and how many chunks of a segment the others' units take.
REMEMBER, FORGET = 0.515, 21.6
#: Of a split call: its launches; a segment of the scan; a head of a sequence, split or not, on a multiprocessor.
SPLIT, SCAN, SPLIT_EACH = 7.7, 1.28, 4.36
#: All in one launch: tokens of the longest sequence that may take it; the launch. By V rows, for each CTA that a multiprocessor takes,
#: one after the other: up to 16 tokens, and what 64 take more.
ONE_LAUNCH, LAUNCH = 64, 3.2
FUSED = {128: (10.6, 3.4), 64: (9.0, 2.9), 32: (7.2, 2.4)}
#: And how much longer either is when all multiprocessors are busy.
FUSED_BUSY = (0.8, 2.2)
#: Pairs of CTAs, all at once: what is no chunk, and a chunk of the longest sequence; how much more when all multiprocessors are
#: busy, and where q and k are normalised.
PAIRS, PAIRS_BUSY, PAIRS_NORM = (10.7, 1.85), (2.2, 0.2), (0.3, 0.58)
#: What they add to the other launch, and to the paths of several.
FUSED_NORM, NORM = 0.9, 2.0
#: A split path must be estimated faster by this factor.
DOUBT = 1.004
#: Where lengths are not known, how much the guess counts that one sequence has nearly all tokens: at least, and divided by their number.
ONE_IS_LONG = (0.06, 0.87)
SEGMENTS = (8, 16, 32, 64, 128)


class Path(NamedTuple):
    rows: int  #: V rows a CTA, 128 or 64; 0 is the portable path
    segment: int  #: chunks a segment; 0: sequences are not split
    half: bool  #: operands of products in fp16 although the inputs are bf16: three more bits (GDN_MULTI_PRECISE)
    fused: bool = False  #: the portable path in one launch, for short sequences; ``rows`` may be any multiple of 16 that divides V
    pairs: bool = False  #: one launch for sm_90a (csrc/prefill/sm90_pairs.cu); half heads where the copy engine cannot take a tensor


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
    half = request.precise and request.q.dtype == torch.bfloat16
    # One launch: its bits are not those of the other paths, and whether it serves a sequence depends on the others of a call.
    # With fp16 operands it has no range beyond theirs for states.
    if not must_split and not half and not request.batch_invariant and request.q.dtype == torch.bfloat16:
        shape = request.num_tokens, request.num_seqs, request.num_heads, request.max_seqlen, multiprocessors
        path = one_launch(*shape, request.use_qk_l2norm, may_split)
        if path is not None:
            return path
    return Path(rows, segment, half)


@functools.lru_cache(maxsize=4096)
def one_launch(
    tokens: int, seqs: int, heads: int, longest: int, multiprocessors: int, l2norm: bool = False, may_split: bool = True
) -> Path | None:
    """The path in one launch that is estimated the fastest, if it is faster than all others."""
    longest = min(longest, tokens)
    times: dict[Path, float] = {}
    if longest <= ONE_LAUNCH:
        for rows in FUSED:
            times[Path(rows, 0, False, fused=True)] = _fused_time(seqs * heads * (HEAD // rows), longest, multiprocessors, rows, l2norm)
    if 2 * seqs * heads <= multiprocessors:
        kinds = _kinds(-(-tokens // CHUNK), seqs, -(-max(1, longest) // CHUNK))
        times[Path(HEAD // 2, 0, False, pairs=True)] = sum(
            weight * _pairs_time(seqs * heads, max(length for _, length in kind), multiprocessors, l2norm) for weight, kind in kinds
        )
    if not times:
        return None
    best = min(times, key=lambda path: times[path])
    shape = tokens, seqs, heads, longest, multiprocessors
    # Normalised q and k cost the other paths tiles of these.
    return best if times[best] < estimate(*shape, *fastest(*shape, may_split)) + NORM * l2norm else None


def _fused_time(units: int, longest: int, multiprocessors: int, rows: int, l2norm: bool) -> float:
    few, more = FUSED[rows]
    busy = FUSED_BUSY[longest > 16] * min(1.0, units / multiprocessors)
    return LAUNCH + -(-units // multiprocessors) * (few + (more if longest > 16 else 0.0)) + busy + FUSED_NORM * l2norm


def _pairs_time(units: int, chunks: int, multiprocessors: int, l2norm: bool) -> float:
    busy = 2 * units / multiprocessors
    fixed, chunk = (x + busy * y + l2norm * z for x, y, z in zip(PAIRS, PAIRS_BUSY, PAIRS_NORM))
    return fixed + chunks * chunk


@functools.lru_cache(maxsize=4096)
def fastest(
    tokens: int, seqs: int, heads: int, longest: int, multiprocessors: int, may_split: bool = True, must_split: bool = False
) -> tuple[int, int]:
    """V rows a CTA, and chunks a segment (0: not split)."""
    options = [] if must_split else [(128, 0), (64, 0)]
    if must_split or (may_split and longest > 2 * SEGMENTS[0] * CHUNK):
        options += [(rows, segment) for segment in SEGMENTS for rows in (128, 64)]
    times = {option: estimate(tokens, seqs, heads, longest, multiprocessors, *option) for option in options}
    # What a split call gains has to be more than what the estimate does not know.
    return min(times, key=lambda option: times[option] * (1 if option[1] == 0 else DOUBT))


def estimate(tokens: int, seqs: int, heads: int, longest: int, multiprocessors: int, rows: int, segment: int) -> float:
    """Microseconds of a prefill."""
    chunks = -(-tokens // CHUNK)
    bound = -(-max(1, min(longest, tokens)) // CHUNK)
    return sum(weight * _time(kinds, heads, multiprocessors, rows, segment) for weight, kinds in _kinds(chunks, seqs, bound))


def _kinds(chunks: int, seqs: int, bound: int) -> list[tuple[float, list[tuple[int, int]]]]:
    """Guesses at the sequences, [(how many, of how many chunks), ...], and how much each guess counts."""
    mean = max(1, -(-chunks // seqs))
    if seqs == 1 or bound <= mean:
        return [(1.0, [(seqs, mean)])]
    rest = max(1, -(-(chunks - bound) // (seqs - 1)))
    if bound < chunks:  # a bound that says something: one sequence is that long
        return [(1.0, [(1, bound), (seqs - 1, rest)])]
    one_is_long = max(ONE_IS_LONG[0], ONE_IS_LONG[1] / seqs)
    return [(1 - one_is_long, [(seqs, mean)]), (one_is_long, [(1, bound), (seqs - 1, rest)])]


def _time(kinds: list[tuple[int, int]], heads: int, multiprocessors: int, rows: int, segment: int) -> float:
    shares = HEAD // rows
    time = BASE + sum(count * length for count, length in kinds) * heads * CHUNKS / multiprocessors
    if segment == 0:
        units = [(count * heads * shares, length) for count, length in kinds]
        return time + _fullest(units, RECURRENCE[rows], multiprocessors)
    first, second, most = [], [], 1
    for count, length in kinds:
        whole, rest = divmod(length, segment)
        if whole:
            second.append((count * whole * heads * shares, segment))
        if rest:
            second.append((count * heads * shares, rest))
        segments = whole + (rest > 0)
        if segments > 1:
            units = count * (segments - 1) * heads
            first += [(units * 2 * REMEMBER, segment), (units * (1 - REMEMBER), min(segment, FORGET))]
        most = max(most, segments)
    time += SPLIT + sum(count for count, _ in kinds) * heads * SPLIT_EACH / multiprocessors
    time += _fullest(first, FIRST_PASS, multiprocessors) + most * SCAN
    return time + _fullest(second, RECURRENCE[rows], multiprocessors)


def _fullest(units: list[tuple[float, float]], unit: Unit, multiprocessors: int) -> float:
    """The time of the fullest multiprocessor; ``units``: [(how many, of how many chunks), ...]."""
    count = sum(n for n, _ in units)
    if count == 0:
        return 0.0
    chunk = unit.chunk + unit.busy * min(1.0, count / multiprocessors)
    longest = max(length for _, length in units)
    slowest = unit.fixed + longest * chunk
    if count <= multiprocessors:
        return slowest
    slow = sum(n for n, length in units if length == longest)
    others = sum(n * (unit.fixed + length * chunk) for n, length in units if length != longest) / multiprocessors
    turns = slow / multiprocessors
    # A few turns are whole ones; of many, the last is half full on average. Where most units are others, these fill it up.
    if slow * slowest >= 0.8 * (slow * slowest + others * multiprocessors):
        return (math.ceil(turns) if turns < 6 else turns + 0.5) * slowest + others
    return slowest * max(1.0, turns) + others
