"""The Hopper prefill on the CPU (cuda_emulator/): its paths against the reference, and q and k read in place against the tiles of them
that the first kernel leaves otherwise, to the bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
pytestmark = pytest.mark.build
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tolerances  # noqa: E402
from gdn_multi.backends.cuda.prefill_heuristics import Path as Way  # noqa: E402

import gdn_multi  # noqa: E402
from gdn_multi import reference  # noqa: E402

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS, PREFIXES, MARGIN = [200, 1, 0, 64, 130], [70, 63, 5, 0, 0], 3
PAGES = [[7, 3, 12, 0, 4], [1], [5], [9], [2, 6, 8]]
CACHED = (7, 3, 1, 5)  # of the prefixes
WAYS = {"whole heads": (128, 0), "half heads": (64, 0), "segments": (128, 2)}


@pytest.fixture(scope="module")
def library():
    from cuda_emulator import FOLDER, build_library, toolchain_or_skip

    toolchain_or_skip()
    return build_library(FOLDER)


@pytest.fixture
def backend(library):
    from cuda_emulator import EmulatedCudaBackend

    backend = EmulatedCudaBackend(library)
    gdn_multi.register_backend(backend, replace=True)
    yield backend
    gdn_multi.unregister_backend("cuda")


def relative(x, y) -> float:
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


def draw(dtype, norm):
    """q, k, v and gates; NaN around the sequences, which is what the first and the last chunk have beside them."""
    torch.manual_seed(1)
    tokens = sum(LENGTHS) + 2 * MARGIN
    q, k, v = torch.randn(tokens, 2, 128), torch.randn(tokens, 2, 128), torch.randn(tokens, 4, 128)
    if not norm:
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    q, k, v, g, beta = q.to(dtype), k.to(dtype), v.to(dtype), torch.rand(tokens, 4) * 0.1 + 0.9, torch.rand(tokens, 4)
    for x in (q, k, v, g, beta):
        x[:MARGIN], x[tokens - MARGIN :] = float("nan"), float("nan")
    return q, k, v, g, beta


def moved(x, elements):
    """The same values in rows of another length, from another address on."""
    rows = torch.full((x.shape[0], x[0].numel() + 8), float("nan")).to(x.dtype)
    view = rows[:, elements : elements + x[0].numel()].unflatten(1, x.shape[1:])
    view.copy_(x)
    return view


def run(q, k, v, g, beta, norm):
    torch.manual_seed(2)
    pool = torch.full((14, 4, 128, 128), float("nan"))
    pool[list(CACHED)] = torch.randn(len(CACHED), 4, 128, 128)
    total = [n + p for n, p in zip(LENGTHS, PREFIXES)]
    output = gdn_multi.chunk_gated_delta_rule_paged(
        q, k, v, g, beta, cu_seqlens=torch.tensor([MARGIN, *LENGTHS]).cumsum(0), state_pool=pool, page_size=64,
        page_indices=torch.tensor([x for p in PAGES for x in p]), page_indptr=torch.tensor([0, *map(len, PAGES)]).cumsum(0),
        last_page_len=torch.tensor([t - (len(p) - 1) * 64 for t, p in zip(total, PAGES)]), use_qk_l2norm_in_kernel=norm, backend="cuda",
    )  # fmt: skip
    return output, pool


# Read in place: operands of the inputs' own type, not normalised. Tiles: the others.
IN_PLACE = [(dtype, False, False, way) for dtype in (BF16, F16) for way in WAYS]
TILES = [
    (BF16, False, True, "half heads"), (BF16, True, False, "segments"), (BF16, True, True, "whole heads"),
    (F16, False, True, "segments"),
]  # fmt: skip


def expected(q, k, v, g, beta, norm):
    """What run() should give: the output, and states by page."""
    cu = torch.tensor([MARGIN, *LENGTHS]).cumsum(0)
    initial = torch.zeros(5, 4, 128, 128)
    torch.manual_seed(2)
    cached = dict(zip(CACHED, torch.randn(len(CACHED), 4, 128, 128)))
    initial[0], initial[1] = cached[3], cached[1]
    o, states = reference.prefill(q, k, v, g, beta, cu_seqlens=cu, initial_state=initial, use_qk_l2norm_in_kernel=norm)
    return o, {3: states[0][58], 12: states[0][122], 0: states[0][186], 4: states[0][200], 1: states[1][1], 9: states[3][64],
               2: states[4][64], 6: states[4][128], 8: states[4][130]}  # fmt: skip


@pytest.mark.parametrize("dtype, half, norm, way", IN_PLACE + TILES)
def test_prefill_with_q_and_k_anywhere(backend, dtype, half, norm, way):
    backend.forced_path = Way(*WAYS[way], half)
    q, k, v, g, beta = draw(dtype, norm)
    output, pool = run(q, k, v, g, beta, norm)
    cu = torch.tensor([MARGIN, *LENGTHS]).cumsum(0)
    o, wanted = expected(q, k, v, g, beta, norm)
    assert (output[:MARGIN] == 0).all() and (output[cu[-1] :] == 0).all()
    assert relative(output[MARGIN : cu[-1]], o[MARGIN : cu[-1]]) < tolerances.prefill_output(dtype) / 2
    for page, state in wanted.items():
        assert relative(pool[page], state) < tolerances.prefill_state(dtype, F32) / 2, page
    # Rows elsewhere that the copy engine can read, and rows of k that it cannot.
    for by_q, by_k in ((8, 8), (0, 3)) if (dtype, half, norm, way) in IN_PLACE else ((0, 3),):
        again = run(moved(q, by_q), moved(k, by_k), v, g, beta, norm)
        assert torch.equal(again[0], output), (by_q, by_k)
        assert torch.equal(again[1].view(torch.int32), pool.view(torch.int32)), (by_q, by_k)


@pytest.mark.parametrize("dtype, half", ((F16, False), (BF16, True), (BF16, False)))
def test_small_betas_lose_no_digits_of_scores(backend, dtype, half):
    """fp16 ends at 6e-5, and its smallest numbers have few digits: scores times such a beta would have none."""
    backend.forced_path = Way(*WAYS["half heads"], half)
    q, k, v, g, beta = draw(dtype, False)
    v, beta[MARGIN : beta.shape[0] - MARGIN] = 400 * v, 1e-4
    output, _ = run(q, k, v, g, beta, False)
    begin = MARGIN + sum(LENGTHS[:2])  # of the sequences that start from nothing
    end = MARGIN + sum(LENGTHS)
    o, _ = expected(q, k, v, g, beta, False)
    assert relative(output[begin:end], o[begin:end]) < tolerances.prefill_output(dtype) / 2


def test_a_value_that_beta_masks_may_be_anything_finite(backend):
    """Operands in fp16 for bf16 inputs: rows shrink where they would leave its range, and what beta = 0 takes away must not make them."""
    backend.forced_path = Way(*WAYS["half heads"], True)
    q, k, v, g, beta = draw(BF16, False)
    beta[MARGIN + 70] = 0
    expectation = run(q, k, v, g, beta, False)
    v[MARGIN + 70] = 1e20
    output, pool = run(q, k, v, g, beta, False)
    assert relative(output[MARGIN:-MARGIN], expectation[0][MARGIN:-MARGIN]) < 1e-3
    rows = torch.isfinite(pool).flatten(1).all(1)
    assert torch.equal(rows, torch.isfinite(expectation[1]).flatten(1).all(1))
    assert relative(pool[rows], expectation[1][rows]) < 1e-3


@pytest.mark.parametrize("norm", (False, True))
def test_prefill_by_pairs_of_ctas(backend, norm):
    backend.forced_path = Way(64, 0, False, pairs=True)
    q, k, v, g, beta = draw(BF16, norm)
    output, pool = run(q, k, v, g, beta, norm)
    cu = torch.tensor([MARGIN, *LENGTHS]).cumsum(0)
    o, wanted = expected(q, k, v, g, beta, norm)
    assert (output[:MARGIN] == 0).all() and (output[cu[-1] :] == 0).all()
    assert relative(output[MARGIN : cu[-1]], o[MARGIN : cu[-1]]) < tolerances.prefill_output(BF16) / 2
    for page, state in wanted.items():
        assert relative(pool[page], state) < tolerances.prefill_state(BF16, F32) / 2, page
    if norm:
        return
    # Rows elsewhere that the copy engine can take; and where it cannot, another path.
    again = run(moved(q, 8), moved(k, 8), moved(v, 8), g, beta, norm)
    assert torch.equal(again[0], output) and torch.equal(again[1].view(torch.int32), pool.view(torch.int32))
    backend.forced_path = Way(64, 0, False)
    other = run(q, k, moved(v, 3), g, beta, norm)
    backend.forced_path = Way(64, 0, False, pairs=True)
    again = run(q, k, moved(v, 3), g, beta, norm)
    assert torch.equal(again[0], other[0]) and torch.equal(again[1].view(torch.int32), other[1].view(torch.int32))


@pytest.mark.parametrize("lengths", ([9], [65, 3], [330]))
def test_pairs_take_any_number_of_tokens(backend, lengths):
    """Fewer than a box of the copy engine's has; more chunks than a ring has places; states that come and go in bf16."""
    torch.manual_seed(3)
    n, cu = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    q, k = (torch.nn.functional.normalize(torch.randn(n, 1, 128), dim=-1).bfloat16() for _ in range(2))
    v, g, beta = torch.randn(n, 2, 128).bfloat16(), torch.rand(n, 2) * 0.2 + 0.8, torch.rand(n, 2)
    g[n // 2] = 0
    initial = torch.randn(len(lengths), 2, 128, 128).bfloat16()
    backend.forced_path = Way(64, 0, False, pairs=True)
    output, final = gdn_multi.chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=initial, output_final_state=True, cu_seqlens=cu,
        output_state=torch.full_like(initial, float("nan")), backend="cuda",
    )  # fmt: skip
    o, states = reference.prefill(q, k, v, g, beta, cu_seqlens=cu, initial_state=initial)
    assert relative(output, o) < tolerances.prefill_output(BF16) / 2
    for i in range(len(lengths)):
        assert relative(final[i], states[i][-1]) < tolerances.prefill_state(BF16, BF16) / 1.5


