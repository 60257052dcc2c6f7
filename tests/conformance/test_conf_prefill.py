"""Prefill values on every backend: head groups, sizes, dtypes, gates, betas, norms, strides, lengths.

Output and final state are compared separately, from a random initial state that is far from symmetric.
"""

from __future__ import annotations

import cases
import pytest
import tolerances
import torch
from cases import Dims, Tokens, random_states, same_bits

import gdn_multi

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def run(door, tokens: Tokens, *, initial=None, state_dtype=None, **more):
    """A plain call with one state row a sequence; compares output and final states and returns both."""
    if initial is None:
        initial = random_states(tokens.num_seqs, tokens.dims).to(door.device)
    expected, states = tokens.reference(initial)
    untouched = more["output"].clone() if "output" in more else None
    given = None
    if state_dtype is not None:
        given = torch.full(initial.shape, cases.NAN).to(state_dtype).to(door.device)
    before = initial.clone()
    output, final = door(
        gdn_multi.chunk_gated_delta_rule,
        **tokens.arguments(initial_state=initial, output_final_state=True, output_state=given, **more),
    )
    tokens.check_output(output, expected, untouched=untouched)
    assert same_bits(initial, before), "initial_state was written"
    assert final.shape == initial.shape
    if given is None:
        assert final.dtype == F32
    else:
        assert final is given
    for i, after in enumerate(states):
        if tokens.lengths[i]:
            allowed = tolerances.prefill_state(tokens.dtype, final.dtype)
            tolerances.assert_close(final[i], after[-1], allowed, f"final state of sequence {i}")
        elif given is None:
            assert same_bits(final[i], initial[i].float()), f"state of the empty sequence {i}"
        else:
            assert torch.isnan(final[i].float()).all(), f"the row of the empty sequence {i} was written"
    return output, final


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "heads", [(1, 1, 1), (3, 3, 3), (2, 2, 4), (1, 1, 4), (4, 2, 2), (6, 2, 2), (4, 1, 1), (2, 2, 16)]
)
def test_head_groups(door, sizes, heads):
    """Equal heads, GVA (state head h reads q and k head h // (Hv / Hq)) and GQA (k and v head h // (Hq / Hk))."""
    dims = Dims(*heads, sizes.dims.K, sizes.dims.V)
    run(door, Tokens(dims, (70, 3), device=door.device, dtype=sizes.dtype))


@pytest.mark.small
@pytest.mark.parametrize("heads", [(1, 1, 2), (2, 1, 1)])
def test_gva_and_gqa(door, sizes, heads):
    dims = Dims(*heads, sizes.dims.K, sizes.dims.V)
    run(door, Tokens(dims, (66, 2), device=door.device, dtype=sizes.dtype))


@pytest.mark.parametrize(
    "K,V", [(64, 64), (128, 128), (256, 256), (64, 128), (128, 64), (64, 256), (256, 64), (128, 256), (256, 128)]
)
def test_head_sizes(door, sizes, K, V):
    run(door, Tokens(Dims(1, 1, 2, K, V), (65, 40), device=door.device, dtype=sizes.dtype))


@pytest.mark.small
def test_value_size_differs_from_key_size(door, sizes):
    run(door, Tokens(Dims(1, 1, 1, 64, 128), (20,), device=door.device, dtype=sizes.dtype))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("gate,beta,l2norm", [("linear", "plain", False), ("raw_half", "logit_half", True)])
def test_input_dtypes(door, sizes, dtype, gate, beta, l2norm):
    tokens = Tokens(sizes.dims, (130, 5), device=door.device, dtype=dtype, gate=gate, beta=beta, l2norm=l2norm)
    run(door, tokens)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 257])
def test_lengths_around_chunks_and_blocks(door, sizes, length):
    run(door, Tokens(sizes.dims, (length,), device=door.device, dtype=sizes.dtype))


def test_many_sequences(door, sizes):
    lengths = [(7 * i) % 45 for i in range(40)]
    run(door, Tokens(sizes.dims, lengths, device=door.device, dtype=sizes.dtype))


def test_a_long_sequence_beside_short_ones(door, sizes):
    run(door, Tokens(sizes.dims, (3, 1100, 64), device=door.device, dtype=sizes.dtype))


