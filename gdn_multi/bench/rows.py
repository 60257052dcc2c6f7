"""The rows of the tables, and how they are written on the command line.

    prefill   Hq/Hv:LENGTHS[:DTYPE]    16/64:32768x1   2/8:4096+28672   4/16:100+2000x3:float16
    decode    Hq/Hv:B=BATCH[:DTYPE]    16/64:B=32:bfloat16
    accuracy  Hq/Hv:LENGTHS[:DTYPE[:GATES]]   2/8:8192x1:float16:slow

A pattern with ``*`` or ``?`` selects rows of the standard tables; anything else is a row of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Union

#: How gates are drawn; see inputs.py.
GATES = {
    "model": "as a model initialises them", "token": "A of a head, dt of a token", "slow": "alpha in [0.9999, 1]",
    "fast": "alpha in [0.5, 1]",
}  # fmt: skip


@dataclass(frozen=True)
class PrefillRow:
    q_heads: int
    v_heads: int
    lengths: tuple[int, ...]
    dtype: str = "bfloat16"
    gates: str = "model"
    head_size: int = 128
    state_dtype: str = "float32"
    prefixes: tuple[int, ...] = ()  #: tokens before each sequence's, for paged calls; (): a full page each

    @property
    def heads(self) -> str:
        return f"{self.q_heads}/{self.v_heads}"

    @property
    def sequences(self) -> str:
        parts: list[tuple[int, int]] = []
        for length in self.lengths:
            if parts and parts[-1][0] == length:
                parts[-1] = (length, parts[-1][1] + 1)
            else:
                parts.append((length, 1))
        if len(parts) == 1:
            return f"{parts[0][0]}x{parts[0][1]}"
        return "+".join(str(n) if times == 1 else f"{n}x{times}" for n, times in parts)

    @property
    def name(self) -> str:
        return f"{self.heads}:{self.sequences}" + ("" if self.dtype == "bfloat16" else f":{self.dtype}")

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class AccuracyRow(PrefillRow):
    @property
    def name(self) -> str:
        return f"{self.heads}:{self.sequences}:{self.dtype}:{self.gates}"


@dataclass(frozen=True)
class DecodeRow:
    q_heads: int
    v_heads: int
    batch: int
    state_dtype: str
    dtype: str = "bfloat16"
    head_size: int = 128

    @property
    def heads(self) -> str:
        return f"{self.q_heads}/{self.v_heads}"

    @property
    def name(self) -> str:
        return f"{self.heads}:B={self.batch}:{self.state_dtype}"

    @property
    def state_bytes(self) -> int:
        """Bytes of all states, read once and written once."""
        size = {"float32": 4, "bfloat16": 2, "float16": 2}[self.state_dtype]
        return 2 * self.batch * self.v_heads * self.head_size * self.head_size * size


Row = Union[PrefillRow, AccuracyRow, DecodeRow]

_HEADS = ((2, 8), (4, 16), (8, 32), (16, 64))
_LENGTHS = (
    (2048,), (8192,), (32768,), (4096, 28672), (8192,) * 4, (2048,) * 4, (1024,) * 8, (256,) * 32,
)  # fmt: skip
_DECODE = {
    ("float32", 16, 64): (1, 8, 32, 128, 256),
    ("bfloat16", 2, 8): (1, 32, 256),
    ("bfloat16", 16, 32): (8, 32, 128),
    ("bfloat16", 16, 64): (1, 32, 256),
}

TABLES: dict[str, tuple[Row, ...]] = {
    "prefill": tuple(PrefillRow(q, v, lengths) for q, v in _HEADS for lengths in _LENGTHS),
    "decode": tuple(DecodeRow(q, v, b, state) for (state, q, v), batches in _DECODE.items() for b in batches),
    "accuracy": tuple(
        AccuracyRow(2, 8, (8192,), dtype=dtype, gates=gates)
        for dtype in ("bfloat16", "float16")
        for gates in ("model", "slow", "fast")
    ),
}

#: What ``--quick`` keeps: each regime once.
QUICK = (
    "2/8:2048x1", "2/8:32768x1", "2/8:256x32", "16/64:32768x1", "16/64:8192x4", "16/64:256x32", "8/32:2048x4",
    "16/64:B=1:*", "16/64:B=32:*", "2/8:B=32:*", "2/8:8192x1:bfloat16:model",
)  # fmt: skip

_PREFILL = re.compile(r"^(\d+)/(\d+):([0-9x+]+)(?::(bfloat16|float16)(?::(\w+))?)?$")
_DECODE_ROW = re.compile(r"^(\d+)/(\d+):B=(\d+)(?::(float32|bfloat16|float16))?$")


def parse_lengths(text: str) -> tuple[int, ...]:
    """``4096+28672`` or ``256x32`` or both mixed, as a tuple of lengths."""
    lengths: list[int] = []
    for part in text.split("+"):
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", part)
        if not match or int(match[1]) < 1 or int(match[2] or 1) < 1:
            raise ValueError(f"sequences must look like 8192x4 or 4096+28672, got {text!r}")
        lengths += [int(match[1])] * int(match[2] or 1)
    return tuple(lengths)


def parse_row(text: str, table: str) -> Row:
    """One row of ``table`` written by hand."""
    if table == "decode":
        match = _DECODE_ROW.match(text)
        if not match:
            raise ValueError(f"a decode row looks like 16/64:B=32:bfloat16, got {text!r}")
        row: Row = DecodeRow(int(match[1]), int(match[2]), int(match[3]), match[4] or "float32")
    else:
        match = _PREFILL.match(text)
        if not match:
            raise ValueError(f"a {table} row looks like 16/64:32768x1 or 2/8:4096+28672, got {text!r}")
        kind = PrefillRow if table == "prefill" else AccuracyRow
        gates = match[5] or "model"
        if gates not in GATES:
            raise ValueError(f"gates must be one of {', '.join(GATES)}, got {gates!r}")
        row = kind(int(match[1]), int(match[2]), parse_lengths(match[3]), match[4] or "bfloat16", gates)
    if not row.q_heads or not row.v_heads or row.v_heads % row.q_heads:
        raise ValueError(f"v heads must be a multiple of q heads, got {row.heads}")
    return row


def select(table: str, patterns: Sequence[str]) -> list[Row]:
    """The rows of ``table`` that ``patterns`` name, in table order, then rows of the user's own."""
    standard = TABLES[table]
    if not patterns:
        return list(standard)
    chosen = [row for row in standard if any(fnmatchcase(row.name, p) for p in patterns)]
    is_decode = table == "decode"
    for pattern in patterns:
        if "*" in pattern or "?" in pattern or ("B=" in pattern) != is_decode:
            continue
        if table == "prefill" and pattern.endswith(tuple(f":{gates}" for gates in GATES)):
            continue  # a row of the table of accuracy
        row = parse_row(pattern, table)
        if row not in chosen:
            chosen.append(row)
    return chosen