def test_pairs_whatever_the_order(backend, monkeypatch):
    """Warps that run far ahead of others, lanes that lag, copies that land late: the same bits, and nobody waits for ever."""
    torch.manual_seed(4)
    q, k = (torch.nn.functional.normalize(torch.randn(450, 1, 128), dim=-1).bfloat16() for _ in range(2))
    v, g, beta = torch.randn(450, 1, 128).bfloat16(), torch.rand(450, 1) * 0.1 + 0.9, torch.rand(450, 1)
    cu = torch.tensor([0, 450])
    backend.forced_path = Way(64, 0, False, pairs=True)

    def call():
        return gdn_multi.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, cu_seqlens=cu, backend="cuda")

    output, state = call()
    for order in range(8):
        monkeypatch.setenv("EMULATED_ORDER", str(order))
        again = call()
        assert torch.equal(again[0], output) and torch.equal(again[1].view(torch.int32), state.view(torch.int32)), order


@pytest.mark.parametrize("dtype, way", [*((F16, way) for way in WAYS), (BF16, "half heads")])
def test_other_paths_whatever_the_order(backend, monkeypatch, dtype, way):
    backend.forced_path = Way(*WAYS[way], False)
    q, k, *others = draw(dtype, False)
    inputs = q, moved(k, 3), *others
    output, pool = run(*inputs, False)
    monkeypatch.setenv("EMULATED_ORDER", "5")  # in which a lane once missed a phase
    again = run(*inputs, False)
    assert torch.equal(again[0], output) and torch.equal(again[1].view(torch.int32), pool.view(torch.int32))


