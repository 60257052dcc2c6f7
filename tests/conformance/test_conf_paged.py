"""Paged prefill on every backend: page tables in, outputs and pages out, nothing else touched."""

from __future__ import annotations

import random

import pytest
import tolerances
import torch
from cases import Dims, PagedBatch, Pool, Tokens, index, random_states, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gdn_multi

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def mixed(door, page_size=None) -> PagedBatch:
    """Every kind of sequence in one batch."""
    size = page_size or door.sizes.page_size
    return (
        PagedBatch(door.sizes.dims, size)
        .add(prefix=2 * size, new=37)  # starts on a boundary
        .add(prefix=0, new=2 * size + 1)  # from nothing, over two boundaries
        .add(prefix=0, new=0)  # padding: one scratch page
        .add(prefix=size - 1, new=2)  # crosses one boundary with its first token
        .add(prefix=size + 30, new=3)  # continues a page in place
        .add(prefix=size + 5, new=0)  # cached, nothing new
        .add(prefix=2 * size, new=size, shares=0)  # ends on a boundary, from shared pages
        .add(prefix=1, new=size - 1)  # fills its first page exactly
    )


def slots_of(batch: PagedBatch, rows: dict) -> gdn_multi.GDNPagedPrefillSlots:
    """The slots tuple from lists, on the batch's device."""
    device = batch.pool.tensor.device
    return gdn_multi.GDNPagedPrefillSlots(
        *(index(rows[name], torch.int32, device) for name in ("read", "write", "starts", "prefix"))
    )


def reference_rows(batch: PagedBatch) -> dict:
    return gdn_multi.reference.prefill_slots(cu_seqlens=batch.tokens.cu_seqlens, **batch.table())


# --- the specification's example ------------------------------------------------------------------


def test_the_example_of_the_specification(door):
    """2500 tokens, the first 2048 cached in pages 7 and 3, page 12 new: reads 3, writes 12, leaves 7 and 3 alone."""
    dims, size = door.sizes.dims, 1024
    whole = Tokens(dims, (2500,), device=door.device, dtype=door.sizes.dtype)
    expected, states = whole.reference()
    pool = Pool(16, dims, F32, door.device)
    pool.set(3, states[0][2048])
    kept = {page: pool.tensor[page].clone() for page in (7, 3)}
    pool.remember()

    new = slice(2048, 2500)
    output = door(
        gdn_multi.chunk_gated_delta_rule_paged,
        q=whole.q[new], k=whole.k[new], v=whole.v[new], g=whole.g[new], beta=whole.beta[new],
        cu_seqlens=index([0, 452], torch.int32, door.device),
        state_pool=pool.tensor,
        page_indices=index([7, 3, 12], torch.int32, door.device),
        page_indptr=index([0, 3], torch.int32, door.device),
        page_size=size,
        last_page_len=index([452], torch.int32, door.device),
    )  # fmt: skip
    tolerances.assert_close(output, expected[new], tolerances.prefill_output(whole.dtype), "output")
    pool.check({12: states[0][2500]}, tolerances.prefill_state(whole.dtype, F32))
    for page, before in kept.items():
        assert same_bits(pool.tensor[page], before), f"page {page} changed"


def test_the_rows_of_the_example_of_the_specification():
    rows = gdn_multi.reference.prefill_slots(index([0, 452]), index([7, 3, 12]), index([0, 3]), 1024, index([452]))
    assert (rows["read"], rows["write"], rows["prefix"], rows["checkpoints"]) == ([3], [12], [2048], [[]])


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [64, 128, 192])
def test_mixed_batch(door, page_size):
    mixed(door, page_size).build(door.device, dtype=door.sizes.dtype, before=2, after=70).run(door)


@pytest.mark.small
def test_small_mixed_batch(door, sizes):
    batch = (
        PagedBatch(sizes.dims, 64)
        .add(prefix=64, new=5)
        .add(prefix=0, new=0)
        .add(prefix=60, new=9)
        .add(prefix=64, new=2, shares=0)
    )
    batch.build(door.device, dtype=sizes.dtype, before=1, after=2).run(door)


@pytest.mark.small
def test_small_continuation_over_two_boundaries(door, sizes):
    """From token 118 on: the second page is completed in place, the third is filled, the fourth opened."""
    PagedBatch(sizes.dims, 64).add(prefix=118, new=80).build(door.device, dtype=sizes.dtype).run(door)


@pytest.mark.small
def test_small_batch_with_slots(door, sizes):
    batch = PagedBatch(sizes.dims, 64).add(prefix=64, new=5).add(prefix=0, new=0).add(prefix=60, new=9)
    batch.build(door.device, dtype=sizes.dtype)
    batch.run(door, slots=slots_of(batch, reference_rows(batch)))


