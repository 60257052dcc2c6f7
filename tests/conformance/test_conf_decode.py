"""Decode on every backend: plain states, pools with rows to read and write, pages; one token and several."""

from __future__ import annotations

from collections.abc import Sequence

import cases
import pytest
import tolerances
import torch
from cases import DecodeStep, Dims, PagedDecode, Pool, bits, index, random_states, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gdn_multi

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def plain(door, step: DecodeStep, *, state_dtype=F32, **more):
    """A call with one state row a sequence, updated in place."""
    state = random_states(step.batch, step.dims).to(state_dtype).to(door.device)
    expected, states = step.reference(state)
    output, returned = door(gdn_multi.gated_delta_rule_decode_pretranspose, **step.arguments(state=state, **more))
    assert returned is state
    step.check_output(output, expected)
    for i in range(step.batch):
        allowed = tolerances.decode_state(state_dtype)
        tolerances.assert_close(state[i], states[i, -1], allowed, f"state of sequence {i}")
    return output, state


class PoolCall:
    """A call on a pool: ``read`` and ``write`` are rows a sequence, negative for padding."""

    def __init__(self, door, step: DecodeStep, rows: int = 12, **pool) -> None:
        self.door, self.step = door, step
        self.pool = Pool(rows, step.dims, pool.pop("pool_dtype", F32), door.device, **pool)
        self.states = random_states(rows, step.dims)

    def run(
        self, read: Sequence[int], write: Sequence[int] | None = None, *, buffer: torch.Tensor | None = None,
        update: bool = True, dtypes=(torch.int32, torch.int32), **more,
    ) -> torch.Tensor:  # fmt: skip
        step, pool, device = self.step, self.pool, self.door.device
        to = list(write) if write is not None else list(read)
        padded = [i for i in range(step.batch) if read[i] < 0 or to[i] < 0]
        live = [i for i in range(step.batch) if i not in padded]
        for i in live:
            pool.set(read[i], self.states[read[i]])
        expected, states = step.reference(pool.rows([read[i] if i in live else -1 for i in range(step.batch)]))
        arguments = step.arguments(initial_state=pool.remember().tensor, state=None, **more)
        arguments["initial_state_indices"] = index(read, dtypes[0], device)
        if write is not None:
            arguments["output_state_indices"] = index(write, dtypes[1], device)
        if buffer is not None:
            arguments["intermediate_states_buffer"] = buffer
            kept = bits(buffer)
        if not update:
            arguments["disable_state_update"] = True
        output, returned = self.door(gdn_multi.gated_delta_rule_decode_pretranspose, **arguments)
        assert returned is pool.tensor
        step.check_output(output, expected, padded)
        written: dict[int, torch.Tensor] = {to[i]: states[i, -1] for i in live} if update else {}
        allowed = tolerances.decode_state(pool.dtype)
        pool.check(written, allowed)
        if buffer is not None:
            for i in live:
                for t in range(step.steps):
                    tolerances.assert_close(
                        buffer[i, t], states[i, t], allowed, f"state of sequence {i} after token {t}"
                    )
            now = bits(buffer)
            assert torch.equal(now[:, step.steps :], kept[:, step.steps :]), "the buffer was written past T"
            for i in padded:
                assert torch.equal(now[i], kept[i]), f"the buffer of padded sequence {i} was written"
        return output


# --- one token ------------------------------------------------------------------------------------


@pytest.mark.small
@pytest.mark.parametrize("l2norm", [True, False])
def test_one_token(door, sizes, l2norm):
    plain(door, DecodeStep(sizes.dims, 3, device=door.device, dtype=sizes.dtype, l2norm=l2norm))


@pytest.mark.parametrize("heads", [(1, 1, 1), (4, 4, 4), (2, 2, 4), (1, 1, 8), (2, 2, 16)])
def test_head_groups(door, sizes, heads):
    dims = Dims(*heads, sizes.dims.K, sizes.dims.V)
    plain(door, DecodeStep(dims, 3, device=door.device, dtype=sizes.dtype))


@pytest.mark.parametrize("K,V", [(64, 64), (128, 128), (256, 256), (64, 128), (128, 64), (256, 64), (64, 256)])
def test_head_sizes(door, sizes, K, V):
    plain(door, DecodeStep(Dims(1, 1, 2, K, V), 2, device=door.device, dtype=sizes.dtype))


