"""One test or more for each kind of fault that users of GDN kernels have met, by the kind's number and name.

Each fails when the fault is put back. Where another file tests the kind more widely, the docstring says so.
"""

from __future__ import annotations

import cases
import pytest
import tolerances
import torch
from cases import DecodeStep, Dims, PagedBatch, PagedDecode, Pool, Tokens, bits, index, random_states, same_bits

import gdn_multi

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


# Kind 1, 32-bit offsets: test_conf_rules.py, the tests of rule 6.


# --- kind 2 ---------------------------------------------------------------------------------------


@pytest.mark.small
def test_kind_2_k_major_for_v_major(door, sizes):
    """Kind 2, K-major for V-major: one state entry at (V row 3, K column 5), alpha 1, and queries that pick a column.

    Loading, storing and checkpointing are looked at one by one; a transposed state would show entry (5, 3).
    """
    dims = sizes.dims
    tokens = Tokens(dims, (65,), device=door.device, dtype=sizes.dtype, gate="none", scale=1.0)
    tokens.k.zero_()  # nothing is added, nothing decays: the state stays what it was
    tokens.q.zero_()
    tokens.q[..., 5] = 1
    pool = Pool(3, dims, F32, door.device)
    state = torch.zeros(dims.heads, dims.V, dims.K)
    state[:, 3, 5] = 0.5
    pool.set(0, state)
    output, _ = door(
        gdn_multi.chunk_gated_delta_rule,
        **tokens.arguments(
            initial_state=pool.tensor, output_state=pool.tensor, state_checkpoints=pool.tensor, output_final_state=True,
            state_indices=index([0], torch.int32, door.device),
            output_state_indices=index([1], torch.int32, door.device),
            checkpoint_every_n_tokens=64, checkpoint_state_indices=index([2], torch.int32, door.device),
            checkpoint_cu_starts=index([0, 1], torch.int32, door.device),
        ),
    )  # fmt: skip
    wanted = torch.zeros(65, dims.heads, dims.V)
    wanted[:, :, 3] = 0.5
    assert torch.equal(output.float().cpu(), wanted), "the state was loaded transposed"
    assert torch.equal(pool.tensor[1].cpu(), state), "the final state was stored transposed"
    assert torch.equal(pool.tensor[2].cpu(), state), "the checkpoint was stored transposed"


@pytest.mark.small
def test_kind_2_k_major_for_v_major_in_decode(door, sizes):
    """Kind 2, K-major for V-major, decode: the state is only read and written back."""
    dims = sizes.dims
    step = DecodeStep(dims, 1, device=door.device, dtype=sizes.dtype, l2norm=False, scale=1.0)
    step.A_log.fill_(-100.0)  # alpha = 1
    step.k.zero_()
    step.q.zero_()
    step.q[..., 5] = 1
    state = torch.zeros(1, dims.heads, dims.V, dims.K, device=door.device)
    state[:, :, 3, 5] = 0.5
    before = state.clone()
    output, _ = door(gdn_multi.gated_delta_rule_decode_pretranspose, **step.arguments(state=state))
    wanted = torch.zeros(1, 1, dims.heads, dims.V)
    wanted[..., 3] = 0.5
    assert torch.equal(output.float().cpu(), wanted), "the state was loaded transposed"
    assert torch.equal(state, before), "the state was stored transposed"


# --- kind 3 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("past", [1, 2, 5, 17])
def test_kind_3_nan_from_memory_that_nothing_wrote(door, past):
    """Kind 3: a prompt that ends a few tokens past a block boundary, in poison; then the next prefix hit on its page.

    The tokens after its end are NaN, so is every row of the pool beforehand, so is the given output.
    """
    dims, size = door.sizes.dims, 64
    first = PagedBatch(dims, size).add(prefix=0, new=size + past)
    first.build(door.device, dtype=door.sizes.dtype, after=130, gate="raw", beta="logit", l2norm=True)
    first.run(door, output=first.tokens.new_output())
    pages = first.sequences[0].pages
    assert torch.isfinite(first.pool.tensor[pages]).all()

    second = PagedBatch(dims, size).add(prefix=size, new=past)
    second.build(door.device, dtype=door.sizes.dtype, after=130, seed=2)
    hit = second.sequences[0].pages[0]
    second.pool.tensor[hit].copy_(first.pool.tensor[pages[0]])
    assert torch.isfinite(second.run(door)[:past].float()).all()


