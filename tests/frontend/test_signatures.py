"""Names, order, kinds and defaults of every public function's parameters: callers' code depends on them."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

import gdn_multi

REQUIRED = inspect.Parameter.empty

PREFILL = (
    dict(
        q=REQUIRED, k=REQUIRED, v=REQUIRED, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
        cu_seqlens=None, use_qk_l2norm_in_kernel=False, output=None, output_state=None, state_checkpoints=None,
        checkpoint_cu_starts=None, checkpoint_every_n_tokens=0, use_cp="auto", state_indices=None, backend="auto",
        max_seqlen=None,
    ),
    dict(
        gate_domain="linear", use_gate_in_kernel=False, A_log=None, dt_bias=None, beta_is_logit=False,
        cu_seqlens_cpu=None,
        output_state_indices=None, checkpoint_state_indices=None, prefix_lens=None,
    ),
)  # fmt: skip
PAGED_PREFILL = (
    dict(q=REQUIRED, k=REQUIRED, v=REQUIRED, g=None, beta=None, scale=None),
    dict(
        cu_seqlens=REQUIRED, state_pool=REQUIRED, page_indices=REQUIRED, page_indptr=REQUIRED, page_size=REQUIRED,
        last_page_len=REQUIRED, use_qk_l2norm_in_kernel=False, output=None, gate_domain="linear",
        use_gate_in_kernel=False,
        A_log=None, dt_bias=None, beta_is_logit=False, slots=None, backend="auto", max_seqlen=None,
    ),
)  # fmt: skip
DECODE = (
    dict(
        q=REQUIRED, k=REQUIRED, v=REQUIRED, state=REQUIRED, A_log=REQUIRED, a=REQUIRED, dt_bias=REQUIRED, b=REQUIRED,
        scale=None, output=None, use_qk_l2norm=True, initial_state=None, initial_state_indices=None,
        output_state_indices=None, intermediate_states_buffer=None, disable_state_update=False, backend="auto",
    ),
    dict(),
)  # fmt: skip
PAGED_DECODE = (
    dict(
        q=REQUIRED, k=REQUIRED, v=REQUIRED, A_log=REQUIRED, a=REQUIRED, dt_bias=REQUIRED, b=REQUIRED, scale=None,
        output=None, use_qk_l2norm=True,
    ),
    dict(
        state_pool=REQUIRED, page_indices=REQUIRED, page_indptr=REQUIRED, last_page_len=REQUIRED, backend="auto",
        slots=None,
    ),
)  # fmt: skip
PREFILL_SLOTS = (
    dict(
        cu_seqlens=REQUIRED, page_indices=REQUIRED, page_indptr=REQUIRED, page_size=REQUIRED, last_page_len=REQUIRED
    ),
    dict(),
)  # fmt: skip
DECODE_SLOTS = (dict(page_indices=REQUIRED, page_indptr=REQUIRED, last_page_len=REQUIRED), dict())

FUNCTIONS = {
    "chunk_gated_delta_rule": ("gdn_prefill", PREFILL),
    "chunk_gated_delta_rule_paged": ("gdn_paged", PAGED_PREFILL),
    "gated_delta_rule_decode_pretranspose": ("gdn_decode", DECODE),
    "gated_delta_rule_decode_paged": ("gdn_paged", PAGED_DECODE),
    "gdn_paged_prefill_slots": ("gdn_paged", PREFILL_SLOTS),
    "gdn_paged_decode_slots": ("gdn_paged", DECODE_SLOTS),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature(name):
    """Positional parameters in the contract's order, the others by keyword only, all with its defaults."""
    module, (positional, keyword_only) = FUNCTIONS[name]
    function = getattr(gdn_multi, name)
    assert getattr(getattr(gdn_multi, module), name) is function, f"gdn_multi.{module}.{name}"
    parameters = inspect.signature(function).parameters.values()
    kinds = {inspect.Parameter.POSITIONAL_OR_KEYWORD: {}, inspect.Parameter.KEYWORD_ONLY: {}}
    for p in parameters:
        assert p.kind in kinds, p
        kinds[p.kind][p.name] = p.default
    ordered, by_keyword = kinds.values()
    assert list(ordered.items()) == list(positional.items())
    assert by_keyword == keyword_only


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring(name):
    """Every parameter is described."""
    function = getattr(gdn_multi, name)
    text = inspect.getdoc(function)
    if "slots" in name:  # these refer to the call that takes the same arguments
        assert "chunk_gated_delta_rule_paged" in text or "gated_delta_rule_decode_paged" in text
        return
    for parameter in inspect.signature(function).parameters:
        assert parameter in text, parameter


