"""The CUDA kernels, run on the CPU by an emulator (cuda_emulator/): against the reference, to the bit across the ways of
splitting work, and the errors that C++ raises. Sizes are small: a chunk of one head takes milliseconds."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
pytestmark = pytest.mark.build
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from gdn_multi.backends.cuda import load_library  # noqa: E402
from gdn_multi.backends.cuda.prefill_heuristics import PORTABLE, Path  # noqa: E402

import gdn_multi  # noqa: E402
from gdn_multi import reference  # noqa: E402

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OUTPUT_LIMIT = {BF16: 4e-3, F16: 5e-4}
STATE_DTYPES = (F32, BF16, F16) + FP8
STATE_LIMIT = {F32: 0, BF16: 2e-3, F16: 3e-4, FP8[0]: 3.5e-2, FP8[1]: 7e-2}


@pytest.fixture(scope="module")
def emulated():
    from cuda_emulator import FOLDER, EmulatedCudaBackend, build_library, toolchain_or_skip

    toolchain_or_skip()
    return EmulatedCudaBackend(build_library(FOLDER))


@pytest.fixture(autouse=True)
def in_place(emulated):
    """The emulated backend as "cuda" while a test runs."""
    gdn_multi.register_backend(emulated, replace=True)
    yield
    gdn_multi.unregister_backend("cuda")


#: (multiprocessors, shared memory of one): many CTAs of few rows, few of many, and one stage of shared memory.
PLANS = ((1, 232448), (4, 232448), (1000, 232448), (1, 101376))


@pytest.fixture
def plan(monkeypatch):
    def use(multiprocessors, shared):
        monkeypatch.setenv("EMULATED_MULTIPROCESSORS", str(multiprocessors))
        monkeypatch.setenv("EMULATED_SHARED", str(shared))

    return use


def relative(x, y) -> float:
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


def bits(x):
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def nan(*shape, dtype):
    return torch.full(shape, float("nan")).to(dtype)


# --- decode --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", (F32, BF16, F16))
@pytest.mark.parametrize("K, V, T", ((128, 128, 1), (128, 128, 3), (64, 64, 1), (128, 64, 2)))
def test_decode(plan, K, V, T, state_dtype):
    torch.manual_seed(K + V + T)
    B, H, HV, dtype = 3, 1, 2, BF16 if T == 1 else F16
    q, k, v = (torch.randn(B, T, h, d).to(dtype) for h, d in ((H, K), (H, K), (HV, V)))
    A_log, a, dt_bias, b = torch.rand(HV), torch.randn(B, T, HV).to(dtype), torch.randn(HV), torch.randn(B, T, HV)
    read, write = torch.tensor([5, 2, 0]), torch.tensor([5, 4, -1], dtype=torch.int64)
    initial = torch.randn(B, HV, V, K).to(state_dtype)
    o, states = reference.decode(q, k, v, A_log, a, dt_bias, b, state=initial)
    first = None
    for multiprocessors, shared in PLANS[:3]:
        plan(multiprocessors, shared)
        pool = nan(7, HV, V, K, dtype=state_dtype)
        pool[read] = initial
        before, steps = pool.clone(), nan(B, T + 1, HV, V, K, dtype=state_dtype) if T == 3 else None
        output, _ = gdn_multi.gated_delta_rule_decode_pretranspose(
            q, k, v, None, A_log, a, dt_bias, b, initial_state=pool, initial_state_indices=read,
            output_state_indices=write, intermediate_states_buffer=steps, backend="cuda",
        )  # fmt: skip
        assert relative(output[:2], o[:2]) < OUTPUT_LIMIT[dtype]
        assert relative(pool[write[:2]], states[:2, -1]) < 1e-6 + STATE_LIMIT[state_dtype]
        assert (output[2] == 0).all(), "padding"
        others = [0, 1, 2, 3, 6]
        assert torch.equal(bits(pool[others]), bits(before[others]))
        if steps is not None:
            assert relative(steps[:2, :T], states[:2]) < 1e-6 + STATE_LIMIT[state_dtype]
            assert steps[2].isnan().all() and steps[:, T].isnan().all()
        if first is None:
            first = output, pool
        assert torch.equal(bits(output), bits(first[0])) and torch.equal(bits(pool), bits(first[1]))


def test_decode_with_pages_that_start_anywhere():
    """A page table, and a pool whose rows are padded to an odd number of elements: no load is aligned."""
    torch.manual_seed(0)
    B, H, HV, K = 2, 1, 2, 128
    fused = torch.randn(B, 1, 2 * H * K + HV * K + 3).to(BF16)[..., 1:]
    q, k, v = fused[..., :K].unflatten(-1, (H, K)), fused[..., K : 2 * K].unflatten(-1, (H, K)), fused[..., 2 * K : 4 * K]
    v = v.unflatten(-1, (HV, K))
    A_log, a, dt_bias, b = torch.rand(HV), torch.randn(B, 1, HV), torch.randn(HV), torch.randn(B, 1, HV)
    pool = torch.full((5, HV * K * K + 1), float("nan"))[:, : HV * K * K].view(5, HV, K, K)
    pool[[3, 1]] = torch.randn(2, HV, K, K)
    o, states = reference.decode(q, k, v, A_log, a, dt_bias, b, state=pool[[3, 1]].contiguous())
    output = gdn_multi.gated_delta_rule_decode_paged(
        q, k, v, A_log, a, dt_bias, b, state_pool=pool, page_indices=torch.tensor([3, 4, 1]),
        page_indptr=torch.tensor([0, 2, 3], dtype=torch.int32), last_page_len=torch.tensor([1, 9]), backend="cuda",
    )  # fmt: skip
    assert relative(output, o) < OUTPUT_LIMIT[BF16] and relative(pool[[4, 1]], states[:, 0]) < 1e-6
    assert pool[[0, 2]].isnan().all()


def test_decode_again_serves_what_is_alike_and_refuses_the_rest(emulated):
    """The short way of the front end: only addresses may differ from the accepted call's."""
    arguments = list(decode_arguments(state=torch.randn(2, 4, 128, 128)))
    again = emulated._emulated.decode_again(*arguments)

    def fresh():
        tensors = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments[:15]]
        for i in (0, 1, 2, 3, 4, 5, 6):
            tensors[i] = torch.randn(tensors[i].shape).to(tensors[i].dtype)
        return tensors

    one = fresh()
    other = [x.clone() if isinstance(x, torch.Tensor) else x for x in one]
    emulated._emulated.decode(*one, *arguments[15:])
    assert again(*other) is True
    assert torch.equal(one[14], other[14]) and torch.equal(one[7], other[7]) and one[14].any()
    for place, change in (
        (0, lambda q: q[:1]), (0, lambda q: q.to(F16)), (1, lambda k: torch.zeros(2, 1, 2, 129, dtype=BF16)[..., :128]),
        (1, lambda k: torch.zeros(k.numel() + 1, dtype=BF16)[1:].view(k.shape)), (7, lambda s: s.to(BF16)),
        (8, lambda rows: torch.tensor([0, 1])), (14, lambda output: None),
    ):  # fmt: skip
        tensors = fresh()
        tensors[place] = change(tensors[place])
        before = tensors[7].clone()
        assert again(*tensors) is False, place
        assert torch.equal(tensors[7], before)


