"""The Triton decode and page-table kernels by themselves, on a GPU or under Triton's interpreter.

Requests are built by hand here, so that nothing of the front end takes part; the conformance suite tests the public
functions.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import tolerances  # noqa: E402
from gdn_multi.backends.triton import decode as kernels  # noqa: E402
from gdn_multi.backends.triton.decode import decode, express_decode, reasons_against_decode  # noqa: E402
from gdn_multi.backends.triton.slots import page_slots  # noqa: E402

from gdn_multi import reference  # noqa: E402
from gdn_multi.request import DecodeRequest, PageTable  # noqa: E402
from gdn_multi.slots import slots_request  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
RUNS_HERE = INTERPRETED or DEVICE.type == "cuda"

runs = pytest.mark.skipif(not RUNS_HERE, reason="needs a CUDA device or TRITON_INTERPRET=1")
rounds = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter truncates float32 to bfloat16")
compiles = pytest.mark.skipif(INTERPRETED, reason="compiles the kernel, which TRITON_INTERPRET=1 prevents")

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16


def rand(rng, *shape, dtype=F32):
    return torch.randn(shape, generator=rng).to(dtype).to(DEVICE)


def make(
    batch=3, tokens=1, heads=(2, 4), K=64, V=64, dtype=F16, stored=F32, gates=F32, read=None, write=None, pages=None,
    pool=None, pool_rows=6, inter=False, update=True, l2norm=True, seed=0,
):  # fmt: skip
    """A request with random inputs; read and write are lists of rows or tensors, pages a PageTable."""
    rng = torch.Generator().manual_seed(seed)
    H, HV = heads
    if pool is None:
        pool = rand(rng, batch if read is None and pages is None else pool_rows, HV, V, K, dtype=stored)
    q, k, v = (rand(rng, batch, tokens, n, d, dtype=dtype) for n, d in ((H, K), (H, K), (HV, V)))
    if not l2norm:
        q, k = (torch.nn.functional.normalize(x.float(), dim=-1).to(dtype) for x in (q, k))
    if isinstance(read, list):
        read = torch.tensor(read, dtype=torch.int32, device=DEVICE)
    if isinstance(write, list):
        write = torch.tensor(write, dtype=torch.int32, device=DEVICE)
    return DecodeRequest(
        function="test", batch=batch, num_tokens=tokens, num_q_heads=H, num_heads=HV, head_size_k=K, head_size_v=V,
        device=DEVICE, q=q, k=k, v=v, A_log=rand(rng, HV), a=rand(rng, batch, tokens, HV, dtype=gates),
        dt_bias=rand(rng, HV), b=rand(rng, batch, tokens, HV, dtype=gates), scale=0.2, use_qk_l2norm=l2norm, state=pool,
        read_rows=read, write_rows=read if write is None else write,
        intermediate_states=rand(rng, batch, tokens + 1, HV, V, K, dtype=stored) if inter else None,
        update_state=update, pages=pages, output=torch.full((batch, tokens, HV, V), 7.0, dtype=dtype, device=DEVICE),
        batch_invariant=False, slot_arguments=(), is_paged=pages is not None,
    )  # fmt: skip


def expected(r: DecodeRequest, read):
    state = r.state[read]
    return reference.decode(
        r.q, r.k, r.v, r.A_log, r.a, r.dt_bias, r.b, r.scale, state=state, use_qk_l2norm=r.use_qk_l2norm
    )


def check(r: DecodeRequest, read=None, write=None):
    """Run ``r`` and compare output, written rows and intermediate states; all other rows must keep their bits."""
    rows = list(range(r.batch))
    read, write = rows if read is None else read, rows if write is None else write
    output, states = expected(r, read)
    before = r.state.clone()
    buffer = None if r.intermediate_states is None else r.intermediate_states.clone()
    decode(r)
    tolerances.assert_close(r.output, output, tolerances.decode_output(r.q.dtype), "output")
    state_tolerance = tolerances.decode_state(r.state.dtype)
    for i, row in enumerate(write if r.update_state else ()):
        tolerances.assert_close(r.state[row], states[i, -1], state_tolerance, f"state of sequence {i}")
    others = [i for i in range(before.shape[0]) if not r.update_state or i not in write]
    assert torch.equal(r.state[others], before[others])
    if buffer is not None:
        after, beyond = r.intermediate_states.split((r.num_tokens, 1), 1)
        tolerances.assert_close(after, states, state_tolerance, "intermediate states")
        assert torch.equal(beyond, buffer[:, r.num_tokens :])


@runs
@pytest.mark.parametrize("tokens", (1, 3))
@pytest.mark.parametrize(
    "dtype, stored",
    [
        (F16, F32),
        (F16, F16),
        (F32, F32),
        (F32, F16),
        pytest.param(BF16, F32, marks=rounds),
        pytest.param(BF16, BF16, marks=rounds),
        pytest.param(F16, BF16, marks=rounds),
    ],
)
def test_matches_the_recurrence(dtype, stored, tokens):
    check(make(tokens=tokens, dtype=dtype, stored=stored, inter=tokens > 1))


@runs
@pytest.mark.parametrize("K, V", ((64, 128), (128, 64), (256, 64), (64, 256), (96, 40), (16, 5)))
def test_head_sizes(K, V):
    check(make(batch=1, heads=(1, 2), K=K, V=V, tokens=2, inter=True))


@runs
@pytest.mark.parametrize("heads", ((1, 1), (2, 2), (1, 3), (2, 6)))
def test_heads(heads):
    check(make(batch=2, heads=heads))


@runs
@pytest.mark.parametrize("gates", (F32, F16, BF16))
def test_gate_dtypes_and_no_norm(gates):
    r = make(gates=gates, l2norm=False)
    check(replace(r, A_log=r.A_log.to(gates), dt_bias=r.dt_bias.to(gates)))


@runs
def test_gates_at_their_limits():
    """alpha from 1 to 0 and beta from 0 to 1, without overflow on the way."""
    r = make(batch=5, dtype=F32)
    r.a.copy_(torch.tensor([-200.0, -20.0, 0.0, 90.0, 1e4])[:, None, None].expand(5, 1, 4))
    r.b.copy_(torch.tensor([200.0, -200.0, 0.0, -90.0, 90.0])[:, None, None].expand(5, 1, 4))
    check(r)


@runs
@pytest.mark.parametrize("index", (torch.int32, torch.int64))
def test_rows(index):
    read, write = [4, 0, 2], [4, 1, 5]
    r = make(read=torch.tensor(read, dtype=index, device=DEVICE), write=write)
    check(r, read, write)


@runs
def test_state_is_only_read_without_update():
    check(make(read=[1, 3, 5], tokens=2, inter=True, update=False), [1, 3, 5])


@runs
@pytest.mark.parametrize("stored", (F32, F16))
@pytest.mark.parametrize("tokens", (1, 2))
def test_padding(stored, tokens):
    """A negative row in either tensor: zero output, nothing read, nothing written."""
    read, write = [-1, 0, 2, 3], [1, -5, 2, 4]
    r = make(batch=4, read=read, write=write, tokens=tokens, stored=stored, inter=True)
    for row in (0, 1, 5):
        r.state[row] = float("nan")
    for x in (r.q, r.k, r.v, r.a, r.b):
        x[:2] = float("nan")
    before, buffer = r.state.clone(), r.intermediate_states.clone()
    output, states = expected(r, [0, 0, 2, 3])
    decode(r)
    assert torch.equal(r.output[:2], torch.zeros_like(r.output[:2]))
    assert torch.equal(r.intermediate_states[:2].view(torch.uint8), buffer[:2].view(torch.uint8))
    for row in (0, 1, 3, 5):
        assert torch.equal(r.state[row].view(torch.uint8), before[row].view(torch.uint8))
    tolerances.assert_close(r.output[2:], output[2:], tolerances.decode_output(F16), "output")
    for row, i in ((2, 2), (4, 3)):
        tolerances.assert_close(r.state[row], states[i, -1], tolerances.decode_state(stored), f"state of sequence {i}")


def same(r: DecodeRequest, other: DecodeRequest, aligned: bool = True) -> None:
    """Two ways to say the same call give the same bits; on a GPU, where loads of another width bring another order of
    sums, only if both are aligned to 16 bytes."""
    decode(r)
    decode(other)
    pairs = [("output", r.output, other.output), ("state", r.state, other.state)]
    if r.intermediate_states is not None:
        pairs.append(("intermediate states", r.intermediate_states, other.intermediate_states))
    for name, x, y in pairs:
        if aligned or DEVICE.type == "cpu":
            assert torch.equal(x, y), name
        else:
            limit = tolerances.decode_output(F16) if name == "output" else tolerances.decode_state(x.dtype)
            tolerances.assert_close(y, x.double().cpu(), limit, name)


@runs
@pytest.mark.parametrize("odd", (0, 1, 8))
@pytest.mark.parametrize("stored", (F32, F16))
def test_views(odd, stored):
    """Slices of a fused projection, gates of another layout, padded pool rows, heads and V rows apart."""
    plain = make(heads=(1, 2), tokens=2, read=[4, 0, 2], stored=stored, inter=True)
    B, T, (H, K), (HV, V) = 3, 2, plain.q.shape[2:], plain.v.shape[2:]
    width = 2 * H * K + HV * V
    fused = torch.full((B, T, width + odd), 7.0, dtype=F16, device=DEVICE)[..., odd:]
    q, k, v = fused[..., :width].split((H * K, H * K, HV * V), -1)
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    ab = torch.empty(HV, 2, T, B, device=DEVICE).permute(1, 3, 2, 0)
    output = torch.empty(T, B, HV + 1, V + odd, dtype=F16, device=DEVICE).transpose(0, 1)[:, :, 1:, :V]
    pool = torch.empty(6, HV + 1, V + 1, K + odd, dtype=stored, device=DEVICE)[:, :HV, 1:, :K]
    inter = torch.empty(B, T + 1, HV, V + 1, K + odd, dtype=stored, device=DEVICE)[:, :, :, :V, :K]
    inter.copy_(plain.intermediate_states)
    for view, x in ((q, plain.q), (k, plain.k), (v, plain.v), (ab[0], plain.a), (ab[1], plain.b), (pool, plain.state)):
        view.copy_(x)
    other = replace(plain, q=q, k=k, v=v, a=ab[0], b=ab[1], state=pool, output=output, intermediate_states=inter)
    assert not any(x.is_contiguous() for x in (q, k, v, ab[0], output, pool, inter))
    same(plain, other, aligned=odd % 8 == 0)


@runs
def test_unaligned_pointers_after_aligned_ones():
    """The same shapes and strides at an odd address: a launch kept for the aligned call must not serve it."""
    plain = make(read=[4, 0, 2])
    moved = []
    for x in (plain.q, plain.k, plain.state):
        y = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape)
        moved.append(y.copy_(x))
    other = replace(plain, q=moved[0], k=moved[1], state=moved[2], output=torch.empty_like(plain.output))
    assert other.q.stride() == plain.q.stride() and other.state.data_ptr() % 16 != 0
    same(plain, other, aligned=False)


@runs
def test_row_offsets_of_more_than_31_bits():
    """Only the pages of the two rows are touched, so the 4 GiB are address space on a CPU."""
    read, stride = [1, 0], 2**31 + 64
    plain = make(batch=2, read=read, stored=F16, pool_rows=2)
    heads, size = plain.num_heads, plain.state[0].numel()
    try:
        memory = torch.empty(stride + size, dtype=F16, device=DEVICE)
    except RuntimeError as error:
        pytest.skip(f"no room for a pool of more than 2^31 elements: {error}")
    pool = memory.as_strided((2, heads, 64, 64), (stride, 64 * 64, 64, 1))
    pool.copy_(plain.state)
    same(plain, replace(plain, state=pool, output=torch.empty_like(plain.output)))


@runs
def test_bits_do_not_depend_on_the_batch():
    whole = make(batch=5, heads=(1, 2), tokens=2, read=[4, 0, 2, 1, 3])
    start = whole.state.clone()
    decode(whole)
    for i in range(5):
        part = {name: getattr(whole, name)[i : i + 1] for name in ("q", "k", "v", "a", "b", "read_rows", "write_rows")}
        alone = replace(whole, batch=1, state=start.clone(), output=torch.empty_like(whole.output[:1]), **part)
        decode(alone)
        row = int(whole.read_rows[i])
        assert torch.equal(alone.output[0], whole.output[i]) and torch.equal(alone.state[row], whole.state[row])


def table(index=torch.int32, lens=(5, 1, 64, 1, 128)):
    """Pages in no order: sequences of 2, 2, 1, 3 and 1 pages."""
    indptr, pages = [0, 2, 4, 5, 8, 9], [7, 3, 12, 0, 9, 5, 1, 10, 6]
    new = lambda x, dtype=index: torch.tensor(x, dtype=dtype, device=DEVICE)  # noqa: E731
    return PageTable(page_indices=new(pages), page_indptr=new(indptr, torch.int32), last_page_len=new(lens))


@runs
@pytest.mark.parametrize("index", (torch.int32, torch.int64))
def test_decode_slots(index):
    pages = table(index)
    request = slots_request("test", pages, None, DEVICE)
    page_slots(request)
    wanted = reference.decode_slots(pages.page_indices, pages.page_indptr, pages.last_page_len)
    assert [out.tolist() for out in request.out] == [list(rows) for rows in wanted]


@runs
@pytest.mark.parametrize("index", (torch.int32, torch.int64))
@pytest.mark.parametrize("stored", (F32, F16))
def test_paged_derives_the_rows_itself(index, stored):
    pages = table(index)
    read, write = reference.decode_slots(pages.page_indices, pages.page_indptr, pages.last_page_len)
    paged = make(batch=5, heads=(1, 2), pages=pages, pool_rows=13, stored=stored)
    assert set(read) != set(write)  # some sequence opens a page
    given = make(batch=5, heads=(1, 2), read=read, write=write, pool_rows=13, stored=stored)
    same(paged, given)
    check(make(batch=5, heads=(1, 2), pages=pages, pool_rows=13, stored=stored), read, write)


@runs
@pytest.mark.parametrize("index", (torch.int32, torch.int64))
def test_prefill_slots(index):
    """Empty prefixes, boundaries met from both sides, zero lengths, more sequences than one program takes."""
    rng = torch.Generator().manual_seed(0)
    size, lengths, total = 128, [], []
    for prefix in (0, 1, 64, 127, 128, 129, 256):
        for new in (0, 1, 64, 127, 128, 129, 300):
            if prefix + new:
                lengths.append(new)
                total.append(prefix + new)
    lengths, total = lengths * 3, total * 3
    counts = [(t + size - 1) // size for t in total]
    new_tensor = lambda x: torch.tensor(x, dtype=index, device=DEVICE)  # noqa: E731
    pages = torch.randperm(2 * sum(counts), generator=rng)[: sum(counts)].to(index).to(DEVICE)
    indptr = new_tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
    last = new_tensor([t - (n - 1) * size for t, n in zip(total, counts)])
    cu = new_tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]) + 3
    request = slots_request("test", PageTable(pages, indptr, last, size), cu, DEVICE)
    page_slots(request)
    wanted = reference.prefill_slots(cu, pages, indptr, size, last)
    for out, name in zip(request.out, ("read", "write", "starts", "prefix")):
        assert out.tolist() == wanted[name], name


@runs
def test_a_launch_is_kept_for_a_signature_only():
    kernels._LAUNCHES.clear()
    r = make(batch=1, heads=(1, 1))
    decode(r)
    decode(replace(r, output=torch.empty_like(r.output), state=r.state.clone()))
    assert len(kernels._LAUNCHES) == 1
    decode(make(batch=1, heads=(1, 1), stored=F16))
    decode(make(batch=1, heads=(1, 1), read=[2]))
    decode(make(batch=1, heads=(1, 1), read=torch.tensor([2], dtype=torch.int64, device=DEVICE)))
    assert len(kernels._LAUNCHES) == 4


@runs
def tensors_of(r: DecodeRequest) -> list:
    """The tensors that a short way takes, in its order."""
    pages = r.pages or PageTable(None, None, None)
    return [
        r.q, r.k, r.v, r.A_log, r.a, r.dt_bias, r.b, r.state, r.read_rows, r.write_rows, r.intermediate_states,
        pages.page_indices, pages.page_indptr, pages.last_page_len, r.output,
    ]  # fmt: skip


EXPRESS = {
    "states": dict(tokens=2, inter=True),
    "rows": dict(read=[4, 0, 2], write=[4, 1, 2]),
    "pages": dict(batch=5, pages=True, pool_rows=13),
}


def express_request(case: str, seed: int) -> DecodeRequest:
    options = dict(EXPRESS[case], seed=seed)
    if options.get("pages"):
        options["pages"] = table()
    return make(**options)


@runs
@pytest.mark.parametrize("case", EXPRESS)
def test_the_short_way_gives_the_same_bits(case):
    again = express_decode(express_request(case, 0))
    ordinary, short = express_request(case, 1), express_request(case, 1)
    decode(ordinary)
    assert again(*tensors_of(short)) is True
    assert torch.equal(ordinary.output, short.output) and torch.equal(ordinary.state, short.state)
    if ordinary.intermediate_states is not None:
        assert torch.equal(ordinary.intermediate_states, short.intermediate_states)


@runs
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", EXPRESS)
def test_the_short_way_refuses_any_other_tensor(case):
    r = express_request(case, 0)
    again = express_decode(r)
    untouched = r.output.clone(), r.state.clone()
    for i, tensor in enumerate(tensors_of(r)):
        if tensor is None:
            others = [torch.zeros(3, device=DEVICE)]
        else:
            wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype, device=DEVICE)
            one_more = torch.zeros((tensor.shape[0] + 1, *tensor.shape[1:]), dtype=tensor.dtype, device=DEVICE)
            others = [None, wide[..., 0], one_more, tensor.double(), torch.empty_like(tensor, device="meta")]
            others += [tensor.to_sparse(), torch.nested.as_nested_tensor([tensor[0], tensor[:0].sum(0)])]
        for other in others:
            tensors = tensors_of(r)
            tensors[i] = other
            try:
                served = again(*tensors)
            except (AttributeError, TypeError):  # the dispatch takes these for a refusal
                served = False
            assert served is False, (i, other)
    assert torch.equal(r.output, untouched[0]) and torch.equal(r.state, untouched[1])


@runs
def test_the_short_way_needs_the_alignment_that_was_compiled():
    r = make()
    again = express_decode(r)
    tensors = tensors_of(r)
    odd = torch.zeros(r.q.numel() + 1, dtype=r.q.dtype, device=DEVICE)[1:].view(r.q.shape)
    tensors[0] = odd
    assert odd.stride() == r.q.stride() and again(*tensors) is False
    assert express_decode(replace(r, q=odd)) is None


@pytest.mark.skipif(INTERPRETED or DEVICE.type != "cuda", reason="counts compilations, which needs a CUDA device")
def test_other_batches_and_strides_compile_nothing():
    decode(make(batch=3, read=[0, 1, 2]))
    compiled = lambda: sum(len(caches[0]) for caches in kernels.decode_kernel.device_caches.values())  # noqa: E731
    before = compiled()
    decode(make(batch=1, read=[1], pool_rows=17))
    decode(make(batch=5, read=[0, 1, 2, 3, 4], pool_rows=9))
    pool = torch.zeros(6, 4 * 64 * 64 + 64, device=DEVICE)[:, : 4 * 64 * 64].view(6, 4, 64, 64)
    decode(make(batch=3, read=[0, 1, 2], pool=pool))
    assert compiled() == before


@runs
@pytest.mark.skipif(INTERPRETED or DEVICE.type != "cuda", reason="CUDA graphs need a CUDA device")
def test_graph_replays_new_values():
    r = make(batch=5, heads=(1, 2), pages=table(), pool_rows=13)
    eager = make(batch=5, heads=(1, 2), pages=table(lens=(1, 7, 9, 64, 2)), pool_rows=13, seed=1)
    decode(r)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(r)
    for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state"):
        getattr(r, name).copy_(getattr(eager, name))
    r.pages.last_page_len.copy_(eager.pages.last_page_len)
    graph.replay()
    decode(eager)
    assert torch.equal(r.output, eager.output) and torch.equal(r.state, eager.state)


def test_reasons():
    class Sizes:
        head_size_k = 2048

    assert "2048" in reasons_against_decode(Sizes)[0]
    Sizes.head_size_k = 256
    assert reasons_against_decode(Sizes) == ()


@compiles
@pytest.mark.parametrize("stored", ("fp32", "bf16"))
def test_state_moves_16_bytes_at_a_time(stored):
    """Compiled for sm_90 (no GPU needed), each load and store of the state is 128 bits wide and nothing spills."""
    from gdn_multi.backends.triton.decode_heuristics import tile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    itemsize = 4 if stored == "fp32" else 2
    shape = tile(128, 128, itemsize)
    constants = dict(
        HV=64, GROUP=4, K=128, V=128, BK=128, BV=shape.block_v, QK_UNIT=8, STATE_UNIT=16 // itemsize, DENSE=True,
        ROWS=2, ONE_TOKEN=True, L2NORM=True, UPDATE=True, INTER=False, LOAD_POLICY=shape.load_policy,
        STORE_POLICY=shape.store_policy,
    )  # fmt: skip
    types = dict(scale="fp32", num_tokens="i32", state_ptr=f"*{stored}", inter_ptr=f"*{stored}")
    types.update({name: "*fp32" for name in ("A_log_ptr", "dt_bias_ptr")})
    types.update({name: "*i32" for name in ("read_ptr", "write_ptr", "last_ptr")})
    names = kernels.decode_kernel.arg_names
    signature = {}
    for name in names:
        other = "*bf16" if name.endswith("_ptr") else "i64"
        signature[name] = "constexpr" if name in constants else types.get(name, other)
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in ("q_ptr", "k_ptr", "state_ptr", "inter_ptr")}
    source = ASTSource(
        fn=kernels.decode_kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": shape.num_warps}).asm["ptx"]
    wide = shape.block_v * 128 * itemsize // (16 * 32 * shape.num_warps)
    stores = [line for line in ptx.splitlines() if "st.global" in line]
    assert sum(".v4.b32" in line for line in stores) == wide
    assert sum("ld.global" in line and ".v4.b32" in line for line in ptx.splitlines()) == wide
    assert len(stores) == wide + 1  # and the output
    assert "ld.local" not in ptx and "st.local" not in ptx


def test_compilations_are_counted(monkeypatch):
    """The count is over the kernels' own caches, device by device."""
    from types import SimpleNamespace

    from gdn_multi.backends.triton import TritonBackend, slots

    backend = TritonBackend()
    before = backend.compilations()
    fake = SimpleNamespace(device_caches={0: ({"one": 1, "two": 2}, {}), 1: ({"one": 1}, {})})
    monkeypatch.setattr(slots, "another_kernel", fake, raising=False)
    assert backend.compilations() == before + 3
