"""``python -m gdn_multi bench``: our backends beside every installed peer, in one run."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time

EPILOG = """\
examples
  python -m gdn_multi bench                              both tables of speed, usable backends, usual peers
  python -m gdn_multi bench --quick                      a few rows of each table
  python -m gdn_multi bench --rows "2/8:*" --ours cuda,triton:model --peers fla,flashinfer-cp
  python -m gdn_multi bench --rows 4/16:100+2000x3 --rows 8/16:B=48:bfloat16      rows of your own
  python -m gdn_multi bench --tables accuracy --peers all
  python -m gdn_multi bench --peers none --against earlier.json                   peers' times from an earlier run
  python -m gdn_multi bench --warm-up 16 --time-limit 500 --json out.json         all peers, unattended

Each call is captured in a CUDA graph and its replays are timed with the L2 flushed before each; a cell marked "e" could
not be captured and was timed eagerly, "†" marks a figure read from --against. Every answer is checked once a row
against a float64 computation, on the first and the last state head (accuracy and decode: on all).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..bench.ours import DEFAULT_VARIANTS, VARIANTS
    from ..bench.peers import DEFAULT, PEERS
    from ..bench.rows import TABLES

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--tables", default="prefill,decode", help=f"of {', '.join(TABLES)} (default: prefill,decode)")
    add(
        "--rows", action="append", default=[], metavar="ROW",
        help="a row or a pattern, may be repeated: 16/64:32768x1, '2/8:*', 4/16:100+2000x3, 16/64:B=32:bfloat16",
    )  # fmt: skip
    add(
        "--ours", default="usable",
        help="backends, each alone or as backend:variant; 'usable' (default: those with kernels of their own; torch "
        "only on a CPU), or 'none'",
    )  # fmt: skip
    add(
        "--variants", default=",".join(DEFAULT_VARIANTS),
        help=f"of {', '.join(VARIANTS)} (default: {','.join(DEFAULT_VARIANTS)})",
    )  # fmt: skip
    add("--peers", default="default", help=f"of {', '.join(PEERS)}; 'default' ({', '.join(DEFAULT)}), 'all' or 'none'")
    add(
        "--cudnn-rows", default="2/8:8192x1,16/32:8192x1,16/64:2048x4,2/8:8192x1:*", metavar="ROWS",
        help="rows that cuDNN's own call runs on; it tunes itself for many seconds on each shape ('*': all)",
    )  # fmt: skip
    add("--quick", action="store_true", help="a few rows of each table, and a smaller time budget")
    add("--budget", type=float, default=None, metavar="S", help="seconds of timing a cell (default 0.2, quick 0.1)")
    add("--time-limit", type=float, default=None, metavar="S", help="measure nothing more after so many seconds")
    add(
        "--warm-up", type=int, default=0, metavar="N",
        help="first make every first call, in N processes where compiled kernels are kept on disk, so that compiling "
        "takes all cores (default 0: each call compiles where it comes in the table)",
    )  # fmt: skip
    add("--warm-up-limit", type=float, default=240, metavar="S", help="give up on first calls after so long (240)")
    add("--first-calls", metavar="TASK", help=argparse.SUPPRESS)  # what a process of --warm-up runs
    add("--page-size", type=int, default=1024, help="tokens a page of the paged calls (default 1024)")
    add("--seed", type=int, default=0)
    add("--device", default=None, help="default: the current GPU, else the CPU")
    add("--no-check", action="store_true", help="leave out the comparison with the float64 computation")
    add("--no-host", action="store_true", help="leave out host times")
    add("--against", metavar="FILE", help="a file written by --json: its figures fill in what is not measured now")
    add("--from", dest="source", metavar="FILE", help="measure nothing: tables and plots of a file written by --json")
    add("--json", metavar="FILE", help="write everything measured, after every row")
    add("--plot", metavar="FILE", help="write a PNG (needs matplotlib)")
    add("--verbose", action="store_true", help="also print spread, host time and errors of every cell")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _ours(text: str, device) -> list[str]:
    if text == "none":
        return []
    from ..registry import registered_backends, registry

    if text != "usable":
        known = registered_backends()
        for name in _names(text):
            if name.partition(":")[0] not in known:
                raise ValueError(f"unknown backend {name!r} in --ours; there are {', '.join(known)}")
        return _names(text)
    left_out = ["flashinfer", "cake_gdn", "cudnn"]  # the same kernels as the peers' own calls
    if device.type == "cuda":
        left_out.append("torch")  # there to be right, not to be fast
    usable = []
    for name in registered_backends():
        try:
            if name not in left_out and not registry.get(name).reasons_unusable(device):
                usable.append(name)
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr)
    return usable