def test_slots_give_the_bits_of_the_page_table(door):
    results = []
    for with_slots in (False, True):
        batch = mixed(door).build(door.device, dtype=door.sizes.dtype, seed=5)
        slots = {"slots": slots_of(batch, reference_rows(batch))} if with_slots else {}
        results.append((batch.run(door, **slots), batch.pool.storage))
    assert same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])


@pytest.mark.parametrize("slots", [False, True], ids=["table", "slots"])
@pytest.mark.parametrize("padding", [0, 3, 64])
@pytest.mark.parametrize("pool_dtype", [F32, BF16, F16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_pool_dtypes_and_padded_rows(door, pool_dtype, padding, slots):
    batch = mixed(door).build(door.device, dtype=door.sizes.dtype, pool_dtype=pool_dtype, padding=padding)
    batch.run(door, **({"slots": slots_of(batch, reference_rows(batch))} if slots else {}))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize(
    "gate,beta,l2norm", [("none", "none", False), ("log", "plain", False), ("raw_half", "logit_half", True)]
)
def test_paged_gates_and_dtypes(door, dtype, gate, beta, l2norm):
    mixed(door).build(door.device, dtype=dtype, gate=gate, beta=beta, l2norm=l2norm, fused=True, after=3).run(door)


@pytest.mark.parametrize("heads", [(1, 1, 1), (1, 1, 4), (4, 2, 2)])
def test_paged_head_groups(door, sizes, heads):
    batch = PagedBatch(Dims(*heads, sizes.dims.K, sizes.dims.V), 64).add(prefix=100, new=70).add(prefix=64, new=64)
    batch.build(door.device, dtype=sizes.dtype).run(door)


INDEX_TENSORS = ("cu_seqlens", "page_indices", "page_indptr", "last_page_len")


@pytest.mark.parametrize("slots", [False, True], ids=["table", "slots"])
@pytest.mark.parametrize("others", [torch.int32, torch.int64], ids=["others int32", "others int64"])
@pytest.mark.parametrize("odd", INDEX_TENSORS)
def test_each_index_dtype_apart(door, odd, others, slots):
    batch = mixed(door).build(door.device, dtype=door.sizes.dtype, index_dtype=others)
    other = torch.int64 if others == torch.int32 else torch.int32
    owner = batch.tokens if odd == "cu_seqlens" else batch
    setattr(owner, odd, getattr(owner, odd).to(other))
    batch.run(door, **({"slots": slots_of(batch, reference_rows(batch))} if slots else {}))


@pytest.mark.parametrize("given", [False, True], ids=["allocated", "given"])
def test_paged_output(door, given):
    batch = mixed(door).build(door.device, dtype=door.sizes.dtype, before=66, after=70)
    output = batch.tokens.new_output() if given else None
    returned = batch.run(door, **({"output": output} if given else {}))
    assert not given or returned is output


@pytest.mark.small
@pytest.mark.parametrize("tokens", [0, 4])
@pytest.mark.parametrize("slots", [False, True], ids=["table", "slots"])
def test_a_batch_of_padding_only(door, tokens, slots):
    """An engine's idle step; without any token (T = 0) too."""
    batch = PagedBatch(door.sizes.dims).add().add(prefix=64).build(door.device, dtype=door.sizes.dtype, after=tokens)
    batch.run(door, **({"slots": slots_of(batch, reference_rows(batch))} if slots else {}))


def test_page_indices_may_be_longer_than_the_table(door):
    """A buffer kept for the largest batch: entries past page_indptr[-1] are never looked at."""
    batch = mixed(door).build(door.device, dtype=door.sizes.dtype)
    extra = torch.full((9,), 10**6, dtype=torch.int32, device=door.device)
    batch.page_indices = torch.cat([batch.page_indices, extra])
    batch.run(door)


def test_page_indptr_may_start_past_zero(door):
    batch = mixed(door).build(door.device, dtype=door.sizes.dtype)
    extra = torch.full((4,), 10**6, dtype=torch.int32, device=door.device)
    batch.page_indices = torch.cat([extra, batch.page_indices])
    batch.page_indptr = batch.page_indptr + 4
    batch.run(door)


# --- one prompt, many calls -----------------------------------------------------------------------


def serve(door, prompt: Tokens, cuts, page_size: int, pool: Pool, pages, output: torch.Tensor) -> None:
    """The prompt in calls that end at ``cuts``, the last of which is its length."""
    device, start = door.device, 0
    for end in cuts:
        part, owned = slice(start, end), -(-end // page_size)
        x = {name: getattr(prompt, name)[part] for name in ("q", "k", "v", "g", "beta")}
        output[part] = door(
            gdn_multi.chunk_gated_delta_rule_paged,
            **x,
            cu_seqlens=index([0, end - start], torch.int32, device),
            state_pool=pool.tensor,
            page_indices=index(pages[:owned], torch.int32, device),
            page_indptr=index([0, owned], torch.int32, device),
            page_size=page_size,
            last_page_len=index([end - (owned - 1) * page_size], torch.int32, device),
        )
        start = end


def check_pages(pool: Pool, pages, states, page_size: int, length: int, allowed: float) -> None:
    ends = [min((j + 1) * page_size, length) for j in range(-(-length // page_size))]
    for page, end in zip(pages, ends):
        tolerances.assert_close(pool.tensor[page], states[end], allowed, f"the page that ends after token {end}")


@pytest.mark.parametrize("page_size", [64, 128, 1024])
def test_a_prompt_of_5000_tokens_cut_at_random(door, page_size):
    """200 random cuts into 1 to 12 calls over the three page sizes: outputs and every page against the reference."""
    cuts = {64: 66, 128: 67, 1024: 67}[page_size] if door.name == "torch" else 8
    dims = Dims(1, 1, 2, 32, 24) if door.name == "torch" else door.sizes.dims._replace(q=1, k=1, v=2)
    length = 5000
    prompt, expected, states = long_prompt(dims, length, door.sizes.dtype, door.device)
    rng = random.Random(page_size)
    pages_needed = -(-length // page_size)
    for _ in range(cuts):
        ends = sorted(rng.sample(range(1, length), rng.randint(1, 12) - 1)) + [length]
        pages = rng.sample(range(pages_needed + 3), pages_needed)
        pool = Pool(pages_needed + 3, dims, F32, door.device)
        output = torch.full((length, dims.heads, dims.V), float("nan"), dtype=prompt.dtype, device=door.device)
        serve(door, prompt, ends, page_size, pool, pages, output)
        allowed = tolerances.prefill_state(prompt.dtype, F32)
        tolerances.assert_close(output, expected, tolerances.prefill_output(prompt.dtype), f"output, cuts {ends}")
        check_pages(pool, pages, states, page_size, length, allowed)


_LONG_PROMPTS: dict = {}


def long_prompt(dims, length, dtype, device):
    """A prompt and the reference's answer for it, computed once."""
    key = (dims, length, dtype)
    if key not in _LONG_PROMPTS:
        tokens = Tokens(dims, (length,), dtype=dtype, seed=11)
        expected, states = tokens.reference()
        _LONG_PROMPTS[key] = (expected, states[0])
    return (Tokens(dims, (length,), dtype=dtype, device=device, seed=11), *_LONG_PROMPTS[key])


@pytest.mark.small
def test_a_short_prompt_in_three_calls(door, sizes):
    prompt, expected, states = long_prompt(sizes.dims, 80, sizes.dtype, door.device)
    pool = Pool(4, sizes.dims, F32, door.device)
    output = torch.full((80, sizes.dims.heads, sizes.dims.V), float("nan"), dtype=sizes.dtype, device=door.device)
    serve(door, prompt, (30, 66, 80), 64, pool, (2, 0), output)
    tolerances.assert_close(output, expected, tolerances.prefill_output(sizes.dtype), "output")
    check_pages(pool, (2, 0), states, 64, 80, tolerances.prefill_state(sizes.dtype, F32))


# --- drawn batches --------------------------------------------------------------------------------

DRAWN = settings(
    max_examples=40, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@st.composite
def plans(draw, sizes=(64, 128, 192)):
    """(page size, [(prefix, new, whom it shares pages with)], page ids in some order)."""
    size = draw(st.sampled_from(sizes))
    near = st.sampled_from([0, 1, size - 1, size, size + 1, 2 * size, 3 * size])
    prefix = near | st.integers(0, 3 * size)
    new = st.sampled_from([0, 1, size - 1, size, size + 1]) | st.integers(0, 2 * size)
    count = draw(st.integers(1, 5))
    sequences = []
    for i in range(count):
        shares = draw(st.none() | st.integers(0, i - 1)) if i else None
        sequences.append((draw(prefix), draw(new), shares))
    pages = sum(max(1, -(-(p + n) // size)) for p, n, _ in sequences)
    ids = draw(st.permutations(range(pages + 4)))
    return size, sequences, ids


def planned(plan, dims) -> PagedBatch:
    size, sequences, _ = plan
    batch = PagedBatch(dims, size)
    for prefix, new, shares in sequences:
        batch.add(prefix=prefix, new=new, shares=shares)
    return batch


@DRAWN
@given(plan=plans(), seed=st.integers(0, 3), slots=st.booleans())
def test_drawn_page_tables(door, plan, seed, slots):
    """Random page sizes, prefixes, splits and shared pages, page ids in any order."""
    dims = Dims(1, 1, 2, 16, 24) if door.name == "torch" else door.sizes.dims
    batch = planned(plan, dims).build(door.device, dtype=door.sizes.dtype, page_ids=plan[2], seed=seed, before=seed)
    batch.run(door, **({"slots": slots_of(batch, reference_rows(batch))} if slots else {}))


@DRAWN
@given(plan=plans())
def test_the_reference_rows_are_those_of_the_specification(plan):
    """reference.prefill_slots against a count of tokens and pages done by hand."""
    batch = planned(plan, Dims(1, 1, 1, 1, 1)).build(page_ids=plan[2])
    rows, size = reference_rows(batch), batch.page_size
    for i, s in enumerate(batch.sequences):
        if s.total == 0:
            continue  # a padded sequence's prefix is whatever its last_page_len says
        crossed = [n for n in range(s.prefix + 1, s.total + 1) if n % size == 0]
        assert rows["prefix"][i] == s.prefix
        assert rows["read"][i] == (s.pages[(s.prefix - 1) // size] if s.prefix else -1)
        assert rows["checkpoints"][i] == [s.pages[n // size - 1] for n in crossed]
        ends_inside = s.new > 0 and s.total % size != 0
        assert rows["write"][i] == (s.pages[-1] if ends_inside else -1)


def test_a_call_of_slots_is_that_of_the_wrapper(door):
    """The paged call is a thin wrapper: the same rows given to chunk_gated_delta_rule give the same bits."""
    size = 64
    batch = PagedBatch(door.sizes.dims, size).add(prefix=100, new=70).add(prefix=0, new=20).add(prefix=128, new=64)
    batch.build(door.device, dtype=door.sizes.dtype, seed=2)
    other = Pool(batch.pool.tensor.shape[0], batch.dims, F32, door.device)
    other.storage.copy_(batch.pool.storage)
    rows = slots_of(batch, reference_rows(batch))
    paged = batch.run(door)
    plain, _ = door(
        gdn_multi.chunk_gated_delta_rule,
        **batch.tokens.arguments(
            initial_state=other.tensor, output_state=other.tensor, output_final_state=True,
            state_checkpoints=other.tensor,
            state_indices=rows.state_indices, output_state_indices=rows.output_state_indices,
            checkpoint_cu_starts=torch.cat([rows.checkpoint_cu_starts, batch.page_indptr[-1:]]),
            checkpoint_state_indices=batch.page_indices, prefix_lens=rows.prefix_lens, checkpoint_every_n_tokens=size,
        ),
    )  # fmt: skip
    assert same_bits(paged, plain)
    assert same_bits(batch.pool.storage, other.storage)


def test_a_prefill_after_another_batchs_prefill(door):
    """Two requests, one after the other: the second starts from pages that the first one wrote."""
    dims, size = door.sizes.dims, 64
    prompt = Tokens(dims, (200,), device=door.device, dtype=door.sizes.dtype, seed=21)
    expected, states = prompt.reference()
    pool = Pool(8, dims, F32, door.device)
    first = torch.empty(128, dims.heads, dims.V, dtype=prompt.dtype, device=door.device)
    serve(door, prompt, (128,), size, pool, (6, 1), first)
    pool.remember()
    x = {name: getattr(prompt, name)[128:] for name in ("q", "k", "v", "g", "beta")}
    output = door(
        gdn_multi.chunk_gated_delta_rule_paged, **x, cu_seqlens=index([0, 72], torch.int32, door.device),
        state_pool=pool.tensor, page_indices=index([6, 1, 3, 5], torch.int32, door.device),
        page_indptr=index([0, 4], torch.int32, door.device), page_size=size,
        last_page_len=index([8], torch.int32, door.device),
    )  # fmt: skip
    tolerances.assert_close(output, expected[128:], tolerances.prefill_output(prompt.dtype), "output")
    pool.check({3: states[0][192], 5: states[0][200]}, tolerances.prefill_state(prompt.dtype, F32))


def test_states_keep_their_pages_apart(door):
    """Random states in every page that is read: a row mixed up with another shows at once."""
    dims = door.sizes.dims
    batch = PagedBatch(dims, 64)
    for prefix in (1, 2, 63, 64, 65, 127, 128):
        batch.add(prefix=prefix, new=1)
    batch.build(door.device, dtype=door.sizes.dtype, seed=9)
    spread = 100 * random_states(batch.pool.tensor.shape[0], dims, 77)
    for row in batch.read:
        batch.pool.set(row, spread[row])
    batch.run(door)