@pytest.mark.parametrize("state_dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_dtypes(door, sizes, dtype, state_dtype):
    plain(door, DecodeStep(sizes.dims, 3, device=door.device, dtype=dtype), state_dtype=state_dtype)


@pytest.mark.parametrize("gate_dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("parameter_dtype", [F32, BF16, F16], ids=str)
def test_gate_dtypes(door, sizes, gate_dtype, parameter_dtype):
    """a, b, A_log and dt_bias have dtypes of their own."""
    step = DecodeStep(
        sizes.dims, 3, device=door.device, dtype=sizes.dtype, gate_dtype=gate_dtype, parameter_dtype=parameter_dtype
    )
    plain(door, step)


@pytest.mark.parametrize("batch", [1, 2, 7, 33, 130])
def test_batch_sizes(door, sizes, batch):
    plain(door, DecodeStep(sizes.dims, batch, device=door.device, dtype=sizes.dtype))


@pytest.mark.small
def test_slices_of_a_fused_projection(door, sizes):
    plain(door, DecodeStep(sizes.dims, 3, device=door.device, dtype=sizes.dtype, fused=True))


@pytest.mark.parametrize("scale", [1.0, 0.25, 2])
def test_scale(door, sizes, scale):
    plain(door, DecodeStep(sizes.dims, 2, device=door.device, dtype=sizes.dtype, scale=scale))


def test_gates_far_out(door, sizes):
    """softplus must neither overflow nor vanish; sigmoid neither."""
    step = DecodeStep(sizes.dims, 5, device=door.device, dtype=sizes.dtype, gate_dtype=F32)
    for i, value in enumerate((100.0, -100.0, 30.0, -30.0, 0.0)):
        step.a[i], step.b[i] = value, -value
    plain(door, step)


def test_zero_query_and_key(door, sizes):
    step = DecodeStep(sizes.dims, 2, device=door.device, dtype=sizes.dtype)
    step.q[0], step.k[1] = 0, 0
    state = random_states(2, sizes.dims).to(door.device)
    expected, states = step.reference(state)
    output, _ = door(gdn_multi.gated_delta_rule_decode_pretranspose, **step.arguments(state=state))
    assert not output[0].any()
    tolerances.assert_close(output[1], expected[1], tolerances.decode_output(sizes.dtype), "output")
    tolerances.assert_close(state, states[:, -1], tolerances.decode_state(F32), "states")


def test_output_given(door, sizes):
    step = DecodeStep(sizes.dims, 3, device=door.device, dtype=sizes.dtype)
    given_output = step.new_output()
    output, _ = plain(door, step, output=given_output)
    assert output is given_output


def test_an_output_with_strides(door, sizes):
    step = DecodeStep(sizes.dims, 3, 2, device=door.device, dtype=sizes.dtype)
    dims = sizes.dims
    wide = torch.full((3, 2, dims.heads + 1, dims.V + 8), cases.NAN, dtype=sizes.dtype, device=door.device)
    view = wide[:, :, : dims.heads, : dims.V]
    output, _ = plain(door, step, output=view)
    assert output is view
    assert torch.isnan(wide[..., dims.V :]).all() and torch.isnan(wide[:, :, dims.heads :]).all()


@pytest.mark.parametrize("state_dtype", [BF16, F16], ids=str)
def test_stores_round_to_nearest_even(door, sizes, state_dtype):
    """alpha = 1 and k = 0 leave the state alone, so it comes back as it was, to the bit."""
    step = DecodeStep(sizes.dims, 3, device=door.device, dtype=sizes.dtype)
    step.A_log.fill_(-100.0)  # exp(A_log) is 0 or next to it, alpha rounds to 1
    step.k.zero_()
    state = random_states(3, sizes.dims).to(state_dtype).to(door.device)
    before = state.clone()
    door(gdn_multi.gated_delta_rule_decode_pretranspose, **step.arguments(state=state))
    assert same_bits(state, before)


@pytest.mark.small
@pytest.mark.parametrize("steps", [1, 2])
def test_an_empty_batch_changes_nothing(door, sizes, steps):
    dims, device = sizes.dims, door.device
    pool = random_states(4, dims).to(device)
    before, none, zero = bits(pool), index([], torch.int32, device), index([0], torch.int32, device)
    for _ in range(2):  # the second is a call like an earlier one
        step = DecodeStep(dims, 0, steps, device=device, dtype=sizes.dtype)
        own = step.arguments(state=None, initial_state=pool, initial_state_indices=none)
        output, _ = door(gdn_multi.gated_delta_rule_decode_pretranspose, **own)
        step.check_output(output, output)
        output, state = door(gdn_multi.gated_delta_rule_decode_pretranspose, **step.arguments(state=pool[:0]))
        step.check_output(output, output)
        assert state.shape[0] == 0
        if steps == 1:
            table = dict(page_indices=none, page_indptr=zero, last_page_len=none)
            slots = door.page_slots(gdn_multi.gdn_paged_decode_slots, **table)
            assert [x.shape for x in slots] == [(0,), (0,)]
            for more in ({}, dict(slots=slots)):
                output = door(gdn_multi.gated_delta_rule_decode_paged, **step.arguments(state_pool=pool, **table, **more))
                step.check_output(output, output)
    assert torch.equal(bits(pool), before)


# --- pools ----------------------------------------------------------------------------------------


@pytest.mark.small
def test_pool_in_place(door, sizes):
    PoolCall(door, DecodeStep(sizes.dims, 3, device=door.device, dtype=sizes.dtype), rows=6).run([4, 0, 5])


@pytest.mark.small
def test_pool_with_other_rows_to_write(door, sizes):
    step = DecodeStep(sizes.dims, 3, device=door.device, dtype=sizes.dtype)
    PoolCall(door, step, rows=7).run([4, 0, 5], [1, 0, 3])


@pytest.mark.small
def test_negative_rows_are_padding(door, sizes):
    """Rule 2: zero output, no row touched, whichever of the two is negative."""
    step = DecodeStep(sizes.dims, 4, device=door.device, dtype=sizes.dtype)
    PoolCall(door, step, rows=7).run([4, -1, 5, -1], [1, 2, -1, -1])


def test_negative_rows_in_place(door, sizes):
    step = DecodeStep(sizes.dims, 4, device=door.device, dtype=sizes.dtype)
    PoolCall(door, step, rows=7).run([-1, 4, -7, 0])


@pytest.mark.parametrize("pool_dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("padding", [0, 3, 64])
def test_pool_dtypes_and_padded_rows(door, sizes, pool_dtype, padding):
    step = DecodeStep(sizes.dims, 3, device=door.device, dtype=sizes.dtype)
    PoolCall(door, step, pool_dtype=pool_dtype, padding=padding).run([4, -1, 5], [11, 2, 0])


@pytest.mark.parametrize("write_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("read_dtype", [torch.int32, torch.int64], ids=str)
def test_index_dtypes(door, sizes, read_dtype, write_dtype):
    step = DecodeStep(sizes.dims, 4, device=door.device, dtype=sizes.dtype)
    PoolCall(door, step).run([4, 2, 5, -1], [11, 2, 0, 3], dtypes=(read_dtype, write_dtype))


def test_padded_sequences_of_poison(door, sizes):
    """A padded sequence's tokens may hold anything."""
    step = DecodeStep(sizes.dims, 3, device=door.device, dtype=sizes.dtype)
    for x in (step.q, step.k, step.v, step.a, step.b):
        x[1] = cases.NAN
    PoolCall(door, step).run([4, -1, 5])


def test_a_pool_that_is_a_slice(door, sizes):
    """Head and row strides of their own: the pool is updated in place, not a copy of it."""
    dims, device = sizes.dims, door.device
    step = DecodeStep(dims, 2, device=device, dtype=sizes.dtype)
    wide = torch.full((5, dims.heads + 2, dims.V + 3, dims.K + 16), cases.NAN, device=device)
    pool = wide[:, 1:-1, 2 : 2 + dims.V, : dims.K]
    pool[3], pool[1] = random_states(2, dims).to(device)
    marked = torch.isnan(wide)
    expected, states = step.reference(torch.stack([pool[3], pool[1]]))
    output, returned = door(
        gdn_multi.gated_delta_rule_decode_pretranspose,
        **step.arguments(state=None, initial_state=pool, initial_state_indices=index([3, 1], torch.int32, device)),
    )
    assert returned is pool
    step.check_output(output, expected)
    assert torch.equal(torch.isnan(wide), marked), "something beside the rows was written"
    tolerances.assert_close(pool[3], states[0, -1], tolerances.decode_state(F32), "row 3")
    tolerances.assert_close(pool[1], states[1, -1], tolerances.decode_state(F32), "row 1")


@pytest.mark.small
@pytest.mark.parametrize("steps", [1, 2])
def test_plain_states_that_are_a_slice(door, sizes, steps):
    """Kind 8: one row a sequence, in a wider tensor; updated in place too, with a buffer that is a slice as well."""
    dims, device = sizes.dims, door.device
    step = DecodeStep(dims, 2, steps, device=device, dtype=sizes.dtype)
    wide = torch.full((4, dims.heads + 1, dims.V + 3, dims.K + 16), cases.NAN, device=device)
    state = wide[1::2, 1:, 2 : 2 + dims.V, : dims.K]
    state.copy_(random_states(2, dims))
    buffer = torch.full((2, steps + 1, *wide.shape[1:]), cases.NAN, device=device)
    expected, states = step.reference(state)
    marked = torch.isnan(wide)
    output, returned = door(
        gdn_multi.gated_delta_rule_decode_pretranspose,
        **step.arguments(state=state, intermediate_states_buffer=buffer[:, :, 1:, 2 : 2 + dims.V, : dims.K]),
    )
    assert returned is state
    step.check_output(output, expected)
    assert torch.equal(torch.isnan(wide), marked), "something beside the states was written"
    allowed = tolerances.decode_state(F32)
    tolerances.assert_close(state, states[:, -1], allowed, "states")
    kept = buffer[:, :steps, 1:, 2 : 2 + dims.V, : dims.K]
    tolerances.assert_close(kept, states, allowed, "intermediate states")
    assert torch.isfinite(buffer).sum() == kept.numel(), "something beside the intermediate states was written"


# --- several tokens -------------------------------------------------------------------------------


@pytest.mark.small
def test_several_tokens(door, sizes):
    plain(door, DecodeStep(sizes.dims, 2, 3, device=door.device, dtype=sizes.dtype))


@pytest.mark.parametrize("steps", [2, 3, 4, 8])
@pytest.mark.parametrize("pool_dtype", [F32, BF16, F16], ids=str)
def test_several_tokens_with_intermediate_states(door, sizes, steps, pool_dtype):
    step = DecodeStep(sizes.dims, 4, steps, device=door.device, dtype=sizes.dtype)
    shape = (4, steps, sizes.dims.heads, sizes.dims.V, sizes.dims.K)
    buffer = torch.full(shape, cases.NAN, dtype=pool_dtype, device=door.device)
    PoolCall(door, step, pool_dtype=pool_dtype).run([4, -1, 5, 0], [11, 2, 5, -1], buffer=buffer)


@pytest.mark.small
@pytest.mark.parametrize("steps", [1, 2])
def test_disable_state_update(door, sizes, steps):
    """The pool is only read; the states after each token go to the buffer."""
    step = DecodeStep(sizes.dims, 2, steps, device=door.device, dtype=sizes.dtype)
    shape = (2, steps, sizes.dims.heads, sizes.dims.V, sizes.dims.K)
    buffer = torch.full(shape, cases.NAN, device=door.device)
    PoolCall(door, step, rows=6).run([4, 5], buffer=buffer, update=False)


def test_disable_state_update_without_a_buffer(door, sizes):
    step = DecodeStep(sizes.dims, 3, 4, device=door.device, dtype=sizes.dtype)
    PoolCall(door, step).run([4, -1, 5], update=False)


def test_a_buffer_for_more_tokens(door, sizes):
    step = DecodeStep(sizes.dims, 2, 3, device=door.device, dtype=sizes.dtype)
    shape = (2, 5, sizes.dims.heads, sizes.dims.V, sizes.dims.K)
    buffer = torch.full(shape, cases.NAN, device=door.device)
    PoolCall(door, step).run([4, 5], buffer=buffer)


def test_several_tokens_are_several_calls(door, sizes):
    """T = 4 gives what four calls of T = 1 give, with a float32 state."""
    step = DecodeStep(sizes.dims, 3, 4, device=door.device, dtype=sizes.dtype)
    together, state = plain(door, step)
    one_by_one = random_states(3, sizes.dims).to(door.device)
    for t in range(4):
        part = step.arguments(state=one_by_one)
        for name in ("q", "k", "v", "a", "b"):
            part[name] = part[name][:, t : t + 1]
        output, _ = door(gdn_multi.gated_delta_rule_decode_pretranspose, **part)
        tolerances.assert_close(output[:, 0], together[:, t], tolerances.decode_output(sizes.dtype), f"token {t}")
    tolerances.assert_close(one_by_one, state, 2e-6, "states")


# --- pages ----------------------------------------------------------------------------------------


def pages(door, size=64) -> PagedDecode:
    """A page opened, continued, filled; two tokens in all; a scratch page of a padded sequence."""
    batch = PagedDecode(door.sizes.dims, size)
    for total in (size + 1, size + 2, 2 * size, 2, 3 * size + 1, 2 * size - 1):
        batch.add(total)
    return batch


def slots_of(batch: PagedDecode) -> gdn_multi.GDNPagedDecodeSlots:
    device = batch.pool.tensor.device
    return gdn_multi.GDNPagedDecodeSlots(
        index(batch.read, torch.int32, device), index(batch.write, torch.int32, device)
    )


@pytest.mark.small
@pytest.mark.parametrize("slots", [False, True], ids=["table", "slots"])
def test_small_paged_decode(door, sizes, slots):
    batch = PagedDecode(sizes.dims, 64).add(65).add(2).build(door.device, dtype=sizes.dtype)
    batch.run(door, **({"slots": slots_of(batch)} if slots else {}))


@pytest.mark.parametrize("slots", [False, True], ids=["table", "slots"])
@pytest.mark.parametrize("padding", [0, 3, 64])
@pytest.mark.parametrize("pool_dtype", [F32, BF16, F16], ids=str)
def test_paged_decode(door, pool_dtype, padding, slots):
    """The full pages of a prefix are poison here: they are neither read nor written."""
    batch = pages(door).build(door.device, dtype=door.sizes.dtype, pool_dtype=pool_dtype, padding=padding)
    batch.run(door, **({"slots": slots_of(batch)} if slots else {}))


@pytest.mark.parametrize("others", [torch.int32, torch.int64], ids=["others int32", "others int64"])
@pytest.mark.parametrize("odd", ["page_indices", "page_indptr", "last_page_len"])
def test_each_index_dtype_apart(door, odd, others):
    batch = pages(door).build(door.device, dtype=door.sizes.dtype, index_dtype=others)
    setattr(batch, odd, getattr(batch, odd).to(torch.int64 if others == torch.int32 else torch.int32))
    batch.run(door)


def test_paged_output(door):
    batch = pages(door).build(door.device, dtype=door.sizes.dtype)
    output = batch.step.new_output()
    assert batch.run(door, output=output) is output


def test_slots_give_the_bits_of_the_page_table(door):
    results = []
    for with_slots in (False, True):
        batch = pages(door).build(door.device, dtype=door.sizes.dtype)
        results.append((batch.run(door, **({"slots": slots_of(batch)} if with_slots else {})), batch.pool.storage))
    assert same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])


@settings(
    max_examples=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(totals=st.lists(st.integers(2, 400), min_size=1, max_size=9), size=st.sampled_from([64, 128, 192]))
def test_drawn_page_tables(door, totals, size):
    batch = PagedDecode(door.sizes.dims, size)
    for total in totals:
        batch.add(total)
    batch.build(door.device, dtype=door.sizes.dtype, seed=len(totals)).run(door)


def test_a_sequence_decoded_over_a_page_boundary(door):
    """Prefill 60 tokens, decode 10: the state of the first page stays as it was after token 64."""
    dims, device, size = door.sizes.dims, door.device, 64
    if dims.q != dims.k:
        pytest.skip("decode has as many q as k heads")
    pool = Pool(4, dims, F32, device)
    start = random_states(1, dims)
    pool.set(2, start[0])
    state = pool.rows([2])
    step = DecodeStep(dims, 1, 10, device=device, dtype=door.sizes.dtype)
    expected, states = step.reference(state)
    pool.remember()
    for t in range(10):
        total = 61 + t
        owned = [2, 0][: -(-total // size)]
        part = step.arguments()
        for name in ("q", "k", "v", "a", "b"):
            part[name] = part[name][:, t : t + 1]
        output = door(
            gdn_multi.gated_delta_rule_decode_paged, **part, state_pool=pool.tensor,
            page_indices=index(owned, torch.int32, device), page_indptr=index([0, len(owned)], torch.int32, device),
            last_page_len=index([total - (len(owned) - 1) * size], torch.int32, device),
        )  # fmt: skip
        tolerances.assert_close(output[:, 0], expected[:, t], tolerances.decode_output(door.sizes.dtype), f"token {t}")
    pool.check({2: states[0, 3], 0: states[0, 9]}, tolerances.decode_state(F32))
