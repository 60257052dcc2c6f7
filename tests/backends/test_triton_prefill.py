"""The Triton prefill by itself: its segments, its work area, its plans, its gates at the edges of their domain.

On a GPU or under Triton's interpreter. What every backend must do is in the conformance suite.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import cases  # noqa: E402
import tolerances  # noqa: E402
from cases import Dims, PagedBatch, Tokens, random_states, same_bits  # noqa: E402
from gdn_multi.backends.triton import TritonBackend, heuristics, prefill  # noqa: E402

import gdn_multi  # noqa: E402
from gdn_multi import dispatch, reference  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16

pytestmark = pytest.mark.skipif(
    not INTERPRETED and DEVICE.type != "cuda", reason="needs a CUDA device or TRITON_INTERPRET=1"
)
on_a_gpu = pytest.mark.skipif(DEVICE.type != "cuda" or INTERPRETED, reason="needs a CUDA device and compiled kernels")


@pytest.fixture(autouse=True)
def fresh_plans():
    prefill.forget_plans()
    yield
    heuristics.OVERRIDES.clear()
    prefill.forget_plans()


def door(function, *args, **kwargs):
    return function(*args, backend="triton", **kwargs)


def cut(chunks: int) -> None:
    heuristics.OVERRIDES["segment_chunks"] = chunks
    prefill.forget_plans()


def tokens(dims: Dims, lengths, **options) -> Tokens:
    return Tokens(dims, lengths, device=DEVICE, **{"dtype": F16, **options})


def check(tk: Tokens, initial=None, **more):
    """Output and final states against the reference; returns both."""
    expected, states = tk.reference(initial)
    arguments = tk.arguments(initial_state=initial, output_final_state=True, **more)
    output, final = door(gdn_multi.chunk_gated_delta_rule, **arguments)
    tk.check_output(output, expected)
    for i, after in enumerate(states):
        tolerances.assert_close(final[i], after[-1], tolerances.prefill_state(tk.dtype, final.dtype), f"state {i}")
    return output, final


# --- segments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks,with_initial", [(1, True), (2, False), (3, True)])
def test_segments(chunks, with_initial):
    """Sequences of no, one, a few and many segments, with the last chunk full or not."""
    cut(chunks)
    tk = tokens(Dims(1, 1, 2, 64, 64), (64 * 7 + 5, 0, 64 * 2, 3, 64 * 3 + 1), before=2, after=3)
    initial = random_states(5, tk.dims).to(DEVICE) if with_initial else None
    check(tk, initial)


@pytest.mark.parametrize("K,V", [(64, 128), (128, 64)])
def test_segments_where_k_and_v_differ(K, V):
    cut(1)
    tk = tokens(Dims(1, 1, 1, K, V), (64 * 3 + 9,), dtype=F32)
    check(tk, random_states(1, tk.dims).to(DEVICE))


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_pages_with_and_without_segments(chunks):
    """Pages completed in place, pages crossed, a pool that is read, checkpointed and written in one call."""
    cut(chunks)
    batch = PagedBatch(Dims(1, 1, 2, 64, 64), 128)
    batch.add(prefix=100, new=300).add(new=0).add(prefix=256, new=129, shares=0).add(new=64).add(prefix=1, new=127)
    batch.build(DEVICE, dtype=F16, padding=64, before=1, after=2).run(door)


def test_a_page_continued_in_place_by_segments():
    """The last segment writes the row that the first one starts from."""
    cut(1)
    PagedBatch(Dims(1, 1, 1, 64, 64), 512).add(prefix=70, new=250).build(DEVICE, dtype=F16).run(door)


@pytest.mark.parametrize("chunks", [0, 1])
def test_where_the_state_before_a_call_lies(chunks):
    """In the page that this call goes on with, in the full one before it, or pages before the last one."""
    cut(chunks)
    batch = PagedBatch(Dims(1, 1, 1, 64, 64), 128)
    batch.add(prefix=90, new=20).add(prefix=128, new=64).add(prefix=128, new=128).add(prefix=192, new=64)
    batch.add(prefix=130, new=260)
    batch.build(DEVICE, dtype=F16).run(door)


def test_use_cp_demands_and_forbids_segments():
    tk = tokens(Dims(1, 1, 1, 64, 64), (64 * 9,))
    check(tk, use_cp=True)
    assert gdn_multi.last_backend().detail.startswith("segments")
    check(tk, use_cp=False)
    assert gdn_multi.last_backend().detail == "whole sequences"


# --- sequences and slots --------------------------------------------------------------------------


def test_more_sequences_than_one_block_of_the_lookup():
    """Slots of 132 sequences, most of them empty."""
    lengths = [0] * 126 + [2, 1, 0, 70, 0, 3]
    tk = tokens(Dims(1, 1, 1, 64, 64), lengths)
    expected, _ = tk.reference()
    output = door(gdn_multi.chunk_gated_delta_rule, **tk.arguments())
    tk.check_output(output, expected)


@pytest.mark.parametrize("lengths", [(63, 63, 63, 63), (1, 64, 127, 65), (190,)])
def test_slots_of_unaligned_sequences(lengths):
    """With a prefix that is not a multiple of 64 a sequence may have two more chunks than its tokens fill."""
    dims = Dims(1, 1, 1, 64, 64)
    tk = tokens(dims, lengths)
    pool = torch.zeros(len(lengths), 1, 64, 64, device=DEVICE)
    rows = torch.arange(len(lengths), dtype=torch.int32, device=DEVICE)
    expected, states = tk.reference()
    output, final = door(
        gdn_multi.chunk_gated_delta_rule,
        **tk.arguments(
            initial_state=pool, output_final_state=True, output_state=pool, state_indices=rows,
            checkpoint_every_n_tokens=1 << 20, state_checkpoints=torch.zeros_like(pool), checkpoint_cu_starts=rows * 0,
            checkpoint_state_indices=rows * 0 - 1, prefix_lens=rows * 0 + 63,
        ),
    )  # fmt: skip
    tk.check_output(output, expected)
    for i, after in enumerate(states):
        tolerances.assert_close(final[i], after[-1], tolerances.prefill_state(F16, F32), f"state {i}")


@pytest.mark.parametrize("together", [1, 2, 4])
def test_heads_of_one_prepare_program(together, monkeypatch):
    monkeypatch.setattr(heuristics, "heads_per_program", lambda *_: together)
    check(tokens(Dims(2, 2, 8, 64, 64), (70,), gate="raw", beta="logit", l2norm=True))


def test_heads_of_a_group_share_a_program_to_the_bit():
    """One program for the four heads of a group, or one each: the same bits."""
    tk = tokens(Dims(2, 2, 8, 64, 64), (70, 64), gate="raw", beta="logit", l2norm=True)
    results = []
    for together in (1, 4):
        heuristics.OVERRIDES["prepare_heads"] = together
        prefill.forget_plans()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GDN_MULTI_BATCH_INVARIANT", "1")  # takes as many as are allowed, however few programs
            results.append(door(gdn_multi.chunk_gated_delta_rule, **tk.arguments(output_final_state=True)))
        (plan,) = prefill.plans.values()
        assert plan.prepare.grid[0] % (8 // together) == 0 and plan.prepare.fixed[19] == together
    assert same_bits(results[0][0], results[1][0]) and same_bits(results[0][1], results[1][1])


def test_a_checkpoint_interval_beyond_every_sequence():
    """The largest that there is: no checkpoint, and no arithmetic that runs over."""
    tk = tokens(Dims(1, 1, 1, 64, 64), (130, 64))
    rows = torch.tensor([0, 0], dtype=torch.int32, device=DEVICE)
    kept = torch.full((1, 1, 64, 64), cases.NAN, device=DEVICE)
    expected, _ = tk.reference()
    output, _ = door(
        gdn_multi.chunk_gated_delta_rule,
        **tk.arguments(
            output_final_state=True, checkpoint_every_n_tokens=2**31 - 64, state_checkpoints=kept,
            checkpoint_cu_starts=rows, checkpoint_state_indices=rows[:1], prefix_lens=rows + 70,
        ),
    )  # fmt: skip
    tk.check_output(output, expected)
    assert torch.isnan(kept).all()


# --- gates and the inverse ------------------------------------------------------------------------


@pytest.mark.parametrize("domain", ["linear", "log"])
def test_decays_to_zero(domain):
    """alpha of 0, denormal, tiny and slightly above 1: a reset forgets all, and later tokens keep their precision."""
    tk = tokens(Dims(1, 1, 1, 64, 64), (150,), dtype=F32)
    alpha = tk.g.double()
    alpha[3:60:7] = 0.0
    alpha[80] = 1e-40
    alpha[90:92] = 1e-30
    alpha[100:] = 1.0001
    alpha[120:122] = 0.0
    tk.g = alpha.float() if domain == "linear" else torch.log(alpha).float()
    tk.gate = domain
    tk.g, want = tk.g.contiguous(), alpha.float()
    initial = random_states(1, tk.dims).to(DEVICE)
    expected, states = reference.prefill(
        tk.q, tk.k, tk.v, want, tk.beta, cu_seqlens=tk.cu_seqlens, initial_state=initial
    )
    output, final = door(
        gdn_multi.chunk_gated_delta_rule, **tk.arguments(initial_state=initial, output_final_state=True)
    )
    # A chunk's logarithms are summed in float32; those of 1e-30 cost the others some digits.
    allowed = 6e-5
    tolerances.assert_close(output, expected, allowed, "output")
    tolerances.assert_close(final[0], states[0][-1], allowed, "state")


def test_equal_keys():
    """Every token has the same key and beta 1: powers of the lower part reach 1e18, its inverse stays small."""
    tk = tokens(Dims(1, 1, 1, 64, 64), (128,), gate="none", beta="none", dtype=F32)
    tk.k = tk.k[:1].expand(128, 1, 64).contiguous()
    check(tk)


def test_raw_gates_far_out():
    """softplus of large and of very negative arguments: alpha of 0 and of 1."""
    tk = tokens(Dims(1, 1, 2, 64, 64), (70,), gate="raw", dtype=F32)
    tk.g[5, 0], tk.g[6, 0], tk.g[7:20, 1] = 1e4, -1e4, 90.0
    check(tk, random_states(1, tk.dims).to(DEVICE))


# --- layouts --------------------------------------------------------------------------------------


def test_heads_before_tokens():
    """q, k, v, gates and output as transposed views of [heads, tokens, ...]."""
    tk = tokens(Dims(2, 2, 4, 64, 64), (70, 9))
    for name in ("q", "k", "v"):
        x = getattr(tk, name)
        setattr(tk, name, x.transpose(0, 1).contiguous().transpose(0, 1))
    tk.g, tk.beta = tk.g.t().contiguous().t(), tk.beta.t().contiguous().t()
    expected, _ = tk.reference()
    output = torch.full((4, 79, 64), cases.NAN, dtype=F16, device=DEVICE).transpose(0, 1)
    door(gdn_multi.chunk_gated_delta_rule, **tk.arguments(output=output))
    tk.check_output(output, expected)


def test_state_rows_of_v_with_gaps():
    """States whose heads and V rows lie apart."""
    tk = tokens(Dims(1, 1, 2, 64, 64), (70, 30))
    wide = torch.full((2, 3, 64, 96), cases.NAN, device=DEVICE)
    initial = wide[:, 1:, :, 16:80]
    initial.copy_(random_states(2, tk.dims))
    expected, states = tk.reference(initial.contiguous())
    output, final = door(
        gdn_multi.chunk_gated_delta_rule,
        **tk.arguments(initial_state=initial, output_final_state=True, output_state=initial),
    )
    tk.check_output(output, expected)
    for i in range(2):
        tolerances.assert_close(final[i], states[i][-1], tolerances.prefill_state(F16, F32), f"state {i}")
    untouched = wide.clone()
    untouched[:, 1:, :, 16:80] = cases.NAN
    assert torch.isnan(untouched).all(), "elements between the rows were written"


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_states_saturate(stored):
    """Exactly the float32 state, clamped and rounded to nearest even."""
    tk = tokens(Dims(1, 1, 1, 64, 64), (2,), dtype=F32)
    initial = (1e6 * random_states(1, tk.dims)).to(DEVICE)
    arguments = tk.arguments(initial_state=initial, output_final_state=True)
    _, exact = door(gdn_multi.chunk_gated_delta_rule, **arguments)
    given = torch.zeros(exact.shape, device=DEVICE).to(stored)
    door(gdn_multi.chunk_gated_delta_rule, **arguments, output_state=given)
    assert exact.abs().max() > torch.finfo(stored).max
    assert same_bits(given, cases.saturated(exact, stored))


@pytest.mark.parametrize("K,V", [(96, 80), (32, 16), (256, 64)])
def test_other_head_sizes(K, V):
    if K > 128 and DEVICE.type == "cuda":
        pytest.skip("float32 inputs with K above 128 are refused on a GPU; conformance has K = 256 in 16 bits")
    check(tokens(Dims(1, 1, 1, K, V), (70,), dtype=F32, l2norm=True))


# --- plans ----------------------------------------------------------------------------------------


def test_a_plan_serves_other_contents():
    """Other lengths and gates in the same buffers need no new plan, and other shapes do."""
    first = tokens(Dims(1, 1, 1, 64, 64), (70, 30))
    check(first)
    assert len(prefill.plans) == 1
    second = tokens(Dims(1, 1, 1, 64, 64), (20, 80), seed=1)
    check(second)
    assert len(prefill.plans) == 1
    check(tokens(Dims(1, 1, 1, 64, 64), (20, 81)))
    assert len(prefill.plans) == 2


def test_like_calls_have_a_plan_for_each_alignment():
    """Calls that are alike share what was worked out, and only addresses may differ: not those that a plan depends on."""
    tk = tokens(Dims(1, 1, 1, 64, 64), (70,), dtype=F16)
    initial = random_states(1, tk.dims).to(DEVICE)
    arguments = tk.arguments(initial_state=initial, output_final_state=True)
    request = dispatch.build_request(gdn_multi.chunk_gated_delta_rule, **arguments)[0]

    def moved(name):
        x = getattr(request, name)
        place = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
        other = object.__new__(type(request))
        other.__dict__.update(request.__dict__, **{name: place})
        return other

    plan = prefill.plan_for(request)
    assert prefill.plan_for(request) is plan and len(prefill.plans) == 1
    for i, name in enumerate(("q", "v", "output", "initial_state", "final_state")):
        another = prefill.plan_for(moved(name))
        assert another is not plan and len(prefill.plans) == i + 2
        assert prefill.plan_for(moved(name)) is another
    assert prefill.plan_for(moved("g")) is plan and prefill.plan_for(request) is plan
    assert list(request.shared.values()) == [plan], "there may be many alignments, and calls are remembered for long"
    prefill.forget_plans()
    assert not prefill.plans and not dispatch._accepted


def launches_of(tk: Tokens, **more):
    """The launches that a call would make, without making them."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill.Launch, "_launch", lambda launch, *_: seen.append(launch))
        door(gdn_multi.chunk_gated_delta_rule, **tk.arguments(**more))
    return seen