@pytest.mark.small
def test_kind_3_poison_right_after_the_last_token(door, sizes):
    """Kind 3, small: NaN and infinity right before the first and right after the last token of a partial chunk."""
    tokens = Tokens(
        sizes.dims, (5,), device=door.device, dtype=sizes.dtype, before=3, after=70, gate="raw", beta="logit"
    )
    expected, states = tokens.reference()
    output, final = door(gdn_multi.chunk_gated_delta_rule, **tokens.arguments(output_final_state=True))
    tokens.check_output(output, expected)
    tolerances.assert_close(final[0], states[0][-1], tolerances.prefill_state(sizes.dtype, F32), "final state")


@pytest.mark.parametrize("alignment", [1, 30, 63])
def test_kind_3_the_left_padding_of_an_unaligned_prefix(door, alignment):
    """Kind 3 on the other side: a prefix inside a chunk, whose left neighbours in memory are NaN."""
    batch = PagedBatch(door.sizes.dims).add(prefix=alignment, new=40).add(prefix=64 + alignment, new=90)
    batch.build(door.device, dtype=door.sizes.dtype, before=70, after=70, gate="log", fused=True)
    batch.run(door)


# --- kind 4 ---------------------------------------------------------------------------------------


@pytest.mark.small
def test_kind_4_a_page_cached_before_it_was_complete(door, sizes):
    """Kind 4: 118 of 128 tokens are not a complete second page; the ten that follow complete it.

    After the first call page 0 holds the state after exactly 64 tokens and page 1 that after 118; after the second call
    page 1 holds the state after exactly 128, page 2 that after 130, and page 0 has not moved.
    """
    dims, device = sizes.dims, door.device
    prompt = Tokens(dims, (130,), device=device, dtype=sizes.dtype)
    _, states = prompt.reference()
    states, pages, pool = states[0], [4, 0, 2], Pool(5, dims, F32, device)
    allowed = tolerances.prefill_state(sizes.dtype, F32)
    for start, end, wanted in ((0, 118, {4: states[64], 0: states[118]}), (118, 130, {0: states[128], 2: states[130]})):
        owned = -(-end // 64)
        pool.remember()
        door(
            gdn_multi.chunk_gated_delta_rule_paged,
            **{n: getattr(prompt, n)[start:end] for n in ("q", "k", "v", "g", "beta")},
            cu_seqlens=index([0, end - start], torch.int32, device), state_pool=pool.tensor,
            page_indices=index(pages[:owned], torch.int32, device), page_indptr=index([0, owned], torch.int32, device),
            page_size=64, last_page_len=index([end - (owned - 1) * 64], torch.int32, device),
        )  # fmt: skip
        pool.check(wanted, allowed)
    # Ten tokens more or fewer are far outside the tolerance, so the comparison above can tell.
    assert tolerances.relative_error(states[118], states[128]) > 10 * allowed


def test_kind_4_the_last_token_of_a_page_counts(door):
    """Kind 4 at the boundary itself: one token before it, on it, one after it."""
    for new in (63, 64, 65):
        batch = PagedBatch(door.sizes.dims).add(prefix=0, new=new).add(prefix=64, new=new)
        batch.build(door.device, dtype=door.sizes.dtype, seed=new).run(door)


# --- kind 5 ---------------------------------------------------------------------------------------


def test_kind_5_turning_the_cache_on_changes_the_answers(door, monkeypatch):
    """Kind 5: chunk boundaries lie at absolute positions, so a prompt split anywhere meets them again.

    Split at token 70, the part from 128 on is computed from the same states in the same chunks. With a float32 pool,
    only what the split itself touches may differ, and by rounding alone; aligned restarts are bit-equal (rule 8).
    """
    monkeypatch.setenv("GDN_MULTI_BATCH_INVARIANT", "1")
    dims, device = door.sizes.dims, door.device
    prompt = Tokens(dims, (256,), device=device, dtype=door.sizes.dtype)
    expected, states = prompt.reference()

    def serve(cuts):
        pool, outputs = Pool(4, dims, F32, device), []
        for start, end in zip((0, *cuts), (*cuts, 256)):
            owned = -(-end // 64)
            outputs.append(
                door(
                    gdn_multi.chunk_gated_delta_rule_paged,
                    **{n: getattr(prompt, n)[start:end] for n in ("q", "k", "v", "g", "beta")},
                    cu_seqlens=index([0, end - start], torch.int32, device), state_pool=pool.tensor,
                    page_indices=index(range(owned), torch.int32, device),
                    page_indptr=index([0, owned], torch.int32, device),
                    page_size=64, last_page_len=index([end - (owned - 1) * 64], torch.int32, device),
                )
            )  # fmt: skip
        return torch.cat(outputs), pool.tensor

    uncached, pages = serve(())
    aligned, aligned_pages = serve((64, 192))
    assert same_bits(aligned, uncached) and same_bits(aligned_pages, pages)
    for cuts in ((70,), (1, 65, 130, 255), (63,)):
        cached, cached_pages = serve(cuts)
        tolerances.assert_close(cached, expected, tolerances.prefill_output(prompt.dtype), f"output, cuts {cuts}")
        for j in range(4):
            allowed = tolerances.prefill_state(prompt.dtype, F32)
            tolerances.assert_close(cached_pages[j], states[0][64 * (j + 1)], allowed, f"page {j}, cuts {cuts}")


@pytest.mark.small
@pytest.mark.parametrize("page_size", [64, 128])
def test_kind_5_chunks_lie_at_absolute_positions(door, sizes, monkeypatch, page_size):
    """Kind 5 behind an unaligned prefix: computed on from token 70 at once, or to a page boundary and on from there.

    The same bits, which chunks counted from the start of the call would not give.
    """
    monkeypatch.setenv("GDN_MULTI_BATCH_INVARIANT", "1")
    dims, device = sizes.dims, door.device
    end = page_size + (10 if door.small else 200)
    prompt = Tokens(dims, (end,), device=device, dtype=sizes.dtype)
    cached = random_states(1, dims)[0]  # what stands for the first 70 tokens
    count = -(-end // page_size)
    start = 30 if page_size == 64 else 70

    def serve(bounds):
        pool = Pool(count, dims, F32, device)
        pool.set(0, cached)
        outputs = []
        for first, last in zip(bounds, bounds[1:]):
            owned = -(-last // page_size)
            outputs.append(
                door(
                    gdn_multi.chunk_gated_delta_rule_paged,
                    **{n: getattr(prompt, n)[first:last] for n in ("q", "k", "v", "g", "beta")},
                    cu_seqlens=index([0, last - first], torch.int32, device), state_pool=pool.tensor,
                    page_indices=index(range(owned), torch.int32, device),
                    page_indptr=index([0, owned], torch.int32, device), page_size=page_size,
                    last_page_len=index([last - (owned - 1) * page_size], torch.int32, device),
                )
            )  # fmt: skip
        return torch.cat(outputs), pool.tensor

    at_once, pages = serve((start, end))
    in_two, in_two_pages = serve((start, page_size, end))
    assert same_bits(at_once, in_two)
    assert same_bits(pages, in_two_pages)


# --- kind 6 ---------------------------------------------------------------------------------------


@pytest.mark.small
def test_kind_6_padding_that_writes(door, sizes):
    """Kind 6: padding of decode by -1 leaves row 0 (and every other) as it is, finite or not."""
    step = DecodeStep(sizes.dims, 4, device=door.device, dtype=sizes.dtype)
    pool = random_states(4, sizes.dims).to(door.device)
    before = bits(pool)
    rows = index([2, -1, -1, -1], torch.int32, door.device)
    output, _ = door(
        gdn_multi.gated_delta_rule_decode_pretranspose,
        **step.arguments(state=None, initial_state=pool, initial_state_indices=rows),
    )
    changed = (bits(pool) != before).flatten(1).any(1).tolist()
    assert changed == [False, False, True, False]
    assert not output[1:].any()


def test_kind_6_padded_pages_that_write(door):
    """Kind 6, paged: padded sequences have a scratch page each; no other page changes, nor does a prefill's own."""
    batch = PagedBatch(door.sizes.dims).add(prefix=70, new=9).add().add().add()
    batch.build(door.device, dtype=door.sizes.dtype).run(door)
    decode = PagedDecode(door.sizes.dims).add(100).add(2).add(2).build(door.device, dtype=door.sizes.dtype)
    decode.run(door)


# --- kind 7 ---------------------------------------------------------------------------------------


@pytest.mark.small
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_kind_7_index_dtypes(door, sizes, dtype):
    """Kind 7: read at the wrong width, every other entry would be 0, or two entries one. All pairs: other files."""
    step = DecodeStep(sizes.dims, 4, device=door.device, dtype=sizes.dtype)
    pool = random_states(9, sizes.dims).to(door.device)
    read, write = [5, 3, 7, 1], [2, 6, 4, 8]
    before = pool.clone()
    expected, states = step.reference(pool[read])
    output, _ = door(
        gdn_multi.gated_delta_rule_decode_pretranspose,
        **step.arguments(
            state=None, initial_state=pool, initial_state_indices=index(read, dtype, door.device),
            output_state_indices=index(write, dtype, door.device),
        ),
    )  # fmt: skip
    step.check_output(output, expected)
    tolerances.assert_close(pool[write], states[:, -1], tolerances.decode_state(F32), "rows written")
    assert same_bits(pool[[0, *read]], before[[0, *read]])


def test_kind_7_non_contiguous_indices(door, sizes):
    """Kind 7: an index tensor with a stride is refused rather than read with stride 1."""
    step = DecodeStep(sizes.dims, 3, device=door.device, dtype=sizes.dtype)
    pool = random_states(9, sizes.dims).to(door.device)
    rows = index([5, 0, 3, 0, 7, 0], torch.int32, door.device)[::2]
    before = bits(pool)
    with pytest.raises(ValueError, match="initial_state_indices.*contiguous"):
        gdn_multi.gated_delta_rule_decode_pretranspose(
            **step.arguments(state=None, initial_state=pool, initial_state_indices=rows, backend=door.name)
        )
    assert torch.equal(bits(pool), before)


# --- kind 8 ---------------------------------------------------------------------------------------


@pytest.mark.small
def test_kind_8_inputs_converted_and_lost(door, sizes):
    """Kind 8: every second row of a larger pool is a pool too; it is updated in place, not a copy of it."""
    dims = sizes.dims
    tokens = Tokens(dims, (66,), device=door.device, dtype=sizes.dtype)
    large = random_states(8, dims).to(door.device)
    pool, before = large[1::2], bits(large)
    expected, states = tokens.reference(pool[2:3])
    rows = index([2], torch.int32, door.device)
    output, returned = door(
        gdn_multi.chunk_gated_delta_rule,
        **tokens.arguments(initial_state=pool, output_state=pool, output_final_state=True, state_indices=rows),
    )
    assert returned is pool
    tokens.check_output(output, expected)
    tolerances.assert_close(large[5], states[0][-1], tolerances.prefill_state(sizes.dtype, F32), "row 2, large row 5")
    assert (bits(large) != before).flatten(1).any(1).tolist() == [i == 5 for i in range(8)]


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_kind_8_fp16_read_as_bf16(door, sizes, dtype):
    """Kind 8: both dtypes have two bytes; every input is scaled so that a mistaken dtype is off by orders."""
    tokens = Tokens(sizes.dims, (66,), device=door.device, dtype=dtype)
    expected, _ = tokens.reference()
    tokens.check_output(door(gdn_multi.chunk_gated_delta_rule, **tokens.arguments()), expected)
    state = random_states(2, sizes.dims).to(dtype).to(door.device)
    step = DecodeStep(sizes.dims, 2, device=door.device, dtype=dtype)
    expected, states = step.reference(state)
    output, _ = door(gdn_multi.gated_delta_rule_decode_pretranspose, **step.arguments(state=state))
    step.check_output(output, expected)
    tolerances.assert_close(state, states[:, -1], tolerances.decode_state(dtype), "states")


# --- kind 9 ---------------------------------------------------------------------------------------


@pytest.mark.small
def test_kind_9_a_shared_default_buffer(door, sizes):
    """Kind 9: two calls without ``output`` (and without an output state) get memory of their own."""
    tokens = [Tokens(sizes.dims, (5,), device=door.device, dtype=sizes.dtype, seed=s) for s in (1, 2)]
    first = door(gdn_multi.chunk_gated_delta_rule, **tokens[0].arguments(output_final_state=True))
    kept = [bits(x) for x in first]
    second = door(gdn_multi.chunk_gated_delta_rule, **tokens[1].arguments(output_final_state=True))
    for x, y, before in zip(first, second, kept):
        assert x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()
        assert torch.equal(bits(x), before)
    steps = [DecodeStep(sizes.dims, 2, device=door.device, dtype=sizes.dtype, seed=s) for s in (1, 2)]
    states = random_states(2, sizes.dims).to(door.device)
    first_output, _ = door(gdn_multi.gated_delta_rule_decode_pretranspose, **steps[0].arguments(state=states.clone()))
    before = bits(first_output)
    second_output, _ = door(gdn_multi.gated_delta_rule_decode_pretranspose, **steps[1].arguments(state=states.clone()))
    assert first_output.untyped_storage().data_ptr() != second_output.untyped_storage().data_ptr()
    assert torch.equal(bits(first_output), before)


# --- kind 10 --------------------------------------------------------------------------------------


def test_kind_10_compile_caches_keyed_too_narrowly(door, sizes):
    """Kind 10: the same shapes with another dtype, head count, gate or stride each, one right after the other.

    Each call is made twice, in an order in which every neighbour differs in one thing; a cached kernel of the wrong
    kind gives wrong values at once.
    """
    K, V = sizes.dims.K, sizes.dims.V
    dtypes = [F16, BF16] if door.name != "torch" else [F16, BF16, F32]
    calls = []
    for dtype in dtypes:
        for heads in ((2, 2, 4), (1, 1, 4), (4, 4, 4), (4, 2, 2)):
            calls.append(dict(dims=Dims(*heads, K, V), dtype=dtype))
    for gate, beta in (
        ("none", "none"),
        ("linear", "none"),
        ("log", "plain"),
        ("raw", "logit"),
        ("raw_half", "logit_half"),
    ):
        for l2norm in (False, True):
            calls.append(dict(dims=sizes.dims, dtype=dtypes[0], gate=gate, beta=beta, l2norm=l2norm))
    calls.append(dict(dims=sizes.dims, dtype=dtypes[0], fused=True))
    for again in range(2):
        for options in calls:
            options = dict(options)
            tokens = Tokens(options.pop("dims"), (65,), device=door.device, seed=again, **options)
            for state_dtype in (F32, BF16, F16):
                state = random_states(1, tokens.dims).to(state_dtype).to(door.device)
                expected, states = tokens.reference(state)
                output, _ = door(
                    gdn_multi.chunk_gated_delta_rule,
                    **tokens.arguments(initial_state=state, output_state=state, output_final_state=True),
                )
                tokens.check_output(output, expected)
                allowed = tolerances.prefill_state(tokens.dtype, state_dtype)
                tolerances.assert_close(state[0], states[0][-1], allowed, f"{options} with a {state_dtype} state")


def test_kind_10_compile_caches_of_decode(door, sizes):
    """Kind 10, decode: dtypes of inputs, gates, parameters and states, heads, T and the norm, in turn."""
    K, V = sizes.dims.K, sizes.dims.V
    dtypes = [F16, BF16] if door.name != "torch" else [F16, BF16, F32]
    calls = [
        dict(dims=Dims(*heads, K, V), dtype=dtype, steps=steps, l2norm=l2norm, gate_dtype=gate_dtype)
        for dtype in dtypes
        for heads in ((2, 2, 4), (1, 1, 4), (4, 4, 4))
        for steps, l2norm, gate_dtype in ((1, True, dtype), (1, False, F32), (2, True, dtype))
    ]
    for options in calls + calls[::-1]:
        options = dict(options)
        step = DecodeStep(options.pop("dims"), 2, options.pop("steps"), device=door.device, **options)
        for state_dtype in (F32, BF16, F16):
            state = random_states(2, step.dims).to(state_dtype).to(door.device)
            expected, states = step.reference(state)
            output, _ = door(gdn_multi.gated_delta_rule_decode_pretranspose, **step.arguments(state=state))
            step.check_output(output, expected)
            allowed = tolerances.decode_state(state_dtype)
            tolerances.assert_close(state, states[:, -1], allowed, f"{options} with a {state_dtype} state")


# Kind 11, a hidden synchronization: test_conf_gpu.py, where there is something to synchronize with.


# --- kind 12 --------------------------------------------------------------------------------------


def test_kind_12_backend_chosen_by_accident(door, sizes):
    """Kind 12: explain says before the call which backend serves it and why not the others; last_backend after it."""
    tokens = Tokens(sizes.dims, (5,), device=door.device, dtype=sizes.dtype)
    explanation = gdn_multi.explain(gdn_multi.chunk_gated_delta_rule, **tokens.arguments())
    assert set(explanation.reasons) == set(gdn_multi.registered_backends())
    gdn_multi.chunk_gated_delta_rule(**tokens.arguments())
    assert gdn_multi.last_backend().backend == explanation.backend
    assert explanation.reasons[explanation.backend] == ()
    for name, reasons in explanation.reasons.items():
        assert all(isinstance(reason, str) and reason for reason in reasons)
        assert name in str(explanation)
    named = gdn_multi.explain(gdn_multi.chunk_gated_delta_rule, **tokens.arguments(), backend=door.name)
    assert named.backend == door.name
    door(gdn_multi.chunk_gated_delta_rule, **tokens.arguments())


# --- kind 13 --------------------------------------------------------------------------------------

ALPHAS = [0.0, 1e-45, 1e-40, 1.2e-38, 1e-30, 1e-10, 0.5, 1.0, 1.0001]


@pytest.mark.small
def test_kind_13_gates_out_of_domain(door, sizes):
    """Kind 13: alpha of zero and denormals among others, in one chunk: the state is cleared, nothing is NaN."""
    tokens = Tokens(sizes.dims, (66,), device=door.device, dtype=sizes.dtype)
    for i, alpha in enumerate(ALPHAS[:3]):
        tokens.g[7 * i + 3] = alpha
    tokens.g[64, 0] = 0.0  # in one head only, and first of its chunk
    state = random_states(1, sizes.dims).to(door.device)
    expected, states = tokens.reference(state)
    output, final = door(
        gdn_multi.chunk_gated_delta_rule, **tokens.arguments(initial_state=state, output_final_state=True)
    )
    tokens.check_output(output, expected)
    tolerances.assert_close(final[0], states[0][-1], tolerances.prefill_state(sizes.dtype, F32), "final state")


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("where", ["one token", "first token", "last token", "all tokens", "every third token"])
def test_kind_13_zero_and_denormal_alpha(door, sizes, alpha, where):
    """Kind 13: log 0 must not become a NaN, wherever the zero stands."""
    tokens = Tokens(sizes.dims, (130,), device=door.device, dtype=sizes.dtype)
    places = {
        "one token": 70,
        "first token": 0,
        "last token": 129,
        "all tokens": slice(None),
        "every third token": slice(None, None, 3),
    }
    tokens.g[places[where]] = alpha
    state = random_states(1, sizes.dims).to(door.device)
    expected, states = tokens.reference(state)
    output, final = door(
        gdn_multi.chunk_gated_delta_rule, **tokens.arguments(initial_state=state, output_final_state=True)
    )
    tokens.check_output(output, expected)
    tolerances.assert_close(final[0], states[0][-1], tolerances.prefill_state(sizes.dtype, F32), "final state")


@pytest.mark.parametrize("log_alpha", [-50.0, -88.0, -104.0, -1e4, -3e38, -cases.INF, 0.0])
def test_kind_13_log_gates_far_out(door, sizes, log_alpha):
    """Kind 13, log domain: exp underflows to zero, at minus infinity too."""
    tokens = Tokens(sizes.dims, (130,), device=door.device, dtype=sizes.dtype, gate="log")
    tokens.g[5::9] = log_alpha
    expected, states = tokens.reference()
    output, final = door(gdn_multi.chunk_gated_delta_rule, **tokens.arguments(output_final_state=True))
    tokens.check_output(output, expected)
    tolerances.assert_close(final[0], states[0][-1], tolerances.prefill_state(sizes.dtype, F32), "final state")


def test_kind_13_a_cleared_state_clears_a_page(door):
    """Kind 13 with pages: alpha is 0 at a page's first token, so nothing before it can be seen behind it."""
    batch = PagedBatch(door.sizes.dims).add(prefix=64, new=130).add(prefix=30, new=40)
    batch.build(door.device, dtype=door.sizes.dtype)
    batch.tokens.g[0] = 0.0
    batch.tokens.g[64] = 0.0
    batch.tokens.g[135] = 0.0
    batch.run(door)


# --- kind 14 --------------------------------------------------------------------------------------


def test_kind_14_unnormalised_keys(door):
    """Kind 14: |k| = 30 makes one sequence overflow; its neighbours in the batch keep their bits."""
    results = []
    for wild in (False, True):
        batch = PagedBatch(door.sizes.dims).add(prefix=9, new=100).add(prefix=9, new=400).add(prefix=64, new=70)
        batch.build(door.device, dtype=door.sizes.dtype, gate="none", beta="none", seed=6)
        if wild:
            batch.tokens.k[batch.tokens.span(1)] *= 30
        output = door(gdn_multi.chunk_gated_delta_rule_paged, **batch.arguments())
        results.append((output, batch))
    (tame, a), (wild, b) = results
    assert not torch.isfinite(wild[b.tokens.span(1)].float()).all(), "the recurrence expands here"
    for i in (0, 2):
        assert same_bits(wild[b.tokens.span(i)], tame[a.tokens.span(i)]), f"output of sequence {i}"
        for page in b.sequences[i].pages:
            assert same_bits(b.pool.tensor[page], a.pool.tensor[page]), f"page {page} of sequence {i}"


def test_kind_14_unnormalised_keys_in_decode(door, sizes):
    """Kind 14, decode: an infinite state stays in its own sequence."""
    step = DecodeStep(sizes.dims, 3, device=door.device, dtype=sizes.dtype)
    state = random_states(3, sizes.dims).to(door.device)
    expected, states = step.reference(state)
    state[1] = cases.INF
    output, _ = door(gdn_multi.gated_delta_rule_decode_pretranspose, **step.arguments(state=state))
    for i in (0, 2):
        tolerances.assert_close(output[i], expected[i], tolerances.decode_output(sizes.dtype), f"output {i}")
        tolerances.assert_close(state[i], states[i, -1], tolerances.decode_state(F32), f"state {i}")
    assert not torch.isfinite(output[1].float()).any()
