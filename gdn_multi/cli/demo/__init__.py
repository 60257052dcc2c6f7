"""``python -m gdn_multi demo``: the main job on real text.

Text files are requests that share a long system prompt. A small GDN layer with fixed random weights serves them from
one paged state pool: prefill in uneven chunks, cached prefix pages shared, decode that opens new pages, batches padded
with scratch pages. Then everything is held against the float64 reference.

    layer.py    bytes to q, k, v and gates
    engine.py   pages, batches and the calls: the part to read for how the library is used
    check.py    the reference's run, tolerances, unchanged pages
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from gdn_multi import layout

from ..table import format_table
from .check import Checker, changed_pages, tolerance, touched_spare_pages
from .engine import Engine, Request
from .layer import Layer

#: Requests served together, and rows of every batch: one row at least is always padded.
WAVE, ROWS = 3, 4

DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="text files, one request each; default: docs/*.md")
    parser.add_argument("--system", metavar="FILE", help="the shared system prompt; default: this project's README.md")
    parser.add_argument("--backend", default="auto", help="default: %(default)s, as variables or the policy say")
    parser.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the tokens; default: %(default)s")
    parser.add_argument("--state-dtype", choices=DTYPES, default="float32", help="of the pool; default: %(default)s")
    parser.add_argument("--page-size", type=int, default=256, help="tokens, a multiple of 64; default: %(default)s")
    parser.add_argument("--heads", default="2/4", metavar="Q/V", help="of q and k, and of v; default: %(default)s")
    parser.add_argument("--head-size", type=int, default=128, help="of q, k and v; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=700, help="at most so many of a file; default: %(default)s")
    parser.add_argument("--decode", type=int, default=24, help="of them, decoded one by one; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of weights, chunks and page ids; default: %(default)s")


def run(args: argparse.Namespace) -> int:
    try:
        _check(args)
        requests = _requests(args)
        server = _server(args, requests)
    except _BadInput as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    with _one_thread():
        return _serve(args, server, requests)


class _BadInput(Exception):
    """What the user gave cannot be served; the message says why."""


def _check(args: argparse.Namespace) -> None:
    """Check the options, and replace names by what they name."""
    try:
        args.q_heads, args.v_heads = (int(part) for part in args.heads.split("/"))
    except ValueError:
        raise _BadInput(f"--heads must look like 2/4 (heads of q and k, heads of v), got {args.heads!r}") from None
    if args.q_heads < 1 or args.v_heads < 1 or args.v_heads % args.q_heads:
        raise _BadInput(f"--heads: the v heads must be a multiple of the q heads, got {args.heads!r}")
    for option, least in (("page_size", 1), ("head_size", 1), ("tokens", 1), ("decode", 1)):
        if getattr(args, option) < least:
            raise _BadInput(f"--{option.replace('_', '-')} must be at least {least}, got {getattr(args, option)}")
    if args.page_size % 64:
        raise _BadInput(f"--page-size must be a multiple of 64, got {args.page_size}")
    try:
        args.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise _BadInput(f"--device {args.device}: {str(error).splitlines()[0]}") from None
    args.dtype, args.state_dtype = getattr(torch, args.dtype), getattr(torch, args.state_dtype)


def _requests(args: argparse.Namespace) -> list[Request]:
    """The system prompt, one request a file, and the first file once more, with more of its text."""
    documents = [] if args.files and args.system else layout.documents()
    system = _read(args.system) if args.system else documents[0]
    files = [_read(path) for path in args.files] or documents[1:]
    prefix = system.text[: 2 * args.tokens]
    texts = [(name, text[: args.tokens]) for name, text in files]
    texts.append((f"{files[0].name}, again", files[0].text[: args.tokens + args.tokens // 2]))
    requests = [Request(f"system: {system.name}", prefix, prompt=len(prefix))]
    for index, (name, text) in enumerate(texts):
        total, decoded = _cut(len(prefix), len(text), args, index)
        requests.append(Request(name, (prefix + text)[:total], prompt=total - decoded))
    return requests


def _read(path: str) -> layout.Document:
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise _BadInput(f"{path}: {error.strerror}") from None
    if not text:
        raise _BadInput(f"{path} is empty")
    return layout.Document(path, text)


def _cut(prefix: int, length: int, args: argparse.Namespace, index: int) -> tuple[int, int]:
    """(tokens, how many of them are decoded) of a request: cut so that decoding opens a page, each request at another
    step, where its text reaches far enough beyond a page's end."""
    total, decoded = prefix + length, min(args.decode, length)
    before = 5 * index % decoded  # tokens decoded before the one that opens a page
    end = (total - decoded + before) // args.page_size * args.page_size
    if end - before >= prefix:
        total = end - before + decoded
    return total, decoded