def run(args: argparse.Namespace) -> int:
    import torch

    from ..bench import first_calls, ours, peers, report, rows
    from ..bench.runner import Runner, as_json
    from ..bench.timing import Timer

    if args.source:
        return _replay(args)
    if args.first_calls:
        return _first_calls(args)
    began = time.monotonic()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    tables = _names(args.tables)
    try:
        for table in tables:
            if table not in rows.TABLES:
                raise ValueError(f"unknown table {table!r}; there are {', '.join(rows.TABLES)}")
        if args.page_size < 64 or args.page_size % 64:
            raise ValueError(f"--page-size must be a positive multiple of 64, got {args.page_size}")
        contenders = ours.contenders(_ours(args.ours, device), _names(args.variants))
        cudnn_rows = None if args.cudnn_rows == "*" else _names(args.cudnn_rows)
        theirs = peers.contenders(_names(args.peers), cudnn_rows)  # a misspelt name is refused without a GPU too
        if device.type == "cuda":
            contenders += theirs
        elif args.peers != "none":
            print("peers need a GPU: only our own calls are measured", file=sys.stderr)
        patterns = args.rows or (list(rows.QUICK) if args.quick else [])
        chosen = {table: rows.select(table, patterns) for table in tables}
        if not any(chosen.values()):
            raise ValueError(f"no row of {', '.join(tables)} matches {', '.join(patterns)}")
        earlier = _read(args.against) if args.against else []
        if args.plot:
            from ..bench.plot import pyplot

            pyplot()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2

    facts = report.machine(device)
    known = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    print(f"{facts['device']}, {known}", file=sys.stderr, flush=True)
    budget = args.budget if args.budget is not None else (0.1 if args.quick else 0.2)
    runner = Runner(
        device=device,
        timer=Timer(device, budget),
        contenders=contenders,
        page_size=args.page_size,
        seed=args.seed,
        check=not args.no_check,
        host=not args.no_host,
        deadline=None if args.time_limit is None else began + args.time_limit,
    )
    done: list = []
    settings = {key: value for key, value in vars(args).items() if isinstance(value, (str, int, float, bool, list))}

    def keep(row) -> None:
        done.append(row)
        if args.json:  # whole at any moment, also when this process is killed
            document = {"machine": facts, "settings": settings, "stopped": runner.stopped, "rows": as_json(done)}
            with open(f"{args.json}.part", "w", encoding="utf-8") as file:
                json.dump(document, file, indent=1)
            os.replace(f"{args.json}.part", args.json)

    before = _interrupt_on_sigterm()
    try:
        if args.warm_up > 0:
            first_calls.run(
                contenders, chosen, device, processes=args.warm_up, limit=args.warm_up_limit,
                page_size=args.page_size, seed=args.seed, say=runner.say,
            )  # fmt: skip
        for table in tables:
            if not runner.stopped:
                runner.run(table, chosen[table], keep)
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    shown = contenders + _add_recorded(done, earlier, {c.name for c in contenders})
    _print(done, shown, facts, args.verbose)
    if runner.stopped:
        print(f"\nStopped early: {runner.stopped}")
    if args.plot:
        from ..bench.plot import plot

        try:
            plot(args.plot, done, shown)
            print(f"\nplot: {args.plot}", file=sys.stderr)
        except ValueError as error:
            print(f"bench: {error}", file=sys.stderr)
    if runner.stopped.startswith("interrupted"):
        return 130
    return 1 if _any_wrong(done, contenders) else 0