def test_prefill_with_gates_anywhere(backend):
    """Those of four heads are loaded together where they lie side by side, and must be the same where they do not."""
    backend.forced_path = Way(*WAYS["half heads"], False)
    q, k, v, g, beta = draw(BF16, False)
    q, k = q[:, :1], k[:, :1]  # shared by all four state heads

    def cut(x, *sizes):
        """The same values in a larger tensor, from its first element on: only strides differ."""
        rows = torch.full(sizes, float("nan"))
        view = rows[:, :4] if len(sizes) == 2 else rows[..., 0]
        view.copy_(x)
        return view

    output, pool = run(q, k, v, g, beta, False)
    turned, odd, apart = g.t().contiguous().t(), cut(beta, len(beta), 5), cut(beta, *beta.shape, 4)
    for gates in ((moved(g, 1), beta), (g, moved(beta, 3)), (turned, beta), (g, odd), (g, apart), (moved(g, 4), moved(beta, 4))):
        again = run(q, k, v, *gates, False)
        assert torch.equal(again[0], output)
        assert torch.equal(again[1].view(torch.int32), pool.view(torch.int32))


@pytest.mark.parametrize("dtype", (BF16, F16))
def test_prefill_with_keys_of_any_length(backend, dtype):
    """Normalised, that is: zeros, whose factor is 1000, beside values that fp16 can only just hold."""
    backend.forced_path = Way(128, 0, False)
    q, k, v, g, beta = draw(dtype, True)
    k *= torch.logspace(-2, 3, len(k)).to(dtype)[:, None, None]
    k[40:50], q[45:55], v[30:60] = 0, 0, 300
    output, pool = run(q, k, v, g, beta, True)
    cu = torch.tensor([MARGIN, *LENGTHS]).cumsum(0)
    initial = torch.zeros(5, 4, 128, 128)
    torch.manual_seed(2)
    cached = dict(zip(CACHED, torch.randn(len(CACHED), 4, 128, 128)))
    initial[0], initial[1] = cached[3], cached[1]
    o, states = reference.prefill(q, k, v, g, beta, cu_seqlens=cu, initial_state=initial, use_qk_l2norm_in_kernel=True)
    assert relative(output[MARGIN : cu[-1]], o[MARGIN : cu[-1]]) < tolerances.prefill_output(dtype)
    assert relative(pool[4], states[0][200]) < tolerances.prefill_state(dtype, F32)