def test_decode_calls_like_the_one_before_are_served_in_cpp(emulated, monkeypatch, caplog):
    """All through the public function: what is served without a request, and what is looked at in full."""
    if emulated._emulated.decode_short is None:
        pytest.skip("this torch has no exchange interface")
    torch.manual_seed(0)
    q, k, v, A_log, a, dt_bias, b, state = decode_arguments()[:8]
    q, k, v, a, b = (torch.randn(x.shape).to(x.dtype) for x in (q, k, v, a, b))
    table = dict(page_indices=torch.tensor([1, 0]), page_indptr=torch.tensor([0, 1, 2]), last_page_len=torch.tensor([3, 4]))
    slots = gdn_multi.gdn_paged_decode_slots(**table)
    ordinary = []
    monkeypatch.setattr(emulated, "decode", lambda request: (ordinary.append(request), type(emulated).decode(emulated, request)))

    def call(backend="cuda", **changes):
        pool = torch.ones_like(state)
        given = dict(q=q, k=k, v=v, A_log=A_log, a=a, dt_bias=dt_bias, b=b, state_pool=pool, slots=slots, backend=backend, **table)
        return gdn_multi.gated_delta_rule_decode_paged(**{**given, **changes}), pool

    def in_full(**changes):
        before = len(ordinary)
        call(**changes)
        return len(ordinary) > before

    first = call()
    for changes in (dict(), dict(output=torch.empty_like(v)), dict(slots=None), dict(slots=None)):
        again = call(**changes)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1]) and again[0] is not first[0]
        assert "output" not in changes or again[0] is changes["output"]
    assert len(ordinary) == 2, "of the call with slots, and of the one with the table"
    assert not in_full() and not in_full(slots=None) and gdn_multi.last_backend() == ("gated_delta_rule_decode_paged", "cuda", "")
    assert in_full(scale=0.5) and not in_full(scale=float("0.5"))
    assert in_full(q=q[:1], k=k[:1], v=v[:1], a=a[:1], b=b[:1], slots=tuple(x[:1] for x in slots), **{
        "page_indptr": table["page_indptr"][:2], "last_page_len": table["last_page_len"][:1]})  # fmt: skip
    assert not in_full()
    with monkeypatch.context() as changed:
        changed.setenv("GDN_MULTI_BATCH_INVARIANT", "1")
        assert in_full() and not in_full()
    assert not in_full()
    with pytest.raises(ValueError, match="A_log requires grad"):
        call(A_log=A_log.clone().requires_grad_())
    with pytest.raises(ValueError, match="b is a view whose sign"):
        call(b=torch._neg_view(b))
    with pytest.raises(TypeError, match="q must be a torch.Tensor"):
        call(q=None)
    with caplog.at_level("DEBUG", logger="gdn_multi"):
        assert not in_full()
    assert "served by cuda (as an earlier call like it)" in caplog.text
    caplog.clear()
    assert not in_full() and not caplog.text


