"""Saved calls and ``compare``: files that hold a call to the bit and no code, and judgements that find faults."""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import bits, same_bits

import gdn_multi
from gdn_multi import dispatch, saved
from gdn_multi.bench import comparison
from gdn_multi.bench.standard import CALLS, Maker
from gdn_multi.cli import compare as command
from gdn_multi.registry import registry

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


def made(name="paged", **changes):
    function, arguments = CALLS[name](Maker(CPU, False))
    return function, {**arguments, **changes}


def run_command(*arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(a) for a in arguments]))


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CALLS))
def test_a_saved_call_comes_back_to_the_bit(tmp_path, name):
    function, arguments = made(name)
    path = saved.save_call(str(tmp_path), function, arguments)
    call = saved.load_call(path)
    again = call.arguments()
    assert call.function == function and set(again) == set(arguments)
    for key, value in arguments.items():
        if isinstance(value, torch.Tensor):
            assert again[key].dtype == value.dtype and again[key].stride() == value.stride()
            assert same_bits(again[key], value), key  # NaN rows of the pool included
        else:
            assert again[key] == value and type(again[key]) is type(value)


def test_strides_aliases_and_tuples_come_back(tmp_path):
    fused = torch.randn(7, 6, 8).bfloat16()
    q, k, v = fused[:, :2], fused[:, 2:4], fused[:, 4:]
    padded = torch.randn(5, 3, 8, 8)[:, :2]  # rows with space between them
    index = torch.arange(3, dtype=torch.int32)
    slots = gdn_multi.GDNPagedPrefillSlots(index, index + 1, index, index)
    arguments = dict(
        q=q, k=k, v=v, initial_state=padded, output_state=padded, scale=0.25, slots=slots, g=None, max_seqlen=7,
        cu_seqlens_cpu=[0, 7], use_cp="auto", output_final_state=True, prefix_lens=torch.zeros(0, dtype=torch.int64),
    )  # fmt: skip
    path = saved.save_call(str(tmp_path), "chunk_gated_delta_rule", arguments)
    again = saved.load_call(path).arguments()
    for name in ("q", "k", "v", "initial_state", "prefix_lens"):
        assert again[name].stride() == arguments[name].stride() and torch.equal(again[name], arguments[name])
    again["output_state"][0] = 9.0
    assert torch.equal(again["initial_state"][0], torch.full((2, 8, 8), 9.0))
    assert again["q"].untyped_storage().data_ptr() == again["v"].untyped_storage().data_ptr()
    assert isinstance(again["slots"], gdn_multi.GDNPagedPrefillSlots)
    assert again["slots"].output_state_indices.tolist() == [1, 2, 3]
    for name in ("scale", "g", "max_seqlen", "cu_seqlens_cpu", "use_cp", "output_final_state"):
        assert again[name] == arguments[name]


def test_each_use_gets_fresh_tensors():
    call = saved.SavedCall.of(*made())
    first, second = call.arguments(), call.arguments()
    first["state_pool"].zero_()
    assert not torch.equal(bits(first["state_pool"]), bits(second["state_pool"]))


def test_of_a_large_pool_only_the_named_rows_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(saved, "WHOLE_BYTES", 1 << 12)
    function, arguments = made("paged")
    wide = torch.zeros(24, 2 * 64 * 64 + 64)
    pool = wide.as_strided((24, 2, 64, 64), (wide.stride(0), 64 * 64, 64, 1))
    pool.copy_(arguments["state_pool"])
    arguments["state_pool"] = pool
    path = saved.save_call(str(tmp_path), function, arguments)
    again = saved.load_call(path).arguments()["state_pool"]
    named = set(arguments["page_indices"].tolist())
    assert 0 < len(named) < 24
    assert os.path.getsize(path) < (len(named) + 1) * 2 * 64 * 64 * 4 + (1 << 20) < wide.numel() * 4 + (1 << 20)
    assert again.stride() == pool.stride()
    for row in range(24):
        assert same_bits(again[row], pool[row] if row in named else torch.zeros_like(pool[row])), row


def test_other_readers_of_safetensors_read_the_file(tmp_path):
    safetensors = pytest.importorskip("safetensors", reason="checks the file format with the safetensors package")
    path = saved.save_call(str(tmp_path), *made("decode"))
    with safetensors.safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["gdn_multi"])["function"] == "gated_delta_rule_decode_pretranspose"
        assert len(list(file.keys())) > 5 and file.get_tensor("memory0").numel() > 0