# --- gates, betas, norm, scale --------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["none", "linear", "log", "raw", "raw_half"])
@pytest.mark.parametrize("beta", ["none", "plain", "logit", "logit_half"])
def test_gates_and_betas(door, sizes, gate, beta):
    run(door, Tokens(sizes.dims, sizes.lengths, device=door.device, dtype=sizes.dtype, gate=gate, beta=beta))


@pytest.mark.small
@pytest.mark.parametrize("gate,beta", [("none", "none"), ("log", "plain"), ("raw", "logit_half")])
def test_gate_kinds(door, sizes, gate, beta):
    tokens = Tokens(sizes.dims, (66, 1), device=door.device, dtype=sizes.dtype, gate=gate, beta=beta, l2norm=True)
    run(door, tokens)


def test_l2norm(door, sizes):
    tokens = Tokens(sizes.dims, sizes.lengths, device=door.device, dtype=sizes.dtype, l2norm=True)
    tokens.q[5] = 0  # a zero vector stays zero: 1e-6 under the root
    tokens.k[9] = 0
    run(door, tokens)


def one_key(door, **options):
    """(state, expected): one V row of the float32 state after one token with v = 1 from zero, which is beta k^T."""
    tokens = Tokens(door.sizes.dims, [1] * 200, device=door.device, **options)
    tokens.v.fill_(1.0)
    _, states = tokens.reference()
    _, final = door(gdn_multi.chunk_gated_delta_rule, **tokens.arguments(output_final_state=True))
    return final[:, :, 0].cpu(), torch.stack([after[-1][:, 0] for after in states]).float()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_l2norm_rounds_to_the_dtype_of_q(door, dtype):
    """Computed in float32, where a tie may fall to either side now and then; unrounded keys would all be others."""
    state, wanted = one_key(door, dtype=dtype, gate="none", beta="none", l2norm=True)
    assert (state != wanted).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_beta_logits_round_to_their_dtype(door, dtype):
    """The sigmoid likewise."""
    state, wanted = one_key(door, dtype=dtype, gate="none", beta="logit_half", l2norm=True)
    close = (state - wanted).abs() <= 2.0**-13 * wanted.abs()  # beta k is exact in float32; unrounded it is 2^-9 off
    assert close.float().mean() > 0.98


@pytest.mark.parametrize("scale", [1.0, 0.03, 2])
def test_scale(door, sizes, scale):
    run(door, Tokens(sizes.dims, (80,), device=door.device, dtype=sizes.dtype, scale=scale))


def test_parameters_of_raw_gates_in_half_precision(door, sizes):
    tokens = Tokens(sizes.dims, (80,), device=door.device, dtype=sizes.dtype, gate="raw")
    tokens.A_log, tokens.dt_bias = tokens.A_log.to(BF16), tokens.dt_bias.to(BF16)
    run(door, tokens)


def test_raw_gates_far_out(door, sizes):
    """softplus must neither overflow for a large argument nor lose a small one."""
    tokens = Tokens(sizes.dims, (90,), device=door.device, dtype=sizes.dtype, gate="raw")
    tokens.g[10], tokens.g[20], tokens.g[30] = 100.0, -100.0, -20.0
    run(door, tokens)


# --- strides and placement ------------------------------------------------------------------------


@pytest.mark.small
def test_slices_of_a_fused_projection(door, sizes):
    """q, k, v, g and beta as strided views; the columns between them are NaN."""
    run(door, Tokens(sizes.dims, sizes.lengths, device=door.device, dtype=sizes.dtype, fused=True))


def test_slices_of_a_fused_projection_with_raw_gates(door, sizes):
    tokens = Tokens(
        sizes.dims,
        sizes.lengths,
        device=door.device,
        dtype=sizes.dtype,
        fused=True,
        gate="raw",
        beta="logit",
        l2norm=True,
    )
    run(door, tokens)


def test_head_major_inputs(door, sizes):
    """q stored [H, T, K] and passed transposed: the stride of a head is the larger one."""
    tokens = Tokens(sizes.dims, (75, 20), device=door.device, dtype=sizes.dtype)
    for name in ("q", "k", "v"):
        x = getattr(tokens, name)
        setattr(tokens, name, x.transpose(0, 1).contiguous().transpose(0, 1))
    run(door, tokens)


def test_output_given(door, sizes):
    tokens = Tokens(sizes.dims, sizes.lengths, device=door.device, dtype=sizes.dtype)
    output = tokens.new_output()
    returned, _ = run(door, tokens, output=output)
    assert returned is output


