"""Checks and times the prefill's candidates over the prefill table; needs a CUDA device.

    python -m gdn_multi.backends.triton.tune [kernels] [segments] [table] [accuracy] [fit]
        [--rows 2/8] [--lengths 256x32] [--only prepare] [--reps 15] [--override dependent=0] [--log FILE]

kernels   each kernel by itself with every candidate of tiles, on a few shapes, and whether the call is right;
          prepare also as a model calls it (after the +)
segments  whole calls with every segment length, for the rows with few programs; then fits the costs of heuristics.py
table     the whole table as it would run now: unpaged, paged, and as a model calls it; host time of a call
accuracy  the accuracy table against the float64 reference
fit       only the fit, to what segments printed into --log FILE; needs no GPU

Times are medians in microseconds of CUDA graph replays with the L2 flushed before each. Nothing named: all of it but fit.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

import gdn_multi
from gdn_multi import reference, validate
from gdn_multi.request import CHUNK, PrefillRequest

from . import heuristics, prefill
from .launch import Launch

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
K = V = 128

#: Sequence lengths -> microseconds of FLA and of the best peer by heads of q and v, measured on one H200.
TABLE: dict[tuple[int, int], dict[tuple[int, ...], tuple[int, int]]] = {
    (2, 8): {
        (2048,): (86, 66), (8192,): (243, 116), (32768,): (919, 238), (4096, 28672): (843, 241),
        (8192,) * 4: (483, 274), (2048,) * 4: (134, 92), (1024,) * 8: (139, 56), (256,) * 32: (164, 45),
    },
    (4, 16): {
        (2048,): (103, 83), (8192,): (324, 150), (32768,): (1256, 397), (4096, 28672): (1178, 392),
        (8192,) * 4: (962, 366), (2048,) * 4: (256, 100), (1024,) * 8: (264, 61), (256,) * 32: (310, 81),
    },
    (8, 32): {
        (2048,): (140, 94), (8192,): (486, 231), (32768,): (1923, 689), (4096, 28672): (1924, 717),
        (8192,) * 4: (1936, 393), (2048,) * 4: (494, 107), (1024,) * 8: (510, 114), (256,) * 32: (596, 148),
    },
    (16, 64): {
        (2048,): (233, 101), (8192,): (844, 368), (32768,): (3446, 1435), (4096, 28672): (3458, 1268),
        (8192,) * 4: (3476, 812), (2048,) * 4: (867, 205), (1024,) * 8: (891, 219), (256,) * 32: (1017, 278),
    },
}  # fmt: skip

#: warps, registers, heads
PREPARE = [(4, 168, 4), (4, 128, 4), (4, 0, 4), (4, 168, 2), (4, 128, 1), (4, 168, 1), (8, 0, 4)]
#: block_v, warps, stages
RECUR = [(64, 4, 2), (64, 4, 3), (64, 4, 1), (64, 8, 3), (128, 8, 2), (128, 8, 3), (32, 4, 3)]
SCAN = [(16, 4, 2), (16, 4, 1), (16, 8, 2), (32, 4, 2), (64, 4, 1)]
SEGMENTS = (0, 8, 16, 32, 64, 128)


@contextmanager
def choice(**overrides):
    heuristics.OVERRIDES.update(overrides)
    prefill.forget_plans()
    try:
        yield
    finally:
        for name in overrides:
            del heuristics.OVERRIDES[name]
        prefill.forget_plans()


_flush = None


def time_us(run: Callable[[], None], reps: int) -> float:
    """Median of graph replays, each with a cold L2."""
    global _flush
    if _flush is None:
        _flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    pairs = []
    for _ in range(reps + 2):
        _flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in pairs[2:])


def inputs(heads: tuple[int, int], lengths: tuple[int, ...], dtype=BF16, gates: str = "model", seed: int = 0) -> dict:
    """Keyword arguments of chunk_gated_delta_rule."""
    rng = torch.Generator(device="cuda").manual_seed(seed)
    H, HV = heads
    T = sum(lengths)

    def rand(*shape):
        return torch.rand(shape, generator=rng, device="cuda")

    def randn(*shape):
        return torch.randn(shape, generator=rng, device="cuda")

    unit = torch.nn.functional.normalize
    if gates == "model":
        A = 1 + 15 * rand(HV)
        g = torch.exp(-A * torch.exp(rand(T, HV) * math.log(100.0) + math.log(1e-3)))
    else:
        low = {"0.9999": 0.9999, "0.5": 0.5}[gates]
        g = low + (1 - low) * rand(T, HV)
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return dict(
        q=unit(randn(T, H, K), dim=-1).to(dtype), k=unit(randn(T, H, K), dim=-1).to(dtype), v=randn(T, HV, V).to(dtype),
        g=g, beta=torch.sigmoid(randn(T, HV)), cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device="cuda"),
        initial_state=0.1 * randn(len(lengths), HV, V, K), output_final_state=True,
        output=torch.empty(T, HV, V, dtype=dtype, device="cuda"),
        output_state=torch.empty(len(lengths), HV, V, K, device="cuda"), max_seqlen=max(lengths), backend="triton",
    )  # fmt: skip


def as_a_model_calls(arguments: dict) -> dict:
    """Raw gates, beta logits and q and k that are not normalised."""
    T, HV = arguments["g"].shape
    more = dict(arguments)
    more.update(
        q=3 * arguments["q"], k=3 * arguments["k"], g=torch.randn(T, HV, device="cuda", dtype=BF16),
        beta=torch.randn(T, HV, device="cuda", dtype=BF16), use_gate_in_kernel=True, beta_is_logit=True,
        use_qk_l2norm_in_kernel=True, A_log=torch.log(1 + 15 * torch.rand(HV, device="cuda")),
        dt_bias=torch.full((HV,), -4.6, device="cuda"),
    )  # fmt: skip
    return more


def paged(arguments: dict, lengths: tuple[int, ...], page_size: int = 1024) -> dict:
    """The same call on pages, with a prefix of one page each."""
    N, HV = arguments["initial_state"].shape[:2]
    counts = [1 + -(-length // page_size) for length in lengths]
    indptr = torch.tensor([sum(counts[:i]) for i in range(N + 1)], dtype=torch.int32, device="cuda")
    last = torch.tensor([(n - 1) % page_size + 1 for n in lengths], dtype=torch.int32, device="cuda")
    pool = 0.1 * torch.randn(sum(counts), HV, V, K, device="cuda")
    names = ("q", "k", "v", "g", "beta", "cu_seqlens", "output", "backend")
    return dict(
        {name: arguments[name] for name in names}, state_pool=pool,
        page_indices=torch.randperm(sum(counts), device="cuda").int(), page_indptr=indptr, page_size=page_size,
        last_page_len=last,
    )  # fmt: skip


def request_of(arguments: dict) -> PrefillRequest:
    import inspect

    names = inspect.signature(validate.prefill_request).parameters
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(gdn_multi.chunk_gated_delta_rule).parameters.items()
    }
    return validate.prefill_request(**{name: arguments.get(name, defaults[name]) for name in names})


def name_of(lengths: tuple[int, ...]) -> str:
    return f"{lengths[0]}x{len(lengths)}" if len(set(lengths)) == 1 else "+".join(map(str, lengths))


def rows_of_table(rows: list[tuple[int, int]], only: list[str]) -> list[tuple[tuple[int, int], tuple[int, ...]]]:
    """Heads and lengths of the table's rows with one of these heads and names; with any where there are none."""
    return [
        (heads, lengths)
        for heads, table in TABLE.items()
        for lengths in table
        if (not rows or heads in rows) and (not only or name_of(lengths) in only)
    ]


