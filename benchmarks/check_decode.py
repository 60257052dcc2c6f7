"""Decode on an H200 in one go: every plan of csrc/decode/sm90_decode.cu checked and timed beside decode.cu.

    python benchmarks/check_decode.py [--build FOLDER] [--build-only] [--only check,times] [--plans 0,1,5]
                                      [--stores] [--rows bf16:16/64] [--pages] [--large]

Builds a small library (no prefill) in which the plan can be chosen; --build-only makes it on a machine without a GPU,
and --build finds it again. Checks: against gdn_multi.reference with poisoned outputs and unused rows; every plan's bits
are decode.cu's, whatever the batch. Times: median us and TB/s of state read and written, CUDA graphs, L2 flushed before
each replay, FlashInfer's figure beside. Plan 0 is what sm90_heuristics.h chooses, -1 is decode.cu.

With --large "times" is one table in TB/s of the large calls: a line a plan, and beside them the Triton backend, a copy between
two buffers and an elementwise kernel in place, of as many bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import torch  # noqa: E402
from gdn_multi.backends.cuda import build  # noqa: E402

import gdn_multi  # noqa: E402
from gdn_multi import reference  # noqa: E402
from gdn_multi.bench.timing import Timer  # noqa: E402
from gdn_multi.layout import csrc_dir  # noqa: E402

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHORT = {BF16: "bf16", F16: "f16", F32: "f32"}
PORTABLE = -1
FAILURES = []

#: state, heads of q and v, batch, FlashInfer's median us
TABLE = (
    (F32, 16, 64, 1, 9.1), (F32, 16, 64, 8, 23.3), (F32, 16, 64, 32, 72.6),
    (F32, 16, 64, 128, 268.2), (F32, 16, 64, 256, 528.6),
    (BF16, 2, 8, 1, 6.7), (BF16, 2, 8, 32, 11.5), (BF16, 2, 8, 256, 44.3),
    (BF16, 16, 32, 8, 11.7), (BF16, 16, 32, 32, 25.6), (BF16, 16, 32, 128, 80.0),
    (BF16, 16, 64, 1, 7.8), (BF16, 16, 64, 32, 44.1), (BF16, 16, 64, 128, None), (BF16, 16, 64, 256, 292.6),
)  # fmt: skip


#: The rows of --large: state, heads of q and v, batch.
LARGE_ROWS = (
    (F32, 16, 64, 32), (F32, 16, 64, 128), (F32, 16, 64, 256), (BF16, 16, 64, 32), (BF16, 16, 64, 128), (BF16, 16, 64, 256),
    (BF16, 16, 32, 128), (BF16, 2, 8, 256),
)  # fmt: skip


# --- the library ---------------------------------------------------------------------------------


def build_library(folder: Path, arch: str) -> Path:
    from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path, find_libtvm_ffi

    csrc = csrc_dir()
    force = csrc.parent / "tests/backends/cuda_emulator/force_decode.cu"
    renamed = ("-Dlaunch_decode=launch_decode_portable", "-Dlaunch_decode_sm90=launch_decode_never")
    jobs = {csrc / "bindings.cu": None, csrc / "common/page_slots.cu": (), csrc / "decode/decode.cu": renamed,
            csrc / "decode/sm90_decode.cu": (), force: ()}  # fmt: skip
    digest = hashlib.sha256(arch.encode())
    for path in sorted({*build.sources(), force}):
        digest.update(path.read_bytes())
    library = folder / f"check-decode-{arch}-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    toolchain = build.find_toolchain()
    start = time.perf_counter()
    number = arch[len("sm_") :]
    includes = [f"-I{path}" for path in (csrc, find_include_path(), find_dlpack_include_path())]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:

        def compiled(job):
            source, flags = job
            made = os.path.join(work, source.stem + ".o")
            device = (
                ["-x", "c++"]
                if flags is None
                else [*flags, "-Xptxas=-v", f"-gencode=arch=compute_{number},code={arch}"]
            )
            command = [toolchain.nvcc, "-std=c++17", "-O3", "-DNDEBUG", "-Xcompiler=-O2", "-Xcompiler=-fPIC",
                       "-Xcompiler=-fvisibility=hidden", *includes, *device, "-c", str(source), "-o", made]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{source}: {done.stderr[-3000:]}")
            for kernel in build.spilling(build.ptxas_report(done.stdout + done.stderr)):
                print(f"  spills: {kernel}")
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, jobs.items()))
        made = os.path.join(work, "made.so")
        where = os.path.dirname(find_libtvm_ffi())
        subprocess.run(
            [toolchain.nvcc, "-shared", "-cudart=static", f"-L{where}", *objects, "-ltvm_ffi", "-o", made], check=True
        )
        os.replace(made, library)
    print(f"built in {time.perf_counter() - start:.0f} s", flush=True)
    return library


class Decode:
    """The library's decode, by the plan asked for."""

    def __init__(self, path: Path) -> None:
        import tvm_ffi

        self.decode = tvm_ffi.load_module(str(path)).decode
        self.functions = ctypes.CDLL(str(path))
        self.plans = range(1, self.functions.gdn_decode_plans() + 1)

    def __call__(self, variant, x, *, pool=None, output=None, steps=None, update=True, norm=True):
        self.functions.gdn_force_decode(variant)
        self.decode(
            x.q, x.k, x.v, x.A_log, x.a, x.dt_bias, x.b, x.pool if pool is None else pool, *x.rows, steps, *x.table,
            x.output if output is None else output, x.q.shape[-1] ** -0.5, norm, update,
        )  # fmt: skip
        return bool(self.functions.gdn_forced_decode_served())

    def chosen(self, nbytes, size):
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        return self.functions.gdn_decode_plan(ctypes.c_longlong(nbytes), size, sms)

    def describe(self, variant):
        if variant < 1:
            return "decode.cu" if variant else "heuristics"
        values = (ctypes.c_int * 5)()
        self.functions.gdn_describe_decode_plan(variant % 100, values)
        tile, wide, warps, streaming, cached = values
        streaming = variant >= 200 if variant >= 100 else streaming
        return f"{tile >> 10}K{' wide' if wide else ''} w{warps}{' streaming' if streaming else ''}{', cached' if cached else ''}"