def test_output_given_with_padded_rows(door, sizes):
    tokens = Tokens(sizes.dims, sizes.lengths, device=door.device, dtype=sizes.dtype)
    output = tokens.new_output(padded=True)
    run(door, tokens, output=output)
    width = output.shape[1] * output.shape[2]
    assert torch.isnan(output._base[:, width:]).all(), "the padding of the output was written"


# --- lengths and tokens outside -------------------------------------------------------------------


@pytest.mark.small
@pytest.mark.parametrize("given", [False, True], ids=["allocated", "given"])
def test_tokens_outside_the_sequences(door, sizes, given):
    """cu_seqlens starts past 0 and ends before T; the other tokens are NaN and infinite, their outputs zero or kept."""
    tokens = Tokens(sizes.dims, sizes.lengths, before=5, after=9, device=door.device, dtype=sizes.dtype)
    run(door, tokens, **({"output": tokens.new_output()} if given else {}))


@pytest.mark.parametrize("given", [False, True], ids=["allocated", "given"])
@pytest.mark.parametrize("gate,beta", [("raw", "logit"), ("log", "plain"), ("none", "none")])
def test_tokens_far_outside_the_sequences(door, sizes, given, gate, beta):
    """More than whole chunks of them, with everything fused into the kernel."""
    tokens = Tokens(
        sizes.dims, sizes.lengths, before=150, after=200, device=door.device, dtype=sizes.dtype, gate=gate, beta=beta,
        l2norm=True, fused=True,
    )  # fmt: skip
    run(door, tokens, **({"output": tokens.new_output()} if given else {}))


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0, 70, 0, 0, 3, 0), (0,), (0, 0, 0), (64, 0, 64)], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["allocated", "given"])
def test_zero_length_sequences(door, sizes, lengths, given):
    """Rule 1: they write nothing; a state that the call allocates holds their initial state."""
    tokens = Tokens(sizes.dims, lengths, after=2, device=door.device, dtype=sizes.dtype)
    run(door, tokens, state_dtype=F32 if given else None)


def test_no_tokens_at_all(door, sizes):
    """T = 0: an engine's idle step."""
    tokens = Tokens(sizes.dims, (0, 0), device=door.device, dtype=sizes.dtype)
    output, _ = run(door, tokens)
    assert output.shape[0] == 0


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_cu_seqlens_dtypes(door, sizes, index_dtype):
    run(door, Tokens(sizes.dims, sizes.lengths, device=door.device, dtype=sizes.dtype, index_dtype=index_dtype))


def test_hints_change_nothing(door, sizes):
    """cu_seqlens_cpu and max_seqlen may help to plan, and nothing else."""
    tokens = Tokens(sizes.dims, sizes.lengths, device=door.device, dtype=sizes.dtype)
    output, final = run(door, tokens)
    hinted = run(door, tokens, cu_seqlens_cpu=tokens.cu_seqlens.cpu(), max_seqlen=max(sizes.lengths))
    for x, y in zip((output, final), hinted):
        tolerances.assert_close(x, y, tolerances.prefill_output(sizes.dtype), "with hints")


@pytest.mark.parametrize("use_cp", [False, True])
def test_use_cp(door, sizes, use_cp):
    tokens = Tokens(sizes.dims, (400,), device=door.device, dtype=sizes.dtype)
    run(door, tokens, use_cp=use_cp, may_refuse=True)


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.small
def test_no_initial_state_and_no_final_state(door, sizes):
    tokens = Tokens(sizes.dims, sizes.lengths, device=door.device, dtype=sizes.dtype)
    expected, _ = tokens.reference()
    output = door(gdn_multi.chunk_gated_delta_rule, **tokens.arguments())
    assert isinstance(output, torch.Tensor)
    tokens.check_output(output, expected)


def test_no_initial_state_but_a_final_one(door, sizes):
    tokens = Tokens(sizes.dims, sizes.lengths, device=door.device, dtype=sizes.dtype)
    expected, states = tokens.reference()
    output, final = door(gdn_multi.chunk_gated_delta_rule, **tokens.arguments(output_final_state=True))
    tokens.check_output(output, expected)
    assert final.dtype == F32
    for i, after in enumerate(states):
        tolerances.assert_close(final[i], after[-1], tolerances.prefill_state(sizes.dtype, F32), f"state {i}")