def test_saving_never_breaks_the_call(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.warns(RuntimeWarning, match="was not saved"):
        assert saved.save_call(str(blocked), *made("decode")) is None


def test_an_argument_that_cannot_be_saved_is_named_at_replay(tmp_path):
    function, arguments = made("decode", scale=object())
    path = saved.save_call(str(tmp_path), function, arguments)
    with pytest.raises(saved.SavedCallError, match="object"):
        saved.load_call(path).arguments()


def damage(path, change):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    content = json.loads(header["__metadata__"]["gdn_multi"])
    change(header, content)
    header["__metadata__"]["gdn_multi"] = json.dumps(content)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def argument(content, **changes):
    content["arguments"]["q"].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        lambda h, c: c.update(function="os.system"),
        lambda h, c: c.update(format=99),
        lambda h, c: argument(c, memory=1000),
        lambda h, c: argument(c, offset=1 << 40),
        lambda h, c: argument(c, offset=-1),
        lambda h, c: argument(c, stride=[1 << 40, 1, 1, 1]),
        lambda h, c: argument(c, shape=[-1]),
        lambda h, c: argument(c, shape="abc"),
        lambda h, c: h["memory0"].update(data_offsets=[0, 1 << 40]),
        lambda h, c: h["memory0"].update(shape=[1 << 20, 1 << 20]),
        lambda h, c: h["memory0"].update(dtype="PICKLE"),
        lambda h, c: h.pop("memory0"),
        lambda h, c: c.pop("memories"),
        lambda h, c: c.update(arguments=[1]),
    ],
)
def test_damaged_files_are_refused(tmp_path, change):
    path = Path(saved.save_call(str(tmp_path), *made("decode")))
    saved.load_call(path)
    damage(path, change)
    with pytest.raises(saved.SavedCallError):
        saved.load_call(path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"\xff" * 100, struct.pack("<Q", 2) + b"{}"])
def test_files_of_another_kind_are_refused(tmp_path, content):
    path = tmp_path / "other.safetensors"
    path.write_bytes(content)
    with pytest.raises(saved.SavedCallError):
        saved.load_call(path)
    assert run_command(path) == 2


# --- GDN_MULTI_SAVE --------------------------------------------------------------------------------------------------


def test_failing_calls_are_saved_and_repeat_their_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GDN_MULTI_SAVE", str(tmp_path))
    function, arguments = made("decode")
    gdn_multi.gated_delta_rule_decode_pretranspose(**arguments)
    assert list(tmp_path.iterdir()) == []  # it did not fail
    with pytest.raises(ValueError, match="A_log"):
        gdn_multi.gated_delta_rule_decode_pretranspose(**{**arguments, "A_log": arguments["A_log"][:1]})
    (path,) = tmp_path.iterdir()
    monkeypatch.delenv("GDN_MULTI_SAVE")
    assert run_command(path, "--no-time") == 0
    assert "refused: ValueError: A_log" in capsys.readouterr().out


REPLAY = """
import hashlib, sys
from gdn_multi import saved
import gdn_multi
call = saved.load_call(sys.argv[1])
arguments = call.arguments("cpu")
out = getattr(gdn_multi, call.function)(**{**arguments, "backend": "torch"})
raw = out.contiguous().view(dtype=__import__("torch").int16).tolist()
pool = arguments["state_pool"].contiguous().view(dtype=__import__("torch").int32).tolist()
print(hashlib.sha256(repr((raw, pool)).encode()).hexdigest())
"""


