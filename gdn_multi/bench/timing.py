"""How long a call takes.

On a GPU: the call is captured in a CUDA graph after a warm-up, and each replay is timed by events of its own with the
L2 flushed before it, so that neither the host nor a warm cache is measured. A call that cannot be captured is timed
eagerly in the same way, and the table says so. On a CPU: the wall clock, without any of this.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: Fewest and most timed replays; between them the time budget decides.
FEWEST, MOST = 10, 300


@dataclass
class Timing:
    ms: float  #: median
    p20: float
    p80: float
    runs: int
    graph: bool  #: captured in a CUDA graph
    note: str = ""  #: why it was not


def _quantile(sorted_values: list[float], q: float) -> float:
    return sorted_values[min(len(sorted_values) - 1, int(q * len(sorted_values)))]


def _summary(times: list[float], graph: bool, note: str) -> Timing:
    times = sorted(times)
    middle = len(times) // 2
    median = times[middle] if len(times) % 2 else 0.5 * (times[middle - 1] + times[middle])
    return Timing(median, _quantile(times, 0.2), _quantile(times, 0.8), len(times), graph, note)


class Timer:
    """Times calls on one device; ``budget`` is in seconds a call, beyond the ``fewest`` replays."""

    def __init__(self, device: torch.device, budget: float, fewest: int = FEWEST):
        self.device, self.budget, self.fewest = device, budget, fewest
        self._flush: torch.Tensor | None = None
        if device.type == "cuda":
            l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
            self._flush = torch.empty(max(256 << 20, 4 * l2), dtype=torch.int8, device=device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, call: Callable[[], object], use_graph: bool = True) -> Timing:
        return self.in_turns([call], use_graph)[0]

    def in_turns(self, calls: Sequence[Callable[[], object]], use_graph: bool = True) -> list[Timing]:
        """A time for each call, the calls taking turns, so that what drifts on the card drifts for all of them."""
        if self.device.type != "cuda":
            return [self._wall_clock(call) for call in calls]
        replays, notes = [], []
        for call in calls:
            graph, note = None, ""
            if use_graph:
                try:
                    graph = self._capture(call)
                except Exception as error:  # a peer may synchronise or allocate in ways that a capture forbids
                    self.synchronize()
                    said = str(error).splitlines()[0][:120] if str(error) else ""
                    note = f"not captured: {type(error).__name__}: {said}"
            replays.append(call if graph is None else graph.replay)
            notes.append((graph is not None, note))
        return [_summary(times, *note) for times, note in zip(self._events(replays), notes)]

    def _capture(self, call: Callable[[], object]) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            call()
            self.synchronize()
            # Not torch.cuda.graph(): it collects garbage, which takes longer than the whole measurement.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                call()
            except BaseException:
                with contextlib.suppress(Exception):
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph.replay()
        self.synchronize()
        return graph

    def _events(self, replays: Sequence[Callable[[], object]]) -> list[list[float]]:
        def run(rounds: int) -> list[list[float]]:
            event = lambda: torch.cuda.Event(enable_timing=True)  # noqa: E731
            pairs = [[(event(), event()) for _ in replays] for _ in range(rounds)]
            for turn in pairs:
                for replay, (start, end) in zip(replays, turn):
                    self._flush.zero_()
                    start.record()
                    replay()
                    end.record()
            self.synchronize()
            return [[start.elapsed_time(end) for start, end in mine] for mine in zip(*pairs)]

        first = time.perf_counter()
        run(3)
        each = max((time.perf_counter() - first) / 3 / len(replays), 1e-6)
        return run(max(self.fewest, min(MOST, int(self.budget / each))))

    def _wall_clock(self, call: Callable[[], object]) -> Timing:
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < 3 or (len(times) < MOST and time.perf_counter() - began < self.budget):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return _summary(times, False, "wall clock")

    def host_us(self, call: Callable[[], object], ms: float, calls: int = 200) -> float | None:
        """Median host time of a call in microseconds, without synchronising between calls.

        In groups with a pause between them, so that a full launch queue is not what is measured. None on a CPU,
        where host time is all there is.
        """
        if self.device.type != "cuda":
            return None
        calls = max(20, min(calls, int(self.budget * 1e3 / max(ms, 1e-3))))
        times: list[float] = []
        while len(times) < calls:
            self.synchronize()
            for _ in range(min(20, calls - len(times))):
                start = time.perf_counter()
                call()
                times.append((time.perf_counter() - start) * 1e6)
        self.synchronize()
        times.sort()
        return times[len(times) // 2]
