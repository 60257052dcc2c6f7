"""gdn_multi.warmup, and after it a mixed day of a model's calls that must compile and load nothing more.

    python benchmarks/warmup_day.py [--backends cuda,triton] [--heads 4/16] [--batch 64] [--tokens 8192] [--steps 4]
    python benchmarks/warmup_day.py --backends cuda --rows few       a short day: not all batch sizes and lengths

The day: prefill and decode in every form that the warm-up knows (a state a sequence, a pool and rows, pages, slots,
with and without initial states, as a model makes the call or plain), batch sizes and lengths that it did not try,
ragged batches with empty sequences and prefixes that end anywhere, one to --steps tokens a decode, and CUDA graphs
replayed with other pages and lengths; then a shorter day with q, k and v as views of one projection.
gdn_multi.compilations() counts; each call that moves it is named, and the exit status is 1.

Every part is printed when it ends, seconds since the start first, so that a run that was cut off shows how far it came.
The warm-up is the same for every --rows. --no-views leaves the views out of it, and their day: far fewer kernels where
strides are compiled in, as Triton's are. --batch, --tokens and --steps shorten it too, as they do for a smaller model.
--device cpu tries the script with the torch backend.
"""

from __future__ import annotations

import time

START = time.perf_counter()  # importing torch is part of what a run takes

import argparse  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from functools import partial  # noqa: E402

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import gdn_multi  # noqa: E402

Named = tuple[str, Callable[[], object]]


def say(text: str) -> None:
    print(f"{time.perf_counter() - START:7.1f} s  {text}", flush=True)