def test_the_same_bits_in_another_process(tmp_path, monkeypatch):
    """A call that ran here, saved by the variable, repeated elsewhere."""
    import hashlib

    monkeypatch.setenv("GDN_MULTI_SAVE", str(tmp_path))
    monkeypatch.setenv("GDN_MULTI_SAVE_WHICH", "all")
    function, arguments = made("paged")
    out = getattr(gdn_multi, function)(**arguments, backend="torch")
    monkeypatch.delenv("GDN_MULTI_SAVE")
    here = (out.contiguous().view(torch.int16).tolist(), arguments["state_pool"].view(torch.int32).tolist())
    (path,) = tmp_path.glob("chunk_gated_delta_rule_paged-*.safetensors")
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [sys.executable, "-c", REPLAY, str(path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == hashlib.sha256(repr(here).encode()).hexdigest()


# --- judging ---------------------------------------------------------------------------------------------------------


class Faulty(gdn_multi.Backend):
    """The torch backend with one fault."""

    name = "faulty"
    fault = None

    def _serve(self, request):
        getattr(registry.get("torch"), request.kind)(request)
        self.fault(request)

    prefill = decode = page_slots = _serve


@pytest.fixture
def judged():
    """judged(call, fault): the outcome of a backend with that fault, and the whole comparison."""
    backend = Faulty()
    gdn_multi.register_backend(backend)

    def judge(name, fault, **changes):
        backend.fault = fault
        call = saved.SavedCall.of(*made(name, **changes))
        result = comparison.compare(name, call, ["faulty", "torch"], CPU)
        assert not result.outcomes["torch"].wrong
        return result.outcomes["faulty"], result

    yield judge
    gdn_multi.unregister_backend("faulty")


@pytest.mark.parametrize("name", list(CALLS))
def test_a_right_backend_is_found_right(judged, name):
    outcome, result = judged(name, lambda request: None)
    assert not outcome.wrong and not result.is_wrong
    assert outcome.bits == result.outcomes["torch"].bits
    (pair,) = result.pairs
    assert (pair.output_differs, pair.states_differ) == (0, 0)
    assert outcome.output_error < 4e-3 and all(error < 4e-3 for _, error in outcome.states) and outcome.states


def test_a_wrong_output_is_found(judged):
    outcome, result = judged("plain", lambda request: request.output[130:].mul_(1.1))
    assert [w.split(":")[0] for w in outcome.wrong] == ["output of sequence 1", "output of sequence 2"]
    assert outcome.bits != result.outcomes["torch"].bits and result.pairs[0].output_differs > 0.1
    assert result.pairs[0].states_differ == 0


def test_a_wrong_page_is_found(judged):
    def fault(request):
        pages = request.pages
        pool = request.final_state
        pool[pages.page_indices[1]] = pool[pages.page_indices[1]].mT.clone()  # K-major for V-major

    outcome, _ = judged("paged", fault)
    (wrong,) = outcome.wrong
    assert wrong.startswith("page ") and "(sequence 0, token 128)" in wrong


def test_a_page_that_was_not_written_is_found(judged):
    def fault(request):
        request.final_state[request.pages.page_indices[0]] = float("nan")

    outcome, _ = judged("paged", fault)
    assert "error inf" in outcome.wrong[0]


def test_a_row_that_must_not_change_is_found(judged):
    def fault(request):
        unused = set(range(24)) - set(request.pages.page_indices.tolist())
        request.final_state[min(unused)] = 0.0

    outcome, _ = judged("paged", fault)
    assert len(outcome.wrong) == 1 and "changed and must not" in outcome.wrong[0]


def test_a_changed_initial_state_is_found(judged):
    outcome, _ = judged("plain", lambda request: request.initial_state[1].add_(1))
    assert outcome.wrong == ["row 1 of initial_state changed and must not"]


def test_a_wrong_decode_is_found(judged):
    def fault(request):
        request.state[request.pages.page_indices[2]] *= 1.01

    outcome, _ = judged("decode_paged", fault)
    assert outcome.wrong and all("page 2" in wrong for wrong in outcome.wrong)


def test_a_failure_is_wrong_and_not_a_crash(judged):
    def fault(request):
        raise RuntimeError("illegal memory access")

    outcome, result = judged("plain", fault)
    assert outcome.wrong == ["failed: RuntimeError: illegal memory access"] and result.is_wrong


def test_expected_items_of_slots_padding_and_intermediate_states():
    """Rows -1, row indices and states after each token: labels and rows of what must be written."""
    function, arguments = made("decode")
    pool = arguments.pop("state")
    rows = torch.tensor([0, -1, 2, 3, 4], dtype=torch.int32)
    arguments.update(state=None, initial_state=pool, initial_state_indices=rows)
    request, _ = dispatch.build_request(function, **arguments)
    items, written = comparison.expected(request)
    assert written == {"state": {0, 2, 3, 4}}
    assert not items[[i.label for i in items].index("output of sequence 1")].expected.any()

    request, _ = dispatch.build_request("chunk_gated_delta_rule", **_slot_arguments())
    items, written = comparison.expected(request)
    assert written == {"initial_state": set(), "final_state": {3}, "state_checkpoints": {1}}
    assert [i.label for i in items if i.tensor == "state_checkpoints"] == ["checkpoint row 1 (sequence 0, token 54)"]
    dispatch.run(request, "torch")
    for item in items:
        torch.testing.assert_close(
            getattr(request, item.tensor)[item.index].double(), item.expected, rtol=2e-2, atol=2e-2
        )
    shortened = replace(request, final_state=None, write_rows=None)
    assert comparison.expected(shortened)[1]["final_state"] == set()


def _slot_arguments():
    _, arguments = made("plain")
    index = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    pool = torch.zeros(6, 2, 64, 64)
    arguments.update(
        initial_state=pool, output_state=pool, state_indices=index(5, -1, 0), output_state_indices=index(3, -1, -1),
        state_checkpoints=pool, checkpoint_every_n_tokens=64, checkpoint_cu_starts=index(0, 2, 3, 3),
        checkpoint_state_indices=index(1, -1, -1), prefix_lens=index(10, 3, 0),
    )  # fmt: skip

    return arguments


# --- the command -----------------------------------------------------------------------------------------------------


def test_command_on_standard_calls(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert (
        run_command("--calls", "plain,decode", "--backends", "torch", "--device", "cpu", "--json", path, "--pages") == 0
    )
    text = capsys.readouterr().out
    assert "final state (sequence 1, token 64)" in text and "row 3 (sequence 3)" in text
    calls = json.loads(path.read_text())["calls"]
    assert [call["name"] for call in calls] == ["plain", "decode"]
    assert all(call["outcomes"]["torch"]["ms"] > 0 for call in calls)


def test_command_says_once_what_the_others_need(capsys):
    assert run_command("--calls", "plain,model", "--device", "cpu", "--no-time") == 0
    text = capsys.readouterr().out
    assert text.count("flashinfer is not usable here") == 1 and "pip install" in text


def test_command_exits_1_on_a_wrong_backend(judged, capsys):
    judged("plain", lambda request: request.output.mul_(2))
    assert run_command("--calls", "plain", "--backends", "faulty", "--device", "cpu", "--no-time") == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--calls", "nope"], ["--backends", "nope"], ["/nonexistent/file"]])
def test_bad_arguments(capsys, arguments):
    assert run_command(*arguments, "--device", "cpu") == 2
    assert "nope" in (text := capsys.readouterr().err) or "No such file" in text


def test_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    path = tmp_path / "plot.png"
    assert run_command("--calls", "plain,decode", "--backends", "torch", "--device", "cpu", "--plot", path) == 0
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_nothing_compared_is_not_a_success(capsys):
    assert run_command("--device", "cpu", "--backends", "flashinfer", "--calls", "plain") == 2
    assert "nothing was compared" in capsys.readouterr().err
    assert run_command("--device", "gpu") == 2
    assert "--device gpu" in capsys.readouterr().err


def test_tables_from_a_file(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert run_command("--calls", "plain,decode", "--backends", "torch", "--device", "cpu", "--json", path) == 0
    text = capsys.readouterr().out
    assert run_command("--from", path) == 0
    assert capsys.readouterr().out == text
    document = json.loads(path.read_text())
    document["calls"][0]["outcomes"]["torch"]["wrong"] = ["page 3"]
    path.write_text(json.dumps(document))
    assert run_command("--from", path) == 1
    assert "WRONG: page 3" in capsys.readouterr().out


def test_plot_from_a_file(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    path, plot = tmp_path / "out.json", tmp_path / "plot.png"
    assert run_command("--calls", "plain,decode", "--backends", "torch", "--device", "cpu", "--json", path) == 0
    assert run_command("--from", path, "--plot", plot) == 0
    assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"machine": {}, "calls": []}', '{"machine": 3, "calls": [{}]}'])
def test_other_files_are_no_run(tmp_path, capsys, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    assert run_command("--from", path) == 2
    assert "no file of this command" in capsys.readouterr().err


def test_the_file_is_written_after_every_call(tmp_path, monkeypatch):
    from gdn_multi.bench import comparison

    whole = comparison.compare

    def fails_later(name, *arguments):
        if name == "decode":
            raise RuntimeError("the GPU is lost")
        return whole(name, *arguments)

    monkeypatch.setattr(comparison, "compare", fails_later)
    path = tmp_path / "out.json"
    arguments = ("--calls", "plain,decode", "--backends", "torch", "--device", "cpu", "--no-time", "--json", path)
    assert run_command(*arguments) == 1
    assert [call["name"] for call in json.loads(path.read_text())["calls"]] == ["plain"]
