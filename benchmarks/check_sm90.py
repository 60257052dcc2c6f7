"""The prefill for sm_90a on an H200, in under two minutes: build, look into each stage, compare whole calls, time the paths.

    python benchmarks/check_sm90.py [--only stages,calls,large,accuracy,times,short,parts] [--release] [--full]

``stages`` compares what the first kernel leaves in the workspace (tiles, coupling, scores, gates) and then states and
outputs chunk by chunk with a plain float64 computation, and says in which chunk, rows and columns a difference begins.
``calls`` compares whole calls with gdn_multi.reference, ``large`` with the torch backend. A wait for a barrier
gives up after a while, with wrong results instead of a hang, unless --release builds without that. Times are of CUDA graphs, the L2
flushed before each replay; medians. --full times every path of every row; otherwise the path that the heuristics choose and its neighbours.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import torch  # noqa: E402
from gdn_multi.backends.cuda import CudaBackend, build  # noqa: E402
from gdn_multi.backends.cuda.prefill_heuristics import PORTABLE, Path, estimate, fastest  # noqa: E402

from gdn_multi import reference  # noqa: E402
from gdn_multi.bench.timing import Timer  # noqa: E402
from gdn_multi.request import PrefillRequest  # noqa: E402

DEVICE = torch.device("cuda", 0)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHORT = {BF16: "bf16", F16: "f16", F32: "f32", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
FAILURES = []
WORST = {}  # what `where` looked at: its largest error
WHOLE, HALF, PAIRS = Path(128, 0, False), Path(64, 0, False), Path(64, 0, False, pairs=True)

# csrc/prefill/sm90_workspace.cuh
RECORD, TRIANGLE, GATES_AT, SCORES_AT, TILE = 11392, 5120, 5120, 5120 + 1152, 16384


def relative(x, y) -> float:
    x, y = x.double(), y.double()
    return ((x - y).norm() / y.norm().clamp_min(1e-30)).item()


def report(name: str, error: float, limit: float, always: bool = False) -> bool:
    bad = not error <= limit
    if bad:
        FAILURES.append(name)
    if bad or always:
        print(f"  {'FAILED ' if bad else ''}{name}: {error:.2e} (limit {limit:.0e})", flush=True)
    return not bad


def where(name: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> bool:
    """Report the error of a matrix, and where it is when it is too large."""
    error = relative(got, want)
    good = report(name, error, limit)
    kind = re.sub(r"\b(after|of)? ?(chunk|head) \d,? ?|\[.*", "", name).strip(" ,")
    WORST[kind] = max(WORST.get(kind, 0.0), error)
    if not good:
        wrong = (got.double() - want.double()).abs() > 10 * limit * want.double().abs().max()
        wrong |= ~torch.isfinite(got.double())
        index = wrong.nonzero()
        if len(index):
            low, high = index.min(0).values.tolist(), index.max(0).values.tolist()
            print(f"    {len(index)} of {got.numel()} elements, from {low} to {high}", flush=True)
            for i in index[:3].tolist():
                print(f"    {i}: got {got[tuple(i)].item():.5g}, want {want[tuple(i)].item():.5g}", flush=True)
    return good


# --- requests ------------------------------------------------------------------------------------


def draw(lengths, heads, dtype, *, gate="linear", norm=True, logit=False, beta=True, low=None, margin=(0, 0), seed=0, views=True):
    """Inputs as keyword arguments of a request; gates as a model initialises them unless `low` says alpha in [low, 1]."""
    hq, hk, hv = heads
    ho, tokens, d = max(hq, hv), sum(lengths) + sum(margin), 128
    generator = torch.Generator(device=DEVICE).manual_seed(seed)

    def rand(*shape):
        return torch.rand(*shape, device=DEVICE, generator=generator)

    def randn(*shape):
        return torch.randn(*shape, device=DEVICE, generator=generator)

    if views:
        fused = randn(tokens, (hq + hk + hv) * d).to(dtype)
        q, k, v = (x.unflatten(1, (-1, d)) for x in fused.split([hq * d, hk * d, hv * d], 1))
    else:
        q, k, v = (randn(tokens, h, d).to(dtype) for h in heads)
    if not norm:
        k.copy_(torch.nn.functional.normalize(k.float(), dim=-1))
        q.copy_(torch.nn.functional.normalize(q.float(), dim=-1))
    A = 1 + 15 * rand(ho)
    dt = torch.exp(-6.9 + 4.6 * rand(ho))
    bias = dt + torch.log(-torch.expm1(-dt))
    raw = 0.1 * randn(tokens, ho)
    alpha = torch.exp(-A * torch.nn.functional.softplus(raw + bias)) if low is None else low + (1 - low) * rand(tokens, ho)
    g = {"none": None, "linear": alpha, "log": alpha.log(), "raw": raw.to(dtype)}[gate]
    b = None if not beta else randn(tokens, ho).to(dtype) if logit else rand(tokens, ho)
    for x in (q, k, v, g, b):
        if x is not None:
            x[: margin[0]] = float("nan")
            x[tokens - margin[1] :] = float("nan")
    return dict(
        q=q, k=k, v=v, g=g, beta=b, gate=gate, A_log=A.log() if gate == "raw" else None, dt_bias=bias if gate == "raw" else None,
        beta_is_logit=logit and beta, use_qk_l2norm=norm,
        cu_seqlens=torch.tensor([margin[0], *lengths], device=DEVICE).cumsum(0).to(torch.int32), max_seqlen=max(lengths),
    )  # fmt: skip


def make(lengths, heads, inputs, **fields) -> PrefillRequest:
    hq, hk, hv = heads
    ho, tokens = max(hq, hv), inputs["q"].shape[0]
    values = dict(
        function="chunk_gated_delta_rule", num_tokens=tokens, num_seqs=len(lengths), num_q_heads=hq, num_k_heads=hk,
        num_v_heads=hv, num_heads=ho, head_size_k=128, head_size_v=128, device=DEVICE, scale=128**-0.5, cu_seqlens_cpu=None,
        initial_state=None, read_rows=None, final_state=None, write_rows=None, final_state_is_new=False, checkpoint_every=0,
        state_checkpoints=None, checkpoint_starts=None, checkpoint_rows=None, prefix_lens=None, pages=None,
        output=torch.full((tokens, ho, 128), float("nan"), device=DEVICE, dtype=inputs["q"].dtype), output_is_new=True,
        use_cp="auto", batch_invariant=False, slot_arguments=(), is_paged=False,
    )  # fmt: skip
    values.update(inputs)
    values.update(fields)
    return PrefillRequest(**values)


def truth(r: PrefillRequest, initial):
    return reference.prefill(
        r.q, r.k, r.v, r.g, r.beta, r.scale, cu_seqlens=r.cu_seqlens, initial_state=initial,
        gate_domain="log" if r.gate == "log" else "linear", use_gate_in_kernel=r.gate == "raw", A_log=r.A_log, dt_bias=r.dt_bias,
        beta_is_logit=r.beta_is_logit, use_qk_l2norm_in_kernel=r.use_qk_l2norm,
    )  # fmt: skip


# --- stages --------------------------------------------------------------------------------------


def triangle(raw: torch.Tensor, dtype) -> torch.Tensor:
    """[64 targets, 64 sources] from the stored strips, whose targets are by groups of 16, the last first."""
    full = torch.zeros(64, 64, dtype=torch.float64, device=DEVICE)
    at = 0
    for k in range(4):
        size = (8 - 2 * k) * 256
        tiles = raw[at : at + size].view(dtype).view(4 - k, 2, 2, 8, 8).double()  # 16 targets, 8 of them, source block, target, source
        full[16 * k :, 16 * k : 16 * k + 16] = tiles.flip(0).permute(0, 1, 3, 2, 4).reshape(64 - 16 * k, 16)
        at += size
    return full


def tile(raw: torch.Tensor, dtype) -> torch.Tensor:
    """[64 tokens, 128] from the swizzled image, whose rows are by groups of 16, the last first."""
    pieces = raw.view(dtype).view(2, 64, 8, 8)  # half, row, piece, element
    row = torch.arange(64, device=DEVICE) % 8
    order = torch.arange(8, device=DEVICE)[None] ^ row[:, None]
    pieces = pieces.gather(2, order[None, :, :, None].expand(2, 64, 8, 8))
    return pieces.permute(1, 0, 2, 3).reshape(4, 16, 128).flip(0).reshape(64, 128).double()


def stages(backend) -> None:
    """One sequence of 2.5 chunks with a prefix of 20 tokens, 2 state heads on one head of q and k. The first kernel leaves tiles of q
    and k only where the recurrence does not read them in place (sm90_launch.cu)."""
    lengths, prefix, heads = [150], 20, (1, 1, 2)
    for dtype, half, norm in ((BF16, False, True), (F16, False, True), (BF16, True, True), (BF16, False, False), (F16, False, False)):
        raw = not half and not norm
        print(f"stages, {SHORT[dtype]}{', fp16 operands' if half else ''}{'' if norm else ', not normalised'}", flush=True)
        operand = F16 if half else dtype
        eps = {BF16: 4e-3, F16: 5e-4}[operand]
        inputs = draw(lengths, heads, dtype, low=0.8, seed=3, norm=norm)
        initial = torch.randn(1, 2, 128, 128, device=DEVICE)
        checkpoints = torch.full((4, 2, 128, 128), float("nan"), device=DEVICE)
        index = lambda *x: torch.tensor(x, dtype=torch.int32, device=DEVICE)  # noqa: E731
        final = torch.full_like(initial, float("nan"))
        backend.scratch = torch.zeros(16 << 20, dtype=torch.uint8, device=DEVICE)
        backend.forced_path = Path(128, 0, half)
        request = make(
            lengths, heads, inputs, initial_state=initial, final_state=final, checkpoint_every=64, state_checkpoints=checkpoints,
            checkpoint_starts=index(0, 2), prefix_lens=index(prefix),
        )  # fmt: skip
        backend.prefill(request)
        torch.cuda.synchronize()
        scratch, slots = backend.scratch.clone(), 150 // 64 + 2
        backend.scratch = None
        records = scratch[: slots * 2 * RECORD].view(slots, 2, RECORD)
        at = -(-slots * 2 * RECORD // 256) * 256
        q_tiles, k_tiles = (scratch[at + i * slots * TILE : at + (i + 1) * slots * TILE].view(slots, TILE) for i in range(2))

        def padded(x):
            return torch.cat([torch.zeros(prefix, *x.shape[1:], device=DEVICE, dtype=x.dtype), x,
                              torch.zeros(192 - 170, *x.shape[1:], device=DEVICE, dtype=x.dtype)])  # fmt: skip

        def normal(x):
            return (x.double() * (x.double().square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(dtype).double() if norm else x.double()

        q, k = padded(normal(request.q[:, 0])), padded(normal(request.k[:, 0]))
        v, g, beta = padded(request.v.double()), padded(request.g.double()), padded(request.beta.double())
        g[:prefix] = 1
        g[170:] = 1
        fine = True
        state = initial[0].double()
        outputs = torch.zeros(192, 2, 128, dtype=torch.float64, device=DEVICE)
        states = []
        lower = torch.ones(64, 64, dtype=torch.bool, device=DEVICE).tril()
        for c in range(3):
            rows = slice(64 * c, 64 * c + 64)
            kc, qc = k[rows], q[rows]
            if not raw:
                fine &= where(f"chunk {c} k tile", tile(k_tiles[c], operand), kc, 1e-3 if half else 1e-7 + eps / 4)
                fine &= where(f"chunk {c} q tile", tile(q_tiles[c], operand), qc, 1e-3 if half else 1e-7 + eps / 4)
            new = []
            for h in range(2):
                total = g[rows, h].log2().cumsum(0)
                decay = torch.where(lower, (total[:, None] - total[None]).exp2(), 0.0)
                b = beta[rows, h]
                # Where beta is: at the sources, or where operands are fp16 at the targets (csrc/prefill/sm90_workspace.cuh).
                source, target = (b, torch.ones_like(b)) if operand == BF16 else (torch.ones_like(b), b)
                L = (target[:, None] * (kc @ kc.T) * decay * source).tril(-1)
                coupling = torch.linalg.inv(torch.eye(64, device=DEVICE, dtype=torch.float64) + L).tril(-1)
                scores = 128**-0.5 * (qc @ kc.T) * decay * source
                record = records[c, h]
                gates = record[GATES_AT : GATES_AT + (200 + 64) * 4].view(F32).double()
                gamma, tail = total.exp2(), source * (total[-1] - total).exp2()
                want = torch.cat([target * gamma, 128**-0.5 * gamma, tail, gamma[-1:]])
                fine &= where(f"chunk {c} head {h} gates", gates[:193], want, 1e-5)
                fine &= where(f"chunk {c} head {h} coupling", triangle(record[:TRIANGLE], operand), coupling, 2 * eps)
                fine &= where(f"chunk {c} head {h} scores", triangle(record[SCORES_AT:], operand), scores, 2 * eps)
                s = state[h]
                if operand != BF16:
                    fine &= where(f"chunk {c} head {h} beta", gates[200:], b, 1e-6)
                y = target[:, None] * (v[rows, h] - gamma[:, None] * (kc @ s.T))
                u = y + coupling @ y
                outputs[rows, h] = 128**-0.5 * gamma[:, None] * (qc @ s.T) + scores @ u
                new.append(gamma[-1] * s + (tail[:, None] * u).T @ kc)
            state = torch.stack(new)
            states.append(state)
        for c in range(2):
            for h in range(2):
                fine &= where(f"state after chunk {c}, head {h} [V, K]", checkpoints[c, h], states[c][h], 3 * eps)
        for h in range(2):
            fine &= where(f"final state, head {h} [V, K]", final[0, h], states[2][h], 3 * eps)
            for c in range(3):
                low, high = max(64 * c, prefix), min(64 * c + 64, 170)
                fine &= where(
                    f"output of chunk {c}, head {h} [token, V]", request.output[low - prefix : high - prefix, h],
                    outputs[low:high, h], 3 * eps + {BF16: 3e-3, F16: 4e-4}[dtype],
                )  # fmt: skip
        print(f"  {'all as computed; ' if fine else ''}largest errors: " + ", ".join(f"{k} {v:.1e}" for k, v in WORST.items()), flush=True)
        WORST.clear()
    backend.forced_path = None


# --- whole calls ---------------------------------------------------------------------------------

LIMIT = {BF16: 6e-3, F16: 8e-4}
STATE_LIMIT = {F32: 0, BF16: 2.5e-3, F16: 4e-4, torch.float8_e4m3fn: 3.5e-2, torch.float8_e5m2: 7e-2}


LENGTHS, PREFIXES = [300, 1, 0, 64, 130, 1000], [70, 64, 5, 0, 61, 128]
PATHS = [Path(rows, segment, half) for segment in (0, 2, 4) for rows in (128, 64) for half in (False, True)]
PATHS += [Path(rows, 0, False, fused=True) for rows in (128, 64, 32, 16)]
PATHS += [PAIRS]


def calls(backend) -> None:
    lengths, prefixes = LENGTHS, PREFIXES
    options = (
        dict(gate="raw", logit=True), dict(gate="log", norm=False), dict(gate="none", logit=True), dict(beta=False, low=0.0),
        dict(low=0.99), dict(low=0.9999, views=False),
    )  # fmt: skip
    count, worst = 0, {}
    for n, path in enumerate(PATHS):
        for m, option in enumerate(options):
            heads = ((1, 1, 4), (4, 2, 2), (2, 2, 2), (2, 1, 4))[(n + m) % 4]
            ho = max(heads[0], heads[2])
            dtype = BF16 if path.half or path.fused or path.pairs or (n + m) % 2 else F16
            state_dtype = list(STATE_LIMIT)[(n + 2 * m) % 5]
            every, margin = 64 * (1 + m % 3), (3, 70)
            inputs = draw(lengths, heads, dtype, margin=margin, seed=n * 10 + m, **option)
            rows = torch.randperm(40, generator=torch.Generator().manual_seed(m)).tolist()
            pool = torch.full((40, ho, 128, 128), float("nan"), device=DEVICE).to(state_dtype)
            read = [rows.pop() for _ in lengths]
            read[3] = -1
            write = list(read)
            write[3], write[4] = rows.pop(), -1
            initial = torch.randn(6, ho, 128, 128, device=DEVICE).to(state_dtype)
            for i, row in enumerate(read):
                if row >= 0:
                    pool[row] = initial[i]
                else:
                    initial[i] = 0
            starts, table, wanted = [0], [], {}
            for i, (length, prefix) in enumerate(zip(lengths, prefixes)):
                for t in range(1, length + 1):
                    if (prefix + t) % every == 0:
                        row = -1 if len(table) % 5 == 4 or len(rows) < 4 else rows.pop()
                        table.append(row)
                        wanted[row] = (i, t)
                starts.append(len(table))
                if length and write[i] >= 0:
                    wanted[write[i]] = (i, length)
            wanted.pop(-1, None)
            before = pool.clone()
            index = lambda x, kind=(torch.int32, torch.int64)[m % 2]: torch.tensor(x, device=DEVICE, dtype=kind)  # noqa: E731
            request = make(
                lengths, heads, inputs, initial_state=pool, read_rows=index(read), final_state=pool, write_rows=index(write),
                checkpoint_every=every, state_checkpoints=pool, checkpoint_starts=index(starts), checkpoint_rows=index(table or [-1]),
                prefix_lens=index(prefixes),
            )  # fmt: skip
            backend.forced_path = path
            backend.prefill(request)
            torch.cuda.synchronize()
            o, states = truth(request, initial)
            low, high = int(request.cu_seqlens[0]), int(request.cu_seqlens[-1])
            name = f"{tuple(path)} {heads} {SHORT[dtype]} states {SHORT[state_dtype]} {option}"
            error = relative(request.output[low:high], o[low:high])
            report(name + ", output", error, LIMIT[dtype])
            rest = torch.cat([request.output[:low], request.output[high:]]).float().abs().max().item()
            report(name + ", rest of output", rest if rest == rest else 9.0, 0)
            for row, (i, t) in wanted.items():
                limit = LIMIT[dtype] + STATE_LIMIT[state_dtype]
                if not report(f"{name}, sequence {i} after {t}", relative(pool[row], states[i][t]), limit):
                    break
            keep = torch.ones(40, dtype=torch.bool, device=DEVICE)
            keep[list(wanted)] = False
            same = torch.equal(pool[keep].view(torch.uint8), before[keep].view(torch.uint8))
            report(name + ", other rows", 0.0 if same else 1.0, 0)
            key = (SHORT[dtype], path.half)
            worst[key] = max(worst.get(key, 0), error)
            count += 1
    backend.forced_path = None
    errors = ", ".join(f"{name}{' with fp16 operands' if half else ''} {v:.1e}" for (name, half), v in worst.items())
    print(f"  {count} calls; largest output errors: {errors}", flush=True)


def large(backend) -> None:
    """Long sequences against the torch backend in float32, every path; unsplit paths must agree to the bit."""
    from gdn_multi.backends.torch import TorchBackend

    plain = TorchBackend()
    for lengths, heads in (([8192, 77, 4000], (2, 2, 8)), ([1024] * 7 + [1], (4, 4, 4))):
        inputs = draw(lengths, heads, BF16, gate="raw", logit=True, seed=9)
        ho = heads[2]
        initial = torch.randn(len(lengths), ho, 128, 128, device=DEVICE)
        slow = {**inputs, "use_qk_l2norm": False, "gate": "linear", "A_log": None, "dt_bias": None, "beta_is_logit": False}
        for name in ("q", "k"):
            x = inputs[name].float()
            slow[name] = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).to(BF16).float()
        slow["v"] = inputs["v"].float()
        slow["g"] = torch.exp(-inputs["A_log"].exp() * torch.nn.functional.softplus(inputs["g"].float() + inputs["dt_bias"]))
        slow["beta"] = inputs["beta"].float().sigmoid().to(BF16).float()
        want = make(lengths, heads, slow, initial_state=initial, final_state=torch.empty_like(initial), final_state_is_new=True)
        plain.prefill(want)
        first = None
        for path in (WHOLE, HALF, Path(128, 8, False), Path(64, 32, False), Path(128, 0, True), Path(64, 0, False, fused=True), PAIRS):
            backend.forced_path = path
            final = torch.full_like(initial, float("nan"))
            for _ in range(2):
                got = make(lengths, heads, inputs, initial_state=initial, final_state=final, final_state_is_new=True)
                backend.prefill(got)
            torch.cuda.synchronize()
            error, state = relative(got.output, want.output), relative(final, want.final_state)
            print(f"  {heads} {len(lengths)} sequences, {tuple(path)}: output {error:.2e}, state {state:.2e}", flush=True)
            report(f"large {heads} {tuple(path)} output", error, LIMIT[BF16])
            report(f"large {heads} {tuple(path)} state", state, LIMIT[BF16])
            if path == WHOLE:
                first = got.output.clone(), final.clone()
            if path == HALF:
                same = torch.equal(first[0], got.output) and torch.equal(first[1], final)
                report("whole and half heads give the same bits", 0.0 if same else 1.0, 0)
    backend.forced_path = None


def accuracy(backend) -> None:
    print("  8192 tokens, 2/8 heads: output, state error against float64, by path", flush=True)
    for dtype in (BF16, F16):
        for low in (None, 0.9999, 0.5):
            inputs = draw([8192], (2, 2, 8), dtype, low=low, seed=1, norm=False)
            initial = 0.25 * torch.randn(1, 8, 128, 128, device=DEVICE)
            final, cells, wanted = torch.empty_like(initial), [], None
            for path in (PORTABLE, WHOLE, Path(64, 16, False), Path(128, 0, True), Path(64, 16, True), Path(64, 0, False, fused=True),
                         PAIRS):
                if (path.half or path.fused or path.pairs) and dtype == F16:
                    continue
                backend.forced_path = path
                request = make([8192], (2, 2, 8), inputs, initial_state=initial, final_state=final, final_state_is_new=True)
                backend.prefill(request)
                wanted = wanted or truth(request, initial)
                errors = relative(request.output, wanted[0]), relative(final[0], wanted[1][0][-1])
                way = f"{path.rows},{path.segment}{'h' if path.half else ''}"
                kind = "one launch" if path.fused else "pairs" if path.pairs else way
                cells.append(f"{kind}: {errors[0]:.2e} {errors[1]:.2e}")
            gates = "of a model" if low is None else f">= {low}"
            print(f"  {SHORT[dtype]:4} alpha {gates:10} " + " | ".join(cells), flush=True)
            del wanted
    backend.forced_path = None


# --- times ---------------------------------------------------------------------------------------

SEQUENCES = {
    "2048x1": [2048], "8192x1": [8192], "32768x1": [32768], "4096+28672": [4096, 28672], "8192x4": [8192] * 4, "2048x4": [2048] * 4,
    "1024x8": [1024] * 8, "256x32": [256] * 32,
}  # fmt: skip
#: Best unpaged peer, ms, measured on this card elsewhere (shared table of the project's benchmarks).
BEST = {
    8: (0.066, 0.116, 0.238, 0.241, 0.274, 0.092, 0.056, 0.045), 16: (0.083, 0.150, 0.397, 0.392, 0.366, 0.100, 0.061, 0.081),
    32: (0.094, 0.231, 0.689, 0.717, 0.393, 0.107, 0.114, 0.148), 64: (0.101, 0.368, 1.435, 1.268, 0.812, 0.205, 0.219, 0.278),
}  # fmt: skip


@functools.cache
def timer(repetitions: int) -> Timer:
    return Timer(DEVICE, 0.0, fewest=repetitions)


def median_us(call, repetitions: int = 9) -> float:
    timing = timer(repetitions).time(call)
    if not timing.graph:
        raise RuntimeError(timing.note)
    return timing.ms * 1e3


def timed_request(lengths, heads, **options):
    inputs = draw(lengths, heads, BF16, norm=options.pop("norm", False), **options)
    initial = 0.25 * torch.randn(len(lengths), heads[2], 128, 128, device=DEVICE)
    return make(lengths, heads, inputs, initial_state=initial, final_state=torch.empty_like(initial), final_state_is_new=True)


def times(backend, full: bool) -> None:
    print("  us by path (V rows, chunks a segment); * is the heuristics' choice; best peer / that; best of the paths", flush=True)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    product, rows = 1.0, 0
    for hv, best in BEST.items():
        heads = (hv // 4, hv // 4, hv)
        for (name, lengths), peer in zip(SEQUENCES.items(), best):
            request = timed_request(lengths, heads)
            chosen = fastest(sum(lengths), len(lengths), hv, max(lengths), count)
            options = [(128, 0), (64, 0)]
            segments = [s for s in (8, 16, 32, 64) if 2 * s * 64 <= max(lengths)]
            if full:
                options += [(r, s) for s in segments for r in (128, 64)]
            else:
                options += sorted(((r, s) for s in segments for r in (128, 64)),
                                  key=lambda o: estimate(sum(lengths), len(lengths), hv, max(lengths), count, *o))[:2]  # fmt: skip
            if chosen not in options:
                options.append(chosen)
            found = {}
            for option in options:
                backend.forced_path = Path(*option, False)
                found[option] = median_us(lambda: backend.prefill(request))
            cells = " ".join(f"{'*' if o == chosen else ''}{o[0]},{o[1]}: {t:.0f}" for o, t in found.items())
            ratio = peer * 1e3 / found[chosen]
            product, rows = product * ratio, rows + 1
            guess = estimate(sum(lengths), len(lengths), hv, max(lengths), count, *chosen)
            print(f"  {hv // 4:2}/{hv:<2} {name:10} {cells} | peer {peer * 1e3:.0f} ratio {ratio:.2f} | best {min(found, key=found.get)}"
                  f" | estimate {guess:.0f}", flush=True)  # fmt: skip
            del request
    backend.forced_path = None
    print(f"  geometric mean of best peer / ours: {product ** (1 / rows):.3f}", flush=True)
    for hv, lengths in ((8, [32768]), (64, [8192] * 4), (64, [256] * 32)):
        request = timed_request(lengths, (hv // 4, hv // 4, hv))
        backend.forced_path = Path(128, 0, False)
        plain = median_us(lambda: backend.prefill(request))
        backend.forced_path = Path(128, 0, True)
        half = median_us(lambda: backend.prefill(request))
        request = timed_request(lengths, (hv // 4, hv // 4, hv), gate="raw", logit=True, norm=True)
        raw = median_us(lambda: backend.prefill(request))
        print(f"  {hv // 4}/{hv} {len(lengths)} x {lengths[0]}, whole heads: {plain:.0f}; fp16 operands {half:.0f}; and raw {raw:.0f} us",
              flush=True)  # fmt: skip
    backend.forced_path = None


def short(backend) -> None:
    """Short sequences: the path of several launches, and those of one."""
    count = torch.cuda.get_device_properties(0).multi_processor_count
    print("  us: several launches, fused.cu by V rows, pairs of CTAs; and pairs where q and k are normalised, gates raw", flush=True)
    batches = [[n] for n in (1, 16, 17, 33, 64, 105, 128, 187, 256, 335, 501, 768)]
    batches += [[n] * m for n in (64, 128, 256) for m in (2, 4, 8)]
    for hv in (8, 16, 32, 64):
        for lengths in batches:
            request = timed_request(lengths, (hv // 4, hv // 4, hv))
            model = timed_request(lengths, (hv // 4, hv // 4, hv), gate="raw", logit=True, norm=True)
            shape = sum(lengths), len(lengths), hv, max(lengths), count
            ways = [("several", Path(*fastest(*shape), False), request)]
            if max(lengths) <= 64:
                ways += [(f"fused {rows}", Path(rows, 0, False, fused=True), request) for rows in (128, 64, 32)]
            ways += [("pairs", PAIRS, request), ("pairs, model", PAIRS, model)]
            cells = []
            for name, path, r in ways:
                backend.forced_path = path
                cells.append(f"{name} {median_us(lambda r=r: backend.prefill(r), 5):.1f}")
            backend.forced_path = None
            cells.append(f"chosen: {backend.detail(request)}")
            print(f"  {hv // 4:2}/{hv:<2} {len(lengths)} x {lengths[0]:<4} {' | '.join(cells)}", flush=True)


def parts(backend) -> None:
    """When each kernel of some calls ends, as the profiler sees it: they are launched to overlap, so durations would not add up."""
    calls = (
        (8, [32768], Path(128, 32, False)), (8, [32768], Path(64, 64, False)), (8, [32768], HALF),
        (32, [32768], Path(128, 64, False)), (64, [8192] * 4, WHOLE), (64, [256] * 32, WHOLE), (64, [32768], HALF),
    )  # fmt: skip
    for hv, lengths, path in calls:
        request = timed_request(lengths, (hv // 4, hv // 4, hv))
        backend.forced_path = path
        ends = []
        for _ in range(5):
            backend.prefill(request)
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                backend.prefill(request)
                torch.cuda.synchronize()
            kernels = [e for e in profile.events() if any(k in e.name for k in ("chunks", "scan", "recurrence"))]
            begin = min(e.time_range.start for e in kernels)
            ends.append(sorted((e.time_range.end - begin, e.name) for e in kernels))
        cells = []
        for i, (_, name) in enumerate(ends[0]):
            kind = next(k for k in ("chunks", "scan", "recurrence") if k in name)
            first = kind == "recurrence" and "false" in name.split(">")[0]
            cells.append(f"{'first pass' if first else kind} {statistics.median(e[i][0] for e in ends):.1f}")
        print(f"  {hv // 4}/{hv} {len(lengths)} x {lengths[0]} {tuple(path)[:2]}, ends of kernels: {'; '.join(cells)} us", flush=True)
    backend.forced_path = None


def main() -> int:
    steps = {"stages": stages, "calls": calls, "large": large, "accuracy": accuracy, "times": None, "short": short, "parts": parts}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(steps), help="steps, by commas")
    parser.add_argument("--release", action="store_true", help="build as for use, without bounds on waits")
    parser.add_argument("--full", action="store_true", help="time every path of every row")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    if not arguments.release:
        build._FLAGS = (*build._FLAGS, "-DGDN_SM90_DEBUG")
    backend = CudaBackend()
    reasons = backend.reasons_unusable(DEVICE)
    if reasons:
        print("cuda backend unusable:", "; ".join(reasons))
        return 1
    start = time.perf_counter()
    backend._library(DEVICE)
    arch = build.ARCHITECTURES[torch.cuda.get_device_capability(0)]
    entry = build.built(arch, toolchain=build.find_toolchain())
    print(f"library built or found, and loaded, in {time.perf_counter() - start:.1f} s", flush=True)
    for kernel in build.ptxas_report(entry.report):
        if "sm90" in kernel.name:
            name = kernel.name.split("::")[-1]
            print(f"  {name}: {kernel.registers} registers, {kernel.spill_stores + kernel.spill_loads} bytes spilled", flush=True)
    for line in entry.report.splitlines():
        if "C75" in line or "Potential Performance" in line:
            print(" ", line.strip())
    for name in arguments.only.split(","):
        start = time.perf_counter()
        print(f"[{name}]", flush=True)
        if name == "times":
            times(backend, arguments.full)
        else:
            steps[name](backend)
        torch.cuda.synchronize()
        print(f"[{name}: {time.perf_counter() - start:.1f} s]", flush=True)
        if name == "stages" and FAILURES:
            print("stages differ: nothing after them would say more")
            break
    print(f"{len(FAILURES)} failures" + (": " + "; ".join(FAILURES[:20]) if FAILURES else ""))
    return 1 if FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