# --- calls ---------------------------------------------------------------------------------------


class Call:
    """One token a sequence, as a model makes it; rows "given", "pages" or "none"."""

    def __init__(self, B, H, HV, K, V, dtype, state_dtype, rows="given", poison=True, padding=False):
        device = "cuda"
        generator = torch.Generator(device).manual_seed(B + HV)

        def randn(*shape):
            return torch.randn(*shape, device=device, generator=generator)

        fused = randn(B, 1, 2 * H * K + HV * V).to(dtype)
        self.q, self.k = (x.unflatten(-1, (H, K)) for x in fused[..., : 2 * H * K].chunk(2, -1))
        self.v = fused[..., 2 * H * K :].unflatten(-1, (HV, V))
        self.A_log, self.dt_bias = torch.rand(HV, device=device, generator=generator).mul_(16).log_(), randn(HV) - 3
        self.a, self.b = randn(B, 1, HV).to(dtype), randn(B, 1, HV).to(dtype)
        self.count = 2 * B + 1
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(B))
        read, write, live = order[:B], order[:B].clone(), torch.ones(B, dtype=torch.bool)
        self.table, self.rows = (None,) * 3, (None, None)
        if rows == "none":
            read = write = torch.arange(B)
        elif rows == "pages":
            opens = torch.arange(B) % 3 == 0
            write = torch.where(opens, order[B : 2 * B], read)
            pages = [[int(r), int(w)] if o else [int(r)] for r, w, o in zip(read, write, opens)]
            indptr = torch.tensor([0] + [len(p) for p in pages]).cumsum(0)
            last = torch.where(opens, 1, 7)
            self.table = tuple(
                x.to(device=device, dtype=torch.int32)
                for x in (torch.tensor([p for q in pages for p in q]), indptr, last)
            )
        else:
            if padding:
                write[-1], live[-1] = -1, False
            self.rows = read.to(device, torch.int32), write.to(device)
            if not padding:  # as slots are
                self.rows = self.rows[0], self.rows[0]
        self.read, self.write, self.live = read.to(device), write.to(device), live.to(device)
        if poison:
            self.initial = randn(B, HV, V, K).to(state_dtype)
            self.pool = torch.full((self.count, HV, V, K), float("nan"), device=device).to(state_dtype)
            self.pool[self.read[self.live]] = self.initial[self.live]
        else:
            self.pool = torch.empty(self.count, HV, V, K, device=device, dtype=state_dtype).normal_()
        self.output = torch.full((B, 1, HV, V), float("nan"), device=device, dtype=dtype)


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def relative(x, y):
    return ((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-300)).item()