@pytest.mark.parametrize("chunks", [0, 2])
def test_every_launch_but_the_first_is_dependent(chunks, monkeypatch):
    """Each waits for the one before it, and the first one for all that went before the call."""
    monkeypatch.setattr(heuristics, "_dependent", lambda device: True)
    tk = tokens(Dims(1, 1, 1, 64, 64), (64 * 5,))

    def flag(launch, name):
        names = launch.kernel.arg_names
        return launch.fixed[names.index(name) - len(names)] if name in names else None

    for dependent in (True, False):
        cut(chunks)
        heuristics.OVERRIDES["dependent"] = dependent
        first, *others = launches_of(tk)
        assert len(others) == (3 if chunks else 1)
        assert "launch_pdl" not in first.options and flag(first, "AFTER") is None
        for launch in others:
            assert launch.options.get("launch_pdl", False) == flag(launch, "AFTER") == dependent
        # The last kernel lets nobody in early: what follows a call knows nothing of it.
        assert not flag(others[-1], "RELEASE")


def test_who_takes_places_early():
    """Programs that fit once on every SM wait, lest two share one; unless two cannot."""
    assert not heuristics.early(programs=100, exclusive=False, sms=132)
    assert heuristics.early(programs=100, exclusive=True, sms=132)
    assert heuristics.early(programs=200, exclusive=False, sms=132)


