"""Every kernel of csrc/ on shapes small enough for compute-sanitizer, each result held against gdn_multi.reference.

    for tool in memcheck synccheck; do
        compute-sanitizer --tool $tool --error-exitcode 9 python benchmarks/sanitize.py || break
    done                                   # [--only decode,slots,portable,fused,sm90,pairs]
    python benchmarks/sanitize.py --each-lane --build-only
    compute-sanitizer --tool racecheck --num-cuda-barriers 32 --error-exitcode 9 python benchmarks/sanitize.py --each-lane

Torch's caching allocator carves tensors out of larger blocks, where an access beyond a tensor's end stays inside the
block and is no error for memcheck: PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives each tensor an allocation of its own. It has
to be set before torch is imported, and this script sets it. The library is the one built for use, not a debug build,
so build it before (python -m gdn_multi build): a compiler under the sanitizer is slow. --each-lane takes another one, in which
every lane arrives at the barriers of the Hopper prefill for itself, because racecheck does not see that what a warp did
before __syncwarp comes before one of its lanes' arrival.

Every output and every state row that a call must not read is NaN beforehand, and rows that must not change are
compared to the bit. The reference runs on the CPU, where the sanitizer does not slow it down. --device cpu runs the
same calls on the torch backend, to try this script where there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
os.environ.setdefault("OMP_NUM_THREADS", "4")  # of the reference, which otherwise spends its time on threads that wait

import check_cuda  # noqa: E402
import torch  # noqa: E402
from check_cuda import BF16, F16, F32, SHORT, expect, nan, relative, same_bits  # noqa: E402
from gdn_multi.backends.cuda import build  # noqa: E402
from gdn_multi.backends.cuda.prefill_heuristics import PORTABLE, Path  # noqa: E402

from gdn_multi import reference  # noqa: E402
from gdn_multi.request import PrefillRequest  # noqa: E402

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OUTPUT = {BF16: 6e-3, F16: 8e-4}
STATE = {F32: 0, BF16: 2.5e-3, F16: 4e-4, E4M3: 3.5e-2, E5M2: 7e-2}
DECODE_OUTPUT, DECODE_STATE = {BF16: 2.5e-3, F16: 4e-4}, {F32: 1e-5, BF16: 2.5e-3, F16: 4e-4}
NAME = {**SHORT, E4M3: "e4m3", E5M2: "e5m2"}


def on_cpu(request) -> SimpleNamespace:
    return SimpleNamespace(**{n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in vars(request).items()})


def changed(request: PrefillRequest, **fields) -> PrefillRequest:
    return replace(request, **fields)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values, one element behind an aligned address."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


def padded(x: torch.Tensor) -> torch.Tensor:
    """The same rows in wider memory, so that they start at any element; what lies between them is NaN."""
    wide = nan(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype)[..., : x.shape[-1]]
    return wide.copy_(x)


# --- prefill -------------------------------------------------------------------------------------

LENGTHS, PREFIXES = [140, 1, 0, 64], [20, 64, 5, 0]  # of a page of 64: it begins anywhere, and at both of its ends
OPTIONS = (
    dict(gate="raw", raw_qk=True, logit=True), dict(gate="log"), dict(gate="none", logit=True),
    dict(alpha=lambda *s: 0.99 + 0.01 * torch.rand(*s, device=check_cuda.DEVICE), raw_qk=True),
    dict(beta=False, alpha=lambda *s: (torch.rand(*s, device=check_cuda.DEVICE) > 0.01).float()),
)  # fmt: skip


def prefill(backend, name, path, request, initial, wanted) -> None:
    """``wanted``: state row -> (sequence, tokens after which it is that row's state); other rows keep their bits."""
    states = request.final_state
    before = None if states is None else states.clone()
    backend.forced_path = path
    backend.prefill(request)
    backend.forced_path = None
    got = on_cpu(request)
    o, after = check_cuda.prefill_reference(got, None if initial is None else initial.cpu())
    low, high = int(got.cu_seqlens[0]), int(got.cu_seqlens[-1])
    expect(name + ", output", relative(got.output[low:high], o[low:high]), OUTPUT[got.q.dtype])
    rest = torch.cat([got.output[:low], got.output[high:]]).float()
    expect(name + ", rows of no sequence", float(not torch.equal(rest, torch.zeros_like(rest))), 0)
    if states is None:
        return
    limit = OUTPUT[got.q.dtype] + STATE[states.dtype]
    for row, (i, n) in wanted.items():
        expect(f"{name}, sequence {i} after {n}", relative(got.final_state[row], after[i][n]), limit)
    keep = torch.ones(states.shape[0], dtype=torch.bool)
    keep[list(wanted)] = False
    expect(name + ", other rows", float(not same_bits(got.final_state[keep], before.cpu()[keep])), 0)


def paged(
    backend, number, path, heads, sizes, dtype, state_dtype, lengths=LENGTHS, prefixes=PREFIXES, change=None, **option
) -> None:  # fmt: skip
    """A call on pages; every other one with its rows given as slots."""
    case = check_cuda.paged_case(
        lengths, prefixes, 64 * (1 + number % 2), heads, *sizes, dtype, state_dtype, number, margin=(3, 70), **option
    )
    request, initial, wanted = case
    if change is not None:
        request = change(request)
    if number % 2:
        request = backend.with_slots(request)
    name = f"{tuple(path)} {heads} K, V {sizes} {NAME[dtype]}, states {NAME[state_dtype]} [{number}]"
    prefill(backend, name, path, request, initial, wanted)


def states_padded(request):
    pool = padded(request.final_state)
    return changed(request, initial_state=pool, final_state=pool, state_checkpoints=pool)


def tokens_shifted(request):
    return changed(request, **{name: shifted(getattr(request, name)) for name in ("q", "k", "v", "output")})


def v_enlarged(request):
    """Beyond fp16's range in the end: rows are then kept below their true values by a factor (recurrence.cu)."""
    return changed(request, v=request.v * 4096)


def plain(backend, name, path, lengths, heads, sizes, dtype, states=True, **option) -> None:
    """One state a sequence in, one out; or neither."""
    fields, initial, wanted = {}, None, {}
    if states:
        shape = len(lengths), max(heads[0], heads[2]), sizes[1], sizes[0]
        initial = torch.randn(*shape, device=check_cuda.DEVICE)
        fields = dict(initial_state=initial, final_state=nan(*shape, dtype=F32), final_state_is_new=True)
        wanted = {i: (i, n) for i, n in enumerate(lengths)}
    request = check_cuda.prefill_request(lengths, heads, *sizes, dtype, seed=len(lengths), **fields, **option)
    prefill(backend, name, path, request, initial, wanted)


def portable(backend, sms: int) -> int:
    cases = (
        ((1, 1, 2), (128, 128), BF16, F32, None), ((2, 2, 2), (64, 64), F16, BF16, None),
        ((2, 1, 1), (128, 64), BF16, F16, None), ((1, 1, 2), (64, 128), F16, E4M3, None),
        ((1, 1, 1), (128, 128), F16, E5M2, None), ((1, 1, 2), (128, 128), BF16, F32, tokens_shifted),
        ((1, 1, 2), (64, 64), F16, BF16, states_padded), ((1, 1, 2), (128, 128), BF16, F32, states_padded),
    )  # fmt: skip
    for n, (heads, sizes, dtype, state_dtype, change) in enumerate(cases):
        paged(backend, n, PORTABLE, heads, sizes, dtype, state_dtype, change=change, **OPTIONS[n % len(OPTIONS)])
    # V rows a CTA: as many as leave a CTA for nearly every multiprocessor (launch.cu). One sequence has two chunks.
    count = 0
    for rows in (32, 64, 128):
        for sizes, dtype in (((128, 128), BF16), ((64, 64), F16)):
            if rows <= sizes[1]:
                lengths = [70] + [1] * -(-9 * sms * rows // (10 * sizes[1] * 2))
                what = f"{len(lengths)} short sequences {sizes}"
                plain(backend, what, PORTABLE, lengths, (2, 2, 2), sizes, dtype, raw_qk=True)
                count += 1
    # Four heads a CTA in the first stage.
    plain(backend, "four heads a CTA", PORTABLE, [1] * (2 * sms), (1, 1, 4), (64, 64), BF16, gate="raw", logit=True)
    plain(backend, "no states", PORTABLE, [70, 0, 1], (1, 1, 1), (128, 128), BF16, states=False)
    return len(cases) + count + 2


def fused(backend, sms: int) -> int:
    """All in one launch."""
    cases = (
        (128, (1, 1, 2), (128, 128), F32, None), (64, (2, 2, 2), (128, 64), BF16, None), (32, (2, 1, 1), (128, 64), F16, None),
        (16, (1, 1, 2), (128, 128), E4M3, None), (64, (1, 1, 2), (128, 128), F32, tokens_shifted),
        (64, (1, 1, 2), (128, 128), BF16, states_padded),
    )  # fmt: skip
    for n, (rows, heads, sizes, state_dtype, change) in enumerate(cases):
        path = Path(rows, 0, False, fused=True)
        paged(backend, n, path, heads, sizes, BF16, state_dtype, change=change, **OPTIONS[n % len(OPTIONS)])
    path = Path(32, 0, False, fused=True)
    plain(backend, "one launch, few tokens", path, [1, 16, 0, 9], (1, 1, 2), (128, 128), BF16, gate="raw", logit=True)
    plain(backend, "one launch, no states", path, [70, 0, 1], (1, 1, 1), (128, 128), BF16, states=False)
    return len(cases) + 2


def sm90(backend, sms: int) -> int:
    kinds = ((BF16, False), (BF16, True), (F16, False))
    heads = ((1, 1, 4), (1, 1, 3), (2, 2, 2), (1, 1, 2), (2, 1, 1))
    paths = [(Path(rows, segment, half), dtype) for segment in (0, 2) for rows in (128, 64) for dtype, half in kinds]
    changes = (None, tokens_shifted, states_padded)
    number = 0
    for path, dtype in paths:
        # Split sequences need several segments behind a prefix.
        lengths, prefixes = ([340, 1, 0, 64], [20, 64, 5, 0]) if path.segment else (LENGTHS, PREFIXES)
        state_dtype = list(STATE)[(2 * number + number // 5) % 5]
        paged(
            backend, number, path, heads[number % 5], (128, 128), dtype, state_dtype, lengths, prefixes,
            changes[number // 2 % 3], **OPTIONS[(number + number // 5) % 5],
        )  # fmt: skip
        number += 1
    for path in (Path(128, 0, True), Path(64, 2, True)):
        paged(backend, number, path, (1, 1, 2), (128, 128), BF16, F32, change=v_enlarged, **OPTIONS[number % 3])
        number += 1
    # The shortest segment that the heuristics take, one sequence of two segments and a chunk.
    for path in (Path(128, 8, True), Path(64, 8, False)):
        paged(backend, number, path, (1, 1, 1), (128, 128), BF16, F32, [17 * 64 - 9], [30], **OPTIONS[0])
        number += 1
    for path in (Path(128, 0, True), Path(64, 2, False)):
        name, lengths, sizes = f"{tuple(path)}, one state a sequence", [150, 0, 1], (128, 128)
        plain(backend, name, path, lengths, (1, 1, 2), sizes, BF16, **OPTIONS[3])
        plain(backend, f"{tuple(path)}, no states", path, lengths, (1, 1, 1), sizes, BF16, states=False)
    few = [300, 1, 64, 3, *[0] * 40, 700, 5]
    plain(backend, "few of many sequences split", Path(128, 2, False), few, (1, 1, 4), (128, 128), BF16, **OPTIONS[3])
    return number + 5


def pairs(backend, sms: int) -> int:
    """All in one launch, pairs of CTAs."""
    path, heads = Path(64, 0, False, pairs=True), ((1, 1, 4), (1, 1, 3), (2, 2, 2), (2, 1, 1))
    for n, (state_dtype, change) in enumerate(((F32, None), (BF16, states_padded), (E4M3, None), (F32, tokens_shifted))):
        options = OPTIONS[n % len(OPTIONS)]
        paged(backend, n, path, heads[n], (128, 128), BF16, state_dtype, [340, 1, 0, 64], [20, 64, 5, 0], change, **options)
    plain(backend, "pairs, one state a sequence", path, [450, 0, 1], (1, 1, 2), (128, 128), BF16, **OPTIONS[3])
    plain(backend, "pairs, no states", path, [150, 0, 64], (1, 1, 1), (128, 128), BF16, states=False)
    return 6


# --- decode --------------------------------------------------------------------------------------


def decode_call(backend, name, batch, steps, heads, sizes, dtype, state_dtype, mode) -> None:
    """``mode``: pages; rows (read and written apart, the last sequence padding); plain (a state a sequence, in place);
    steps (all intermediate states, the pool only read); padded (as rows, states of odd strides)."""
    (H, HV), (K, V) = heads, sizes
    initial = torch.randn(batch, HV, V, K, device=check_cuda.DEVICE).to(state_dtype)
    table = buffer = read = write = None
    live = batch
    if mode in ("plain", "steps"):
        pool, read_at = initial.clone(), torch.arange(batch)
        written = read_at if mode == "plain" else read_at[:0]
        if mode == "steps":
            buffer = nan(batch, steps + 1, HV, V, K, dtype=state_dtype)
    else:
        apart = min(batch, 3)  # sequences that write another row than they read; more would only cost memory
        order = torch.randperm(batch + apart + 1, generator=torch.Generator().manual_seed(batch))
        read_at, written = order[:batch], order[:batch].clone()
        written[:apart] = order[batch : batch + apart]
        pool = nan(batch + apart + 1, HV, V, K, dtype=state_dtype)
        pool[read_at.to(pool.device)] = initial
        if mode == "pages":
            pages = [[int(r), int(w)] if r != w else [int(r)] for r, w in zip(read_at, written)]
            table = check_cuda.table_of(pages, [1 if len(p) == 2 else 7 for p in pages])
        else:
            read, write = read_at.to(pool.device, torch.int32), written.to(pool.device)
            if mode == "padded":
                pool = padded(pool)
            if batch > 1:
                live, write[-1] = batch - 1, -1
                written = written[:live]
    before = pool.clone()
    request = check_cuda.decode_request(
        batch, steps, H, HV, K, V, dtype, pool, read, write, table, buffer, update=mode != "steps", norm=mode != "plain"
    )
    backend.decode(request)
    # A few sequences against the reference, on the CPU.
    some = torch.tensor(sorted({0, live // 2, live - 1}))
    names = ("q", "k", "v", "a", "b", "output")
    x = on_cpu(SimpleNamespace(**{n: getattr(request, n)[some.to(pool.device)] for n in names}))
    o, states = reference.decode(
        x.q, x.k, x.v, request.A_log.cpu(), x.a, request.dt_bias.cpu(), x.b, request.scale,
        state=initial[some.to(pool.device)].cpu(), use_qk_l2norm=request.use_qk_l2norm,
    )  # fmt: skip
    name = f"decode {name}, {batch} sequences, T {steps}, {H}/{HV} K{K} V{V} {NAME[dtype]}, {NAME[state_dtype]}, {mode}"
    expect(name + ", output", relative(x.output, o), DECODE_OUTPUT[dtype])
    expect(name + ", all outputs finite", float(not request.output.isfinite().all()), 0)
    expect(name + ", padding", request.output[live:].float().abs().sum().item(), 0)
    limit = DECODE_STATE[state_dtype]
    if buffer is not None:
        expect(name + ", steps", relative(buffer[some.to(pool.device), :steps].cpu(), states), limit)
        expect(name + ", step that is not taken", float(not buffer[:, steps:].isnan().all()), 0)
    if len(written):
        expect(name + ", state", relative(pool[written[some].to(pool.device)].cpu(), states[:, -1]), limit)
    keep = torch.ones(pool.shape[0], dtype=torch.bool)
    keep[written] = False
    keep = keep.to(pool.device)
    expect(name + ", other rows", float(not same_bits(pool[keep], before[keep])), 0)


def decode(backend, sms: int) -> int:
    count = 0

    def call(*arguments):
        nonlocal count
        count += 1
        decode_call(backend, *arguments)

    # decode.cu, which serves the smallest calls, several tokens a sequence and states at odd addresses.
    forms = (
        ("pages", 1), ("rows", 1), ("plain", 1), ("steps", 1), ("rows", 3), ("steps", 3), ("padded", 1), ("padded", 2),
    )  # fmt: skip
    for n, state_dtype in enumerate((F32, BF16, F16)):
        for m, (mode, steps) in enumerate(forms):
            sizes = ((128, 128), (64, 64), (128, 64), (64, 128))[(m + n) % 4]
            call("small", 3, steps, (1, 2), sizes, (BF16, F16)[(m + n) % 2], state_dtype, mode)
    # Two and four rows a thread, where there are so many heads (decode.cu, launch).
    half = -(-sms // 2)
    call("two rows a thread", half, 1, (1, 2), (128, 128), BF16, BF16, "pages")
    call("two rows a thread", 2 * half, 1, (2, 2), (64, 64), F16, F32, "rows")
    call("four rows a thread", 2 * half, 1, (1, 4), (64, 64), BF16, BF16, "rows")
    call("two rows a thread", half, 2, (1, 2), (128, 128), BF16, F32, "rows")
    call("two rows a thread", half, 2, (1, 2), (64, 128), BF16, F16, "steps")
    # sm90_decode.cu: narrow and wide tiles, from 32 KB and 400 KB of state a multiprocessor on (sm90_heuristics.h).
    for n, state_dtype in enumerate((F32, BF16, F16)):
        head, wide = torch.empty(0, dtype=state_dtype).element_size() * 128 * 128, ("rows", "pages", "plain")[n]
        for mode in ("pages", "steps"):
            call("narrow", -(-40 * 1024 * sms // (8 * head)), 1, (2, 8), (128, 128), BF16, state_dtype, mode)
        call("K of 64", -(-40 * 1024 * sms // (16 * head // 4)), 1, (4, 16), (64, 64), F16, state_dtype, "rows")
        call("wide", -(-420 * 1024 * sms // (64 * head)), 1, (16, 64), (128, 128), BF16, state_dtype, wide)
    return count


def slots(backend, sms: int) -> int:
    check_cuda.check_slots(backend)
    return 4


def main() -> int:
    groups = {"decode": decode, "slots": slots, "portable": portable, "fused": fused, "sm90": sm90, "pairs": pairs}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(groups), help="groups, by commas (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--each-lane", action="store_true", help="for racecheck: every lane arrives at barriers for itself")
    parser.add_argument("--build-only", action="store_true")
    args = parser.parse_args()
    if args.each_lane:
        build._FLAGS = (*build._FLAGS, "-DGDN_SM90_EACH_LANE")
    if args.device == "cpu":
        from gdn_multi.backends.torch import TorchBackend

        check_cuda.DEVICE, backend, sms, has_sm90 = torch.device("cpu"), TorchBackend(), 8, True
        print(f"torch backend on the CPU, torch {torch.__version__}", flush=True)
    else:
        backend = check_cuda.CudaBackend()
        reasons = backend.reasons_unusable(check_cuda.DEVICE)
        if reasons:
            print("cuda backend unusable:", "; ".join(reasons))
            return 1
        capability, sms = backend.facts(check_cuda.DEVICE)
        has_sm90 = capability == (9, 0)
        caching = "off" if os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1" else "on: memcheck sees little"
        print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, caching allocator {caching}", flush=True)
        start = time.perf_counter()
        backend._library(check_cuda.DEVICE)
        print(f"library loaded in {time.perf_counter() - start:.1f} s", flush=True)
    if args.build_only:
        return 0
    failures = 0
    print(f"{'group':10} {'calls':>5} {'failed':>6} {'seconds':>8}")
    for name in args.only.split(","):
        if name == "sm90" and not has_sm90:
            print(f"{name:10} left out: this card has no sm_90a")
            continue
        start = time.perf_counter()
        torch.manual_seed(0)
        calls = groups[name](backend, sms)
        if args.device == "cuda":
            torch.cuda.synchronize()
        failed, failures = len(check_cuda.FAILURES) - failures, len(check_cuda.FAILURES)
        print(f"{name:10} {calls:5} {failed:6} {time.perf_counter() - start:8.1f}", flush=True)
    print("all as the reference says" if not failures else f"{failures} comparisons failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