def compare(arguments: dict, expected: tuple[torch.Tensor, torch.Tensor]) -> float:
    output, state = gdn_multi.chunk_gated_delta_rule(**arguments)
    pairs = zip((output, state), expected)
    return max(float((x.double() - y.double()).norm() / y.double().norm()) for x, y in pairs)


def launches(arguments: dict) -> dict[str, tuple[Launch, tuple[torch.Tensor, ...]]]:
    request = request_of(arguments)
    steps = prefill.steps(request, prefill.plan_for(request))
    return dict(zip(("prepare", "recur") if len(steps) == 2 else ("prepare", "local", "scan", "recur"), steps))


def tune_kernels(reps: int, rows: list[tuple[int, int]], only: str) -> None:
    print("\n# kernels by themselves, us; first column: largest relative difference of a call from the reference")
    small = inputs((2, 8), (700, 333, 64, 1))
    expected, states = reference.prefill(
        *(small[name] for name in ("q", "k", "v", "g", "beta")), cu_seqlens=small["cu_seqlens"],
        initial_state=small["initial_state"],
    )  # fmt: skip
    final = torch.stack([after[-1] for after in states])
    shapes = [(2, 8), (16, 64)]
    shapes = [(heads, lengths) for heads in shapes for lengths in ((8192,), (2048,) * 4, (256,) * 32)]
    shapes.append(((16, 64), (8192,) * 4))
    calls = [(heads, lengths, inputs(heads, lengths)) for heads, lengths in shapes if not rows or heads in rows]
    header = "".join(f"{f'{h[0]}/{h[1]} ' + name_of(n):>16}" for h, n, _ in calls)

    def line(title: str, names: tuple[str, ...], model: bool = False, **overrides) -> None:
        if not title.startswith(only):
            return
        begin = time.time()
        try:
            with choice(**{**overrides, "segment_chunks": min(2, overrides["segment_chunks"])}):
                error = compare(small, (expected, final))
            with choice(**overrides):
                cells = []
                for _, _, arguments in calls:
                    times = []
                    for ones in (arguments, as_a_model_calls(arguments)) if model else (arguments,):
                        found = launches(ones)
                        for launch, tensors in found.values():  # so that each reads what a call would give it
                            launch(*tensors)
                        times += [time_us(lambda s=found[name]: s[0](*s[1]), reps) for name in names]
                    cells.append(f"{'+'.join(f'{t:.0f}' for t in times):>16}")
            print(f"{title:<38}{error:9.1e}{''.join(cells)}   ({time.time() - begin:.1f} s)", flush=True)
        except Exception as problem:  # a candidate that does not fit must not end the run
            print(f"{title:<38} failed: {type(problem).__name__}: {str(problem)[:150]}", flush=True)

    print(f"{'':<47}{header}")
    for warps, regs, heads in PREPARE:
        tiles = dict(prepare_warps=warps, prepare_regs=regs, prepare_heads=heads)
        line(f"prepare warps={warps} regs={regs} heads={heads}", ("prepare",), True, **tiles, segment_chunks=0)
    for block, warps, stages in RECUR:
        tiles = dict(block_v=block, recur_warps=warps, recur_stages=stages, alone_stages=stages, local_stages=stages)
        line(f"recur block={block} warps={warps} stages={stages}", ("recur",), **tiles, segment_chunks=0)
    for block, warps, stages in RECUR:
        tiles = dict(block_v=block, recur_warps=warps, recur_stages=stages, alone_stages=stages, local_stages=stages)
        title = f"local+final block={block} warps={warps} stages={stages}"
        line(title, ("local", "recur"), **tiles, segment_chunks=16)
    for block, warps, stages in SCAN:
        tiles = dict(scan_block=block, scan_warps=warps, scan_stages=stages)
        line(f"scan block={block} warps={warps} stages={stages}", ("scan",), **tiles, segment_chunks=16)