def test_prefill_split_where_one_head_forgets_and_another_does_not(backend):
    """One head's decay over a segment is nothing in float32: its first pass begins in the middle, and its transition is zero."""
    backend.forced_path = Way(64, 4, False)
    torch.manual_seed(4)
    tokens = 700
    q, k, v = torch.randn(tokens, 1, 128), torch.randn(tokens, 1, 128), torch.randn(tokens, 2, 128)
    q, k, v = (q / q.norm(dim=-1, keepdim=True)).to(BF16), (k / k.norm(dim=-1, keepdim=True)).to(BF16), v.to(BF16)
    g, beta = torch.rand(tokens, 2), torch.rand(tokens, 2)
    g[:, 0], g[:, 1] = 0.1 + 0.9 * g[:, 0], 0.99 + 0.01 * g[:, 1]
    assert g[256:512, 0].log2().sum() < -160 < g[:, 1].log2().sum()  # the second segment
    cu, initial = torch.tensor([0, tokens]), torch.randn(1, 2, 128, 128)
    o, states = reference.prefill(q, k, v, g, beta, cu_seqlens=cu, initial_state=initial)
    state = initial.clone()  # in place: the second pass may not read what its last segment has written
    output, final = gdn_multi.chunk_gated_delta_rule(
        q, k, v, g, beta, cu_seqlens=cu, initial_state=state, output_final_state=True, output_state=state, backend="cuda"
    )
    assert final.data_ptr() == state.data_ptr()
    for head in range(2):
        assert relative(output[:, head], o[:, head]) < tolerances.prefill_output(BF16) / 2, head
        assert relative(final[0, head], states[0][-1, head]) < tolerances.prefill_state(BF16, F32) / 2, head


@pytest.mark.parametrize("alpha", (0.95, 1.0))
def test_what_a_segment_leaves_of_a_state_is_right_however_little(backend, alpha):
    """V is zero, so all that there is at the end comes through transitions, of which each leaves 1e-7 of the state with alpha = 0.95;
    half the columns keys reach only once in 100 tokens, so that little else becomes of them and the rows of a transition differ in size."""
    backend.forced_path = Way(128, 4, False)
    torch.manual_seed(7)
    tokens = 1000
    q, k, v = torch.randn(tokens, 1, 128), torch.randn(tokens, 1, 128), torch.zeros(tokens, 1, 128)
    k[torch.arange(tokens) % 100 > 0, :, :64] = 0
    q, k, beta = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), torch.rand(tokens, 1)
    inputs = dict(q=q.to(BF16), k=k.to(BF16), v=v.to(BF16), g=torch.full((tokens, 1), alpha), beta=beta)
    cu, initial = torch.tensor([0, tokens]), torch.randn(1, 1, 128, 128)
    o, states = reference.prefill(**inputs, cu_seqlens=cu, initial_state=initial)
    output, final = gdn_multi.chunk_gated_delta_rule(
        **inputs, cu_seqlens=cu, initial_state=initial, output_final_state=True, backend="cuda"
    )
    assert states[0][-1].norm() > 0
    assert relative(final[0], states[0][-1]) < 2 * tolerances.prefill_state(BF16, F32)
    for part in (slice(0, 256), slice(256, 512), slice(512, 768), slice(768, tokens)):
        assert relative(output[part], o[part]) < 2 * tolerances.prefill_output(BF16), part


