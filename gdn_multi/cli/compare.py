"""``python -m gdn_multi compare``: calls on every usable backend, against the float64 reference."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import asdict

EPILOG = """\
examples
  python -m gdn_multi compare                                  the standard calls on every usable backend
  python -m gdn_multi compare --calls plain,paged --plot compare.png
  python -m gdn_multi compare --from out.json --plot compare.png      of a run elsewhere with --json out.json
  GDN_MULTI_SAVE=calls python serve.py                         saves failing calls (GDN_MULTI_SAVE_WHICH=all: every one)
  python -m gdn_multi compare calls/*.safetensors              repeats them; send such a file to report a wrong answer

The column "bits" is a digest of all that a call wrote: the same digest means the same bits, between backends, runs and
machines. Exit code 1 when a backend is wrong, changes a state row that it must not, or fails.
"""

FAULTY = "an entry of its page table or indices is out of range; GDN_MULTI_CHECK=1 names it where the call is made"
INTERPRETER = "note: on a CPU triton is its interpreter, which refuses to prefill with bfloat16: take --dtype float16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..bench.standard import CALLS

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE", help="saved calls; without any, the standard calls")
    add("--calls", default=",".join(CALLS), help=f"standard calls, of {', '.join(CALLS)} (default: all)")
    add("--backends", default=None, help="names, by commas (default: every registered backend)")
    add("--device", default=None, help="default: the current GPU, else the CPU")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the standard calls' inputs")
    add("--seed", type=int, default=0)
    add("--no-time", action="store_true", help="compare answers only")
    add("--budget", type=float, default=0.1, metavar="S", help="seconds of timing a call and backend (default 0.1)")
    add("--pages", action="store_true", help="list the error of every state and page, not only the worst")
    add("--from", dest="source", metavar="FILE", help="run nothing: tables and plot of a file written by --json")
    add("--json", metavar="FILE", help="write everything, every page included, after every call")
    add("--plot", metavar="FILE", help="write a PNG (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    if args.source:
        return _replay(args)
    import torch

    from ..bench import report
    from ..bench.comparison import compare
    from ..bench.standard import CALLS, Maker
    from ..bench.timing import Timer
    from ..registry import registered_backends
    from ..saved import SavedCall, load_call

    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch does not know the device, or has no GPU
        print(f"compare: --device {args.device}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    backends = _names(args.backends) if args.backends else list(registered_backends())
    try:
        unknown = [name for name in backends if name not in registered_backends()]
        if unknown:
            raise ValueError(f"no backend named {', '.join(unknown)}; registered: {', '.join(registered_backends())}")
        if args.plot:
            from ..bench.plot import pyplot

            pyplot()
        if args.files:
            calls = [(path, load_call(path)) for path in args.files]
        else:
            for name in _names(args.calls):
                if name not in CALLS:
                    raise ValueError(f"no standard call named {name!r}; there are {', '.join(CALLS)}")
            calls = []
            for name in _names(args.calls):
                maker = Maker(device, device.type == "cuda", args.seed, getattr(torch, args.dtype))
                calls.append((name, SavedCall.of(*CALLS[name](maker))))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2

    facts = report.machine(device)
    timer = None if args.no_time else Timer(device, args.budget)
    results, faulty = [], False
    print(f"{facts['device']}\n")
    backends = _usable(backends, device)
    if not backends:
        print("compare: none of the backends asked for is usable here: nothing was compared", file=sys.stderr)
        return 2
    for name, call in calls:
        say = lambda text, name=name: print(f"{name}: {text}", file=sys.stderr, flush=True)  # noqa: E731
        try:
            result = compare(name, call, backends, device, timer, say)
        except ValueError as error:  # a part of the call that could not be saved
            print(f"compare: {name}: {error}", file=sys.stderr)
            return 2
        except IndexError:  # a saved call with a faulty table or index; the next file may be sound
            print(f"compare: {name}: not compared, {FAULTY}", file=sys.stderr)
            faulty = True
            continue
        except RuntimeError as error:
            print(f"compare: {name}: stopped, {str(error).splitlines()[0]}", file=sys.stderr)
            return 1
        results.append(result)
        _print(result, args.pages)
        if args.json:  # whole at any moment, also when this process is killed
            with open(f"{args.json}.part", "w", encoding="utf-8") as file:
                json.dump({"machine": facts, "calls": [asdict(result) for result in results]}, file, indent=1)
            os.replace(f"{args.json}.part", args.json)
    if args.plot:
        _plot(args.plot, results, facts)
    return 1 if faulty or any(result.is_wrong for result in results) else 0


def _replay(args: argparse.Namespace) -> int:
    """Tables and plot of a run that was written to a file."""
    from ..bench.comparison import from_json

    try:
        with open(args.source, encoding="utf-8") as file:
            document = json.load(file)
        results, facts = from_json(document["calls"]), document["machine"]
        print(f"{facts['device']}\n")
        if args.plot:
            from ..bench.plot import pyplot

            pyplot()
    except OSError as error:
        print(f"compare: {args.source}: {error.strerror}", file=sys.stderr)
        return 2
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"compare: {args.source} is no file of this command: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    for result in results:
        _print(result, args.pages)
    if args.plot:
        _plot(args.plot, results, facts)
    return 1 if any(result.is_wrong for result in results) else 0


def _usable(backends: list[str], device) -> list[str]:
    """Those that are usable here; says once what the others need."""
    from ..registry import registry

    usable = []
    for name in backends:
        try:
            reasons = registry.get(name).reasons_unusable(device)
        except RuntimeError as error:
            reasons = (str(error),)
        if not reasons:
            usable.append(name)
        else:
            print(f"{name} is not usable here: " + "\n  ".join(reasons))
    interpreted = device.type == "cpu" and "triton" in usable
    if interpreted:
        print(INTERPRETER)
    if len(usable) < len(backends) or interpreted:
        print()
    return usable


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _print(result, pages: bool) -> None:
    from .table import format_table

    print(f"{result.name}: {result.function}" + (f", {result.shape}" if result.shape else ""))
    if result.info.get("device", "cpu") != "cpu" or result.info.get("environment"):
        said = [f"made on {result.info.get('device')} with torch {result.info.get('torch')}"]
        said += [f"{name}={value}" for name, value in result.info.get("environment", {}).items()]
        print(f"  {', '.join(said)}")
    if result.refused:
        print(f"  refused: {result.refused}\n")
        return
    rows = []
    for name, o in result.outcomes.items():
        if o.output_error is None:
            continue
        label, worst = max(o.states, key=lambda pair: pair[1], default=("", None))
        rows.append(
            [
                name, f"{o.output_error:.2e}", "-" if worst is None else f"{worst:.2e}", label or "-",
                "-" if o.ms is None else f"{o.ms:.4f}", "-" if o.host_us is None else f"{o.host_us:.0f}",
                "-" if o.launches is None else str(o.launches),
                "-" if o.peak_bytes is None else f"{o.peak_bytes / 2**20:.1f}", o.bits,
                "WRONG" if o.wrong else "ok",
            ]
        )  # fmt: skip
    if rows:
        head = ["backend", "output", "worst state", "which", "ms", "host us", "launches", "peak MiB", "bits", ""]
        print(_indent(format_table(head, rows, right=(1, 2, 4, 5, 6, 7))))
    for name, o in result.outcomes.items():
        if o.detail:
            print(f"  {name} ran: {o.detail}")
        for reason in o.reasons:
            print(f"  {name}: {reason}")
        for problem in o.wrong[:8]:
            print(f"  {name} WRONG: {problem}")
        if len(o.wrong) > 8:
            print(f"  {name} WRONG: and {len(o.wrong) - 8} more")
    if pages:
        ran = {name: dict(o.states) for name, o in result.outcomes.items() if o.states}
        labels = list(dict.fromkeys(label for states in ran.values() for label in states))
        if labels:
            table = [
                [label] + [f"{states.get(label, float('nan')):.2e}" for states in ran.values()] for label in labels
            ]
            print("\n" + _indent(format_table(["state", *ran], table, right=tuple(range(1, len(ran) + 1)))))
    if result.pairs:
        head = ["bits that differ", "output", "largest", "states", "largest"]
        table = [
            [
                f"{p.first} / {p.second}", f"{100 * p.output_differs:.2f}%", f"{p.output_largest:.1e}",
                f"{100 * p.states_differ:.2f}%", f"{p.states_largest:.1e}",
            ]
            for p in result.pairs
        ]  # fmt: skip
        print("\n" + _indent(format_table(head, table, right=(1, 2, 3, 4))))
    print()


def _indent(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())


def _plot(path: str, results, facts) -> None:
    """Errors and times of every backend, call by call."""
    from ..bench.plot import MARKERS, OURS, pyplot

    plt = pyplot()
    shown = [r for r in results if any(o.output_error is not None for o in r.outcomes.values())]
    if not shown:
        print("compare: nothing to plot", file=sys.stderr)
        return
    names = list(dict.fromkeys(n for r in shown for n, o in r.outcomes.items() if o.output_error is not None))
    timed = any(o.ms is not None for r in shown for o in r.outcomes.values())
    panels = [
        ("error of output", lambda o: o.output_error),
        ("worst error of a state", lambda o: max((e for _, e in o.states), default=None)),
    ]
    if timed:
        panels.append(("milliseconds", lambda o: o.ms))
    figure, axes = plt.subplots(len(panels), 1, figsize=(max(7, 1.6 * len(shown) + 2), 3.2 * len(panels)))
    width = min(0.15, 0.8 / len(names))
    for axis, (title, value) in zip(axes, panels):
        seen: list[float] = []
        for number, name in enumerate(names):
            places, heights = [], []
            for i, result in enumerate(shown):
                outcome = result.outcomes.get(name)
                height = value(outcome) if outcome is not None and outcome.output_error is not None else None
                if height:
                    places.append(i + (number - (len(names) - 1) / 2) * width)
                    heights.append(height)
            seen += heights
            axis.plot(places, heights, MARKERS[number % len(MARKERS)], label=name, color=OURS[number % len(OURS)])
        axis.set_yscale("log")
        if seen:  # whole decades, so that heights can be compared
            axis.set_ylim(10 ** math.floor(math.log10(min(seen))), 10 ** math.ceil(math.log10(1.01 * max(seen))))
        axis.set_xlim(-0.5, len(shown) - 0.5)
        axis.set_ylabel(title)
        axis.set_xticks(range(len(shown)), [r.name.rsplit("/", 1)[-1][:40] for r in shown], rotation=20, ha="right")
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend(fontsize=8, ncols=min(5, len(names)))
    axes[0].set_title(f"against the float64 reference, {facts['device']}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