def _interrupt_on_sigterm():
    """SIGTERM, which `timeout` sends, ends a run as Ctrl-C does: with what it has. Returns what to put back."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def interrupt(number, frame):
        raise KeyboardInterrupt

    return signal.signal(signal.SIGTERM, interrupt)


def _first_calls(args: argparse.Namespace) -> int:
    import torch

    from ..bench import first_calls

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    task = first_calls.decode(args.first_calls)
    return 1 if first_calls.make(task, device, args.page_size, args.seed, print) else 0


def _replay(args: argparse.Namespace) -> int:
    """Tables and plots of a run that was written to a file."""
    from ..bench.calls import Contender
    from ..bench.peers import PEERS
    from ..bench.runner import from_json

    try:
        with open(args.source, encoding="utf-8") as file:
            document = json.load(file)
        done, facts = from_json(document["rows"]), document["machine"]
        if args.plot:
            from ..bench.plot import pyplot

            pyplot()
    except OSError as error:
        print(f"bench: {args.source}: {error.strerror}", file=sys.stderr)
        return 2
    except (ValueError, KeyError, TypeError) as error:
        print(f"bench: {args.source} is no file of this command: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    names = list(dict.fromkeys(name for row in done for name in row.results))
    shown = [PEERS.get(name) or Contender(name, True) for name in names]
    _print(done, shown, facts, args.verbose)
    if args.plot:
        from ..bench.plot import plot

        plot(args.plot, done, shown)
    return 0


def _read(path: str) -> list:
    from ..bench.runner import from_json

    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    rows = from_json(document["rows"])
    for row in rows:
        for result in row.results.values():
            result.recorded = result.recorded or path
    return rows


def _add_recorded(done, earlier, measured) -> list:
    """Fill in figures of an earlier run; returns contenders for those that this run does not have."""
    from ..bench.calls import Contender
    from ..bench.peers import PEERS

    known = {(row.table, row.row): row for row in earlier}
    added = {}
    for row in done:
        old = known.get((row.table, row.row))
        for name, result in (old.results if old else {}).items():
            now = row.results.get(name)
            if now is None or (now.ms is None and now.output_error is None):
                row.results[name] = result
                if name not in measured and name not in added:
                    added[name] = PEERS.get(name) or Contender(f"{name}", True, title=f"{name} (earlier)")
    return [added[name] for name in sorted(added, key=lambda n: (list(PEERS).index(n) if n in PEERS else -1, n))]


def _print(done, shown, facts, verbose) -> None:
    from ..bench import report

    for table in ("prefill", "decode", "accuracy"):
        rows = [row for row in done if row.table == table]
        if not rows:
            continue
        print(f"\n## {table.capitalize()}", end="")
        if table == "accuracy":
            print(": relative error of output, final state\n")
            print(report.accuracy_table(rows, shown))
        else:
            unit = "ms" if table == "prefill" else "us (TB/s of state read once and written once)"
            print(f", median {unit}, {facts['device']}\n")
            print(report.speed_table(rows, shown))
            for line in report.summary(rows, shown):
                print(f"- {line}")
            if verbose:
                print("\n" + report.spread_table(rows, shown))
        for line in report.notes(rows, shown):
            print(f"- {line}")


def _any_wrong(done, contenders) -> bool:
    from ..bench import report

    mine = [c.name for c in contenders if c.is_ours]
    return any(name in row.results and report.is_wrong(row, row.results[name]) for row in done for name in mine)