# Split where longer than 128 tokens, behind any number that are not.
RAGGED = [5, 300, 1, 0, 64, 129, *[0] * 34, 260, 3, *[0, 0, 17] * 3, 270, 9]


def test_prefill_splits_few_of_many_sequences(backend, monkeypatch):
    """CTAs pass over what is not split, but over nothing that is, whoever deals."""
    torch.manual_seed(8)
    tokens, seqs = sum(RAGGED), len(RAGGED)
    q, k, v = torch.randn(tokens, 1, 128), torch.randn(tokens, 1, 128), torch.randn(tokens, 2, 128)
    q, k, v = (q / q.norm(dim=-1, keepdim=True)).to(BF16), (k / k.norm(dim=-1, keepdim=True)).to(BF16), v.to(BF16)
    g, beta = torch.rand(tokens, 2), torch.rand(tokens, 2)
    g[:, 0], g[:, 1] = 0.1 + 0.9 * g[:, 0], 0.99 + 0.01 * g[:, 1]  # one head forgets
    initial = torch.randn(seqs, 2, 128, 128)

    def call(rows, segment, multiprocessors):
        monkeypatch.setenv("EMULATED_MULTIPROCESSORS", str(multiprocessors))
        backend.forced_path = Way(rows, segment, False)
        output, final = torch.full((tokens, 2, 128), float("nan")).to(BF16), torch.zeros_like(initial)
        gdn_multi.chunk_gated_delta_rule(
            q, k, v, g, beta, cu_seqlens=torch.tensor([0, *RAGGED]).cumsum(0), initial_state=initial, output_final_state=True,
            output=output, output_state=final, backend="cuda",
        )  # fmt: skip
        return output, final

    o, states = call(128, 0, 2)
    for multiprocessors in (1, 3):
        output, final = call(128, 2, multiprocessors)
        begin = 0
        for i, n in enumerate(RAGGED):
            if n <= 128:  # one segment: the same arithmetic
                assert torch.equal(output[begin : begin + n], o[begin : begin + n]), i
                assert torch.equal(final[i], states[i]), i
            else:
                assert relative(output[begin : begin + n], o[begin : begin + n]) < tolerances.prefill_output(BF16) / 2, i
                assert relative(final[i], states[i]) < tolerances.prefill_state(BF16, F32) / 2, i
            begin += n


def test_prefill_of_many_segments(backend):
    """The scan looks for transitions that are not zero 32 segments at a time: here with runs of either kind, also across such borders."""
    backend.forced_path = Way(128, 1, False)
    torch.manual_seed(9)
    chunks, remembered = 75, [*range(1, 5), 31, 32, 33, 50, *range(60, 71)]
    tokens = chunks * 64
    q, k, v = torch.randn(tokens, 1, 128), torch.randn(tokens, 1, 128), torch.randn(tokens, 1, 128)
    q, k, v = (q / q.norm(dim=-1, keepdim=True)).to(BF16), (k / k.norm(dim=-1, keepdim=True)).to(BF16), v.to(BF16)
    g, beta = torch.full((chunks, 64, 1), 0.1), torch.rand(tokens, 1)
    g[remembered] = 0.999
    g, initial, cu = g.flatten(0, 1), torch.randn(1, 1, 128, 128), torch.tensor([0, tokens])
    o, states = reference.prefill(q, k, v, g, beta, cu_seqlens=cu, initial_state=initial)
    output, final = gdn_multi.chunk_gated_delta_rule(
        q, k, v, g, beta, cu_seqlens=cu, initial_state=initial, output_final_state=True, backend="cuda"
    )
    for chunk in range(chunks):
        rows = slice(chunk * 64, chunk * 64 + 64)
        assert relative(output[rows], o[rows]) < tolerances.prefill_output(BF16), chunk
    assert relative(final[0], states[0][-1]) < tolerances.prefill_state(BF16, F32)


SHORT = [200, 1, 0, 64, 0, 0, 3, 130, 0]  # a CTA takes many, some of no or one chunk; the first and the last but one may be split
FIRST, NO_READ, NO_WRITE = 0, 1, 3
POOLS = {"whole rows": 128, "rows apart": 132, "rows at any element": 129}  # floats from V row to V row; the last cannot be staged