def expect(name, value, limit):
    if not value <= limit:
        FAILURES.append(name)
        print(f"  FAILED {name}: {value:.3g}, limit {limit:.3g}", flush=True)


def check(decode, plans):
    limit, count = {F32: 1e-5, BF16: 2.5e-3, F16: 4e-4}, 0
    cases = [
        (B, H, HV, K, V, dtype, state, rows)
        for state in (F32, BF16, F16)
        for B, H, HV, K, V, dtype, rows in (
            (1, 2, 8, 128, 128, BF16, "given"), (37, 16, 64, 128, 128, BF16, "given"),
            (37, 4, 4, 128, 64, F16, "pages"), (300, 2, 2, 128, 128, F16, "none"),
            (9, 1, 3, 64, 128, BF16, "pages"), (70, 2, 8, 64, 64, F16, "given"),
        )
    ]  # fmt: skip
    for case in cases:
        state, dtype = case[6], case[5]
        x = Call(*case[:7], rows=case[7], padding=case[0] > 1)
        B, HV, V, K = x.initial.shape
        o, states = reference.decode(
            x.q, x.k, x.v, x.A_log, x.a, x.dt_bias, x.b, K**-0.5, state=x.initial, use_qk_l2norm=True
        )
        wanted = {}
        for variant in (PORTABLE, 0, *plans):
            for form in ("update", "steps"):
                if form == "steps" and variant > 0 and variant % 4:
                    continue
                pool, output, steps = x.pool.clone(), x.output.clone(), None
                if form == "steps":
                    steps = torch.full((B, 1, HV, V, K), float("nan"), device="cuda").to(state)
                served = decode(variant, x, pool=pool, output=output, steps=steps, update=form == "update")
                count += 1
                name = f"{SHORT[state]} B{B} {case[1]}/{HV} K{K} V{V} {case[7]} {form}, [{variant}]"
                chosen = variant or decode.chosen(x.initial.nbytes, pool.element_size())  # decode.cu, for small calls
                expect(name + " served", float(served != (chosen > 0)), 0)
                if form in wanted:
                    got = output, pool if steps is None else steps
                    same = all(torch.equal(bits(a), bits(b)) for a, b in zip(wanted[form], got))
                    same = same and (steps is None or torch.equal(bits(pool), bits(x.pool)))
                    expect(name + " bits of decode.cu", float(not same), 0)
                    continue
                wanted[form] = output, pool if steps is None else steps
                live, written = x.live, x.write[x.live] if form == "update" else x.write[:0]
                expect(name + " output", relative(output[live], o[live]), limit[dtype])
                expect(name + " padding", output[~live].float().abs().sum().item(), 0)
                if form == "update":
                    expect(name + " state", relative(pool[written], states[live, 0]), limit[state])
                else:
                    expect(name + " steps", relative(steps[live, 0], states[live, 0]), limit[state])
                keep = torch.ones(x.count, dtype=torch.bool, device="cuda")
                keep[written] = False
                expect(name + " other rows", float(not torch.equal(bits(pool[keep]), bits(x.pool[keep]))), 0)
        del x, o, states
    # Alone or in a batch, a sequence has the same bits.
    for state in (F32, BF16):
        x = Call(150, 16, 32, 128, 128, BF16, state, rows="none")
        pool, output = x.pool.clone(), x.output.clone()
        decode(0, x, pool=pool, output=output)
        for b in (0, 77, 149):
            one = Call(1, 16, 32, 128, 128, BF16, state, rows="none")
            for name in ("q", "k", "v", "a", "b"):
                setattr(one, name, getattr(x, name)[b : b + 1])
            one.A_log, one.dt_bias, one.pool = x.A_log, x.dt_bias, x.pool[b : b + 1].clone()
            decode(0, one)
            count += 1
            same = torch.equal(bits(one.output), bits(output[b : b + 1])) and torch.equal(
                bits(one.pool), bits(pool[b : b + 1])
            )
            expect(f"{SHORT[state]} sequence {b} alone", float(not same), 0)
        del x, pool, output
    # A pool of more than 2^31 elements, on its last rows.
    x = Call(2, 16, 32, 128, 128, BF16, BF16)
    big = torch.empty(4200, 32, 128, 128, device="cuda", dtype=BF16)
    rows = torch.tensor([4199, 4198], device="cuda", dtype=torch.int32)
    x.rows = rows, rows
    big[4199], big[4198] = x.initial[0], x.initial[1]
    for variant in (0, *plans):
        pool = big[:]
        decode(variant, x, pool=pool, update=False)
        o, _ = reference.decode(
            x.q, x.k, x.v, x.A_log, x.a, x.dt_bias, x.b, 128**-0.5, state=x.initial, use_qk_l2norm=True
        )
        expect(f"row 4199, variant {variant}", relative(x.output, o), limit[BF16])
        count += 1
    print(f"{count} calls checked, {len(FAILURES)} failures", flush=True)


