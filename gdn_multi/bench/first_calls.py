"""First calls, made before anything is timed, so that compiling takes all cores once instead of one core row by row.

What compiles how, read in the peers' sources (FLA 0.6, FlashQLA 0.1.3, FlashInfer 0.7.4, cuDNN frontend 1.32):

- FLA tries some 35 Triton configurations for each pair of head counts, whatever the lengths; the compiled kernels stay
  in Triton's cache on disk, the choice in the process that made it.
- FlashQLA compiles some ten kernels with nvcc for each pair of head counts; which of them depends on the lengths. They
  stay in tilelang's cache on disk.
- FlashInfer compiles a prefill kernel for each combination of dtypes and arguments, whatever the shape, and keeps it in
  the process alone.
- cuDNN's cuTile engine tries 8 configurations of each kernel for each pair of head counts and dtype; compiled kernels
  stay on disk.

So processes of their own fill the caches on disk, each with a part of the work, while this one makes the first calls
of those that keep nothing on disk. All choices between configurations are made later, by the process that times,
when nothing else uses the GPU.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase

import torch

from . import inputs as draw
from . import ours, peers
from .calls import Contender, Unavailable
from .rows import DecodeRow, Row, select


@dataclass(frozen=True)
class Task:
    """First calls that one process makes."""

    table: str
    contenders: tuple[str, ...]
    rows: tuple[str, ...]
    #: (i, n): of the configurations that an autotuner tries, the i-th and every n-th after it.
    share: tuple[int, int] = (0, 1)

    def __str__(self) -> str:
        share = f" part {self.share[0] + 1}/{self.share[1]}" if self.share[1] > 1 else ""
        rows = self.rows[0] + (f" and {len(self.rows) - 1} more" if len(self.rows) > 1 else "")
        return f"{', '.join(self.contenders)}: {self.table} {rows}{share}"


def plan(
    contenders: Sequence[Contender], chosen: dict[str, Sequence[Row]], processes: int
) -> tuple[list[Task], list[Task]]:
    """Tasks for other processes, those that take longest first, and tasks for this one."""
    elsewhere: list[tuple[int, Task]] = []
    here: dict[tuple, list[str]] = {}
    for table, rows in chosen.items():
        by_heads: dict[tuple, list[Row]] = {}
        for row in rows:
            by_heads.setdefault((row.heads, row.dtype, row.state_dtype, row.head_size), []).append(row)
        able = [c for c in contenders if (c.decode if table == "decode" else c.prefill) is not None]
        triton = tuple(c.name for c in able if c.is_ours and c.name.partition(":")[0] == "triton")
        if triton:  # another length may take other kernels, so all rows
            parts = [rows] if table == "decode" else by_heads.values()
            elsewhere += [(1, Task(table, triton, _names(part))) for part in parts]
        for c in able:
            runs_on = [r for r in rows if c.only_rows is None or any(fnmatchcase(r.name, p) for p in c.only_rows)]
            if not runs_on or c.name in triton:
                continue
            if c.name in ("fla", "fla-model"):
                smallest = [min(group, key=_work) for group in by_heads.values()]
                if table == "decode":  # nothing to try there
                    elsewhere.append((2, Task(table, (c.name,), _names(smallest))))
                    continue
                shares = max(1, min(4, processes // (2 * len(by_heads))))
                for row in smallest:
                    elsewhere += [(2, Task(table, (c.name,), (row.name,), (i, shares))) for i in range(shares)]
            elif c.name == "flash_qla":
                for group in by_heads.values():  # few sequences are split, many are not: other kernels
                    parts = [[r for r in group if (len(r.lengths) <= 2) is few] for few in (True, False)]
                    elsewhere += [(3, Task(table, (c.name,), _names(part))) for part in parts if part]
            elif c.name == "cudnn-frontend":
                elsewhere += [(3, Task(table, (c.name,), (row.name,))) for row in runs_on]
            else:
                here.setdefault((table, _names(runs_on)), []).append(c.name)
    elsewhere.sort(key=lambda pair: -pair[0])
    return [task for _, task in elsewhere], [Task(table, tuple(names), rows) for (table, rows), names in here.items()]


def _names(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(row.name for row in rows)


def _work(row: Row) -> int:
    return row.batch if isinstance(row, DecodeRow) else row.tokens


# --- in a process ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def share_of_configurations(i: int, n: int):
    """Triton's autotuners try only every n-th configuration, from the i-th on, and at least one."""
    if n == 1:
        yield
        return
    from triton.runtime.autotuner import Autotuner

    whole = Autotuner.prune_configs

    def part(self, *args, **keywords):
        configurations = whole(self, *args, **keywords)
        return configurations[i::n] or configurations[:1]

    Autotuner.prune_configs = part
    try:
        yield
    finally:
        Autotuner.prune_configs = whole
        for each in gc.get_objects():  # a choice among a few is no choice to keep
            if issubclass(type(each), Autotuner):  # isinstance would ask each object for its __class__
                each.cache.clear()


