"""Goes through rows and contenders: draws inputs, checks each answer once, times it, reports progress."""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase

import torch

from . import inputs as draw
from . import truth
from .calls import Call, Contender, Unavailable
from .rows import DecodeRow, Row
from .timing import Timer


@dataclass
class Result:
    """What one contender did on one row."""

    ms: float | None = None
    p20: float | None = None
    p80: float | None = None
    runs: int = 0
    graph: bool = False
    host_us: float | None = None
    output_error: float | None = None
    state_error: float | None = None
    first_call_s: float | None = None
    note: str = ""
    recorded: str = ""  #: where it was read from, when it was not measured in this run


@dataclass
class RowResult:
    table: str
    row: str
    heads: str
    sequences: str  #: for decode: "B=32"
    dtype: str
    state_dtype: str
    gates: str
    state_bytes: int
    results: dict[str, Result] = field(default_factory=dict)


class ContextLost(Exception):
    """The GPU answers nothing any more; what was measured so far stands."""


@dataclass
class Runner:
    device: torch.device
    timer: Timer
    contenders: Sequence[Contender]
    page_size: int = 1024
    seed: int = 0
    check: bool = True
    host: bool = True
    deadline: float | None = None  #: time.monotonic() after which nothing is started
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
    stopped: str = ""  #: why rows are missing; empty when none are

    def run(self, table: str, rows: Sequence[Row], done: Callable[[RowResult], None]) -> list[RowResult]:
        results: list[RowResult] = []
        for number, row in enumerate(rows, 1):
            if self.deadline is not None and time.monotonic() > self.deadline:
                self.stopped = f"time limit reached before {table} row {row.name}"
                self.say(self.stopped)
                break
            self.say(f"{table} {number}/{len(rows)}  {row.name}")
            started = time.perf_counter()
            result = _describe(table, row)
            results.append(result)
            try:
                self._row(table, row, result)
            except ContextLost as lost:
                self.stopped = str(lost)
            except KeyboardInterrupt:
                self.stopped = f"interrupted in {table} row {row.name}"
            else:
                self.say(f"    row done in {time.perf_counter() - started:.1f} s")
            done(result)
            if self.stopped:
                self.say(self.stopped)
                break
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return results

    @torch.no_grad()
    def _row(self, table: str, row: Row, result: RowResult) -> None:
        is_decode = table == "decode"
        drawn = (draw.draw_decode if is_decode else draw.draw_prefill)(row, self.device, self.seed, self.page_size)
        right = None
        if self.check:
            if is_decode:
                heads: Sequence[int] = range(row.v_heads)
                right = truth.decode_truth(drawn)
            else:
                heads = range(row.v_heads) if table == "accuracy" else sorted({0, row.v_heads - 1})
                right = truth.prefill_truth(drawn, heads)
            index = torch.tensor(list(heads), device=self.device)
        for contender in self.contenders:
            make = contender.decode if is_decode else contender.prefill
            if make is None:
                continue
            if contender.only_rows is not None and not any(fnmatchcase(row.name, p) for p in contender.only_rows):
                continue
            if self.deadline is not None and time.monotonic() > self.deadline:
                self.stopped = f"time limit reached in {table} row {row.name}, before {contender.name}"
                return
            measured = result.results[contender.name] = Result()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    call = make(drawn)
                    measured.note = call.note
                    self._first_run(call, measured)
                    if right is not None:
                        output, state = call.read()
                        head_dim = 2 if is_decode else 1
                        measured.output_error = truth.relative_error(output.index_select(head_dim, index), right[0])
                        measured.state_error = truth.relative_error(state.index_select(1, index), right[1])
                    if table != "accuracy":
                        self._time(call, measured)
            except Unavailable as reason:
                measured.note = str(reason)
            except Exception as error:
                text = str(error).strip().splitlines()
                measured.note = f"failed: {type(error).__name__}: {text[0][:200] if text else ''}"
                self._see_whether_it_lives(contender)
            self.say(f"    {contender.heading:24} {_line(measured)}")
            call = None  # its tensors are not needed any more

    def _first_run(self, call: Call, measured: Result) -> None:
        call.reset()
        self.timer.synchronize()
        started = time.perf_counter()
        call.run()
        self.timer.synchronize()
        measured.first_call_s = time.perf_counter() - started

    def _time(self, call: Call, measured: Result) -> None:
        timing = self.timer.time(call.run)
        measured.ms, measured.p20, measured.p80 = timing.ms, timing.p20, timing.p80
        measured.runs, measured.graph = timing.runs, timing.graph
        if timing.note and timing.note != "wall clock":
            measured.note = f"{measured.note}; {timing.note}" if measured.note else timing.note
        if self.host:
            measured.host_us = self.timer.host_us(call.run, timing.ms)

    def _see_whether_it_lives(self, contender: Contender) -> None:
        try:
            self.timer.synchronize()
            torch.zeros(1, device=self.device)
        except Exception as error:
            raise ContextLost(f"the GPU is lost after {contender.name}: {str(error).splitlines()[0]}") from error


def _describe(table: str, row: Row) -> RowResult:
    if isinstance(row, DecodeRow):
        return RowResult(
            table, row.name, row.heads, f"B={row.batch}", row.dtype, row.state_dtype, "model", row.state_bytes
        )
    return RowResult(table, row.name, row.heads, row.sequences, row.dtype, row.state_dtype, row.gates, 0)


def _line(result: Result) -> str:
    if result.ms is None and result.output_error is None:
        return f"- {result.note}"
    parts = []
    if result.ms is not None:
        parts.append(f"{result.ms:8.4f} ms ({result.p20:.4f} to {result.p80:.4f}, {result.runs} runs)")
    if result.host_us is not None:
        parts.append(f"host {result.host_us:.0f} us")
    if result.output_error is not None:
        parts.append(f"error {result.output_error:.2e}, {result.state_error:.2e}")
    if result.first_call_s is not None and result.first_call_s > 1:
        parts.append(f"first call {result.first_call_s:.1f} s")
    if result.note:
        parts.append(result.note)
    return "  ".join(parts)


def as_json(results: Sequence[RowResult]) -> list[dict]:
    return [asdict(result) for result in results]


def from_json(rows: Sequence[dict]) -> list[RowResult]:
    made = []
    for row in rows:
        fields = {name: row[name] for name in RowResult.__dataclass_fields__ if name in row and name != "results"}
        results = {
            name: Result(**{key: value for key, value in each.items() if key in Result.__dataclass_fields__})
            for name, each in row.get("results", {}).items()
        }
        made.append(RowResult(**fields, results=results))
    return made