class Day:
    """Calls of one model on one backend."""

    def __init__(self, args, backend: str):
        self.backend, self.device, self.page = backend, args.device, args.page_size
        self.hq, self.hv = (int(n) for n in args.heads.split("/"))
        self.d, self.batch, self.tokens, self.steps = args.head_size, args.batch, args.tokens, args.steps
        self.few = args.rows == "few"
        self.random = random.Random(0)

    def rand(self, *shape, dtype=torch.bfloat16):
        return torch.rand(*shape, device=self.device).to(dtype)

    def ints(self, values):
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def pool(self, rows):
        return torch.zeros(rows, self.hv, self.d, self.d, device=self.device)

    def qkv(self, *shape, views=False):
        """Separate tensors, or views of one projection."""
        widths = [self.hq * self.d, self.hq * self.d, self.hv * self.d]
        if views:
            parts = self.rand(*shape, sum(widths)).split(widths, -1)
            return [x.unflatten(-1, (-1, self.d)) for x in parts]
        return [F.normalize(self.rand(*shape, h, self.d), dim=-1) for h in (self.hq, self.hq, self.hv)]

    # --- decode ------------------------------------------------------------------------------

    def table(self, batch, offset=0):
        """One sequence in three opens a page with the token."""
        opens = [(i + offset) % 3 == 0 for i in range(batch)]
        ids = list(range(2 * batch))
        self.random.shuffle(ids)
        pages = [[ids.pop() for _ in range(2 if new else 1)] for new in opens]
        indptr = [sum(len(p) for p in pages[:i]) for i in range(batch + 1)]
        # Room for two pages a sequence, so that a graph can be given another table.
        flat = [i for p in pages for i in p]
        return dict(
            page_indices=self.ints(flat + [0] * (2 * batch - len(flat))), page_indptr=self.ints(indptr),
            last_page_len=self.ints(1 if new else 2 + self.random.randrange(self.page - 1) for new in opens),
        )  # fmt: skip

    def decode(self, batch, steps, views=False) -> Iterator[Named]:
        q, k, v = self.qkv(batch, steps, views=views)
        a, b = self.rand(batch, steps, self.hv), self.rand(batch, steps, self.hv)
        A_log, dt_bias = torch.zeros(2, self.hv, device=self.device)
        common = dict(q=q, k=k, v=v, A_log=A_log, a=a, dt_bias=dt_bias, b=b, backend=self.backend)
        pool, name = self.pool(2 * batch), f"decode, {batch} sequences, {steps} tokens" + (", views" if views else "")
        order = torch.randperm(2 * batch).to(self.device, torch.int32)
        read, write = order[:batch].contiguous(), order[batch:].contiguous()
        plain, paged = gdn_multi.gated_delta_rule_decode_pretranspose, gdn_multi.gated_delta_rule_decode_paged
        rows = dict(state=None, initial_state=pool, initial_state_indices=read)
        yield f"{name}, rows", lambda: plain(**common, **rows)
        yield f"{name}, other rows", lambda: plain(**common, **rows, output_state_indices=write)
        if steps > 1:
            buffer = torch.zeros(batch, steps, *pool.shape[1:], device=self.device)
            yield (
                f"{name}, all steps kept",
                lambda: plain(**common, **rows, intermediate_states_buffer=buffer, disable_state_update=True),
            )
            return
        yield f"{name}, a state a sequence", lambda: plain(**common, state=pool[:batch])
        table = self.table(batch)
        yield f"{name}, pages", lambda: paged(**common, state_pool=pool, **table)
        slots = []
        yield f"{name}, slots", lambda: slots.append(self.slots(gdn_multi.gdn_paged_decode_slots, table))
        yield f"{name}, slots given", lambda: paged(**common, state_pool=pool, **table, slots=slots[0])
        if self.device == "cuda" and not views:
            output = torch.empty(batch, 1, self.hv, self.d, device=self.device, dtype=q.dtype)
            call = lambda: paged(**common, state_pool=pool, output=output, **table)  # noqa: E731
            yield f"{name}, captured", lambda: self.captured(call, table, lambda: self.table(batch, 1))

    # --- prefill -----------------------------------------------------------------------------

    def pages(self, lengths, prefixes, rows=None):
        """The page table of a batch, in a pool of ``rows``; by default with room for another batch like it."""
        totals = [a + b for a, b in zip(lengths, prefixes)]
        counts = [max(1, -(-n // self.page)) for n in totals]
        ids = list(range(sum(counts) + 2 * len(counts) if rows is None else rows))
        assert len(ids) >= sum(counts)
        self.random.shuffle(ids)
        bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        return dict(
            cu_seqlens=self.ints(bounds), page_indices=self.ints(ids),
            page_indptr=self.ints(sum(counts[:i]) for i in range(len(counts) + 1)),
            last_page_len=self.ints(max(1, n - (c - 1) * self.page) for n, c in zip(totals, counts)),
        )  # fmt: skip

    def prefill(self, lengths, views=False) -> Iterator[Named]:
        total, count = sum(lengths), len(lengths)
        q, k, v = self.qkv(total, views=views)
        A_log, dt_bias = torch.zeros(2, self.hv, device=self.device)
        g, beta = self.rand(2, total, self.hv, dtype=torch.float32)
        raw, logit = self.rand(2, total, self.hv)
        forms = {
            "plain": dict(g=g, beta=beta),
            "as a model": dict(
                g=raw, beta=logit, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, beta_is_logit=True,
                use_qk_l2norm_in_kernel=True,
            ),
        }  # fmt: skip
        shown = f"{count} sequences, {total} tokens, longest {max(lengths)}" + (", views" if views else "")
        prefixes = [self.random.choice((0, self.page, self.random.randrange(2 * self.page))) for _ in lengths]
        if not min(lengths):  # an empty sequence owns a page too
            prefixes[lengths.index(0)] = 5
        table = self.pages(lengths, prefixes)
        rows = table["page_indices"].shape[0]
        pool, states = self.pool(rows), self.pool(count)
        for form, arguments in forms.items():
            common = dict(q=q, k=k, v=v, backend=self.backend, **arguments)
            yield from self.prefill_calls(f"prefill, {shown}, {form}", common, table, pool, states, max(lengths))
            if self.device == "cuda" and not views:
                # Replayed with another batch of as many tokens and sequences.
                others, before = [lengths[-1], *lengths[:-1]], [n if n else 7 for n in prefixes]
                other = partial(self.pages, others, before, rows)
                yield self.captured_prefill(f"prefill, {shown}, {form}, captured", common, table, pool, other)

    def prefill_calls(self, name, common, table, pool, states, longest) -> Iterator[Named]:
        bounds, made, at = table["cu_seqlens"], [], dict(state_pool=pool, page_size=self.page, **table)
        unpaged, paged = gdn_multi.chunk_gated_delta_rule, gdn_multi.chunk_gated_delta_rule_paged
        hinted = dict(common, initial_state=states, max_seqlen=longest)
        yield f"{name}, from zero", lambda: unpaged(**common, cu_seqlens=bounds, output_final_state=True)
        yield f"{name}, from states", lambda: unpaged(**hinted, cu_seqlens=bounds, output_final_state=True)
        yield f"{name}, pages", lambda: paged(**common, **at)
        whole = dict(page_size=self.page, **table)
        yield f"{name}, slots", lambda: made.append(self.slots(gdn_multi.gdn_paged_prefill_slots, whole))
        yield f"{name}, slots given", lambda: paged(**common, **at, slots=made[0])

    def captured_prefill(self, name, common, table, pool, other) -> Named:
        tokens = common["q"].shape[0]
        output = torch.empty(tokens, self.hv, self.d, device=self.device, dtype=common["q"].dtype)

        def call():
            at = dict(state_pool=pool, page_size=self.page, output=output, **table)
            gdn_multi.chunk_gated_delta_rule_paged(**common, **at)

        return name, lambda: self.captured(call, table, other)

    # --- both --------------------------------------------------------------------------------

    def slots(self, function, table):
        """Of this backend, whatever the policy would choose."""
        from gdn_multi.dispatch import build_request
        from gdn_multi.registry import registry

        request, _ = build_request(function, **table)
        registry.get(self.backend).page_slots(request)
        return (gdn_multi.GDNPagedPrefillSlots if request.is_prefill else gdn_multi.GDNPagedDecodeSlots)(*request.out)

    @staticmethod
    def captured(call, table, other) -> None:
        """Captures the call and replays it with another table in the same tensors."""
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            call()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        graph.replay()
        for name, values in other().items():
            n = min(len(values), len(table[name]))
            table[name][:n] = values[:n]
        graph.replay()
        torch.cuda.synchronize()

    def parts(self, views: bool) -> Iterator[tuple[str, Iterator[Named]]]:
        most, batch = self.tokens, self.batch
        batches = sorted({1, 2, 3, 7, 16, batch // 2 + 1, batch - 1, batch})
        ragged = [most // 2 + 13, 1, 0, most // 10]
        lengths = [
            [1], [63], [65], [100], [most // 10 + 1], [most - 1], [most], [most // 2] * 2, [1] * 3, ragged,
            [most // batch] * batch, [most // 2] + [2] * (batch - 4), [most // 3, most // 3 + 1, 17],
        ]  # fmt: skip
        if views or self.few:
            batches, lengths = [3, batch], [[100], ragged]
        if self.few and not views:
            lengths += [[most], [most // batch] * batch]
        for n in batches:
            for steps in range(1, self.steps + 1):
                yield f"decode, {n} sequences, {steps} tokens", self.decode(n, steps, views)
        for some in lengths:
            text = f"prefill, {len(some)} sequences, {sum(some)} tokens, longest {max(some)}"
            yield text, self.prefill(some, views)


def live(day: Day, views: bool) -> tuple[int, list[str], tuple[float, str]]:
    """How many calls, what the calls that compiled say, and the slowest call."""
    count, compiling, slowest = 0, [], (0.0, "")
    for part, calls in day.parts(views):
        began, so_far = time.perf_counter(), count
        for name, call in calls:
            before, start = gdn_multi.compilations(), time.perf_counter()
            call()
            seconds, made = time.perf_counter() - start, gdn_multi.compilations() - before
            count, slowest = count + 1, max(slowest, (seconds, name))
            if made:
                compiling.append(f"{made} in {name} ({seconds:.2f} s)")
                say(f"{day.backend}: compiled {compiling[-1]}")
        if day.device == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - began
        say(f"{day.backend}: {part}{', views' if views else ''}: {count - so_far} calls, {took:.2f} s")
    return count, compiling, slowest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="cuda,triton")
    parser.add_argument("--heads", default="4/16")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=4, help="most tokens a sequence of one decode call")
    parser.add_argument("--page-size", type=int, default=512)
    parser.add_argument("--rows", default="all", choices=("all", "few"), help="batch sizes and lengths of the day")
    parser.add_argument("--no-views", action="store_true", help="neither warm up nor call with views of one projection")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    names = ("torch",) if args.device == "cpu" else tuple(args.backends.split(","))
    hq, hv = (int(n) for n in args.heads.split("/"))
    card = torch.cuda.get_device_name(0) if args.device == "cuda" else "CPU"
    say(f"{card}, torch {torch.__version__}; {hq}/{hv} heads of {args.head_size}")
    usable = []
    for name in names:  # one after the other, as one call for all of them does it, to see what each takes
        report = gdn_multi.warmup(
            num_q_heads=hq, num_v_heads=hv, head_size_k=args.head_size, max_batch=args.batch, max_tokens=args.tokens,
            max_decode_tokens=args.steps, page_size=args.page_size, backends=(name,), fused_qkv=not args.no_views,
            device=torch.device(args.device), progress=lambda text: say(f"warm-up: {text}"),
        )  # fmt: skip
        usable += report.backends
    missing = set(names) - set(usable)
    if missing:
        say(f"not usable here: {', '.join(sorted(missing))}")
    failed = bool(missing)
    lines = [f"{'backend':8} {'day':24} {'calls':>5} {'compiled':>8} {'seconds':>8}  slowest call"]
    with torch.no_grad():
        for name in usable:
            for views in (False,) if args.no_views else (False, True):
                start = time.perf_counter()
                count, compiling, (seconds, slowest) = live(Day(args, name), views)
                what = "views of one projection" if views else "as warmed up"
                lines.append(f"{name:8} {what:24} {count:5} {len(compiling):8} {time.perf_counter() - start:8.1f}  "
                             f"{seconds * 1e3:.1f} ms, {slowest}")  # fmt: skip
                say(" ".join(lines[-1].split()))
                lines += [f"    compiled {line}" for line in compiling]
                failed |= bool(compiling)
    print("\n".join(lines))
    limits = ["a few of the rows"] * (args.rows == "few") + ["no views"] * args.no_views
    limited = f" ({', '.join(limits)})" if limits else ""
    print(("FAILED" if failed else "nothing was compiled after the warm-up") + limited, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
