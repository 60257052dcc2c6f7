"""Times tile shapes of the decode kernel over the decode table; needs a CUDA device.

    python -m gdn_multi.backends.triton.tune_decode [--reps 40] [--quick] [--large]

Every candidate is first compared with the float64 reference, and its bits with those of the tile in use. Times are
medians of graph replays with the L2 flushed before each; TB/s counts the state read once and written once.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch
import triton

from gdn_multi import reference
from gdn_multi.request import DecodeRequest, PageTable

from . import decode as kernels
from .decode_heuristics import Tile, tile

F32, BF16 = torch.float32, torch.bfloat16
PAGE = 64

#: State dtype, heads of q and v, batch; microseconds of FlashInfer and FLA on one H200 where they are known.
TABLE = (
    (F32, 16, 64, 1, 9.1, 9.7),
    (F32, 16, 64, 8, 23.3, 30.7),
    (F32, 16, 64, 32, 72.6, 98.2),
    (F32, 16, 64, 128, 268.2, 369.5),
    (F32, 16, 64, 256, 528.6, 732.6),
    (BF16, 2, 8, 1, 6.7, 7.7),
    (BF16, 2, 8, 32, 11.5, 19.1),
    (BF16, 2, 8, 256, 44.3, 98.1),
    (BF16, 16, 32, 8, 11.7, 18.9),
    (BF16, 16, 32, 32, 25.6, 53.1),
    (BF16, 16, 32, 128, 80.0, 188.7),
    (BF16, 16, 64, 1, 7.8, 9.6),
    (BF16, 16, 64, 32, 44.1, 98.3),
    (BF16, 16, 64, 256, 292.6, 731.6),
)

#: What decides about bandwidth: rows that move 134 MB and more.
LARGE = (
    (BF16, 16, 64, 32), (BF16, 16, 64, 128), (BF16, 16, 64, 256), (BF16, 16, 32, 128),
    (F32, 16, 64, 32), (F32, 16, 64, 128), (F32, 16, 64, 256),
)  # fmt: skip

FIRST = ("evict_first", "evict_first")
CANDIDATES = {
    F32: [
        *(Tile(v, w, "", "") for v, w in ((4, 1), (8, 1), (16, 1), (16, 2), (16, 4), (32, 4))),
        Tile(8, 1, *FIRST),
        Tile(8, 1, "evict_first", ""),
        Tile(16, 1, *FIRST),
    ],
    BF16: [
        *(Tile(v, w, "", "") for v, w in ((4, 1), (8, 1), (16, 1), (32, 1), (16, 2), (32, 2), (32, 4), (64, 4))),
        Tile(8, 1, *FIRST),
        Tile(16, 1, *FIRST),
        Tile(16, 1, "evict_first", ""),
        Tile(32, 1, *FIRST),
    ],
}


def paged_request(stored: torch.dtype, hq: int, hv: int, batch: int, tokens: int = 1, size: int = 128) -> DecodeRequest:
    """Two pages a sequence in random order, bf16 inputs, gates as models initialise them; updates in place."""
    rng = torch.Generator("cuda").manual_seed(batch)
    rand = lambda *shape, dtype=BF16: torch.randn(shape, generator=rng, device="cuda").to(dtype)  # noqa: E731
    pool = torch.empty(2 * batch, hv, size, size, dtype=stored, device="cuda").normal_(generator=rng)
    pages = PageTable(
        page_indices=torch.randperm(2 * batch, device="cuda", generator=rng).int(),
        page_indptr=torch.arange(0, 2 * batch + 1, 2, device="cuda", dtype=torch.int32),
        last_page_len=torch.randint(2, PAGE, (batch,), device="cuda", generator=rng, dtype=torch.int32),
    )
    step = torch.rand(hv, generator=rng, device="cuda") * 4.6 - 6.9  # log of 1e-3 to 0.1
    return DecodeRequest(
        function="tune_decode", batch=batch, num_tokens=tokens, num_q_heads=hq, num_heads=hv, head_size_k=size,
        head_size_v=size, device=pool.device, q=rand(batch, tokens, hq, size), k=rand(batch, tokens, hq, size),
        v=rand(batch, tokens, hv, size), A_log=torch.log(1 + 15 * torch.rand(hv, generator=rng, device="cuda")),
        a=rand(batch, tokens, hv), dt_bias=torch.log(torch.expm1(torch.exp(step))), b=rand(batch, tokens, hv),
        scale=size**-0.5, use_qk_l2norm=True, state=pool, read_rows=None, write_rows=None, intermediate_states=None,
        update_state=True, pages=pages, output=torch.empty(batch, tokens, hv, size, dtype=BF16, device="cuda"),
        batch_invariant=False, slot_arguments=(), is_paged=True,
    )  # fmt: skip


def use(shape: Tile) -> None:
    kernels.tile = lambda *_: shape
    kernels._LAUNCHES.clear()


class Timer:
    def __init__(self, reps: int):
        self.reps = reps
        self.cache = torch.empty(2**28, dtype=torch.uint8, device="cuda")

    def __call__(self, request: DecodeRequest) -> float:
        """Median microseconds of a graph replay with a cold L2."""
        kernels.decode(request)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernels.decode(request)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.reps + 3)]
        for start, end in events:
            self.cache.zero_()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) * 1e3 for start, end in events[3:])


def check(shape: Tile, base: Tile, stored: torch.dtype, hq: int, hv: int) -> str:
    """Worst relative errors against the reference, and whether the bits are those of ``base``."""
    results = []
    for which in (base, shape):
        use(which)
        r = paged_request(stored, hq, hv, 3)
        rows = r.pages.page_indices[1::2].long()
        if which is shape:
            output, states = reference.decode(
                r.q, r.k, r.v, r.A_log, r.a, r.dt_bias, r.b, r.scale, state=r.state[rows]
            )
        kernels.decode(r)
        results.append((r.output, r.state[rows]))
    (o0, s0), (o1, s1) = results
    errors = [float((x.double() - ref).norm() / ref.norm()) for x, ref in ((o1, output), (s1, states[:, -1]))]
    if not (errors[0] < 3e-3 and errors[1] < (1e-5 if stored is F32 else 3e-3)):
        raise SystemExit(f"wrong: {shape} {stored} errors {errors}")
    return "same bits" if torch.equal(o0, o1) and torch.equal(s0, s1) else "other bits"


def name(shape: Tile) -> str:
    policy = {"": "", "evict_first": "f", "evict_last": "l"}
    suffix = "".join(policy[p] or "-" for p in shape[2:]) if any(shape[2:]) else ""
    return f"{shape.block_v}x{shape.num_warps}{suffix}"


def host_time(call, calls: int = 200) -> float:
    """Microseconds of host time a call, the better of three runs without a synchronization inside."""
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return best


def host_times() -> None:
    r = paged_request(BF16, 2, 8, 1)
    kernels.decode(r)
    launch = next(reversed(kernels._LAUNCHES.values()))
    pages = r.pages
    tensors = (
        r.q, r.k, r.state, r.state, r.v, r.a, r.b, r.A_log, r.dt_bias, r.output, pages.page_indices, pages.page_indptr,
        pages.last_page_len,
    )  # fmt: skip
    print("host us a call (bf16 2/8 B=1):", end=" ")
    print(f"decode(request) {host_time(lambda: kernels.decode(r)):.1f}", end=", ")
    print(f"its launch {host_time(lambda: launch(*tensors)):.1f}", end=", ")
    through_triton = lambda: launch.kernel[launch.grid](*tensors, *launch.fixed, **launch.options)  # noqa: E731
    print(f"the same through kernel[grid] {host_time(through_triton):.1f}", end=", ")
    import gdn_multi

    def public():
        gdn_multi.gated_delta_rule_decode_paged(
            r.q, r.k, r.v, r.A_log, r.a, r.dt_bias, r.b, r.scale, r.output, True, state_pool=r.state,
            page_indices=pages.page_indices, page_indptr=pages.page_indptr, last_page_len=pages.last_page_len,
            backend="triton",
        )  # fmt: skip

    try:
        public()
        print(f"gated_delta_rule_decode_paged {host_time(public):.1f}")
    except Exception as error:
        print(f"gated_delta_rule_decode_paged: {type(error).__name__}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reps", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="only the tile in use")
    parser.add_argument("--large", action="store_true", help="only rows of 134 MB and more, as TB/s, and no host times")
    options = parser.parse_args()
    begin = time.perf_counter()
    timer = Timer(options.reps)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for stored in (F32, BF16):
        table = [row for row in TABLE if row[0] is stored]
        if options.large:
            known = {row[:4]: row[4:] for row in TABLE}
            table = [(*row, *known.get(row, (math.nan, math.nan))) for row in LARGE if row[0] is stored]
        used = tile(128, 128, stored.itemsize)
        shapes: list[Tile] = [used] + [s for s in CANDIDATES[stored] if s != used and not options.quick]
        bits = [check(shape, used, stored, 16, 64) for shape in shapes]
        for verdict in ("same bits", "other bits"):
            print(f"{stored} {verdict}:", *(name(s) for s, b in zip(shapes, bits) if b == verdict))
        print("q/v   B    peers FlashInfer FLA |", *(f"{name(s):>7}" for s in shapes), "| best")
        for _, hq, hv, batch, flashinfer, fla in table:
            times: list[float] = []
            request = paged_request(stored, hq, hv, batch)
            for shape in shapes:
                use(shape)
                times.append(timer(request))
            moved = 2 * batch * hv * 128 * 128 * stored.itemsize
            best = min(times)
            rates: tuple[float, float] = (moved / times[0] / 1e6, moved / best / 1e6)
            print(
                f"{hq:>2}/{hv:<2} {batch:>4} {flashinfer:>16.1f} {fla:>6.1f} |",
                *(f"{moved / t / 1e6:7.2f}" if options.large else f"{t:7.1f}" for t in times),
                f"| {name(shapes[times.index(best)])} {rates[1]:.2f} TB/s (in use {rates[0]:.2f})",
                flush=True,
            )
            del request
        use(used)
        if options.large:
            continue
        request = paged_request(stored, 16, 64, 32, tokens=4)  # not a public call: pages with T > 1, for its time only
        print(f"16/64 B=32 T=4: {timer(request):.1f} us")
        del request
    kernels.tile = tile
    kernels._LAUNCHES.clear()
    if not options.large:
        host_times()
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