# --- prefill -------------------------------------------------------------------------------------


@pytest.fixture
def launches(request, emulated, monkeypatch):
    """Prefill in two launches, or all in one, of so many V rows a CTA."""

    def use(rows):
        monkeypatch.setattr(emulated, "forced_path", PORTABLE if rows is None else Path(rows, 0, False, fused=True))

    use(getattr(request, "param", None))
    return use


TWO_OR_ONE = pytest.mark.parametrize("launches", (None, 64), indirect=True, ids=("two", "one"))
GATES = (
    dict(use_gate_in_kernel=True, beta_is_logit=True, use_qk_l2norm_in_kernel=True), dict(gate_domain="log"),
    dict(beta=None), dict(g=None),
)  # fmt: skip


def prefill_inputs(T, heads, K, V, dtype, option):
    Hq, Hk, Hv = heads
    Ho = max(Hq, Hv)
    q, k, v = torch.randn(T, Hq, K), torch.randn(T, Hk, K), torch.randn(T, Hv, V)
    if not option.get("use_qk_l2norm_in_kernel"):
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    inputs = dict(g=torch.rand(T, Ho) * 0.1 + 0.9, beta=torch.rand(T, Ho), **{n: x for n, x in option.items() if n not in ("g", "beta")})
    if option.get("use_gate_in_kernel"):
        inputs.update(g=torch.randn(T, Ho).to(dtype), A_log=torch.rand(Ho) * 2, dt_bias=torch.randn(Ho) - 4)
    if option.get("gate_domain") == "log":
        inputs["g"] = inputs["g"].log()
    if option.get("beta_is_logit"):
        inputs["beta"] = torch.randn(T, Ho).to(dtype)
    inputs.update({n: x for n, x in option.items() if n in ("g", "beta")})
    return q.to(dtype), k.to(dtype), v.to(dtype), inputs


