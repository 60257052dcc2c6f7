"""GDN_MULTI_CHECK=1, beyond what the conformance suite asks of every backend."""

import pytest
import torch

import gdn_multi
from gdn_multi import env


@pytest.fixture(autouse=True)
def check(monkeypatch):
    monkeypatch.setenv(env.CHECK, "1")


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def paged_prefill(pages, new=60, prefix=64, page_size=64, pool=None):
    q, v = torch.randn(new, 1, 8), torch.randn(new, 2, 8)
    total = prefix + new
    return gdn_multi.chunk_gated_delta_rule_paged(
        q, q, v, cu_seqlens=ints(0, new), state_pool=torch.zeros(5, 2, 8, 8) if pool is None else pool,
        page_indices=ints(*pages), page_indptr=ints(0, len(pages)), page_size=page_size,
        last_page_len=ints(total - (len(pages) - 1) * page_size), backend="torch",
    )  # fmt: skip


def test_a_page_listed_twice_in_one_sequence():
    """A page allocated twice: the new tokens would overwrite the cached page that they start from."""
    pool = torch.randn(5, 2, 8, 8)
    before = pool.clone()
    with pytest.raises(ValueError, match=r"page_indices\[1\] \(sequence 0, its page 1\) is page 3, as is page_indices\[0\]"):
        paged_prefill((3, 3), pool=pool)
    assert torch.equal(pool, before)
    paged_prefill((3, 1), pool=pool)
    q, v, gate, head = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2), torch.zeros(2)
    with pytest.raises(ValueError, match="a sequence lists a page once"):
        gdn_multi.gated_delta_rule_decode_paged(
            q, q, v, head, gate, head, gate, state_pool=pool, page_indices=ints(3, 3), page_indptr=ints(0, 2),
            last_page_len=ints(1),
        )  # fmt: skip


def test_without_the_check_a_row_out_of_range_points_to_it(monkeypatch):
    monkeypatch.delenv(env.CHECK)
    with pytest.raises(IndexError, match="run the call again with GDN_MULTI_CHECK=1"):
        paged_prefill((3, 5))


def test_the_entry_that_is_named_is_the_entry_of_the_table():
    q, v = torch.randn(20, 1, 8), torch.randn(20, 2, 8)
    call = dict(
        q=q, k=q, v=v, cu_seqlens=ints(0, 10, 20), state_pool=torch.zeros(9, 2, 8, 8), page_indptr=ints(0, 2, 5),
        page_size=64, last_page_len=ints(5, 5), backend="torch",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"sequence 1 writes .*page_indices\[4\] \(row 3\) and page_indices\[1\] \(row 3\)"):
        gdn_multi.chunk_gated_delta_rule_paged(**call, page_indices=ints(7, 3, 5, 6, 3))
    slots = gdn_multi.gdn_paged_prefill_slots(
        ints(0, 10, 20), ints(7, 3, 5, 6, 4), ints(0, 2, 5), 64, ints(5, 5)
    )  # fmt: skip
    broken = slots._replace(state_indices=ints(7, 99))
    with pytest.raises(ValueError, match=r"slots.state_indices\[1\] \(sequence 1\) must be 6, .*got 99"):
        gdn_multi.chunk_gated_delta_rule_paged(**call, page_indices=ints(7, 3, 5, 6, 4), slots=broken)
    with pytest.raises(ValueError, match=r"cu_seqlens\[0\] and \[1\].*got 10 and 0"):
        gdn_multi.gdn_paged_prefill_slots(ints(10, 0, 20), ints(7, 3, 5, 6, 4), ints(0, 2, 5), 64, ints(5, 5))


def test_a_write_row_that_is_not_used_may_be_anything():
    q, v, gate, head = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2), torch.zeros(2)
    call = dict(initial_state=torch.zeros(3, 2, 8, 8), initial_state_indices=ints(1), output_state_indices=ints(99))
    decode = gdn_multi.gated_delta_rule_decode_pretranspose
    decode(q, q, v, None, head, gate, head, gate, **call, disable_state_update=True, backend="torch")
    with pytest.raises(ValueError, match=r"output_state_indices\[0\] \(sequence 0\) must be below 3"):
        decode(q, q, v, None, head, gate, head, gate, **call, backend="torch")


def test_an_entry_of_a_sequence_without_tokens_may_be_anything():
    q, v = torch.randn(4, 1, 8), torch.randn(4, 2, 8)
    pool = torch.randn(3, 2, 8, 8)
    gdn_multi.chunk_gated_delta_rule(
        q, q, v, cu_seqlens=ints(0, 0, 4), initial_state=pool, output_state=pool, output_final_state=True,
        state_indices=ints(77, 1), backend="torch",
    )  # fmt: skip


def test_a_call_like_an_earlier_one_points_to_it_too(monkeypatch):
    monkeypatch.delenv(env.CHECK)
    q, v, gate, head = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2), torch.zeros(2)
    pool = torch.zeros(3, 2, 8, 8)
    for row in (1, 1, 99):
        call = dict(initial_state=pool, initial_state_indices=ints(row), backend="torch")
        if row < 3:
            gdn_multi.gated_delta_rule_decode_pretranspose(q, q, v, None, head, gate, head, gate, **call)
            continue
        with pytest.raises(IndexError, match="run the call again with GDN_MULTI_CHECK=1"):
            gdn_multi.gated_delta_rule_decode_pretranspose(q, q, v, None, head, gate, head, gate, **call)


