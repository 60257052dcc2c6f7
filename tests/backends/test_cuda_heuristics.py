"""Which path a Hopper prefill takes, from shapes alone."""

import types

import pytest
import torch
from gdn_multi.backends.cuda import prefill_heuristics as heuristics

SMS = 132


def request(tokens, seqs, heads, longest=None, **fields):
    values = dict(
        num_tokens=tokens, num_seqs=seqs, num_heads=heads, max_seqlen=longest or tokens, head_size_k=128, head_size_v=128,
        use_cp="auto", batch_invariant=False, precise=False, pages=None, use_qk_l2norm=False, prefix_lens=None,
        q=torch.empty(0, dtype=torch.bfloat16),
    )  # fmt: skip
    return types.SimpleNamespace(**{**values, **fields})


def choose(*args, **fields):
    return heuristics.choose(request(*args, **fields), (9, 0), SMS)


def test_the_three_ways_to_fill_the_card():
    assert choose(32768, 1, 8).segment > 0  # few heads, one long sequence
    assert choose(8192, 1, 64)[:2] == (64, 0)  # V rows split
    assert choose(32768, 4, 64, 8192)[:2] == (128, 0)  # whole heads


def test_what_may_not_be_split_is_not():
    for fields in (dict(use_cp=False), dict(batch_invariant=True)):
        assert choose(32768, 1, 8, **fields).segment == 0
    assert choose(64, 1, 64, use_cp=True).segment > 0


def test_one_launch_where_no_sequence_is_long():
    for tokens, seqs, heads, longest in ((1, 1, 8, 1), (16, 1, 64, 16), (16, 2, 64, 8), (512, 8, 16, 64)):
        assert choose(tokens, seqs, heads, longest).fused, tokens
    for tokens, seqs, heads, longest in ((65, 1, 8, 65), (2048, 32, 64, 64), (96, 2, 16, None)):
        assert not choose(tokens, seqs, heads, longest).fused, tokens
    assert choose(16, 1, 8).rows < choose(16, 2, 64, 8).rows  # few CTAs of many V rows, or many of few


def test_pairs_where_short_sequences_are_few():
    for tokens, seqs, heads, longest in ((105, 1, 8, 105), (187, 1, 16, 187), (1024, 8, 8, 128), (128, 1, 64, 128), (1024, 8, 8, None)):
        assert choose(tokens, seqs, heads, longest).pairs, tokens
    for tokens, seqs, heads, longest in ((1024, 1, 8, 1024), (256, 2, 64, 128), (2048, 8, 8, None), (16, 1, 8, 16)):
        assert not choose(tokens, seqs, heads, longest).pairs, tokens
    half = torch.empty(0, dtype=torch.float16)
    for fields in (dict(batch_invariant=True), dict(precise=True), dict(use_cp=True), dict(head_size_v=64), dict(q=half)):
        assert choose(128, 1, 8).pairs and not choose(128, 1, 8, **fields).pairs, fields


def test_one_launch_only_where_it_changes_nothing_else():
    half = torch.empty(0, dtype=torch.float16)  # whose range states may leave
    for fields in (dict(batch_invariant=True), dict(precise=True), dict(use_cp=True), dict(head_size_v=64), dict(q=half)):
        assert choose(16, 1, 8).fused and not choose(16, 1, 8, **fields).fused, fields


def test_elsewhere_the_portable_path():
    assert heuristics.choose(request(8192, 1, 8), (8, 0), SMS) == heuristics.PORTABLE
    assert choose(8192, 1, 8, head_size_k=64) == heuristics.PORTABLE


def test_precise_means_fp16_operands_of_bfloat16():
    assert choose(8192, 1, 8, precise=True).half
    assert not choose(8192, 1, 8, precise=True, q=torch.empty(0, dtype=torch.float16)).half


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("lengths", [[2048], [32768], [1024] * 8, [256] * 32])
def test_a_prefix_changes_no_choice(heads, lengths):
    """Segments are counted from where a call begins, so pages take the path that the same call takes without."""
    shape = sum(lengths), len(lengths), heads
    assert choose(*shape, pages=object()) == choose(*shape) == choose(*shape, prefix_lens=object())


def test_estimates_grow_with_work():
    times = [heuristics.estimate(n, 1, 16, n, SMS, 64, 0) for n in (64, 1000, 8192, 100_000)]
    assert times == sorted(times) and times[0] > 0
    for rows, segment in ((128, 0), (64, 0), (128, 16), (64, 16)):
        assert heuristics.estimate(5000, 7, 12, 3000, SMS, rows, segment) > 0