#: (heads, lengths) -> microseconds by chunks of a segment.
Measured = dict[tuple[tuple[int, int], tuple[int, ...]], dict[int, float]]


def tune_segments(reps: int, rows: list[tuple[int, int]], only: list[str]) -> None:
    print("\n# whole calls by chunks of a segment (0: whole sequences), us; * is the heuristics' choice")
    print(f"{'':<24}{''.join(f'{size:>9}' for size in SEGMENTS)}")
    measured: Measured = {}
    for heads, lengths in rows_of_table(rows, only):
        if len(lengths) > 8:
            continue
        arguments = inputs(heads, lengths)
        path = prefill.plan_for(request_of(arguments)).path
        times, cells = {}, []
        for size in SEGMENTS:
            with choice(segment_chunks=size):
                times[size] = time_us(lambda: gdn_multi.chunk_gated_delta_rule(**arguments), reps)
                mark = "*" if prefill.plan_for(request_of(arguments)).path == path else " "
            cells.append(f"{times[size]:8.0f}{mark}")
        measured[heads, lengths] = times
        print(f"{heads[0]}/{heads[1]} {name_of(lengths):<18}{''.join(cells)}", flush=True)
    fit(measured)


def read_segments(text: str) -> Measured:
    """What ``tune_segments`` printed."""
    measured: Measured = {}
    for q, v, name, times in re.findall(r"^(\d+)/(\d+) (\d+x\d+|\d+(?:\+\d+)+) ((?:\s+\d+[* ]?){6})\s*$", text, re.M):
        length, _, count = name.partition("x")
        lengths = (int(length),) * int(count) if count else tuple(map(int, name.split("+")))
        found = map(float, re.findall(r"\d+", times))
        measured[(int(q), int(v)), lengths] = dict(zip(SEGMENTS, found))
    return measured


