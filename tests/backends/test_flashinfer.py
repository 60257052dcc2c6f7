"""The FlashInfer adapters without FlashInfer: what they say when it is missing, what they refuse, what they hand over.

The hand-over is checked with stand-ins for FlashInfer's functions that have its argument names and this library's torch
backend behind them, on the CPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gdn_multi.backends import flashinfer as adapter

import gdn_multi
from gdn_multi import dispatch
from gdn_multi.bench.standard import CALLS, Maker

CPU = torch.device("cpu")


@pytest.fixture
def backend():
    return adapter.FlashInferBackend()


@pytest.fixture
def cake():
    return adapter.CakeGDNBackend()


class Wide(Maker):
    """The standard calls with K = V = 128, which FlashInfer needs."""

    def __init__(self, dtype=torch.bfloat16, seed=0):
        super().__init__(CPU, False, seed, dtype)
        self.d = 128


def request_of(name, maker=None, **changes):
    function, arguments = CALLS[name](maker or Wide())
    arguments.update(changes)
    return dispatch.build_request(function, **arguments)[0], function, arguments


@pytest.fixture
def stand_ins(monkeypatch):
    """FlashInfer's functions, played by this library's torch backend. Records the arguments of each call."""
    seen = []

    def function(module, name):
        def call(*args, **arguments):
            seen.append((module, name, dict(arguments)))
            if name.startswith("gdn_paged_"):
                return getattr(gdn_multi, name)(*args)
            arguments["backend"] = "torch"
            return getattr(gdn_multi, name)(*args, **arguments)

        return call

    monkeypatch.setattr(adapter, "_function", function)
    return seen


# --- usable or not ---------------------------------------------------------------------------------------------------


def test_needs_a_gpu(backend, cake):
    for one in (backend, cake):
        (reason,) = one.reasons_unusable(CPU)
        assert "NVIDIA GPU" in reason and "cpu" in reason


@pytest.mark.parametrize(
    "missing, said",
    [("flashinfer", "flashinfer-python is not installed"), ("cutlass", "nvidia-cutlass-dsl")],
)
def test_missing_package_says_what_mends_it(monkeypatch, missing, said):
    monkeypatch.setattr(adapter.importlib.util, "find_spec", lambda name: None if name == missing else object())
    monkeypatch.setattr(adapter.metadata, "version", lambda name: "0.7.4")
    reason = adapter._package.__wrapped__()
    assert said in reason and adapter.INSTALL in reason


def test_old_package(monkeypatch):
    monkeypatch.setattr(adapter.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(adapter.metadata, "version", lambda name: "0.7.3")
    reason = adapter._package.__wrapped__()
    assert "0.7.3 is too old" in reason and adapter.INSTALL in reason


def test_broken_package_is_a_reason_not_a_crash(monkeypatch):
    def broken(name):
        raise OSError("libsomething.so: cannot open")

    monkeypatch.setattr(adapter.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(adapter.metadata, "version", lambda name: "0.7.4")
    monkeypatch.setattr(adapter.importlib, "import_module", broken)
    assert "libsomething.so" in adapter._package.__wrapped__()


@pytest.mark.parametrize("capability, usable", [((9, 0), True), ((7, 5), False), ((12, 0), True)])
def test_architectures(backend, capability, usable):
    assert (backend._device_reasons(capability) == ()) is usable


def test_cake_names_its_architectures(cake):
    (reason,) = cake._device_reasons((9, 0))
    for name in ("sm_100a", "sm_103a", "sm_107a", "sm_90"):
        assert name in reason


def test_not_in_the_automatic_choice(backend, cake):
    assert backend.priority is None and cake.priority is None


# --- refusals --------------------------------------------------------------------------------------------------------


def against(one, name, **changes):
    return " | ".join(one.reasons_against(request_of(name, **changes)[0]))


def test_serves_the_standard_calls(backend):
    for name in ("plain", "model", "paged", "checkpoints"):
        assert backend.reasons_against(request_of(name)[0]) == ()
    for name in ("decode", "decode_paged"):
        assert backend.reasons_against(request_of(name)[0]) == ()


def test_refuses_other_head_sizes_and_dtypes(backend):
    small = Maker(CPU, False)
    assert "K = V = 128" in " ".join(backend.reasons_against(request_of("plain", small)[0]))
    reasons = backend.reasons_against(request_of("plain", Wide(torch.float32))[0])
    assert any("float32" in reason for reason in reasons)
    assert "bfloat16" in " ".join(backend.reasons_against(request_of("decode", Wide(torch.float16))[0]))


def test_refuses_strided_tokens(backend):
    _, arguments = CALLS["plain"](Wide())
    q = arguments["q"]
    wide = torch.cat([q, q], dim=-1)[..., :128]
    assert "q must be contiguous" in against(backend, "plain", q=wide)


def test_refuses_mixed_state_dtypes(backend):
    _, arguments = CALLS["plain"](Wide())
    other = torch.empty_like(arguments["initial_state"], dtype=torch.bfloat16)
    assert "one dtype" in against(backend, "plain", output_state=other)


def test_refuses_batch_invariance(backend, monkeypatch):
    monkeypatch.setenv("GDN_MULTI_BATCH_INVARIANT", "1")
    assert "GDN_MULTI_BATCH_INVARIANT" in against(backend, "plain")


def test_refuses_padding_that_would_write_row_0(backend):
    _, arguments = CALLS["decode"](Wide())
    pool, rows = arguments["state"], torch.arange(5, dtype=torch.int32)
    changes = dict(state=None, initial_state=pool, initial_state_indices=rows)
    assert "row 0" in against(backend, "decode", **changes, output_state_indices=rows.clone())
    assert against(backend, "decode", **changes) == ""  # float32, the same rows: its kernel skips them
    changes["initial_state"] = pool.bfloat16()
    assert "row 0" in against(backend, "decode", **changes)


def unknown_lengths(name, **changes):
    """The request as on a GPU, where the lengths are on the device and the host does not know them."""
    return replace(request_of(name, **changes)[0], cu_seqlens_cpu=None)


def test_use_cp_needs_to_know_that_no_sequence_is_empty(backend):
    given = torch.empty_like(CALLS["plain"](Wide())[1]["initial_state"])
    changes = dict(use_cp=True, output_state=given)
    (reason,) = backend.reasons_against(unknown_lengths("plain", **changes))
    assert "use_cp=True" in reason and "cu_seqlens_cpu" in reason
    assert against(backend, "plain", **changes) == ""  # known on the host: no sequence is empty
    assert backend.reasons_against(unknown_lengths("plain", use_cp=True)) == ()  # a new buffer for the states


def test_cake_rejects_slots_and_pages(cake):
    assert "rejects slot arguments" in against(cake, "paged")
    assert "page tables" in against(cake, "decode_paged")
    assert "cu_seqlens_cpu" in " | ".join(cake.reasons_against(unknown_lengths("plain")))
    assert against(cake, "plain") == ""


# --- what is handed over ---------------------------------------------------------------------------------------------


def results(request):
    names = ("output", "final_state", "initial_state", "state_checkpoints", "state")
    return {n: getattr(request, n) for n in names if isinstance(getattr(request, n, None), torch.Tensor)}


@pytest.mark.parametrize("name", ["plain", "model", "paged", "checkpoints", "decode", "decode_paged"])
def test_same_bits_as_the_stand_in(backend, stand_ins, name):
    """Through the adapter and directly: the adapter adds and loses nothing."""
    request, _, _ = request_of(name)
    getattr(backend, request.kind)(request)
    direct, _, _ = request_of(name)
    dispatch.run(direct, "torch")
    assert stand_ins, "no FlashInfer function was called"
    for key, tensor in results(request).items():
        torch.testing.assert_close(tensor, results(direct)[key], rtol=0, atol=0, equal_nan=True, msg=key)


def test_pool_rows_become_slot_arguments(backend, stand_ins):
    request, _, _ = request_of("paged")
    backend.prefill(request)
    (call,) = [arguments for _, name, arguments in stand_ins if name == "chunk_gated_delta_rule"]
    assert call["use_cp"] is False
    assert call["output_state_indices"].dtype == torch.int32
    assert call["checkpoint_state_indices"] is not None and call["prefix_lens"] is not None


def test_a_pool_that_is_only_read_is_not_written(backend, stand_ins):
    _, arguments = CALLS["plain"](Wide())
    pool = arguments["initial_state"].clone()
    before = pool.clone()
    rows = torch.tensor([2, -1, 0], dtype=torch.int32)
    changes = dict(initial_state=pool, state_indices=rows, output_final_state=False)
    request, _, _ = request_of("plain", **changes)
    backend.prefill(request)
    assert torch.equal(pool, before)
    direct, _, _ = request_of("plain", **changes)
    dispatch.run(direct, "torch")
    assert torch.equal(request.output, direct.output)
    assert "state_indices" in stand_ins[-1][2] and bool((stand_ins[-1][2]["output_state_indices"] == -1).all())


def test_empty_sequences(backend, stand_ins):
    """New final states of empty sequences are the initial states; a given buffer's row stays."""
    _, arguments = CALLS["plain"](Wide())
    cu = torch.tensor([0, 130, 130, 211], dtype=torch.int32)
    request, _, _ = request_of("plain", cu_seqlens=cu)
    backend.prefill(request)
    assert torch.equal(request.final_state[1], request.initial_state[1])
    given = torch.full_like(arguments["initial_state"], 7.0)
    request, _, _ = request_of("plain", cu_seqlens=cu, output_state=given)
    backend.prefill(request)
    assert bool((given[1] == 7).all()) and not bool((given[0] == 7).all())


def test_rows_of_a_page_table(backend, stand_ins):
    _, arguments = CALLS["paged"](Wide())
    table = [arguments[n] for n in ("cu_seqlens", "page_indices", "page_indptr", "page_size", "last_page_len")]
    request, _ = dispatch.build_request("gdn_paged_prefill_slots", *table)
    backend.page_slots(request)
    for mine, right in zip(request.out, gdn_multi.gdn_paged_prefill_slots(*table)):
        assert torch.equal(mine, right)
    assert stand_ins[0][1] == "gdn_paged_prefill_slots"


def test_detail_says_what_is_converted(backend):
    request, _, _ = request_of("plain")
    assert "heuristic" in backend.detail(request)
    g = request.g.t().contiguous().t()
    request, _, _ = request_of("plain", g=g)
    assert "g copied to be contiguous" in backend.detail(request)
    request, _, _ = request_of("decode", A_log=torch.zeros(2, dtype=torch.bfloat16))
    assert "A_log converted to float32" in backend.detail(request)