def run_paged(q, k, v, inputs, lengths, prefixes, pool, pages, page_size):
    total = [n + p for n, p in zip(lengths, prefixes)]
    indptr = torch.tensor([0, *(len(p) for p in pages)]).cumsum(0)
    return gdn_multi.chunk_gated_delta_rule_paged(
        q, k, v, **inputs, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0), state_pool=pool,
        page_indices=torch.tensor([x for p in pages for x in p], dtype=torch.int32), page_indptr=indptr, page_size=page_size,
        last_page_len=torch.tensor([t - (len(p) - 1) * page_size for t, p in zip(total, pages)]), backend="cuda",
    )  # fmt: skip


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize(
    "K, V, heads, one_launch",
    (
        (128, 128, (1, 1, 2), False), (64, 64, (2, 1, 1), False), (64, 128, (1, 1, 1), False), (128, 128, (1, 1, 2), True),
        (128, 64, (2, 1, 1), True),
    ),
)  # fmt: skip
def test_prefill_paged(plan, launches, K, V, heads, state_dtype, one_launch):
    """Ragged, unaligned prefixes, pages crossed, every gate in turn; bits alike however the work is split."""
    number = 3 * STATE_DTYPES.index(state_dtype) + (K, V).index(V)
    torch.manual_seed(number)
    option, dtype = GATES[number % 4], BF16 if one_launch else (BF16, F16)[number // 4 % 2]
    lengths, prefixes, page_size = [100, 0, 64, 5], [70, 9, 0, 60], 64
    q, k, v, inputs = prefill_inputs(sum(lengths), heads, K, V, dtype, option)
    pages, Ho = [[7, 3, 12], [1], [5], [9, 2]], max(heads[0], heads[2])
    initial = torch.zeros(4, Ho, V, K).to(state_dtype)
    initial[0], initial[3] = (torch.randn(2, Ho, V, K)).to(state_dtype)
    o, states = reference.prefill(q, k, v, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0), initial_state=initial,
                                  **inputs)  # fmt: skip
    # page -> the state it must hold: boundaries crossed and last pages; the prefix' full pages stay as they are
    wanted = {3: states[0][128 - 70], 12: states[0][100], 5: states[2][64], 9: states[3][4], 2: states[3][5]}
    first = None
    ways = (V, 32, 16) if one_launch else PLANS
    for one in ways if state_dtype == F32 else ways[1:2]:
        launches(one) if one_launch else plan(*one)
        pool = nan(14, Ho, V, K, dtype=state_dtype)
        pool[3], pool[9] = initial[0], initial[3]
        before = pool.clone()
        output = run_paged(q, k, v, inputs, lengths, prefixes, pool, pages, page_size)
        assert relative(output, o) < OUTPUT_LIMIT[dtype]
        for page, state in wanted.items():
            assert relative(pool[page], state) < OUTPUT_LIMIT[dtype] + STATE_LIMIT[state_dtype], page
        others = [page for page in range(14) if page not in wanted]
        assert torch.equal(bits(pool[others]), bits(before[others]))
        if first is None:
            first = output, pool
        assert torch.equal(bits(output), bits(first[0])) and torch.equal(bits(pool), bits(first[1])), one