def fit(measured: Measured) -> heuristics.Costs:
    """The costs that bring the estimates of all calls closest, in the mean square of their logarithms; prints them and
    how good the choices are that follow. Block sizes and SMs are those of an H200."""
    sms, blocks = 132, K // 64
    cells = [
        ([(1, -(-length // CHUNK)) for length in lengths], size or max(lengths), heads[1], us)
        for (heads, lengths), times in measured.items()
        for size, us in times.items()
        if size * CHUNK < max(lengths)  # else nothing was cut, and empty segments were launched
    ]
    if not cells:
        raise SystemExit("nothing to fit: the log holds no rows of segments")

    def errors(costs: heuristics.Costs) -> list[float]:
        return [math.log(heuristics.estimate(n, size, h, blocks, blocks, sms, costs) / us) for n, size, h, us in cells]

    def loss(costs: heuristics.Costs) -> float:
        return sum(x * x for x in errors(costs)) / len(cells)

    best, lowest, step = heuristics.COSTS, loss(heuristics.COSTS), 0.3
    before = best, lowest
    while step > 0.002:
        improved = False
        for name in heuristics.Costs._fields:
            for factor in (1 + step, 1 / (1 + step)):
                tried = best._replace(**{name: getattr(best, name) * factor})
                if (new := loss(tried)) < lowest:
                    best, lowest, improved = tried, new, True
        step = step if improved else step / 2
    for title, costs, mean in (("in use", *before), ("fitted", best, lowest)):
        values = ", ".join(f"{name}={value:.3g}" for name, value in costs._asdict().items())
        worst = max(map(abs, errors(costs)))
        print(f"{title}: Costs({values}); off by {math.sqrt(mean):.1%} in the mean, {math.expm1(worst):.0%} at most")
    kept = heuristics.COSTS
    for title, costs in (("in use", kept), ("fitted", best)):
        heuristics.COSTS = costs
        lost = []
        for (heads, lengths), times in measured.items():
            chunks, longest = sum(lengths) // CHUNK, max(lengths) // CHUNK
            size = heuristics.segment_chunks(chunks, longest, len(lengths), heads[1], blocks, blocks, sms, False)
            # A choice that cuts nothing was measured where it is called 0.
            us = times[size if size * CHUNK < max(lengths) else 0]
            lost.append((us / min(times.values()), f"{heads[0]}/{heads[1]} {name_of(lengths)} {size}"))
        worse = ", ".join(f"{name}: {ratio:.2f}" for ratio, name in sorted(lost, reverse=True) if ratio > 1.02)
        mean = math.exp(sum(math.log(ratio) for ratio, _ in lost) / len(lost))
        print(
            f"{title}: chosen over best {mean:.3f} in the mean; chosen chunks and ratio where above 1.02: {worse or '-'}"
        )
    heuristics.COSTS = kept
    return best


def tune_table(reps: int, rows: list[tuple[int, int]], only: list[str]) -> None:
    print("\n# the table, us; FLA and the best peer as measured elsewhere on an H200")
    columns = (("FLA", 7), ("best", 7), ("ours", 8), ("paged", 8), ("model", 8), ("FLA/ours", 10))
    columns += (("paged", 7), ("model", 7))
    print(" " * 21 + "".join(f"{name:>{width}}" for name, width in columns) + "  path")
    ratios = []
    for heads, lengths in rows_of_table(rows, only):
        fla, best = TABLE[heads][lengths]
        arguments = inputs(heads, lengths)
        model, pages = as_a_model_calls(arguments), paged(arguments, lengths)
        ours = time_us(lambda: gdn_multi.chunk_gated_delta_rule(**arguments), reps)
        path = gdn_multi.last_backend().detail
        on_pages = time_us(lambda: gdn_multi.chunk_gated_delta_rule_paged(**pages), reps)
        as_model = time_us(lambda: gdn_multi.chunk_gated_delta_rule(**model), reps)
        ratios.append(fla / ours)
        print(
            f"{heads[0]}/{heads[1]} {name_of(lengths):<16}{fla:7}{best:7}{ours:8.1f}{on_pages:8.1f}{as_model:8.1f}"
            f"{fla / ours:10.2f}{on_pages / ours:7.2f}{as_model / ours:7.2f}  {path}",
            flush=True,
        )
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"geometric mean of FLA / ours {mean:.2f}, least {min(ratios):.2f}")
    arguments = inputs((2, 8), (256,))
    for title, call, chosen in (
        ("unpaged", gdn_multi.chunk_gated_delta_rule, arguments),
        ("paged", gdn_multi.chunk_gated_delta_rule_paged, paged(arguments, (256,))),
    ):
        for _ in range(20):
            call(**chosen)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            call(**chosen)
        print(f"host time of a call, {title}: {(time.perf_counter() - begin) / 200 * 1e6:.1f} us")
        torch.cuda.synchronize()


def truth(arguments: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and final state of the only sequence in float64; unlike ``reference.prefill`` without every state between,
    which would be 8 GB."""
    heads = arguments["v"].shape[1]
    q, k = (reference.expand_heads(arguments[name].double(), heads).unbind() for name in ("q", "k"))
    v, alpha, beta = (arguments[name].double().unbind() for name in ("v", "g", "beta"))
    S = arguments["initial_state"][0].double()
    output = []
    for token in zip(q, k, v, alpha, beta):
        o, S = reference.step(S, *token, K**-0.5)
        output.append(o)
    return torch.stack(output), S


def tune_accuracy() -> None:
    print("\n# relative error of output and final state, 2/8 heads, 8192 tokens; whole sequences, then segments of 16")
    for dtype in (BF16, F16):
        for gates in ("model", "0.9999", "0.5"):
            arguments = inputs((2, 8), (8192,), dtype, gates)
            expected = truth(arguments)
            cells = []
            for size in (0, 16):
                with choice(segment_chunks=size):
                    output, state = gdn_multi.chunk_gated_delta_rule(**arguments)
                for x, y in zip((output, state[0]), expected):
                    cells.append(f"{float((x.double() - y).norm() / y.norm()):.2e}")
            print(f"{str(dtype):<16}{gates:<8}", *cells, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("kernels", "segments", "table", "accuracy")
    parser.add_argument("parts", nargs="*", choices=[*parts, "fit", []], help="what to run")
    parser.add_argument("--rows", action="append", default=[], help="only these heads, such as 2/8 (may be repeated)")
    parser.add_argument(
        "--lengths", action="append", default=[], help="only these rows, such as 256x32, of table, segments"
    )
    parser.add_argument("--log", help="where fit finds what segments printed")
    parser.add_argument("--only", default="", help="only kernels whose line starts so: prepare, recur, local, scan")
    parser.add_argument("--reps", type=int, default=15)
    parser.add_argument("--override", action="append", default=[], help="NAME=NUMBER of heuristics.OVERRIDES")
    options = parser.parse_args()
    for override in options.override:
        name, _, value = override.partition("=")
        heuristics.OVERRIDES[name] = int(value)
    rows = [tuple(map(int, row.split("/"))) for row in options.rows]
    begin = time.time()
    chosen = options.parts or parts
    if "table" in chosen:
        tune_table(options.reps, rows, options.lengths)
    if "kernels" in chosen:
        tune_kernels(options.reps, rows, options.only)
    if "segments" in chosen:
        tune_segments(options.reps, rows, options.lengths)
    if "accuracy" in chosen:
        tune_accuracy()
    if "fit" in chosen:
        if options.log is None:
            parser.error("fit needs --log FILE")
        fit(read_segments(Path(options.log).read_text()))
    print(f"{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