@pytest.mark.parametrize("final", [F32, BF16, F16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("initial", [F32, BF16, F16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_state_dtypes(door, sizes, initial, final):
    tokens = Tokens(sizes.dims, (70, 0, 3), device=door.device, dtype=sizes.dtype)
    states = random_states(3, sizes.dims).to(initial).to(door.device)
    run(door, tokens, initial=states, state_dtype=final)


@pytest.mark.small
def test_half_precision_states(door, sizes):
    tokens = Tokens(sizes.dims, (66, 3), device=door.device, dtype=sizes.dtype)
    states = random_states(2, sizes.dims).to(F16).to(door.device)
    run(door, tokens, initial=states, state_dtype=F16)


@pytest.mark.parametrize("dtype", [BF16, F16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("gate", ["none", "linear"])
def test_stores_round_to_nearest_even_and_float8_saturates(door, sizes, dtype, gate):
    """A state that the recurrence leaves alone (k = 0, alpha = 1) arrives as its own rounding, to the bit."""
    tokens = Tokens(sizes.dims, (70,), device=door.device, dtype=sizes.dtype, gate=gate)
    tokens.k.zero_()
    if gate == "linear":
        tokens.g.fill_(1.0)
    state = random_states(1, sizes.dims)
    flat = state.view(-1)
    flat[:16] = torch.tensor(
        [0.0, -0.0, 449.0, 463.9, 465.0, -1e4, 57345.0, 6.5e4, -6.5e4, 1 / 512, 3 / 1024, 1e-3, 17.0, 18.0, 19.0, 27.0]
    )
    # Ties between neighbours of the dtype, where half away from zero and half to even differ.
    mantissa = {BF16: 7, F16: 10, torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}[dtype]
    steps = torch.arange(64, 64 + 100, dtype=F32) % 2**mantissa
    flat[16:116] = 1 + (steps + 0.5) / 2**mantissa
    if dtype is F16:
        flat.clamp_(-65000, 65000)
    final = torch.full(state.shape, cases.NAN).to(dtype).to(door.device)
    door(
        gdn_multi.chunk_gated_delta_rule,
        **tokens.arguments(initial_state=state.to(door.device), output_final_state=True, output_state=final),
    )
    wanted = cases.saturated(state, dtype)
    different = (cases.bits(final) != cases.bits(wanted)) & (wanted.float().cpu() != 0)  # the sign of a zero is free
    assert not different.any(), (state[different][:5], final.cpu().float()[different][:5])


def test_state_rows_of_a_wider_tensor(door, sizes):
    """States that are slices of something wider: heads and V rows with strides of their own, written in place."""
    dims = sizes.dims
    tokens = Tokens(dims, (70, 10), device=door.device, dtype=sizes.dtype)
    wide = torch.full((2, dims.heads + 2, dims.V + 3, dims.K + 16), cases.NAN, device=door.device)
    states = wide[:, 1:-1, 2 : 2 + dims.V, : dims.K]
    states.copy_(random_states(2, dims))
    initial = states.clone()
    expected, after = tokens.reference(initial)
    marked = torch.isnan(wide)
    output, final = door(
        gdn_multi.chunk_gated_delta_rule,
        **tokens.arguments(initial_state=states, output_state=states, output_final_state=True),
    )
    assert final is states
    tokens.check_output(output, expected)
    assert torch.equal(torch.isnan(wide), marked), "something beside the states was written"
    for i in range(2):
        allowed = tolerances.prefill_state(sizes.dtype, F32)
        tolerances.assert_close(states[i], after[i][-1], allowed, f"final state of sequence {i}")


@pytest.mark.small
def test_in_place_states(door, sizes):
    tokens = Tokens(sizes.dims, (66, 0, 3), device=door.device, dtype=sizes.dtype)
    states = random_states(3, sizes.dims).to(door.device)
    initial = states.clone()
    expected, after = tokens.reference(initial)
    output, final = door(
        gdn_multi.chunk_gated_delta_rule,
        **tokens.arguments(initial_state=states, output_state=states, output_final_state=True),
    )
    assert final is states
    tokens.check_output(output, expected)
    for i in range(3):
        allowed = tolerances.prefill_state(sizes.dtype, F32)
        tolerances.assert_close(states[i], after[i][-1], allowed, f"final state of sequence {i}")
    assert same_bits(states[1], initial[1])