def decode_call(**more):
    q, v, gate, head = torch.randn(2, 1, 1, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2), torch.zeros(2)
    table = dict(page_indices=ints(4, 1, 3), page_indptr=ints(0, 2, 3), last_page_len=ints(1, 9))
    return dict(q=q, k=q, v=v, A_log=head, a=gate, dt_bias=head, b=gate, backend="torch", **{**table, **more})


def prefill_call(**more):
    """Sequence 0: 64 tokens before in page 7, 10 new in page 3. Sequence 1: none. Sequence 2: 74 before, 54 new, to the end of page 4."""
    q, v = torch.randn(64, 1, 8), torch.randn(64, 2, 8)
    table = dict(
        cu_seqlens=ints(0, 10, 10, 64), page_indices=ints(7, 3, 5, 6, 4), page_indptr=ints(0, 2, 3, 5), page_size=64,
        last_page_len=ints(10, 9, 64),
    )  # fmt: skip
    return dict(q=q, k=q, v=v, backend="torch", **{**table, **more})


def of_table(call, names):
    return {name: call[name] for name in names}


DECODE_TABLE = ("page_indices", "page_indptr", "last_page_len")
PREFILL_TABLE = ("cu_seqlens", "page_indices", "page_indptr", "page_size", "last_page_len")


@pytest.mark.parametrize("field,entry,value", [
    ("initial_state_indices", 0, 1), ("initial_state_indices", 1, -1), ("output_state_indices", 0, 4), ("output_state_indices", 1, 99),
])  # fmt: skip
def test_slots_of_a_decode_are_those_of_its_page_table(field, entry, value):
    call, pool = decode_call(), torch.randn(5, 2, 8, 8)
    slots = gdn_multi.gdn_paged_decode_slots(**of_table(call, DECODE_TABLE))
    gdn_multi.gated_delta_rule_decode_paged(**call, state_pool=pool, slots=slots)
    before = pool.clone()
    stale = getattr(slots, field).clone()
    right, stale[entry] = int(stale[entry]), value
    words = rf"slots\.{field}\[{entry}\] \(sequence {entry}\) must be {right}, .*got {value}: slots belong to"
    with pytest.raises(ValueError, match=words):
        gdn_multi.gated_delta_rule_decode_paged(**call, state_pool=pool, slots=slots._replace(**{field: stale}))
    assert torch.equal(pool, before)


@pytest.mark.parametrize("field,entry,value", [
    ("state_indices", 0, -1), ("state_indices", 2, 7), ("output_state_indices", 0, -1), ("output_state_indices", 2, 4),
    ("checkpoint_cu_starts", 2, 3), ("prefix_lens", 0, 0), ("prefix_lens", 2, 64),
])  # fmt: skip
def test_slots_of_a_prefill_are_those_of_its_page_table(field, entry, value):
    call, pool = prefill_call(), torch.randn(9, 2, 8, 8)
    slots = gdn_multi.gdn_paged_prefill_slots(**of_table(call, PREFILL_TABLE))
    unused = {name: x.clone() for name, x in slots._asdict().items()}
    for x in unused.values():
        x[1] = 77  # of the sequence without new tokens
    gdn_multi.chunk_gated_delta_rule_paged(**call, state_pool=pool, slots=gdn_multi.GDNPagedPrefillSlots(**unused))
    before = pool.clone()
    stale = getattr(slots, field).clone()
    right, stale[entry] = int(stale[entry]), value
    assert right != value
    with pytest.raises(ValueError, match=rf"slots\.{field}\[{entry}\] \(sequence {entry}\) must be {right}, .*got {value}: slots"):
        gdn_multi.chunk_gated_delta_rule_paged(**call, state_pool=pool, slots=slots._replace(**{field: stale}))
    assert torch.equal(pool, before)


@pytest.mark.parametrize("page", [-1, 2**31, 2**32 + 1])
@pytest.mark.parametrize("with_slots", [False, True])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_page_id_that_is_no_row_of_a_pool(page, with_slots, kind):
    """2**32 + 1 in an int32 would be page 1."""
    if kind == "prefill":
        call, names, make = prefill_call(), PREFILL_TABLE, gdn_multi.gdn_paged_prefill_slots
        function, pool = gdn_multi.chunk_gated_delta_rule_paged, torch.randn(9, 2, 8, 8)
    else:
        call, names, make = decode_call(), DECODE_TABLE, gdn_multi.gdn_paged_decode_slots
        function, pool = gdn_multi.gated_delta_rule_decode_paged, torch.randn(5, 2, 8, 8)
    if with_slots:
        call["slots"] = make(**of_table(call, names))
    wrong = call["page_indices"].long()
    wrong[1] = page
    call["page_indices"], before = wrong, pool.clone()
    words = rf"page_indices\[1\] \(sequence 0, its page 1\) must be in \[0, .*got {page}"
    with pytest.raises(ValueError, match=words):
        make(**of_table(call, names))
    with pytest.raises(ValueError, match=words):
        function(**call, state_pool=pool)
    assert torch.equal(pool, before)
