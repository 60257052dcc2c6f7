"""Prefill between the rows of the standard table: all lengths, ragged batches, chunked-prefill steps; the heuristics.

    python benchmarks/sweeps.py [--peers flashinfer] [--json FILE]       against FlashInfer, and cliffs
    python benchmarks/sweeps.py --heuristics [--json FILE]               every path of every point beside the choice
    python benchmarks/sweeps.py --heuristics --from FILE                 today's heuristics on the times in FILE; no GPU

Series, each at 2/8 and 16/64 heads: one sequence of 1 to 200000 tokens; one long prompt and 31 of 1 to 200 tokens; a
step of 8192 tokens of 1, 3, 17 or 64 requests with prefixes that end anywhere, unpaged and paged.

Without --heuristics: median ms of the cuda backend and of FlashInfer's native and context-parallel kernels (paged: of
its paged call), measured as ``python -m gdn_multi bench`` does, answers checked against float64 where the sequences,
padded to the longest, hold at most --check-tokens. Fails where a point is slower than FlashInfer's best, or slower than
--cliff times the interpolation of its neighbours.

With it: times of each path, forced, and by how much the choice is slower than the best of them; the standard table's
rows are points too. Fails where that is more than --aim per cent. --device cpu tries the script with the torch backend.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from dataclasses import dataclass, replace

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import torch  # noqa: E402
from gdn_multi.backends.cuda import prefill_heuristics as heuristics  # noqa: E402

from gdn_multi.bench import inputs, ours, peers, report  # noqa: E402
from gdn_multi.bench.rows import TABLES, PrefillRow  # noqa: E402
from gdn_multi.bench.runner import Runner  # noqa: E402
from gdn_multi.bench.timing import Timer  # noqa: E402
from gdn_multi.registry import registry  # noqa: E402

PAGE = 1024
REQUESTS = (1, 3, 17, 64)
#: Our variant -> the peers that do the same.
RIVALS = {"plain": ("flashinfer", "flashinfer-cp"), "paged": ("flashinfer-paged",)}


@dataclass(frozen=True)
class Point:
    series: str
    x: int  #: along the series
    row: PrefillRow
    variant: str = "plain"

    @property
    def longest(self) -> int:
        """As the heuristics see it: a paged call does not say how long its longest sequence is."""
        return self.row.tokens if self.variant == "paged" else max(self.row.lengths)


# --- the points ----------------------------------------------------------------------------------


def lengths_from_one(longest: int, count: int = 22) -> list[int]:
    """Geometric and odd, and ``longest`` itself."""
    found = {int(longest ** (i / (count - 1))) | 1 for i in range(count - 1)}
    return sorted({n for n in found if n < longest} | {longest})


def parts(total: int, count: int, rng: random.Random) -> tuple[int, ...]:
    """``total`` in ``count`` parts of any size."""
    cuts = sorted(rng.sample(range(1, total), count - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total]))


def points_of(heads: str, longest: int, step: int) -> list[Point]:
    q, v = (int(n) for n in heads.split("/"))
    rng = random.Random(0)
    made = [Point(f"{heads}, one sequence", n, PrefillRow(q, v, (n,))) for n in lengths_from_one(longest)]
    short = tuple(rng.randrange(1, 201) for _ in range(31))
    for n in (501, 2047, 8191, 32767, 131071):
        if n <= longest:
            made.append(Point(f"{heads}, one long and 31 short", n, PrefillRow(q, v, (*short[:11], n, *short[11:]))))
    steps = {}
    for count in REQUESTS:
        prefixes = tuple(rng.randrange(1, 3 * PAGE) for _ in range(count))
        steps[count] = PrefillRow(q, v, parts(step, count, rng), prefixes=prefixes)
    for variant in RIVALS:
        series = f"{heads}, requests of a step of {step} tokens, {variant}"
        made += [Point(series, n, row, variant) for n, row in steps.items()]
    return made


# --- times and cliffs ----------------------------------------------------------------------------


def sweep(args, points: list[Point], device: torch.device, keep) -> tuple[list[dict], list[str]]:
    backend = "cuda" if device.type == "cuda" else "torch"
    mine = {variant: ours.contenders([backend], [variant])[0] for variant in RIVALS}
    rivals = {
        # FlashInfer's paged call is the best of its own where ours is paged too.
        variant: [replace(peer, counts_as_best=True) for peer in peers.contenders(names)]
        for variant, names in RIVALS.items()
        if args.peers != "none" and device.type == "cuda"
    }
    timer, found = Timer(device, 0.0, fewest=7), []
    for point in points:
        contenders = [mine[point.variant], *rivals.get(point.variant, ())]
        check = len(point.row.lengths) * max(point.row.lengths) <= args.check_tokens
        runner = Runner(device, timer, contenders, PAGE, check=check, host=False, say=lambda text: None)
        if not found or found[-1]["series"] != point.series:
            names = " ".join(f"{c.heading:>18}" for c in contenders)
            print(f"\n{point.series}\n{'':>8} {names}   FlashInfer / ours", flush=True)
        (result,) = runner.run("prefill", [point.row], lambda row: None)
        release(device)
        if runner.stopped:
            raise SystemExit(runner.stopped)
        cells = []
        for contender in contenders:
            each = result.results[contender.name]
            mark = " WRONG" if report.is_wrong(result, each) else " eager" if each.ms and not each.graph else ""
            cells.append(f"{each.ms:.4f}{mark}" if each.ms is not None else "-")
        me, best = result.results[contenders[0].name], report.best_peer(result, contenders)
        ratio = result.results[best].ms / me.ms if best and me.ms else None
        cells = [f"{cell:>18}" for cell in cells] + ([f"  {ratio:.2f}"] if ratio else [])
        print(f"{point.x:8} " + " ".join(cells), flush=True)
        for contender in contenders:
            note = result.results[contender.name].note
            if note and note != "wall clock" and not (found and note in found[-1]["notes"].values()):
                print(f"{'':8} {contender.heading}: {note}")
        found.append(dict(
            series=point.series, x=point.x, variant=point.variant, lengths=point.row.lengths,
            prefixes=point.row.prefixes, ms={name: each.ms for name, each in result.results.items()},
            notes={name: each.note for name, each in result.results.items()}, ours=contenders[0].name, ratio=ratio,
            checked=check, wrong=report.is_wrong(result, me) or me.ms is None,
        ))  # fmt: skip
        keep(found)
    return found, complaints(found, args.cliff)


def release(device: torch.device) -> None:
    """Give memory back: each captured graph has had some of its own."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def complaints(found: list[dict], limit: float) -> list[str]:
    said = [f"{f['series']}: {f['x']}: no right answer of ours" for f in found if f["wrong"]]
    said += [f"{f['series']}: {f['x']}: slower than FlashInfer, {1 / f['ratio']:.2f} times as long" for f in found
             if f["ratio"] and f["ratio"] < 1]  # fmt: skip
    for series in dict.fromkeys(f["series"] for f in found):
        mine = [f for f in found if f["series"] == series and f["ms"][f["ours"]]]
        xs, times = [f["x"] for f in mine], [f["ms"][f["ours"]] for f in mine]
        for x, factor in zip(xs, report.above_neighbours(xs, times)):
            if factor is not None and factor > limit:
                said.append(f"{series}: {x}: a cliff, {factor:.2f} times the interpolation of its neighbours")
    return said


