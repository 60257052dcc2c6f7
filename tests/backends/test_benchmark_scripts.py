"""The scripts of benchmarks/ that judge something: how they judge, and that they run on a CPU at tiny sizes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from pathlib import Path

import pytest
import torch

from gdn_multi.bench.rows import AccuracyRow
from gdn_multi.bench.timing import Timer

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def script(name: str):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.fixture(scope="module")
def accuracy():
    return script("accuracy")


MODEL = AccuracyRow(2, 8, (8192,), "bfloat16", "model")
SLOW = AccuracyRow(2, 8, (8192,), "bfloat16", "slow")


def judged(accuracy, row, found, draws, peers=()):
    args = argparse.Namespace(backends=[n for n in found if n not in peers], peers=list(peers), draws=draws, seed=5)
    wrong: list[str] = []
    accuracy.judge(row, found, args, wrong)
    return wrong


# Published of cudnn for this row: 3.93e-3 and 2.81e-3; the best peer's: 3.59e-3 and 2.73e-3.
@pytest.mark.parametrize(
    "pairs, what",
    [
        ([(4.1e-3, 3.1e-3), (3.8e-3, 2.7e-3)], ""),
        ([(4.1e-3, 3.1e-3), (4.04e-3, 2.89e-3)], ""),  # below the range, by less than 3%
        ([(4.1e-3, 3.1e-3), (4.0e-3, 2.9e-3)], "state"),
        ([(3.7e-3, 2.9e-3), (3.5e-3, 2.7e-3)], "output"),  # better than published in every draw: not that kernel
        ([(4.1e-3, math.inf), (3.8e-3, 2.7e-3)], "not finite"),
    ],
)
def test_published_of_cudnn_against_the_range(accuracy, pairs, what):
    wrong = judged(accuracy, MODEL, {"cudnn": pairs}, len(pairs))
    assert len(wrong) == bool(what) and all(what in text for text in wrong)


def test_one_draw_is_held_to_the_published_figure(accuracy):
    assert not judged(accuracy, MODEL, {"cudnn": [(3.7e-3, 2.5e-3)]}, 1)
    assert len(judged(accuracy, MODEL, {"cudnn": [(4.1e-3, 3.1e-3)]}, 1)) == 2
    # Draws say nothing of gates that do not depend on parameters of the heads.
    assert len(judged(accuracy, SLOW, {"cudnn": [(4.8e-3, 4.1e-3)]}, 16)) == 2


def test_our_own_kernels_over_draws(accuracy):
    ours = [(3.6e-3, 2.7e-3), (3.9e-3, 3.0e-3)]
    assert not judged(accuracy, MODEL, {"cuda": ours}, 2)
    assert not judged(accuracy, MODEL, {"cuda": [(1e-3, 1e-3)] * 2}, 2)
    assert len(judged(accuracy, MODEL, {"cuda": [(3.8e-3, 3.0e-3), (3.9e-3, 3.0e-3)]}, 2)) == 2
    # Beside peers, each draw is compared with the best of that draw.
    fla = [(3.6e-3, 2.7e-3), (3.9e-3, 3.0e-3)]
    assert not judged(accuracy, MODEL, {"cuda": ours, "fla": fla}, 2, ["fla"])
    (text,) = judged(accuracy, MODEL, {"cuda": ours, "fla": [fla[0], (3.9e-3, 2.8e-3)]}, 2, ["fla"])
    assert "state" in text and "seed 6" in text


def test_draws_that_meet_a_pair_at_once(accuracy):
    pairs = [(3.93e-3, 3.0e-3), (4.1e-3, 2.81e-3), (3.9e-3, 2.85e-3)]
    assert accuracy.met(pairs, (3.93e-3, 2.81e-3)) == [2]


def test_accuracy_runs(accuracy, monkeypatch, tmp_path, capsys):
    file = tmp_path / "errors.json"
    command = f"accuracy --device cpu --tokens 70 --backends torch --draws 3 --only table --json {file}"
    monkeypatch.setattr(sys, "argv", command.split())
    assert accuracy.main() == 0
    printed = capsys.readouterr().out
    assert "median over 3 draws" in printed and "| over 3 draws |" in printed.replace("  ", " ")
    done = json.loads(file.read_text())["rows"]
    assert [len(row["draws"]["torch"]) for row in done] == [3, 1, 1, 3, 1, 1]
    assert all(row["errors"]["torch"] == row["draws"]["torch"][0] for row in done)
    first, second, _ = done[0]["draws"]["torch"]
    assert first != second


# --- the timer that the scripts share --------------------------------------------------------------------------------


class Clock:
    """Stands for CUDA events: each one records how many calls were made before it."""

    calls: list[str] = []

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = len(Clock.calls)

    def elapsed_time(self, end):
        return float(sum({"a": 1, "b": 5}[name] for name in Clock.calls[self.at : end.at]))


def test_calls_take_turns(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    timer = Timer(torch.device("cpu"), 0.0, fewest=4)
    timer._flush = torch.ones(8, dtype=torch.int8)
    Clock.calls = []
    a, b = timer._events([lambda: Clock.calls.append("a"), lambda: Clock.calls.append("b")])
    assert (a, b) == ([1.0] * 4, [5.0] * 4)
    assert "".join(Clock.calls) == "ab" * 7  # three rounds are not counted
    assert not timer._flush.any()


def test_wall_clock_of_several_calls():
    slow, fast = Timer(torch.device("cpu"), 0.0).in_turns([lambda: time.sleep(0.02), lambda: None])
    assert slow.ms > fast.ms and not slow.graph


# --- warmup_day ------------------------------------------------------------------------------------------------------

DAY = "warmup_day --device cpu --heads 1/2 --head-size 16 --batch 8 --tokens 130 --steps 2 --page-size 64"


@pytest.mark.parametrize(
    "options, calls, said",
    [
        ("", [193, 38], "nothing was compiled after the warm-up"),
        ("--rows few --no-views", [58], "after the warm-up (a few of the rows, no views)"),
    ],
)
def test_warmup_day_runs(options, calls, said, monkeypatch, capsys):
    day = script("warmup_day")
    monkeypatch.setattr(sys, "argv", f"{DAY} {options}".split())
    assert day.main() == 0
    lines = capsys.readouterr().out.splitlines()
    parts = [line for line in lines if " s  torch: " in line]
    assert sum(int(line.rpartition(": ")[2].split()[0]) for line in parts) == sum(calls)
    table = [line.split() for line in lines if line.startswith("torch ")]
    assert [int(next(word for word in words if word.isdigit())) for words in table] == calls
    assert lines[-1].endswith(said)


def test_warmup_day_fails_where_a_call_compiles(monkeypatch, capsys):
    day = script("warmup_day")
    count = iter(range(10**9))
    compiled = [0]

    def compilations():  # there is one look at the counter before each call and one after: one more after the 51st
        compiled[0] += next(count) == 101
        return compiled[0]

    monkeypatch.setattr(day.gdn_multi, "compilations", compilations)
    monkeypatch.setattr(sys, "argv", DAY.split())
    assert day.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "FAILED" and sum("compiled 1 in" in line for line in lines) == 2
