"""A model's decode step: many layers of paged decode, each with a pool of its own, sharing the rows of one page table.

    python benchmarks/model_step.py [--layers 48] [--batch 32] [--heads 16/64] [--state-dtype float32]
                                    [--backends cuda,triton] [--peers flashinfer]

A step derives the rows from the page table once and then makes one call a layer. Columns: eager, host time until the
last call of a step returns, and wall clock until its results are there; captured in a CUDA graph, GPU time of a replay
by events, what that is a layer, and TB/s of states read and written. Medians. Every contender's first step starts from
the same states and is checked against float64. Fails where an answer is wrong or a step of the cuda backend is slower
than FlashInfer's, eager or captured. --device cpu tries the script with the torch backend.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from types import ModuleType

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import torch  # noqa: E402

import gdn_multi  # noqa: E402
import gdn_multi.gdn_paged  # noqa: E402
from gdn_multi.bench import inputs, peers, truth  # noqa: E402
from gdn_multi.bench.rows import DecodeRow  # noqa: E402
from gdn_multi.bench.timing import Timer  # noqa: E402

#: Largest relative errors of outputs (bfloat16) and of states by their dtype.
OUTPUT, STATE = 4e-3, {"float32": 1e-4, "bfloat16": 4e-3, "float16": 6e-4}


def step_of(module: ModuleType, layers: list[inputs.DecodeInputs], **keywords):
    """Two functions of ``module``, called as FlashInfer's are."""
    pages = layers[0].pages
    table = dict(page_indices=pages.page_indices, page_indptr=pages.page_indptr, last_page_len=pages.last_page_len)
    rows_of, decode = module.gdn_paged_decode_slots, module.gated_delta_rule_decode_paged
    keywords.update(table, use_qk_l2norm=True)
    calls = [(x.q, x.k, x.v, x.A_log, x.a, x.dt_bias, x.b, x.scale, x.output, x.pages.pool) for x in layers]

    def step():
        slots = rows_of(**table)
        for *arguments, output, pool in calls:
            decode(*arguments, output=output, state_pool=pool, slots=slots, **keywords)

    return step


def reset(layers, states) -> None:
    for x in layers:
        x.output.fill_(float("nan"))
        x.pages.pool.fill_(float("nan"))
        x.pages.pool[x.read_rows.long()] = states


def errors(layers, right) -> tuple[float, float]:
    """Largest over the first and the last layer."""
    found = [
        (truth.relative_error(x.output, right[0]), truth.relative_error(x.pages.pool[x.write_rows.long()], right[1]))
        for x in (layers[0], layers[-1])
    ]
    return max(output for output, _ in found), max(state for _, state in found)


def eager_ms(step, timer: Timer, repetitions: int = 20) -> tuple[float, float]:
    """Host time and wall clock of a step, medians; the queue is empty at its start."""
    host, wall = [], []
    for _ in range(repetitions):
        timer.synchronize()
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
        timer.synchronize()
        wall.append(time.perf_counter() - start)
    return statistics.median(host) * 1e3, statistics.median(wall) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--heads", default="16/64")
    parser.add_argument("--state-dtype", default="float32", choices=sorted(STATE))
    parser.add_argument("--backends", default="cuda,triton")
    parser.add_argument("--peers", default="flashinfer", help="flashinfer or none")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds of replays each (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.device == "cpu":
        args.backends, args.peers = "torch", "none"
    hq, hv = (int(n) for n in args.heads.split("/"))
    row = DecodeRow(hq, hv, args.batch, args.state_dtype)
    timer = Timer(device, args.budget)
    # The same numbers in every layer, in memory of its own.
    layers = []
    for _ in range(args.layers):
        layers.append(inputs.draw_decode(row, device, 0, 1024))
        if len(layers) > 1:
            layers[-1].states = layers[0].states
    right = truth.decode_truth(layers[0])
    moved = args.layers * row.state_bytes
    names = args.backends.split(",") + [name for name in args.peers.split(",") if name != "none"]
    card = torch.cuda.get_device_name(0) if args.device == "cuda" else "CPU"
    found = ", ".join(f"{k} {v}" for k, v in peers.versions().items())
    print(f"{card}, {found}")
    print(f"{args.layers} layers, {args.batch} sequences, {args.heads} heads, {args.state_dtype} states; ms a step")
    print(f"{'':10} {'host':>8} {'wall':>8} {'captured':>9} {'us a layer':>10} {'TB/s':>6} {'output':>8} {'state':>8}")
    wrong, times = [], {}
    with torch.no_grad():
        for name in names:
            is_peer = name in peers.PEERS
            try:
                if is_peer:
                    step = step_of(peers._module(name, "flashinfer.gdn_paged"), layers)
                else:
                    os.environ["GDN_MULTI_BACKEND"] = name  # for the rows too
                    step = step_of(gdn_multi.gdn_paged, layers, backend=name)
                reset(layers, layers[0].states)
                step()
                output, state = errors(layers, right)
                for _ in range(2):
                    step()
                host, wall = eager_ms(step, timer)
                timing = timer.time(step)
            except Exception as error:  # a peer's failure is a line of the table, whatever it raises
                print(f"{name:10} - {type(error).__name__}: {(str(error).splitlines() or [''])[0][:140]}", flush=True)
                if not is_peer:
                    wrong.append(f"{name} did not run")
                continue
            finally:
                os.environ.pop("GDN_MULTI_BACKEND", None)
            captured = timing.ms if timing.graph else float("nan")
            print(f"{name:10} {host:8.3f} {wall:8.3f} {captured:9.3f} {captured * 1e3 / args.layers:10.1f} "
                  f"{moved / captured * 1e-9:6.2f} {output:8.1e} {state:8.1e}", flush=True)  # fmt: skip
            if timing.note and device.type == "cuda":
                print(f"{'':10} {timing.note}")
                if not is_peer:
                    wrong.append(f"{name} was not captured")
            if not (output <= OUTPUT and state <= STATE[args.state_dtype]) and not is_peer:
                wrong.append(f"{name}: errors {output:.1e}, {state:.1e}")
            times[name] = wall, captured
    for name in times:
        if name not in peers.PEERS and "flashinfer" in times:
            ratios = [theirs / ours for ours, theirs in zip(times[name], times["flashinfer"])]
            print(f"FlashInfer / {name}: eager {ratios[0]:.2f}, captured {ratios[1]:.2f}")
            if name == "cuda":
                wrong += [f"cuda is slower, {how}" for how, r in zip(("eager", "captured"), ratios) if r < 1]
    print("FAILED: " + "; ".join(wrong) if wrong else "fine")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