# --- the heuristics ------------------------------------------------------------------------------


def options(longest: int) -> list[tuple[int, int]]:
    """V rows a CTA and chunks a segment; segments that are shorter than the longest sequence."""
    split = [(rows, n) for n in heuristics.SEGMENTS if n * heuristics.CHUNK < longest for rows in (128, 64)]
    return [(128, 0), (64, 0), *split]


def measure_paths(points: list[Point], device: torch.device, keep) -> list[dict]:
    name = "cuda" if device.type == "cuda" else "torch"
    backend, timer, found = registry.get(name), Timer(device, 0.0, fewest=7), []
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    for point in points:
        drawn = inputs.draw_prefill(point.row, device, 0, PAGE)
        call = ours.contenders([name], [point.variant])[0].prefill(drawn)
        times = {}
        facts = dict(
            series=point.series, x=point.x, label=point.row.sequences if "table" in point.series else str(point.x),
            tokens=point.row.tokens, seqs=len(point.row.lengths), heads=point.row.v_heads, longest=point.longest,
            lengths=point.row.lengths, multiprocessors=sms, us=times,
        )  # fmt: skip
        try:
            for rows, segment in dict.fromkeys([*options(point.longest), choice(facts)]):
                backend.forced_path = heuristics.Path(rows, segment, False)
                timing = timer.time(call.run)
                if device.type == "cuda" and not timing.graph:
                    raise SystemExit(f"{point.series}: {point.x}: {rows},{segment} {timing.note}")
                times[f"{rows},{segment}"] = timing.ms * 1e3
        finally:
            backend.forced_path = None
        found.append(facts)
        show(found[-1], first=len(found) == 1 or found[-2]["series"] != point.series)
        keep(found)
        del drawn, call, timing
        release(device)
    return found