# --- times ---------------------------------------------------------------------------------------


@functools.cache
def timer(repetitions) -> Timer:
    return Timer(torch.device("cuda", torch.cuda.current_device()), 0.0, fewest=repetitions)


def medians(calls, repetitions=15):
    """Median us of each call, replayed from a CUDA graph with a cold L2; the calls take turns."""
    timings = timer(repetitions).in_turns(calls)
    for timing in timings:
        if not timing.graph:
            raise RuntimeError(timing.note)
    return [timing.ms * 1e3 for timing in timings]


def cells(values, moved, best):
    out = []
    for us in values:
        mark = "*" if us <= best * 1.005 else " "
        out.append(f"{us:6.1f} {moved / us * 1e-6:4.2f}{mark}")
    return " ".join(out)


def time_row(decode, variants, state, H, HV, B, flashinfer):
    x = Call(B, H, HV, 128, 128, BF16, state, poison=False)
    # What this card gives a plain copy of as many bytes between the two halves of the pool.
    copy_from, copy_to = x.pool[:B], x.pool[B : 2 * B]
    moved = 2 * B * HV * 128 * 128 * x.pool.element_size()
    got = medians([lambda: copy_to.copy_(copy_from)] + [lambda v=v: decode(v, x) for v in variants])
    best, chosen = min(got[1:]), decode.chosen(moved // 2, x.pool.element_size())
    print(
        f"{SHORT[state]:5} {H:2}/{HV:<3} {B:3} {flashinfer or float('nan'):8.1f} {cells(got[:1], moved, 0)} "
        f"{cells(got[1:], moved, best)}  best [{variants[got[1:].index(best)]}], chosen [{chosen}]",
        flush=True,
    )


def times(decode, variants, rows):
    print("columns: " + "; ".join(f"[{v}] {decode.describe(v)}" for v in variants))
    print("us and TB/s; * within 0.5% of the row's best")
    print(f"{'state':5} {'heads':6} {'B':>3} {'FlashInf':>8} {'copy':>11}  " + " ".join(f"{v:>11} " for v in variants))
    for row in chosen_rows(rows):
        time_row(decode, variants, *row)


def times_of_large(decode, variants, pattern):
    """A line a kernel and a column a call, TB/s of state read and written."""
    rows = [row for row in LARGE_ROWS if not pattern or re.search(pattern, f"{SHORT[row[0]]}:{row[1]}/{row[2]}:{row[3]}")]
    names = ["copy", "in place", "triton", *(f"[{v}] {decode.describe(v)}" for v in variants)]
    columns = []
    for state, H, HV, B in rows:
        x = Call(B, H, HV, 128, 128, BF16, state, poison=False)
        copy_from, copy_to = x.pool[:B], x.pool[B : 2 * B]

        def triton(x=x):
            gdn_multi.gated_delta_rule_decode_pretranspose(
                x.q, x.k, x.v, None, x.A_log, x.a, x.dt_bias, x.b, output=x.output, initial_state=x.pool,
                initial_state_indices=x.rows[0], backend="triton",
            )  # fmt: skip

        calls = [lambda a=copy_from, b=copy_to: b.copy_(a), copy_from.neg_, triton]
        got = medians(calls + [lambda v=v, x=x: decode(v, x) for v in variants], 25)
        moved = 2 * B * HV * 128 * 128 * x.pool.element_size()
        columns.append([moved / us * 1e-6 for us in got])
        del x, copy_from, copy_to, calls
    print(f"{'TB/s; * within 0.5% of the best plan':44}" + "".join(f"{SHORT[s]:>5} {h}/{hv}" for s, h, hv, _ in rows))
    print(f"{'sequences':44}" + "".join(f"{b:>11}" for *_, b in rows))
    for i, name in enumerate(names):
        cells = [f"{c[i]:10.3f}" + ("*" if i > 2 and c[i] >= 0.995 * max(c[3:]) else " ") for c in columns]
        print(f"{name:44}" + "".join(cells), flush=True)


def time_row_of_pages(decode, state, H, HV, B, _):
    x = Call(B, H, HV, 128, 128, BF16, state, rows="given", poison=False)
    y = Call(B, H, HV, 128, 128, BF16, state, rows="pages", poison=False)
    got = medians([lambda: decode(0, x), lambda: decode(0, y)])
    print(f"{SHORT[state]:5} {H:2}/{HV:<3} {B:3}  {got[0]:6.1f} {got[1]:6.1f}", flush=True)


def times_of_pages(decode, rows):
    print("plan 0: slots, page table")
    for row in chosen_rows(rows):
        time_row_of_pages(decode, *row)


def chosen_rows(pattern):
    return [row for row in TABLE if not pattern or re.search(pattern, f"{SHORT[row[0]]}:{row[1]}/{row[2]}:{row[3]}")]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path, default=Path(tempfile.gettempdir()) / "gdn_multi_check_decode")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--arch", default=None)
    parser.add_argument("--only", default="check,times")
    parser.add_argument("--plans", help="comma-separated; all otherwise")
    parser.add_argument("--stores", action="store_true", help="each plan with plain and with streaming stores")
    parser.add_argument("--rows", help="a regular expression on state:heads:batch")
    parser.add_argument("--pages", action="store_true", help="time page tables beside slots")
    parser.add_argument("--large", action="store_true", help="the large calls alone, in TB/s")
    args = parser.parse_args()
    arch = args.arch or ("sm_90a" if args.build_only else build.ARCHITECTURES[torch.cuda.get_device_capability(0)])
    path = build_library(args.build, arch)
    if args.build_only:
        print(path)
        return 0
    decode = Decode(path)
    plans = [int(p) for p in args.plans.split(",")] if args.plans else list(decode.plans)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    for step in args.only.split(","):
        start = time.perf_counter()
        if step == "check":
            check(decode, [p for p in plans if p > 0])
        elif step == "times":
            variants = [v for p in plans for v in ([p + 100, p + 200] if args.stores and p > 0 else [p])]
            (times_of_large if args.large else times)(decode, [PORTABLE, *variants], args.rows)
            if args.pages:
                times_of_pages(decode, args.rows)
        torch.cuda.synchronize()
        print(f"[{step}: {time.perf_counter() - start:.1f} s]", flush=True)
    if FAILURES:
        print(f"{len(FAILURES)} failures: " + "; ".join(FAILURES[:20]))
    return 1 if FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