@pytest.mark.parametrize("dtype, way", ((BF16, "whole heads"), (BF16, "half heads"), (BF16, "segments"), (F16, "whole heads")))
def test_prefill_states_of_short_sequences(backend, monkeypatch, dtype, way):
    """Wherever a state comes from and goes to: the same bits, and those of the right sequence."""
    backend.forced_path = Way(*WAYS[way], False)
    torch.manual_seed(5)
    tokens, seqs = sum(SHORT), len(SHORT)
    q, k, v = torch.randn(tokens, 1, 128), torch.randn(tokens, 1, 128), torch.randn(tokens, 2, 128)
    q, k, v = (q / q.norm(dim=-1, keepdim=True)).to(dtype), (k / k.norm(dim=-1, keepdim=True)).to(dtype), v.to(dtype)
    inputs = dict(q=q, k=k, v=v, g=torch.rand(tokens, 2) * 0.1 + 0.9, beta=torch.rand(tokens, 2))
    inputs.update(cu_seqlens=torch.tensor([0, *SHORT]).cumsum(0))
    initial = torch.randn(seqs, 2, 128, 128)
    if dtype == F16:
        initial[6:] *= 1000  # rows that must shrink to be operands
    initial[NO_READ] = 0
    o, states = reference.prefill(**inputs, initial_state=initial)
    wanted = [states[i][-1] if n else initial[i] for i, n in enumerate(SHORT)]

    def call(multiprocessors, **given):
        monkeypatch.setenv("EMULATED_MULTIPROCESSORS", str(multiprocessors))
        return gdn_multi.chunk_gated_delta_rule(**inputs, **given, output_final_state=True, backend="cuda")

    output, final = call(1, initial_state=initial)
    for i, n in enumerate(SHORT):
        rows = slice(*inputs["cu_seqlens"][i : i + 2].tolist())
        if n:
            assert relative(output[rows], o[rows]) < tolerances.prefill_output(dtype) / 2, i
            assert relative(final[i], wanted[i]) < tolerances.prefill_state(dtype, F32) / 2, i
        else:
            assert torch.equal(final[i], initial[i]), i

    # In a pool, in place; the sequences in the other order. The emulator runs one CTA behind the other, so that the second takes a
    # first segment behind all that follows it: it must not find the final state where the initial one was.
    read, write = torch.arange(seqs).flip(0), torch.arange(seqs).flip(0)
    read[NO_READ], write[NO_WRITE] = -1, -1
    for name, apart in POOLS.items():
        pool = torch.full((seqs, 2, 128, apart), float("nan"))[..., :128]
        pool[read[read >= 0]] = initial[read >= 0]
        kept = [row for row in range(seqs) if row not in write or SHORT[seqs - 1 - row] == 0]
        before = pool.clone()
        again, _ = call(2, initial_state=pool, state_indices=read, output_state=pool, output_state_indices=write)
        assert torch.equal(again, output), name
        assert torch.equal(pool[kept].view(torch.int32), before[kept].view(torch.int32)), name
        for i, n in enumerate(SHORT):
            if n and i != NO_WRITE:
                assert torch.equal(pool[write[i]], final[i]), (name, i)
    # One of the two of another type.
    rounded = torch.full((seqs, 2, 128, 128), float("nan")).to(BF16)
    again, _ = call(2, initial_state=initial, output_state=rounded)
    assert torch.equal(again, output)
    for i, n in enumerate(SHORT):
        assert torch.equal(rounded[i], final[i].to(BF16)) if n else rounded[i].isnan().all(), i


def test_prefill_from_nothing(backend, monkeypatch):
    """States from nowhere are zero, behind others in the same stages too; and stay away where they are not wanted."""
    monkeypatch.setenv("EMULATED_MULTIPROCESSORS", "1")
    backend.forced_path = Way(128, 0, False)
    torch.manual_seed(6)
    q, k, v = torch.randn(74, 1, 128), torch.randn(74, 1, 128), torch.randn(74, 1, 128)
    inputs = dict(q=q.to(BF16), k=(k / k.norm(dim=-1, keepdim=True)).to(BF16), v=v.to(BF16), cu_seqlens=torch.tensor([0, 5, 5, 74]))
    output, final = gdn_multi.chunk_gated_delta_rule(**inputs, output_final_state=True, backend="cuda")
    o, states = reference.prefill(**inputs)
    assert relative(output, o) < tolerances.prefill_output(BF16) / 2
    for i in (0, 2):
        assert relative(final[i], states[i][-1]) < tolerances.prefill_state(BF16, F32) / 2
    assert (final[1] == 0).all()
    assert torch.equal(gdn_multi.chunk_gated_delta_rule(**inputs, backend="cuda"), output)
