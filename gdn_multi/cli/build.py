"""``python -m gdn_multi build``: compile csrc/ ahead of time, and say what the assembler made of it."""

from __future__ import annotations

import argparse
import sys

from .table import format_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch", action="append", metavar="ARCH",
        help="architecture, as sm_90a or 90a; may be given several times; 'all' is every one that this nvcc knows. "
        "Default: those of the GPUs here, or all where there is none.",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list compiler, architectures and cached builds; build nothing")
    parser.add_argument("--cache", metavar="FOLDER", help="where to keep the builds (default: GDN_MULTI_CACHE_DIR/cuda)")
    parser.add_argument("--report", action="store_true", help="print registers, shared memory and spills of each kernel")


def run(args: argparse.Namespace) -> int:
    from gdn_multi.backends.cuda import build

    try:
        if args.list:
            return _list(build, args)
        toolchain = build.find_toolchain()
        failed = False
        for arch in _wanted(build, toolchain, args.arch):
            entry = build.build(arch, args.cache, toolchain=toolchain, say=_say)
            kernels = build.ptxas_report(entry.report)
            print(f"{arch}: {entry.library} ({entry.library.stat().st_size / 1e6:.1f} MB, {len(kernels)} kernels)")
            if args.report:
                print(_table(kernels))
            spills = build.spilling(kernels)
            if spills:
                failed = True
                print(f"{arch}: kernels that spill registers:\n{_table(spills)}", file=sys.stderr)
        return int(failed)
    except build.BuildError as error:
        print(f"python -m gdn_multi build: {error}", file=sys.stderr)
        return 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _wanted(build, toolchain, given: list[str]) -> list[str]:
    known = [arch for arch in build.ARCHITECTURES.values() if toolchain.supports(arch)]
    if not given:
        import torch

        here = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        return [arch for capability, arch in build.ARCHITECTURES.items() if capability in here] or known
    wanted = []
    for name in given:
        wanted += known if name == "all" else [name if name.startswith("sm_") else f"sm_{name}"]
    return list(dict.fromkeys(wanted))


def _table(kernels) -> str:
    rows = [(k.name, k.registers, k.shared, k.stack, k.spill_stores, k.spill_loads) for k in kernels]
    headers = ("kernel", "registers", "static smem", "stack", "spill stores", "spill loads")
    return format_table(headers, rows, right=(1, 2, 3, 4, 5))


def _list(build, args: argparse.Namespace) -> int:
    try:
        toolchain = build.find_toolchain()
        print(f"nvcc {toolchain.version_text}, from {toolchain.origin}: {toolchain.nvcc} (toolkit {toolchain.toolkit})")
    except build.BuildError as error:
        toolchain = None
        print(error)
    root = build.cache_root(args.cache)
    print(f"cache: {root}")
    rows = []
    for arch in build.ARCHITECTURES.values():
        if toolchain is None:
            compiler = "no compiler"
        else:
            compiler = "yes" if toolchain.supports(arch) else "needs a newer nvcc"
        entry = build.built(arch, args.cache, toolchain)
        fault = entry.fault() if entry else None
        rows.append((arch, compiler, "no" if entry is None else (f"damaged: {fault}" if fault else "yes")))
    print(format_table(("architecture", "can be built", "built"), rows))
    return 0