def choice(f: dict) -> tuple[int, int]:
    return heuristics.fastest(f["tokens"], f["seqs"], f["heads"], f["longest"], f["multiprocessors"])


def judged(f: dict) -> tuple[str, float | None, str, float]:
    """The choice, its time (None where it was not measured), the best path, its time."""
    rows, segment = choice(f)
    chosen, best = f"{rows},{segment}", min(f["us"], key=f["us"].get)
    return chosen, f["us"].get(chosen), best, f["us"][best]


def show(f: dict, first: bool) -> None:
    if first:
        print(f"\n{f['series']}")
        print(f"{'':>10} {'choice':>8} {'us':>9} {'estimate':>9} {'best':>8} {'us':>9} {'worse':>7}  all paths, us")
    chosen, us, best, least = judged(f)
    guess = heuristics.estimate(f["tokens"], f["seqs"], f["heads"], f["longest"], f["multiprocessors"], *choice(f))
    shown = f"{us:9.1f} {guess:9.1f}" if us is not None else f"{'-':>9} {guess:9.1f}"
    worse = f"{(us / least - 1) * 100:6.1f}%" if us is not None else f"{'?':>7}"
    print(f"{f['label']:>10} {chosen:>8} {shown} {best:>8} {least:9.1f} {worse}  "
          + " ".join(f"{k}: {t:.0f}" for k, t in f["us"].items()), flush=True)  # fmt: skip


def judge(found: list[dict], aim: float) -> list[str]:
    said, factors = [], []
    for f in found:
        chosen, us, best, least = judged(f)
        if us is None:
            said.append(f"{f['series']}: {f['label']}: {chosen} was chosen and not measured")
            continue
        factors.append(us / least)
        if us > least * (1 + aim / 100):
            said.append(f"{f['series']}: {f['label']}: {chosen} takes {(us / least - 1) * 100:.1f}% more than {best}")
    worst = max(factors, default=1.0)
    mean = sum(factors) / max(1, len(factors))
    print(f"\n{len(found)} points: the choice takes {(mean - 1) * 100:.1f}% more than the best path on average, "
          f"{(worst - 1) * 100:.1f}% at most")  # fmt: skip
    return said


def table_points() -> list[Point]:
    return [Point(f"{row.heads}, standard table", i, row) for i, row in enumerate(TABLES["prefill"])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--heads", default="2/8,16/64")
    add("--longest", type=int, default=200_000)
    add("--step", type=int, default=8192, help="tokens of a chunked-prefill step (default: %(default)s)")
    add("--series", default="", help="only series whose name contains this")
    add("--peers", default="flashinfer", choices=("flashinfer", "none"))
    add("--cliff", type=float, default=1.15)
    add("--check-tokens", type=int, default=100_000, help="0: check no answer (default: %(default)s)")
    add("--heuristics", action="store_true")
    add("--aim", type=float, default=5.0, help="per cent (default: %(default)s)")
    add("--from", dest="source", metavar="FILE", help="with --heuristics: a file written by --json")
    add("--json", metavar="FILE")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    start = time.perf_counter()
    if args.source:
        with open(args.source, encoding="utf-8") as file:
            document = json.load(file)
        found = document["points"]
        print(document["machine"]["device"])
        for i, f in enumerate(found):
            show(f, first=i == 0 or found[i - 1]["series"] != f["series"])
        said = judge(found, args.aim)
    else:
        device = torch.device(args.device)
        facts = report.machine(device)
        print(f"{facts['device']}, {', '.join(' '.join(pair) for pair in facts['versions'].items())}", flush=True)
        points = [p for heads in args.heads.split(",") for p in points_of(heads, args.longest, args.step)]
        if args.heuristics and args.longest >= 32768:
            points += table_points()
        points = [p for p in points if args.series in p.series]

        def keep(found: list[dict]) -> None:
            if args.json:
                with open(args.json, "w", encoding="utf-8") as file:
                    json.dump(dict(machine=facts, points=found), file)

        with torch.no_grad():
            if args.heuristics:
                found = measure_paths(points, device, keep)
                said = judge(found, args.aim)
            else:
                found, said = sweep(args, points, device, keep)
    print(f"\n{time.perf_counter() - start:.0f} s")
    print("fine" if not said else f"{len(said)} complaints\n" + "\n".join(f"  {line}" for line in said))
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