def test_slots_tuples():
    assert gdn_multi.GDNPagedPrefillSlots._fields == (
        "state_indices", "output_state_indices", "checkpoint_cu_starts", "prefix_lens",
    )  # fmt: skip
    assert gdn_multi.GDNPagedDecodeSlots._fields == ("initial_state_indices", "output_state_indices")
    assert issubclass(gdn_multi.GDNPagedPrefillSlots, tuple) and issubclass(gdn_multi.GDNPagedDecodeSlots, tuple)


def test_code_written_for_flashinfer_runs():
    """The names and the modules that such code uses."""
    import gdn_multi as flashinfer
    from gdn_multi.gdn_decode import gated_delta_rule_decode_pretranspose
    from gdn_multi.gdn_prefill import chunk_gated_delta_rule

    assert flashinfer.gdn_prefill.chunk_gated_delta_rule is chunk_gated_delta_rule
    assert flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose is gated_delta_rule_decode_pretranspose
    q = k = torch.nn.functional.normalize(torch.ones(5, 2, 16), dim=-1)
    out, state = flashinfer.chunk_gated_delta_rule(
        q,
        k,
        torch.ones(5, 4, 16),
        torch.full((5, 4), 0.9),
        torch.full((5, 4), 0.5),
        None,
        None,
        True,
        torch.tensor([0, 5]),
    )
    assert out.shape == (5, 4, 16) and state.shape == (1, 4, 16, 16) and state.dtype == torch.float32


@pytest.mark.parametrize("module,name,words", [
    ("gdn_multi", "gated_delta_rule_mtp", "FlashInfer's, .*gated_delta_rule_decode_pretranspose takes T > 1 .*disable_state_update=True"),
    ("gdn_multi.gdn_decode", "gated_delta_rule_decode", "FlashInfer's, whose states are K-major"),
    ("gdn_multi.gdn_prefill", "chunk_gated_delta_rule2", "another recurrence"),
    ("gdn_multi", "nothing_of_the_kind", "module 'gdn_multi' has no attribute 'nothing_of_the_kind'$"),
])  # fmt: skip
def test_functions_of_flashinfer_that_are_not_here_say_so(module, name, words):
    module = importlib.import_module(module)
    with pytest.raises(AttributeError, match=words) as caught:
        getattr(module, name)
    assert caught.value.name == name and not hasattr(module, name)


def test_return_values():
    q = k = torch.nn.functional.normalize(torch.ones(5, 2, 16), dim=-1)
    v, cu = torch.ones(5, 2, 16), torch.tensor([0, 5])
    assert isinstance(gdn_multi.chunk_gated_delta_rule(q, k, v, cu_seqlens=cu), torch.Tensor)
    result = gdn_multi.chunk_gated_delta_rule(q, k, v, cu_seqlens=cu, output_final_state=True)
    assert isinstance(result, tuple) and len(result) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_a_final_state_that_the_call_allocates_is_float32(dtype):
    """As FlashInfer allocates it, whatever the initial state's dtype."""
    q = k = torch.nn.functional.normalize(torch.ones(5, 2, 16), dim=-1)
    v, cu = torch.ones(5, 2, 16), torch.tensor([0, 5])
    initial = torch.zeros(1, 2, 16, 16).to(dtype)
    _, state = gdn_multi.chunk_gated_delta_rule(q, k, v, initial_state=initial, cu_seqlens=cu, output_final_state=True)
    assert state.dtype == torch.float32