def test_a_call_is_planned_once(monkeypatch):
    """Although it is asked what it did as well."""
    keys = []
    key = prefill._key
    monkeypatch.setattr(prefill, "_key", lambda request: keys.append(key(request)) or keys[-1])
    check(tokens(Dims(1, 1, 1, 64, 64), (70,)))
    assert len(keys) == 1


def test_batch_invariance(monkeypatch):
    """Alone or with others, heads together or not on offer: the same bits."""
    monkeypatch.setenv("GDN_MULTI_BATCH_INVARIANT", "1")
    cut(1)  # must not count
    together = tokens(Dims(1, 1, 2, 64, 64), (50, 200, 3))
    initial = random_states(3, together.dims).to(DEVICE)
    output, final = check(together, initial)
    assert gdn_multi.last_backend().detail == "whole sequences"
    at = together.span(1)
    alone = door(
        gdn_multi.chunk_gated_delta_rule,
        together.q[at], together.k[at], together.v[at], together.g[at], together.beta[at],
        initial_state=initial[1:2], output_final_state=True,
        cu_seqlens=torch.tensor([0, 200], dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    assert same_bits(alone[0], output[at]) and same_bits(alone[1], final[1:2])


def test_segments_are_for_few_and_long_sequences():
    def choice(tokens, longest, seqs, heads):
        return heuristics.segment_chunks(tokens // 64, longest // 64, seqs, heads, 2, 2, sms=132, demanded=False)

    assert choice(32768, 32768, 1, 8) > 0
    assert choice(32768, 28672, 2, 8) > 0
    assert choice(8192, 256, 32, 64) == 0
    assert choice(32768, 8192, 4, 64) == 0
    assert choice(64, 64, 1, 8) == 0
    # Whether four of a length are known to be alike or not.
    for heads in (8, 16, 32, 64):
        assert choice(32768, 8192, 4, heads) == choice(32768, 32768, 4, heads)


def test_use_cp_and_batch_invariance_exclude_each_other(monkeypatch):
    monkeypatch.setenv("GDN_MULTI_BATCH_INVARIANT", "1")
    tk = tokens(Dims(1, 1, 1, 64, 64), (70,))
    with pytest.raises(NotImplementedError, match="use_cp=True"):
        door(gdn_multi.chunk_gated_delta_rule, **tk.arguments(use_cp=True))


def test_sm_107_needs_a_new_assembler(monkeypatch, tmp_path):
    """The sentence of the issue where Triton's ptxas is older than CUDA 13.4, nothing where it is not."""
    from gdn_multi.backends import triton as backend

    knobs = pytest.importorskip("triton.knobs", reason="needs a Triton that has knobs")
    monkeypatch.setattr(backend.shutil, "which", lambda _: None)
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", "")  # restored after the test, as the knob sets it
    for version, enough in (("13.0", False), ("13.4", True), ("14.0", True)):
        ptxas = tmp_path / f"ptxas-{version}"
        ptxas.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
        ptxas.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setitem(knobs.nvidia.__dict__, "ptxas_blackwell", str(ptxas))
            reasons = backend._reasons_sm107()
        if enough:
            assert reasons == ()
        else:
            assert all(part in reasons[0] for part in ("CUDA 13.4", "TRITON_PTXAS_BLACKWELL_PATH", str(ptxas)))


def test_usable_where_it_can_run():
    assert TritonBackend().reasons_unusable(DEVICE) == ()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="about the interpreter, which runs on a CPU")
def test_the_interpreters_wrong_products_are_refused():
    arguments = Tokens(Dims(2, 2, 8, 64, 64), (3,), device=DEVICE, dtype=BF16).arguments()
    with pytest.raises(NotImplementedError, match="interpreter multiplies bfloat16 matrices wrongly"):
        gdn_multi.chunk_gated_delta_rule(**arguments, backend="triton")


# --- only compiled --------------------------------------------------------------------------------


@on_a_gpu
def test_work_area():
    """Peak memory of a call beyond its tensors: what docs and the plan say."""
    tk = Tokens(Dims(2, 2, 8, 128, 128), (4096,), device=DEVICE, dtype=BF16)
    output = torch.empty(4096, 8, 128, dtype=BF16, device=DEVICE)
    for chunks in (0, 16):
        cut(chunks)
        arguments = tk.arguments(output=output)
        door(gdn_multi.chunk_gated_delta_rule, **arguments)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        door(gdn_multi.chunk_gated_delta_rule, **arguments)
        torch.cuda.synchronize()
        used = torch.cuda.max_memory_allocated() - before
        (plan,) = prefill.plans.values()
        records = plan.records.shape[0]
        said = records + (4 * plan.segments.shape[0] if chunks else 0)
        assert said <= used <= said + (4 << 20)  # the allocator rounds large blocks to 2 MiB
        assert records == (4096 // 64 + 1) * 8 * (2 * 64 * 64 * 2 + 2 * 64 * 4)


@on_a_gpu
@pytest.mark.parametrize("lengths", [(4096,), (700, 64, 0, 333), (64,) * 40])
def test_dependent_launches_change_no_bit(lengths):
    """Whether programs start early, late, or behind the kernel before; also where some have nothing to do."""
    tk = Tokens(Dims(2, 2, 8, 128, 128), lengths, device=DEVICE, dtype=BF16)
    initial = random_states(len(lengths), tk.dims).to(DEVICE)
    for chunks in (0, 8):
        results = []
        for overrides in ({"dependent": False}, {"early": False}, {"early": True}):
            heuristics.OVERRIDES.update(overrides)
            cut(chunks)
            for _ in range(10):
                results.append(door(
                    gdn_multi.chunk_gated_delta_rule, **tk.arguments(initial_state=initial, output_final_state=True)
                ))  # fmt: skip
            for name in overrides:
                del heuristics.OVERRIDES[name]
        for output, final in results[1:]:
            assert same_bits(output, results[0][0]) and same_bits(final, results[0][1])


@on_a_gpu
def test_another_batch_compiles_nothing():
    """Beyond the one kernel for few programs and the one for many."""
    from gdn_multi.backends.triton import prefill_kernels

    def run(lengths):
        tk = Tokens(Dims(2, 2, 4, 64, 64), lengths, device=DEVICE, dtype=BF16)
        initial = random_states(len(lengths), tk.dims).to(DEVICE)
        door(gdn_multi.chunk_gated_delta_rule, **tk.arguments(initial_state=initial, output_final_state=True))

    def compiled():
        device = torch.cuda.current_device()
        return [len(k.device_caches[device][0]) for k in (prefill_kernels.prepare, prefill_kernels.recur)]

    run((64, 16))
    run((5,) * 100)  # more programs than SMs: the other depth of the pipeline
    before = compiled()
    for lengths in ((1,), (7, 9, 3), (200,), tuple(range(80))):
        run(lengths)
    assert compiled() == before
