"""The benchmark harness on a CPU at tiny sizes: rows, inputs, the float64 truth, the run, its tables and files."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time

import pytest
import torch

from gdn_multi import reference
from gdn_multi.bench import first_calls, inputs, ours, peers, report, rows, runner, truth
from gdn_multi.bench.calls import Call, Contender, Unavailable
from gdn_multi.bench.timing import Timer
from gdn_multi.cli import bench

CPU = torch.device("cpu")


def command(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(list(arguments)))


# --- rows ------------------------------------------------------------------------------------------------------------


def test_standard_tables():
    assert [len(rows.TABLES[name]) for name in ("prefill", "decode", "accuracy")] == [32, 14, 6]
    assert all(len({row.name for row in table}) == len(table) for table in rows.TABLES.values())


@pytest.mark.parametrize("text", ["32768x1", "4096+28672", "100+2000x3", "256x32"])
def test_lengths_as_written(text):
    row = rows.PrefillRow(2, 8, rows.parse_lengths(text))
    assert row.sequences == text and row.name == f"2/8:{text}"


@pytest.mark.parametrize("text", ["", "x3", "10x0", "10y2", "0x4", "5+"])
def test_bad_lengths(text):
    with pytest.raises(ValueError, match="sequences"):
        rows.parse_lengths(text)


def test_selection():
    assert len(rows.select("prefill", ["2/8:*"])) == 8
    assert len(rows.select("decode", ["16/64:B=1:*"])) == 2
    (own,) = rows.select("prefill", ["4/16:100+2000x3"])
    assert own.lengths == (100, 2000, 2000, 2000)
    assert rows.select("decode", ["4/16:100x1"]) == [] and rows.select("prefill", ["4/16:B=3"]) == []
    assert rows.select("prefill", ["2/8:70x1:float16:slow"]) == []
    assert rows.select("accuracy", ["2/8:70x1:float16:slow"])[0].gates == "slow"
    with pytest.raises(ValueError, match="multiple"):
        rows.select("prefill", ["4/6:100x1"])
    with pytest.raises(ValueError, match="looks like"):
        rows.select("prefill", ["nonsense"])


def test_state_bytes():
    assert rows.DecodeRow(16, 64, 32, "float32").state_bytes == 2 * 32 * 64 * 128 * 128 * 4


# --- inputs and truth ------------------------------------------------------------------------------------------------


@pytest.fixture
def prefill():
    return inputs.draw_prefill(rows.PrefillRow(1, 2, (130, 1, 64, 70), head_size=16), CPU, 0, 64)


def test_gates_are_those_of_a_new_model(prefill):
    rate = prefill.A_log.exp()
    dt = torch.nn.functional.softplus(prefill.dt_bias)
    assert bool(((rate >= 1) & (rate <= 16)).all()) and bool(((dt > 0.99e-3) & (dt < 0.101)).all())
    assert prefill.alpha.min() > 0 and prefill.alpha.max() < 1
    torch.testing.assert_close(prefill.alpha, prefill.log_alpha.exp())
    slow = inputs.draw_prefill(rows.PrefillRow(1, 2, (64,), gates="slow", head_size=16), CPU, 0, 64)
    assert slow.alpha.min() >= 0.9999 and slow.alpha.max() <= 1 and slow.a is None


def test_prefill_truth_is_the_reference(prefill):
    """Raw gates, logits and unnormalised q and k, token by token, against the chunked form of everything."""
    output, states = truth.prefill_truth(prefill, range(2))
    right, right_states = reference.prefill(
        prefill.q_raw, prefill.k_raw, prefill.v, prefill.a, prefill.b, cu_seqlens=prefill.cu_seqlens,
        initial_state=prefill.initial_state, use_gate_in_kernel=True, A_log=prefill.A_log, dt_bias=prefill.dt_bias,
        beta_is_logit=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert right.abs().max() > 1e-2
    torch.testing.assert_close(output, right, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(states, torch.stack([s[-1] for s in right_states]), rtol=1e-10, atol=1e-12)
    one, _ = truth.prefill_truth(prefill, [1])
    torch.testing.assert_close(one[:, 0], output[:, 1])


def test_decode_truth_is_the_reference():
    drawn = inputs.draw_decode(rows.DecodeRow(1, 2, 9, "float32", head_size=16), CPU, 0, 64)
    output, states = truth.decode_truth(drawn)
    right, right_states = reference.decode(
        drawn.q, drawn.k, drawn.v, drawn.A_log, drawn.a, drawn.dt_bias, drawn.b, state=drawn.states
    )
    torch.testing.assert_close(output, right, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(states, right_states[:, 0], rtol=1e-10, atol=1e-12)


def test_page_tables_say_what_the_inputs_say(prefill):
    pages = prefill.pages
    slots = reference.prefill_slots(
        prefill.cu_seqlens, pages.page_indices, pages.page_indptr, pages.page_size, pages.last_page_len
    )
    assert slots["read"] == pages.read and slots["prefix"] == [64] * 4
    for last, write, kept in zip(pages.last, slots["write"], slots["checkpoints"]):
        assert last == (write if write >= 0 else kept[-1])  # the final state is the last page's, either way
    drawn = inputs.draw_decode(rows.DecodeRow(1, 2, 9, "float32", head_size=16), CPU, 0, 64)
    pages = drawn.pages
    read, write = reference.decode_slots(pages.page_indices, pages.page_indptr, pages.last_page_len)
    assert read == drawn.read_rows.tolist() and write == drawn.write_rows.tolist() and read != write


def test_prefixes_that_end_anywhere():
    row = rows.PrefillRow(1, 2, (130, 1, 64, 70), head_size=16, prefixes=(1, 63, 64, 200))
    drawn = inputs.draw_prefill(row, CPU, 0, 64)
    pages = drawn.pages
    slots = reference.prefill_slots(
        drawn.cu_seqlens, pages.page_indices, pages.page_indptr, pages.page_size, pages.last_page_len
    )
    assert slots["read"] == pages.read and slots["prefix"] == [1, 63, 64, 200]
    right = truth.prefill_truth(drawn, range(2))
    for contender in ours.contenders(["torch"], ["paged", "slots"]):
        call = contender.prefill(drawn)
        call.reset()
        call.run()
        assert all(truth.relative_error(x, y) < 1e-2 for x, y in zip(call.read(), right))


def test_relative_error_of_nan_is_infinite():
    right = torch.ones(3, dtype=torch.float64)
    assert truth.relative_error(torch.tensor([1.0, float("nan"), 1.0]), right) == math.inf
    assert truth.relative_error(torch.tensor([1.0, 1.0, 1.0]), right) == 0


# --- runs ------------------------------------------------------------------------------------------------------------


def test_every_variant_of_ours_is_right(tmp_path, capsys):
    path = tmp_path / "out.json"
    code = command(
        "--tables", "prefill,decode,accuracy", "--rows", "1/2:70+64x2", "--rows", "1/2:B=9:bfloat16",
        "--ours", "torch", "--variants", ",".join(ours.VARIANTS), "--page-size", "64", "--budget", "0.001",
        "--device", "cpu", "--json", str(path),
    )  # fmt: skip
    assert code == 0
    document = json.loads(path.read_text())
    found = {(row["table"], name): r for row in document["rows"] for name, r in row["results"].items()}
    names = {"torch"} | {f"torch:{v}" for v in ours.VARIANTS if v != "plain"}
    assert {name for table, name in found if table == "prefill"} == names
    assert {name for table, name in found if table == "decode"} == {"torch", "torch:paged", "torch:slots"}
    for (table, _), result in found.items():
        assert result["output_error"] < 4e-3 and result["state_error"] < 4e-3 and not result["note"]
        assert (result["ms"] is None) is (table == "accuracy")
    text = capsys.readouterr().out
    assert "## Prefill" in text and "## Decode" in text and "## Accuracy" in text and "torch:slots" in text

    assert command("--from", str(path)) == 0  # the same tables from the file alone
    assert capsys.readouterr().out == text


def make_call(inputs, factor=1.0, fails=False):
    def run():
        if fails:
            raise RuntimeError("no kernel for this")
        output, state = truth.prefill_truth(inputs, range(inputs.row.v_heads))
        inputs.output.copy_(output * factor)
        inputs.final_state.copy_(state)

    return Call(run, lambda: (inputs.output, inputs.final_state))


def run_with(contenders, *names):
    spoken = []
    runs = runner.Runner(CPU, Timer(CPU, 0.001), contenders, page_size=64, say=spoken.append)
    results = runs.run("prefill", rows.select("prefill", list(names)), lambda row: None)
    return results, "\n".join(spoken)


def test_wrong_answers_and_failures_are_told_apart():
    def unavailable(inputs):
        raise Unavailable("not installed")

    contenders = [
        Contender("good", True, make_call),
        Contender("bad", True, lambda i: make_call(i, factor=1.1)),
        Contender("nan", True, lambda i: make_call(i, factor=float("nan"))),
        Contender("broken", False, lambda i: make_call(i, fails=True)),
        Contender("absent", False, unavailable),
    ]
    (row,), spoken = run_with(contenders, "1/2:70x1")
    wrong = {name: report.is_wrong(row, result) for name, result in row.results.items()}
    assert wrong == {"good": False, "bad": True, "nan": True, "broken": False, "absent": False}
    assert row.results["broken"].note == "failed: RuntimeError: no kernel for this"
    assert row.results["absent"].note == "not installed" and "not installed" in spoken
    assert "WRONG" in report.speed_table([row], contenders)
    assert any("bad: WRONG ANSWERS" in line for line in report.summary([row], contenders))
    assert any("broken" in line and "no kernel" in line for line in report.notes([row], contenders))


def timed(ms, error=1e-3):
    return runner.Result(ms=ms, p20=ms, p80=ms, runs=9, graph=True, output_error=error, state_error=error)


def synthetic():
    contenders = [Contender("mine", True, make_call), Contender("mine:paged", True, make_call)]
    contenders += [Contender("fast", False, make_call), Contender("slow", False, make_call)]
    contenders.append(Contender("pages", False, make_call, counts_as_best=False))
    row = runner.RowResult("prefill", "1/2:64x1", "1/2", "64x1", "bfloat16", "float32", "model", 0)
    row.results = {
        "mine": timed(1.0), "mine:paged": timed(1.1), "fast": timed(2.0), "slow": timed(4.0), "pages": timed(0.5),
    }  # fmt: skip
    return row, contenders


def test_best_peer_is_the_fastest_right_unpaged_one():
    row, contenders = synthetic()
    assert report.best_peer(row, contenders) == "fast"
    row.results["fast"].output_error = 0.5
    assert report.best_peer(row, contenders) == "slow"
    row.table = "decode"
    assert report.best_peer(row, contenders) == "pages"


def test_summary_counts_ratios_and_paged_cost():
    row, contenders = synthetic()
    lines = report.summary([row], contenders)
    assert any(line.startswith("mine: best peer / ours 2.00") and "no row slower" in line for line in lines)
    assert any("mine:paged over mine: at most +10.0%" in line and "1 of 1 rows above 5%" in line for line in lines)


def test_points_above_their_neighbours():
    even = report.above_neighbours([1, 3, 9, 40], [2.0, 6.0, 18.0, 80.0])
    assert even[0] is even[-1] is None and even[1:3] == pytest.approx([1, 1])
    cliff = report.above_neighbours([1, 10, 100], [1.0, 20.0, 100.0])
    assert cliff[1] == pytest.approx(2)


def test_figures_of_an_earlier_run(tmp_path, capsys):
    row, _ = synthetic()
    row.row, row.results = "1/2:70x1", {"fla": timed(3.0), "torch": timed(9.0)}
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps({"machine": {}, "rows": runner.as_json([row])}))
    code = command(
        "--tables", "prefill", "--rows", "1/2:70x1", "--ours", "torch", "--variants", "plain", "--device", "cpu",
        "--budget", "0.001", "--against", str(path),
    )  # fmt: skip
    text = capsys.readouterr().out
    assert code == 0 and "3.000 †" in text and "best peer / torch" in text and "9.000" not in text


def test_time_limit_stops_between_rows(capsys):
    code = command("--rows", "1/2:70x1", "--ours", "torch", "--device", "cpu", "--time-limit", "-1")
    assert code == 0 and "Stopped early" in capsys.readouterr().out


def test_time_limit_stops_between_contenders():
    contenders = [Contender("first", True, make_call), Contender("second", True, make_call)]
    runs = runner.Runner(CPU, Timer(CPU, 0.001), contenders, page_size=64, say=lambda text: None)
    whole = runs._first_run

    def late(call, measured):
        whole(call, measured)
        runs.deadline = time.monotonic() - 1

    runs._first_run = late
    seen = []
    runs.run("prefill", rows.select("prefill", ["1/2:70x1", "1/2:71x1"]), seen.append)
    assert [(row.row, list(row.results)) for row in seen] == [("1/2:70x1", ["first"])]
    assert seen[0].results["first"].ms > 0 and "before second" in runs.stopped


def test_an_interrupted_run_keeps_what_it_has(tmp_path, monkeypatch, capsys):
    """SIGTERM in the second row, as `timeout` sends it: both rows are in the file, the tables are printed."""
    path, whole = tmp_path / "out.json", runner.Runner._time

    def killed(self, call, measured):
        whole(self, call, measured)
        if json_rows(path):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)  # the handler interrupts it

    def json_rows(path):
        return json.loads(path.read_text())["rows"] if path.exists() else []

    monkeypatch.setattr(runner.Runner, "_time", killed)
    before = signal.getsignal(signal.SIGTERM)
    code = command(
        "--tables", "prefill", "--rows", "1/2:70x1", "--rows", "1/2:71x1", "--rows", "1/2:72x1", "--ours", "torch",
        "--variants", "plain", "--device", "cpu", "--budget", "0.001", "--json", str(path),
    )  # fmt: skip
    assert code == 130 and signal.getsignal(signal.SIGTERM) is before
    document = json.loads(path.read_text())
    assert [row["row"] for row in document["rows"]] == ["1/2:70x1", "1/2:71x1"]
    assert "interrupted" in document["stopped"] and document["rows"][1]["results"]["torch"]["ms"] > 0
    assert "interrupted in prefill row 1/2:71x1" in capsys.readouterr().out


# --- first calls -----------------------------------------------------------------------------------------------------


def planned(names, processes=16):
    chosen = {table: list(rows.TABLES[table]) for table in ("prefill", "decode")}
    contenders = ours.contenders(["cuda", "triton"], ["plain", "model"]) + peers.contenders(names, ["2/8:8192x1"])
    return first_calls.plan(contenders, chosen, processes)


def test_every_first_call_is_planned_once():
    tasks, here = planned(["flashinfer", "flash_qla", "fla", "cudnn-frontend"])
    made = {}
    for task in tasks + here:
        for name in task.contenders:
            for row in task.rows:
                made.setdefault((name, task.table), []).append((row, task.share))
    assert sorted(made["flash_qla", "prefill"]) == sorted((r.name, (0, 1)) for r in rows.TABLES["prefill"])
    assert made["cudnn-frontend", "prefill"] == [("2/8:8192x1", (0, 1))]
    assert len(made["triton", "decode"]) == 14 and ("triton:model", "decode") not in made
    # FLA: a row for each pair of head counts, each configuration tried by exactly one process
    shares = {}
    for row, share in made["fla", "prefill"]:
        shares.setdefault(row.split(":")[0], []).append(share)
    assert shares == {heads: [(0, 2), (1, 2)] for heads in ("2/8", "4/16", "8/32", "16/64")}
    # what keeps nothing on disk is called in the process that times
    assert {name for task in here for name in task.contenders} == {"flashinfer", "cuda", "cuda:model"}
    assert not any(name.startswith(("flashinfer", "cuda")) for task in tasks for name in task.contenders)


def test_a_task_survives_its_way_to_another_process():
    for task in planned(["default"])[0]:
        assert first_calls.decode(first_calls.encode(task)) == task


def test_shares_try_every_configuration_and_choose_nothing():
    autotuner = pytest.importorskip("triton.runtime.autotuner", reason="needs triton")
    whole = autotuner.Autotuner.prune_configs
    kernel = autotuner.Autotuner.__new__(autotuner.Autotuner)
    kernel.configs, kernel.early_config_prune, kernel.perf_model, kernel.cache = list("abcde"), None, None, {}
    tried = []
    for i in range(3):
        with first_calls.share_of_configurations(i, 3):
            tried.append(kernel.prune_configs({}))
            kernel.cache["key"] = tried[-1][0]
        assert kernel.cache == {}
    assert tried == [["a", "d"], ["b", "e"], ["c"]]
    kernel.configs = ["a"]
    with first_calls.share_of_configurations(2, 3):
        assert kernel.prune_configs({}) == ["a"]
    assert autotuner.Autotuner.prune_configs is whole


def test_first_calls_go_on_after_a_failure(monkeypatch):
    said = []
    monkeypatch.setattr(first_calls, "contender_named", {
        "broken": Contender("broken", False, lambda i: make_call(i, fails=True)),
        "good": Contender("good", True, make_call),
    }.get)  # fmt: skip
    task = first_calls.Task("prefill", ("broken", "good"), ("1/2:70x1",))
    assert first_calls.make(task, CPU, 64, 0, said.append) == 1
    assert "no kernel for this" in "\n".join(said)


def test_first_calls_in_other_processes():
    said = []
    tasks = [first_calls.Task("prefill", (name,), ("1/2:70x1",)) for name in ("torch", "nonsense", "cuda")]
    command_line = [sys.executable, "-m", "gdn_multi", "bench", "--device", "cpu", "--page-size", "64", "--first-calls"]
    pool = first_calls.Pool(tasks, 2, command_line, said.append, limit=120)
    assert pool.join() == 0  # refused is not failed
    assert len([line for line in said if ": prefill 1/2:70x1: " in line]) == 3


def test_first_calls_end_when_time_is_up():
    said = []
    task = first_calls.Task("prefill", ("torch",), ("1/2:70x1",))
    started = time.monotonic()
    pool = first_calls.Pool([task] * 3, 2, [sys.executable, "-c", "import time; time.sleep(60)"], said.append, limit=0.3)
    assert pool.join() == 3 and time.monotonic() - started < 20
    assert "time is up" in "\n".join(said)


def test_warm_up_of_the_command(capsys):
    code = command(
        "--rows", "1/2:70x1", "--rows", "1/2:B=3", "--ours", "torch", "--variants", "plain", "--device", "cpu",
        "--budget", "0.001", "--page-size", "64", "--warm-up", "2",
    )  # fmt: skip
    err = capsys.readouterr().err
    assert code == 0 and err.index("first calls: ") < err.index("prefill 1/1") and "failed" not in err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--tables", "nope"], "unknown table"), (["--rows", "zzz*"], "no row"),
        (["--page-size", "65"], "multiple of 64"),
        (["--ours", "torch,nix", "--time-limit", "-1"], "unknown backend 'nix' in --ours; there are cuda, triton"),
        (["--ours", "torch:nope"], "unknown variant"), (["--against", "/nonexistent/file"], "No such file"),
    ],
)  # fmt: skip
def test_bad_arguments(capsys, arguments, said):
    assert command("--device", "cpu", *arguments) == 2
    assert said in capsys.readouterr().err


def test_peer_lists():
    assert [p.name for p in peers.contenders(["default"])] == list(peers.DEFAULT)
    assert peers.contenders(["none"]) == []
    assert len(peers.contenders(["all"])) == len(peers.PEERS)
    with pytest.raises(ValueError, match="unknown peer"):
        peers.contenders(["nope"])


@pytest.mark.parametrize("name", list(peers.PEERS))
def test_peers_are_absent_gracefully(monkeypatch, prefill, name):
    """On a machine without them, and without a GPU, each says so."""
    drawn = inputs.draw_decode(rows.DecodeRow(1, 2, 2, "float32", head_size=16), CPU, 0, 64)
    peer = peers.PEERS[name]
    for make, of in ((peer.prefill, prefill), (peer.decode, drawn)):
        if make is not None:
            with pytest.raises(Unavailable, match="needs a GPU"):
                make(of)
    monkeypatch.setattr(peers, "_need_gpu", lambda tensor: None)

    def missing(module):
        raise ModuleNotFoundError(f"No module named {module!r}")

    monkeypatch.setattr(peers.importlib, "import_module", missing)
    for make, of in ((peer.prefill, prefill), (peer.decode, drawn)):
        if make is not None:
            with pytest.raises(Unavailable, match="No module named"):
                make(of)


def test_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    from gdn_multi.bench.plot import plot

    row, contenders = synthetic()
    other, _ = synthetic()
    other.row, other.sequences = "1/2:128x1", "128x1"
    path = tmp_path / "plot.png"
    plot(str(path), [row, other], contenders)
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_plot_without_matplotlib_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command("--device", "cpu", "--plot", "x.png") == 2
    assert "pip install matplotlib" in capsys.readouterr().err
