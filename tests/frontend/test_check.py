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
    with pytest.raises(ValueError, match=r"slots.state_indices\[1\] \(sequence 1\) must be below 9"):
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