@TWO_OR_ONE
def test_prefill_restart_from_a_page_gives_the_same_bits(launches):
    torch.manual_seed(0)
    q, k, v, inputs = prefill_inputs(200, (1, 1, 1), 128, 128, BF16, {})
    pool = nan(4, 1, 128, 128, dtype=F32)
    whole = run_paged(q, k, v, inputs, [200], [0], pool, [[2, 0, 1, 3]], 64)
    after = pool.clone()
    pool[1], pool[3] = float("nan"), float("nan")
    rest = {n: x[128:] if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    part = run_paged(q[128:], k[128:], v[128:], rest, [72], [128], pool, [[2, 0, 1, 3]], 64)
    assert torch.equal(bits(part), bits(whole[128:])) and torch.equal(bits(pool), bits(after))


@pytest.mark.parametrize("launches, dtype", ((None, BF16), (None, F16), (64, BF16)), indirect=["launches"])
def test_prefill_gates_that_have_no_logarithm(launches, dtype):
    """Zeros, denormals and values above one; the state that a zero forgets must be gone."""
    torch.manual_seed(0)
    q, k, v, inputs = prefill_inputs(150, (1, 1, 2), 128, 128, dtype, {})
    g = inputs["g"]
    g[torch.rand(g.shape) < 0.1], g[torch.rand(g.shape) < 0.05], g[torch.rand(g.shape) < 0.05] = 0, 1e-40, 1.001
    g[128:130] = 0
    cu = torch.tensor([0, 150])
    o, states = reference.prefill(q, k, v, g, inputs["beta"], cu_seqlens=cu)
    output, final = gdn_multi.chunk_gated_delta_rule(
        q, k, v, g, inputs["beta"], cu_seqlens=cu, output_final_state=True, backend="cuda",
        initial_state=torch.full((1, 2, 128, 128), 1e30 if dtype == BF16 else 1e4),  # states are operands, of q's range
    )  # fmt: skip
    assert relative(final[0], states[0][-1]) < OUTPUT_LIMIT[dtype]
    assert relative(output[128:], o[128:]) < OUTPUT_LIMIT[dtype]


@TWO_OR_ONE
def test_prefill_rest_of_the_tokens(launches):
    """Tokens outside the sequences, NaN here: zero rows in an output of the call's own, untouched rows in one given."""
    torch.manual_seed(0)
    q, k, v, inputs = prefill_inputs(90, (1, 1, 1), 128, 64, BF16, {})
    for x in (q, k, v, inputs["g"], inputs["beta"]):
        x[:3], x[80:] = float("nan"), float("nan")
    cu = torch.tensor([3, 3, 80])
    o, _ = reference.prefill(q, k, v, inputs["g"], inputs["beta"], cu_seqlens=cu)
    output = gdn_multi.chunk_gated_delta_rule(q, k, v, **inputs, cu_seqlens=cu, backend="cuda")
    assert relative(output[3:80], o[3:80]) < OUTPUT_LIMIT[BF16]
    assert (output[:3] == 0).all() and (output[80:] == 0).all()
    given = torch.full((90, 1, 64), 7.0, dtype=BF16)
    gdn_multi.chunk_gated_delta_rule(q, k, v, **inputs, cu_seqlens=cu, output=given, backend="cuda")
    assert torch.equal(given[3:80], output[3:80]) and (given[:3] == 7).all() and (given[80:] == 7).all()


@pytest.mark.parametrize("lengths", ((1, 16), (17,), (64, 0), (16, 65)))
@pytest.mark.parametrize("views", (False, True))
def test_prefill_in_one_launch_of_few_tokens(launches, lengths, views):
    """Chunks of 16 tokens and less are worked on as such; q, k, v and gates that start anywhere, in rows of any stride."""
    torch.manual_seed(len(lengths) + views)
    total = sum(lengths)
    q, k, v, inputs = prefill_inputs(total, (1, 1, 2), 128, 128, BF16, GATES[0])
    if views:
        wide = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
        fused = torch.empty(total, wide.shape[1] + 3, dtype=BF16)[:, 1:-2].copy_(wide)
        q, k, v = (x.unflatten(1, (-1, 128)) for x in fused.split([128, 128, 256], 1))
        gates = torch.stack([inputs["g"], inputs["beta"]], 2)
        inputs["g"], inputs["beta"] = gates[..., 0], gates[..., 1]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    initial = torch.randn(len(lengths), 2, 128, 128)
    o, states = reference.prefill(q, k, v, cu_seqlens=cu, initial_state=initial, **inputs)
    for rows in (128, 32):
        launches(rows)
        output, final = gdn_multi.chunk_gated_delta_rule(
            q, k, v, **inputs, cu_seqlens=cu, initial_state=initial, output_final_state=True, backend="cuda"
        )
        assert relative(output, o) < OUTPUT_LIMIT[BF16]
        for i, each in enumerate(states):
            assert relative(final[i], each[-1]) < OUTPUT_LIMIT[BF16] if lengths[i] else torch.equal(final[i], initial[i])


def test_one_launch_refuses_what_it_does_not_serve(launches):
    launches(64)
    for K, dtype in ((64, BF16), (128, F16)):
        q, k, v, inputs = prefill_inputs(9, (1, 1, 1), K, 64, dtype, {})
        with pytest.raises(ValueError, match="one launch serves bfloat16 and K = 128"):
            gdn_multi.chunk_gated_delta_rule(q, k, v, **inputs, cu_seqlens=torch.tensor([0, 9]), backend="cuda")


@pytest.mark.parametrize("alike, strength", ((0.8, 1.9), (1.0, 1.5)))
def test_prefill_in_one_launch_where_keys_are_alike(launches, alike, strength):
    """Errors must not grow from block to block: none is larger than that of two launches by more than a tenth."""
    errors = {}
    for seed in range(2):
        torch.manual_seed(seed)
        _, k, v, inputs = prefill_inputs(64, (1, 1, 1), 128, 128, BF16, {})
        q, k = torch.nn.functional.normalize(torch.randn(64, 1, 128), dim=-1).to(BF16), k.float()
        k = torch.nn.functional.normalize((1 - alike) * k + alike * k[:1], dim=-1).to(BF16)
        inputs.update(beta=torch.full((64, 1), strength), cu_seqlens=torch.tensor([0, 64]))
        o, states = reference.prefill(q, k, v, **inputs)
        for rows in (None, 128):
            launches(rows)
            output, final = gdn_multi.chunk_gated_delta_rule(q, k, v, **inputs, output_final_state=True, backend="cuda")
            errors.setdefault(rows, []).extend((relative(output, o), relative(final[0], states[0][-1])))
    assert all(one < 1.1 * two for one, two in zip(errors[128], errors[None])), errors


# --- errors raised in C++ ------------------------------------------------------------------------


def decode_arguments(**changes):
    given = dict(
        q=torch.zeros(2, 1, 2, 128, dtype=BF16), k=torch.zeros(2, 1, 2, 128, dtype=BF16), v=torch.zeros(2, 1, 4, 128, dtype=BF16),
        A_log=torch.zeros(4), a=torch.zeros(2, 1, 4), dt_bias=torch.zeros(4), b=torch.zeros(2, 1, 4),
        state=torch.zeros(2, 4, 128, 128), read=None, write=None, steps=None, indices=None, indptr=None, last=None,
        output=torch.zeros(2, 1, 4, 128, dtype=BF16), scale=1.0, l2norm=True, update=True,
    )  # fmt: skip
    given.update(changes)
    return tuple(given.values())


@pytest.mark.parametrize(
    "changes, message",
    (
        (dict(q=torch.zeros(2, 1, 2, 128)), "q must be bfloat16 or float16.*float32"),
        (dict(q=torch.zeros(2, 2, 128, dtype=BF16)), "q must have 4 dimensions, got 3"),
        (dict(k=torch.zeros(2, 1, 3, 128, dtype=BF16)), "k must have size 2 in dimension 2, got 3"),
        (dict(v=torch.zeros(2, 1, 4, 96, dtype=BF16)), "head sizes 64 and 128"),
        (dict(v=torch.zeros(2, 1, 3, 128, dtype=BF16)), "multiple of those of q"),
        (dict(output=torch.zeros(2, 1, 4, 128, dtype=F16)), "output must have q's dtype"),
        (dict(state=torch.zeros(2, 4, 128, 64)), "state must have size 128 in dimension 3"),
        (dict(state=torch.zeros(2, 4, 128, 128).transpose(2, 3)), "state must be contiguous in its last dimension"),
        (dict(state=torch.zeros(1, 4, 128, 128)), "state must have a row for each of the 2"),
        (dict(state=torch.zeros(2, 4, 128, 128).to(FP8[0])), "state must be float32, bfloat16 or float16"),
        (dict(read=torch.zeros(2), write=torch.zeros(2)), "read rows must be int32 or int64"),
        (dict(read=torch.zeros(2, dtype=torch.int32)), "read rows and write rows go together"),
        (dict(indices=torch.zeros(2, dtype=torch.int32)), "page_indices needs"),
    ),
)
def test_wrong_arguments_are_value_errors(emulated, changes, message):
    with pytest.raises(ValueError, match=message):
        emulated._emulated.decode(*decode_arguments(**changes))


def test_right_arguments_are_not(emulated):
    emulated._emulated.decode(*decode_arguments())


def test_missing_library():
    with pytest.raises(Exception, match="no_such_file"):
        load_library("/no_such_file.so", "sm_80")