def contender_named(name: str) -> Contender:
    return peers.PEERS[name] if name in peers.PEERS else ours.contenders([name], ["plain"])[0]


@torch.no_grad()
def make(task: Task, device: torch.device, page_size: int, seed: int, say: Callable[[str], None]) -> int:
    """The first calls of ``task``; returns how many failed. A call that is refused is no failure."""
    failed = 0
    contenders = [contender_named(name) for name in task.contenders]
    for name in task.rows:
        (row,) = select(task.table, [name])
        drawn = (draw.draw_decode if task.table == "decode" else draw.draw_prefill)(row, device, seed, page_size)
        for contender in contenders:
            started = time.perf_counter()
            try:
                with share_of_configurations(*task.share):
                    call = (contender.decode if task.table == "decode" else contender.prefill)(drawn)
                    call.reset()
                    call.run()
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                took = time.perf_counter() - started
                if took > 1:
                    say(f"{contender.name} {name}: {took:.1f} s")
            except Unavailable as reason:
                say(f"{contender.name} {name}: {reason}")
            except Exception as error:
                failed += 1
                text = str(error).strip().splitlines()
                say(f"{contender.name} {name}: failed: {type(error).__name__}: {text[0][:200] if text else ''}")
            call = None
    return failed


# --- in many processes -----------------------------------------------------------------------------------------------


def encode(task: Task) -> str:
    return json.dumps(asdict(task))


def decode(text: str) -> Task:
    fields = json.loads(text)
    return Task(fields["table"], tuple(fields["contenders"]), tuple(fields["rows"]), tuple(fields["share"]))


class Pool:
    """Runs tasks in at most ``processes`` processes at a time, started with ``command`` and the task as text."""

    def __init__(self, tasks: Sequence[Task], processes: int, command: Sequence[str], say, limit: float):
        self.waiting, self.processes, self.command, self.say = list(tasks), processes, list(command), say
        self.ends = time.monotonic() + limit
        self.running: list = []
        self.failed = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _start(self, task: Task) -> None:
        printed = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
        process = subprocess.Popen(
            [*self.command, encode(task)], stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT,
            env=dict(os.environ, PYTHONUNBUFFERED="1"),
        )  # fmt: skip
        self.running.append((task, process, printed, time.monotonic()))

    def _work(self) -> None:
        while (self.waiting or self.running) and not self._stop.is_set():
            if time.monotonic() > self.ends:
                self.say(f"first calls: time is up, {len(self.waiting) + len(self.running)} tasks are not done")
                break
            while self.waiting and len(self.running) < self.processes:
                self._start(self.waiting.pop(0))
            for each in list(self.running):
                task, process, printed, started = each
                if process.poll() is None:
                    continue
                self.running.remove(each)
                printed.seek(0)
                lines = printed.read().strip().splitlines()
                printed.close()
                self.say(f"{task}: {time.monotonic() - started:.0f} s" + ("" if not process.returncode else ", failed"))
                if process.returncode:
                    self.failed += 1
                    for line in lines[-3:]:
                        self.say(f"    {line[:200]}")
            self._stop.wait(0.1)
        for _, process, printed, _ in self.running:  # only where time is up or it was stopped
            self.failed += 1
            process.kill()
            process.wait()
            printed.close()

    def join(self) -> int:
        """Waits for all; returns how many tasks failed or were not done."""
        self._thread.join()
        return self.failed + len(self.waiting)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def run(
    contenders: Sequence[Contender], chosen: dict[str, Sequence[Row]], device: torch.device, *, processes: int,
    limit: float, page_size: int, seed: int, say: Callable[[str], None],
) -> None:  # fmt: skip
    """All first calls of a run; says what it does and never raises for a call that fails."""
    started = time.monotonic()
    tasks, here = plan(contenders, chosen, processes)
    say(f"first calls: {len(tasks)} tasks in up to {processes} processes, {len(here)} in this one")
    command = [sys.executable, "-m", "gdn_multi", "bench", "--device", str(device), "--page-size", str(page_size)]
    pool = Pool(tasks, processes, [*command, "--seed", str(seed), "--first-calls"], say, limit)
    try:
        for task in here:
            if time.monotonic() > pool.ends:
                break
            make(task, device, page_size, seed, say)
        failed = pool.join()
    finally:
        pool.stop()
    say(f"first calls: {time.monotonic() - started:.0f} s" + (f", {failed} tasks failed" if failed else ""))
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
