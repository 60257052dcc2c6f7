"""The native CUDA backend on a GPU, in a few minutes: build it, check it against the reference, time it.

    python benchmarks/check_cuda.py [--only build,decode,slots,host,time-decode,prefill,accuracy,time-prefill,parts-prefill]

Outputs, unused pool rows and pages are poisoned with NaN before every checked call, and rows that must not change are
compared to the bit. Times are of CUDA graphs, replayed with the L2 flushed before each replay; medians.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from dataclasses import replace

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import torch  # noqa: E402
from gdn_multi.backends.cuda import CudaBackend  # noqa: E402

import gdn_multi  # noqa: E402
from gdn_multi import reference  # noqa: E402
from gdn_multi.bench.timing import Timer  # noqa: E402
from gdn_multi.request import DecodeRequest, PageTable, PrefillRequest, SlotsRequest  # noqa: E402

DEVICE = torch.device("cuda", 0)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHORT = {BF16: "bf16", F16: "f16", F32: "f32"}
FAILURES = []


def relative(x, y) -> float:
    x, y = x.double(), y.double()
    return ((x - y).norm() / y.norm().clamp_min(1e-300)).item()


def expect(name: str, value: float, limit: float) -> None:
    if not value <= limit:
        FAILURES.append(name)
        print(f"  FAILED {name}: {value:.3g}, limit {limit:.3g}", flush=True)


def same_bits(x, y) -> bool:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    return torch.equal(x.contiguous().view(kind), y.contiguous().view(kind))


def nan(*shape, dtype):
    return torch.full(shape, float("nan"), device=DEVICE, dtype=F32).to(dtype)


@functools.cache
def timer(repetitions: int) -> Timer:
    return Timer(DEVICE, 0.0, fewest=repetitions)


def flushed_median_us(call, repetitions: int = 30) -> float:
    """Median time of ``call`` replayed from a CUDA graph with a cold L2."""
    timing = timer(repetitions).time(call)
    if not timing.graph:
        raise RuntimeError(timing.note)
    return timing.ms * 1e3


# --- decode --------------------------------------------------------------------------------------


def decode_request(B, T, H, HV, K, V, dtype, state, read=None, write=None, pages=None, steps=None, update=True, norm=True):
    generator = torch.Generator(device=DEVICE).manual_seed(B + T + HV)

    def randn(*shape):
        return torch.randn(*shape, device=DEVICE, generator=generator)

    fused = randn(B, T, 2 * H * K + HV * V).to(dtype)  # one projection, as a model makes it
    return DecodeRequest(
        function="gated_delta_rule_decode_pretranspose", batch=B, num_tokens=T, num_q_heads=H, num_heads=HV,
        head_size_k=K, head_size_v=V, device=DEVICE,
        q=fused[..., : H * K].unflatten(-1, (H, K)), k=fused[..., H * K : 2 * H * K].unflatten(-1, (H, K)),
        v=fused[..., 2 * H * K :].unflatten(-1, (HV, V)),
        A_log=torch.rand(HV, device=DEVICE, generator=generator).mul_(16).log_(), a=randn(B, T, HV).to(dtype),
        dt_bias=randn(HV) - 3, b=randn(B, T, HV).to(dtype), scale=K**-0.5, use_qk_l2norm=norm, state=state,
        read_rows=read, write_rows=write, intermediate_states=steps, update_state=update, pages=pages,
        output=nan(B, T, HV, V, dtype=dtype), batch_invariant=False, slot_arguments=(), is_paged=pages is not None,
    )  # fmt: skip


def table_of(pages_of, last, page_size=0, dtype=torch.int32):
    indptr = [0]
    for pages in pages_of:
        indptr.append(indptr[-1] + len(pages))

    def tensor(values):
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    return PageTable(tensor([p for pages in pages_of for p in pages]), tensor(indptr), tensor(last), page_size)


def check_decode(backend) -> None:
    count = 0
    for K, V in ((128, 128), (64, 64), (128, 64)):
        for dtype in (BF16, F16):
            for state_dtype in (F32, BF16, F16):
                for B, T, H, HV in ((1, 1, 2, 4), (5, 1, 1, 8), (64, 1, 16, 64), (3, 4, 2, 4)):
                    for mode in ("rows", "pages", "steps"):
                        if (mode == "pages" and T > 1) or (mode == "steps" and B > 5):
                            continue
                        count += 1
                        name = f"decode K{K} V{V} {SHORT[dtype]} state {SHORT[state_dtype]} B{B} T{T} {H}/{HV} {mode}"
                        rows = 2 * B + 3
                        pool = nan(rows, HV, V, K, dtype=state_dtype)
                        order = torch.randperm(rows, generator=torch.Generator().manual_seed(B)).to(DEVICE)
                        read, write, table, steps = order[:B].clone(), order[B : 2 * B].clone(), None, None
                        live = B
                        if mode == "pages":
                            opens = [i % 3 == 0 for i in range(B)]
                            pages = [[int(read[i]), int(write[i])] if opens[i] else [int(read[i])] for i in range(B)]
                            table = table_of(pages, [1 if o else 7 for o in opens])
                            write = torch.where(torch.tensor(opens, device=DEVICE), write, read)
                        initial = torch.randn(B, HV, V, K, device=DEVICE).to(state_dtype)
                        pool[read] = initial
                        if mode == "rows" and B > 1:
                            live = B - 1
                            write[-1] = -1
                        if mode == "steps":
                            steps = nan(B, T + 1, HV, V, K, dtype=state_dtype)
                        before = pool.clone()
                        request = decode_request(
                            B, T, H, HV, K, V, dtype, pool, None if table else read,
                            None if table else write.to(torch.int32), table, steps, update=mode != "steps",
                        )  # fmt: skip
                        backend.decode(request)
                        o, s = reference.decode(
                            request.q, request.k, request.v, request.A_log, request.a, request.dt_bias, request.b,
                            request.scale, state=initial, use_qk_l2norm=True,
                        )  # fmt: skip
                        limit = {F32: 1e-5, BF16: 2.5e-3, F16: 4e-4}
                        expect(name + " output", relative(request.output[:live], o[:live]), limit[dtype])
                        keep = torch.ones(rows, dtype=torch.bool, device=DEVICE)
                        if mode != "steps":
                            keep[write[:live]] = False
                            expect(name + " state", relative(pool[write[:live]], s[:live, -1]), limit[state_dtype])
                        else:
                            expect(name + " steps", relative(steps[:, :T], s), limit[state_dtype])
                        if live < B:
                            expect(name + " padding", request.output[live:].float().abs().max().item(), 0)
                        expect(name + " other rows", float(not same_bits(pool[keep], before[keep])), 0)
    # Bits of a sequence do not depend on the batch it is in, and rows beyond 2^31 elements are reached.
    state = torch.randn(300, 32, 128, 128, device=DEVICE)
    big = decode_request(256, 1, 16, 32, 128, 128, BF16, state[:256].clone())
    backend.decode(big)
    for b in (0, 100, 255):
        one = {n: getattr(big, n)[b : b + 1] for n in ("q", "k", "v", "a", "b")}
        small = decode_request(1, 1, 16, 32, 128, 128, BF16, state[b : b + 1].clone())
        small = replace(small, **one, A_log=big.A_log, dt_bias=big.dt_bias)
        backend.decode(small)
        expect(f"decode batch invariance {b}", float(not same_bits(small.output, big.output[b : b + 1])), 0)
        expect(f"decode state invariance {b}", float(not same_bits(small.state, big.state[b : b + 1])), 0)
    pool = torch.empty(4200, 32, 128, 128, device=DEVICE, dtype=BF16)
    rows = torch.tensor([4199, 4198], device=DEVICE)
    pool[rows] = torch.randn(2, 32, 128, 128, device=DEVICE).to(BF16)
    request = decode_request(2, 1, 16, 32, 128, 128, BF16, pool, rows, rows.flip(0).to(torch.int32))
    initial = pool[rows].clone()
    request = replace(request, write_rows=rows.to(torch.int32))
    backend.decode(request)
    o, s = reference.decode(
        request.q, request.k, request.v, request.A_log, request.a, request.dt_bias, request.b, request.scale,
        state=initial, use_qk_l2norm=True,
    )  # fmt: skip
    expect("decode row 4199", relative(pool[rows], s[:, -1]), 2.5e-3)
    print(f"decode: {count + 7} calls checked", flush=True)


DECODE_TABLE = (
    (F32, 16, 64, (1, 8, 32, 128, 256)),
    (BF16, 2, 8, (1, 32, 256)),
    (BF16, 16, 32, (8, 32, 128)),
    (BF16, 16, 64, (1, 32, 128, 256)),
)


def time_decode(backend) -> None:
    print("decode, T = 1, bf16 inputs, K = V = 128: median us (TB/s of state read and written)")
    print("  state heads   B       paged              slots")
    for state_dtype, H, HV, batches in DECODE_TABLE:
        for B in batches:
            pool = torch.randn(2 * B, HV, 128, 128, device=DEVICE).to(state_dtype)
            order = torch.randperm(2 * B).tolist()
            table = table_of([[order[2 * i], order[2 * i + 1]] for i in range(B)], [5] * B)
            rows = torch.tensor(order[1::2], dtype=torch.int32, device=DEVICE)
            moved = 2 * B * HV * 128 * 128 * pool.element_size()
            cells = []
            for request in (
                decode_request(B, 1, H, HV, 128, 128, BF16, pool, pages=table),
                decode_request(B, 1, H, HV, 128, 128, BF16, pool, rows, rows),
            ):
                us = flushed_median_us(lambda: backend.decode(request))
                cells.append(f"{us:8.1f} ({moved / us * 1e-6:.2f})")
            print(f"  {SHORT[state_dtype]:5} {H:2}/{HV:<3} {B:4}  " + "  ".join(cells), flush=True)
            del pool


def host_time(backend) -> None:
    """Time until a call returns: of the backend alone, and of the public function, rows given as slots."""
    pool = torch.randn(4, 32, 128, 128, device=DEVICE)
    rows = torch.arange(2, dtype=torch.int32, device=DEVICE)
    x = decode_request(2, 1, 16, 32, 128, 128, BF16, pool, rows, rows)
    slots = gdn_multi.GDNPagedDecodeSlots(rows, rows)
    table = table_of([[0], [1]], [5, 5])

    def public():
        gdn_multi.gated_delta_rule_decode_paged(
            x.q, x.k, x.v, x.A_log, x.a, x.dt_bias, x.b, output=x.output, state_pool=pool, slots=slots, backend="cuda",
            page_indices=table.page_indices, page_indptr=table.page_indptr, last_page_len=table.last_page_len,
        )  # fmt: skip

    for name, call in (("backend.decode", lambda: backend.decode(x)), ("gated_delta_rule_decode_paged, slots given", public)):
        for _ in range(200):
            call()
        torch.cuda.synchronize()
        times = []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(100):
                call()
            times.append((time.perf_counter() - start) / 100)
            torch.cuda.synchronize()
        print(f"host time, {name}: {statistics.median(times) * 1e6:.2f} us a call (median of 20 x 100)", flush=True)


# --- page slots ----------------------------------------------------------------------------------


def check_slots(backend) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    for dtype in (torch.int32, torch.int64):
        size, pages, last, new = 128, [], [], []
        for i in range(300):
            count, tail = draw(1, 6), draw(1, 129)
            pages.append([draw(0, 10000) for _ in range(count)])
            last.append(tail)
            new.append(draw(0, (count - 1) * size + tail + 1) if i % 7 else 0)
        table = table_of(pages, last, size, dtype)
        cu = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=dtype, device=DEVICE)
        out = tuple(torch.full((300,), -77, dtype=torch.int32, device=DEVICE) for _ in range(4))
        backend.page_slots(SlotsRequest("gdn_paged_prefill_slots", table, cu, out, DEVICE))
        want = reference.prefill_slots(cu.cpu(), table.page_indices.cpu(), table.page_indptr.cpu(), size, table.last_page_len.cpu())
        for got, name in zip(out, ("read", "write", "starts", "prefix")):
            expect(f"prefill slots {name} {dtype}", float(got.tolist() != want[name]), 0)
        pages = [p if len(p) > 1 else p * 2 for p in pages]
        table = table_of(pages, last, 0, dtype)
        backend.page_slots(SlotsRequest("gdn_paged_decode_slots", table, None, out[:2], DEVICE))
        want = reference.decode_slots(table.page_indices.cpu(), table.page_indptr.cpu(), table.last_page_len.cpu())
        expect(f"decode slots {dtype}", float([out[0].tolist(), out[1].tolist()] != list(map(list, want))), 0)
    print("slots: checked", flush=True)


# --- prefill -------------------------------------------------------------------------------------


def prefill_request(lengths, heads, K, V, dtype, *, gate="linear", alpha=None, raw_qk=False, logit=False, beta=True,
                    margin=(0, 0), seed=0, **states) -> PrefillRequest:  # fmt: skip
    """Inputs as a model makes them; ``states`` are fields of the request."""
    Hq, Hk, Hv = heads
    Ho, T = max(Hq, Hv), sum(lengths) + sum(margin)
    generator = torch.Generator(device=DEVICE).manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, device=DEVICE, generator=generator)

    def poison(x):
        x[: margin[0]] = float("nan")
        x[T - margin[1] :] = float("nan")
        return x

    q, k, v = randn(T, Hq, K), randn(T, Hk, K), randn(T, Hv, V)
    if not raw_qk:
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    fused = poison(torch.cat([x.flatten(1) for x in (q, k, v)], 1).to(dtype))
    q, k, v = (x.unflatten(-1, (h, -1)) for x, h in zip(fused.split([Hq * K, Hk * K, Hv * V], 1), heads))
    A_log, dt_bias = torch.empty(Ho, device=DEVICE).uniform_(1, 16, generator=generator).log(), None
    dt = torch.exp(torch.empty(Ho, device=DEVICE).uniform_(-6.9, -2.3, generator=generator))
    dt_bias = dt + torch.log(-torch.expm1(-dt))
    raw = randn(T, Ho)
    if gate == "none":
        g = None
    elif gate == "raw":
        g = raw.to(dtype)
    else:
        g = torch.exp(-A_log.exp() * torch.nn.functional.softplus(raw + dt_bias)) if alpha is None else alpha(T, Ho)
        g = g.log() if gate == "log" else g
    fields = dict(
        function="chunk_gated_delta_rule", num_tokens=T, num_seqs=len(lengths), num_q_heads=Hq, num_k_heads=Hk,
        num_v_heads=Hv, num_heads=Ho, head_size_k=K, head_size_v=V, device=DEVICE, q=q, k=k, v=v,
        g=None if g is None else poison(g), gate=gate,
        beta=None if not beta else poison(randn(T, Ho).to(dtype) if logit else torch.sigmoid(randn(T, Ho))),
        A_log=A_log if gate == "raw" else None, dt_bias=dt_bias if gate == "raw" else None, beta_is_logit=logit,
        use_qk_l2norm=raw_qk, scale=K**-0.5,
        cu_seqlens=torch.tensor([margin[0], *lengths], device=DEVICE).cumsum(0).to(torch.int32), cu_seqlens_cpu=None,
        max_seqlen=max(lengths), initial_state=None, read_rows=None, final_state=None, write_rows=None,
        final_state_is_new=False, checkpoint_every=0, state_checkpoints=None, checkpoint_starts=None,
        checkpoint_rows=None, prefix_lens=None, pages=None, output=nan(T, Ho, V, dtype=dtype), output_is_new=True,
        use_cp="auto", batch_invariant=False, slot_arguments=(), is_paged=False,
    )  # fmt: skip
    fields.update(states)
    return PrefillRequest(**fields)


def prefill_reference(request, initial):
    return reference.prefill(
        request.q, request.k, request.v, request.g, request.beta, request.scale, cu_seqlens=request.cu_seqlens,
        initial_state=initial, gate_domain="log" if request.gate == "log" else "linear",
        use_gate_in_kernel=request.gate == "raw", A_log=request.A_log, dt_bias=request.dt_bias,
        beta_is_logit=request.beta_is_logit, use_qk_l2norm_in_kernel=request.use_qk_l2norm,
    )  # fmt: skip


def paged_case(lengths, prefixes, page_size, heads, K, V, dtype, state_dtype, seed, **inputs):
    """A paged request on a poisoned pool, its initial states, and page -> (sequence, tokens whose state it gets)."""
    Ho, order = max(heads[0], heads[2]), torch.randperm(96, generator=torch.Generator().manual_seed(seed)).tolist()
    pool = nan(97, Ho, V, K, dtype=state_dtype)
    initial = torch.zeros(len(lengths), Ho, V, K, device=DEVICE, dtype=state_dtype)
    pages_of, last, wanted = [], [], {}
    for i, (length, prefix) in enumerate(zip(lengths, prefixes)):
        total = length + prefix
        pages = [order.pop() for _ in range(max(1, -(-total // page_size)))]
        if prefix:
            initial[i] = torch.randn(Ho, V, K, device=DEVICE).to(state_dtype)
            pool[pages[(prefix - 1) // page_size]] = initial[i]
        for n in range(1, length + 1):
            if (prefix + n) % page_size == 0 or n == length:
                wanted[pages[(prefix + n - 1) // page_size]] = (i, n)
        pages_of.append(pages)
        last.append(total - (len(pages) - 1) * page_size)
    request = prefill_request(
        lengths, heads, K, V, dtype, seed=seed, initial_state=pool, final_state=pool, state_checkpoints=pool,
        checkpoint_every=page_size, pages=table_of(pages_of, last, page_size), is_paged=True, **inputs,
    )  # fmt: skip
    return request, initial, wanted


def check_prefill(backend) -> None:
    count, limit = 0, {BF16: 5e-3, F16: 7e-4}
    state_limit = {F32: 0, BF16: 2.5e-3, F16: 4e-4, torch.float8_e4m3fn: 3.5e-2, torch.float8_e5m2: 7e-2}
    options = (
        dict(gate="raw", raw_qk=True, logit=True), dict(gate="log"), dict(gate="none", logit=True),
        dict(gate="linear", beta=False), dict(gate="linear", raw_qk=True),
    )  # fmt: skip
    lengths, prefixes = [300, 1, 0, 64, 130, 1000], [70, 64, 5, 0, 61, 128]
    for K, V in ((128, 128), (64, 64), (64, 128)):
        for heads in ((2, 2, 8), (4, 2, 2), (2, 2, 2)):
            for state_dtype in state_limit:
                for option in options:
                    count += 1
                    dtype = BF16 if count % 2 else F16
                    request, initial, wanted = paged_case(
                        lengths, prefixes, 64 * (1 + count % 3), heads, K, V, dtype, state_dtype, count,
                        margin=(3, 70), **option,
                    )  # fmt: skip
                    before = request.initial_state.clone()
                    backend.prefill(request)
                    o, states = prefill_reference(request, initial)
                    name = f"prefill K{K} V{V} {heads} {SHORT[dtype]} {state_dtype} {option}"
                    low, high = int(request.cu_seqlens[0]), int(request.cu_seqlens[-1])
                    expect(name + " output", relative(request.output[low:high], o[low:high]), limit[dtype])
                    rest = torch.cat([request.output[:low], request.output[high:]]).float().abs().max()
                    expect(name + " rest", rest.item(), 0)
                    worst = max(relative(request.final_state[page], states[i][n]) for page, (i, n) in wanted.items())
                    expect(name + " states", worst, limit[dtype] + state_limit[state_dtype])
                    keep = torch.ones(97, dtype=torch.bool, device=DEVICE)
                    keep[list(wanted)] = False
                    expect(name + " other rows", float(not same_bits(request.final_state[keep], before[keep])), 0)
    # Rows given as slots are the page table; a restart from a page, and another batch, give the same bits.
    request, initial, wanted = paged_case([700, 64, 333], [0, 64, 77], 128, (2, 2, 8), 128, 128, BF16, F32, 1)
    pool = request.final_state.clone()
    pools = {name: pool for name in ("initial_state", "final_state", "state_checkpoints")}
    with_slots = backend.with_slots(replace(request, output=request.output.clone(), **pools))
    backend.prefill(request)
    backend.prefill(with_slots)
    expect("prefill slots against pages", float(not same_bits(request.output, with_slots.output)), 0)
    expect("prefill slots against pages, pool", float(not same_bits(request.final_state, pool)), 0)
    whole = request.output[:700].clone()
    pages = request.pages.page_indices[:6]
    tokens = {name: getattr(request, name)[256:700].clone() for name in ("q", "k", "v", "g", "beta", "output")}
    part = replace(
        request, pages=table_of([pages.tolist()], [700 - 5 * 128], 128), num_seqs=1, num_tokens=700 - 256,
        cu_seqlens=torch.tensor([0, 700 - 256], dtype=torch.int32, device=DEVICE), **tokens,
    )  # fmt: skip
    final = request.final_state.clone()
    request.final_state[pages[2:]] = float("nan")
    backend.prefill(part)
    expect("prefill restart from a page", float(not same_bits(part.output, whole[256:])), 0)
    expect("prefill restart from a page, pool", float(not same_bits(request.final_state, final)), 0)
    print(f"prefill: {count + 3} calls checked", flush=True)


def accuracy(backend) -> None:
    print("accuracy, 2/8 heads, 8192 tokens: relative error of output and final state")
    gates = {
        "as a model initialises": None,
        "alpha in [0.9999, 1]": lambda *s: 0.9999 + 1e-4 * torch.rand(*s, device=DEVICE),
        "alpha in [0.5, 1]": lambda *s: 0.5 + 0.5 * torch.rand(*s, device=DEVICE),
    }
    for dtype in (BF16, F16):
        for name, alpha in gates.items():
            initial = torch.randn(1, 8, 128, 128, device=DEVICE)
            final = nan(1, 8, 128, 128, dtype=F32)
            request = prefill_request(
                [8192], (2, 2, 8), 128, 128, dtype, alpha=alpha, initial_state=initial, final_state=final, final_state_is_new=True
            )
            backend.prefill(request)
            o, states = prefill_reference(request, initial)
            print(f"  {SHORT[dtype]:4} {name:24} {relative(request.output, o):.2e}  {relative(final, states[0][-1:]):.2e}", flush=True)
            del o, states


SEQUENCES = (
    ("2048x1", [2048]), ("8192x1", [8192]), ("32768x1", [32768]), ("4096+28672", [4096, 28672]), ("8192x4", [8192] * 4),
    ("2048x4", [2048] * 4), ("1024x8", [1024] * 8), ("256x32", [256] * 32),
)  # fmt: skip


def time_prefill(backend) -> None:
    print("prefill, bf16 inputs, float32 states, K = V = 128: median ms (unpaged, paged, raw gates and q, k)")
    for heads in ((2, 2, 8), (4, 4, 16), (8, 8, 32), (16, 16, 64)):
        for name, lengths in SEQUENCES:
            N, cells = len(lengths), []
            for kind in ("unpaged", "paged", "raw"):
                size, states = 1024, {}
                if kind == "paged":
                    pages = [-(-n // size) + 1 for n in lengths]  # one page of prefix
                    pool = torch.randn(sum(pages), heads[2], 128, 128, device=DEVICE)
                    order = torch.randperm(sum(pages)).tolist()
                    lists = [[order.pop() for _ in range(count)] for count in pages]
                    last = [(n - 1) % size + 1 for n in lengths]
                    states = dict(initial_state=pool, final_state=pool, state_checkpoints=pool, checkpoint_every=size,
                                  pages=table_of(lists, last, size), is_paged=True)  # fmt: skip
                else:
                    initial = torch.randn(N, heads[2], 128, 128, device=DEVICE)
                    states = dict(initial_state=initial, final_state=torch.empty_like(initial), final_state_is_new=True)
                inputs = dict(gate="raw", raw_qk=True, logit=True) if kind == "raw" else {}
                request = prefill_request(lengths, heads, 128, 128, BF16, **inputs, **states)
                cells.append(f"{flushed_median_us(lambda request=request: backend.prefill(request), 15) * 1e-3:8.3f}")
                del request, states
            print(f"  {heads[0]:2}/{heads[2]:<3} {name:10} " + " ".join(cells), flush=True)


def parts_prefill(backend) -> None:
    """Time of each kernel of a few calls, as the profiler sees it."""
    for heads, lengths in (((2, 2, 8), [32768]), ((16, 16, 64), [8192] * 4), ((16, 16, 64), [256] * 32)):
        initial = torch.randn(len(lengths), heads[2], 128, 128, device=DEVICE)
        request = prefill_request(
            lengths, heads, 128, 128, BF16, initial_state=initial, final_state=torch.empty_like(initial), final_state_is_new=True
        )
        backend.prefill(request)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(3):
                backend.prefill(request)
            torch.cuda.synchronize()
        for event in profile.key_averages():
            print(f"  {heads[0]}/{heads[2]} {len(lengths)} x {lengths[0]}: {event.key[:60]:60} {event.device_time:9.1f} us")


def main() -> int:
    steps = {
        "build": None, "decode": check_decode, "slots": check_slots, "host": host_time, "time-decode": time_decode,
        "prefill": check_prefill, "accuracy": accuracy, "time-prefill": time_prefill, "parts-prefill": parts_prefill,
    }  # fmt: skip
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help=f"comma-separated steps of {', '.join(steps)}; 'decode' takes its timings along")
    args = parser.parse_args()
    wanted = list(steps)
    if args.only:
        wanted = args.only.split(",")
        if wanted == ["decode"]:
            wanted = ["decode", "slots", "host", "time-decode"]
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    backend = CudaBackend()
    reasons = backend.reasons_unusable(DEVICE)
    if reasons:
        print("cuda backend unusable:", "; ".join(reasons))
        return 1
    start = time.perf_counter()
    backend._library(DEVICE)
    print(f"library built or found, and loaded, in {time.perf_counter() - start:.2f} s", flush=True)
    for name in wanted:
        if steps[name] is not None:
            start = time.perf_counter()
            steps[name](backend)
            torch.cuda.synchronize()
            print(f"[{name}: {time.perf_counter() - start:.1f} s]", flush=True)
    print(f"{len(FAILURES)} failures" + (": " + "; ".join(FAILURES[:20]) if FAILURES else ""))
    return 1 if FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