def _server(args: argparse.Namespace, requests: list[Request]) -> Engine:
    sizes = args.q_heads, args.v_heads, args.head_size
    layer = Layer(*sizes, dtype=args.dtype, device=args.device, seed=args.seed)
    engine = Engine(
        layer,
        num_pages=sum(-(-len(request.tokens) // args.page_size) for request in requests),
        page_size=args.page_size,
        rows=ROWS,
        state_dtype=args.state_dtype,
        device=args.device,
        backend=args.backend,
        seed=args.seed,
        say=lambda line: print(line, flush=True),
    )
    try:
        for explanation in engine.explain():
            if explanation.backend is None:
                raise _BadInput(explanation.error)
    except ValueError as error:  # an unknown backend, by keyword or in the environment
        raise _BadInput(str(error)) from None
    return engine


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """On a CPU, this layer and a token of the reference are too little work to share: threads would spend their time on
    waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _serve(args: argparse.Namespace, engine: Engine, requests: list[Request]) -> int:
    started = time.perf_counter()
    layer, pool = engine.layer, engine.pool
    name = {dtype: str(dtype).rpartition(".")[2] for dtype in (args.dtype, args.state_dtype)}
    print(
        f"layer: {layer.q_heads} q and k heads, {layer.v_heads} v heads, head size {layer.head_size}, "
        f"{name[args.dtype]}, on {args.device}\n"
        f"pool:  {pool.shape[0]} pages of {args.page_size} tokens, {name[args.state_dtype]}, "
        f"{pool.numel() * pool.element_size() / 2**20:.1f} MiB, NaN in every page at the start\n"
        f"calls: {ROWS} rows each; rows without a request are padded with scratch pages"
    )
    system, rest = requests[0], requests[1:]
    waves = [[system], *(rest[i : i + WAVE] for i in range(0, len(rest), WAVE))]
    for wave in waves:
        print(f"serving {' | '.join(request.name for request in wave)}", flush=True)
        engine.serve(wave)
    served = time.perf_counter() - started

    checker, errors = Checker(layer, engine), []
    for index, request in enumerate(requests, start=1):
        _progress(f"float64 reference, token by token: {index} of {len(requests)}, {request.name}")
        errors.append(checker.largest_error(request))
    _progress("")

    print("\n" + _table(requests, errors))
    failures = _failures(args, engine, requests, errors)
    shared = {page for request in rest for page in request.pages[: request.reused // args.page_size]}
    took = time.perf_counter() - started
    print(
        f"\npages: {len(engine.complete)} complete, {len(shared)} of them shared; "
        f"{len(changed_pages(engine))} changed after they were complete\n"
        f"error: at most {max(errors):.1e}, allowed {tolerance(args.dtype, args.state_dtype):.0e} "
        f"({name[args.dtype]} tokens, {name[args.state_dtype]} states)\n"
        f"time:  {served:.1f} s to serve, {took - served:.1f} s for the reference"
    )
    for failure in failures:
        print(f"FAILED: {failure}")
    if not failures:
        print("ok")
    return 1 if failures else 0


def _failures(args: argparse.Namespace, engine: Engine, requests: list[Request], errors: list[float]) -> list[str]:
    allowed = tolerance(args.dtype, args.state_dtype)
    failures = [
        f"{request.name}: error {error:.1e} against the reference, allowed {allowed:.0e}"
        for request, error in zip(requests, errors)
        if not error <= allowed
    ]
    failures += [f"page {page} changed after it was complete" for page in changed_pages(engine)]
    failures += [f"page {page} was written though no request owns it" for page in touched_spare_pages(engine)]
    return failures


def _table(requests: list[Request], errors: list[float]) -> str:
    headers = ("request", "reused", "prefilled", "decoded", "pages read", "written", "opened", "backend", "error", "ms")
    rows = [
        (
            request.name,
            request.reused,
            request.prompt - request.reused,
            len(request.tokens) - request.prompt,
            len(request.read),
            len(request.written),
            request.opened,
            ", ".join(request.backends),
            f"{error:.1e}",
            f"{request.seconds * 1e3:.0f}",
        )
        for request, error in zip(requests, errors)
    ]
    return format_table(headers, rows, right=(1, 2, 3, 4, 5, 6, 8, 9))


def _progress(text: str) -> None:
    """A line that the next one replaces, on a terminal; a plain line elsewhere."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)
    elif text:
        print(text, flush=True)
