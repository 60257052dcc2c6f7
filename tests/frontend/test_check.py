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
