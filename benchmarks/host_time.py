"""Host time of a call: 200 calls without a synchronization, the median and the least of several rounds.

    python benchmarks/host_time.py [--backends cuda,triton] [--steps]
    python benchmarks/host_time.py --dry

Needs a CUDA device, but for --dry: that is the prefill with `triton` on the CPU, its launches replaced by functions that
do nothing, which leaves what this library does itself. Decode: one sequence, 2/8 heads, bfloat16, float32 state; paged
with slots given, paged with the page table, and a pool with rows. Prefill: one sequence of 64 tokens, plain and paged. The
queue is empty at each start and the calls are short, so that the host, not the device, is what is measured; front end
included. The least is what a call takes while nothing else wants the processor. Decode calls are written out as an engine
writes them: putting keywords together from dictionaries takes longer than some of the checks. --steps adds what parts of
the first call take.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from itertools import chain

import torch

import gdn_multi
from gdn_multi import dispatch, env, memory


def microseconds(call, calls: int = 200, rounds: int = 25) -> tuple[float, float]:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(20):
        call()
    times = []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    wait()
    return statistics.median(times), min(times)


def ints(values, device="cuda"):
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def decode_calls(backend: str, B: int, hq: int, hv: int, steps: bool, dtype=torch.bfloat16):
    q, k = (torch.randn(B, 1, hq, 128, device="cuda").to(dtype) for _ in range(2))
    v = torch.randn(B, 1, hv, 128, device="cuda").to(dtype)
    a, b = (torch.randn(B, 1, hv, device="cuda").to(dtype) for _ in range(2))
    A_log, dt_bias = torch.zeros(hv, device="cuda"), torch.zeros(hv, device="cuda")
    pool = torch.zeros(B, hv, 128, 128, device="cuda")
    indices, indptr, last = ints(range(B)), ints(range(B + 1)), ints([2] * B)
    slots = gdn_multi.gdn_paged_decode_slots(indices, indptr, last)
    read, write = slots
    paged, unpaged = gdn_multi.gated_delta_rule_decode_paged, gdn_multi.gated_delta_rule_decode_pretranspose
    yield "paged decode, slots given", lambda: paged(
        q, k, v, A_log, a, dt_bias, b, state_pool=pool, page_indices=indices, page_indptr=indptr, last_page_len=last,
        slots=slots, backend=backend,
    )  # fmt: skip
    if steps:  # out of the short way in gdn_multi/dispatch.py, whose newest is that of the call above
        newest, options = dispatch.short_ways["gated_delta_rule_decode_paged"].newest, (None, True, None, backend)
        tensors = (q, k, v, A_log, a, dt_bias, b, pool, read, write, None, None, None, None)
        new, given, wrong = ((*options, output, *tensors) for output in (None, torch.empty_like(v), pool))
        quick = getattr(memory._allocators, "_empty_strided_cuda", None)
        yield "  of it the short way", lambda: newest(new)
        yield "  output given", lambda: newest(given)
        yield "  all but the launch", lambda: newest(wrong)
        if quick is not None:
            yield "  output", lambda: quick((B, 1, hv, 128), (hv * 128, hv * 128, 128, 1), dtype)
        yield "  (by torch.empty_like)", lambda: torch.empty_like(v)
        yield "  environment", env.deciding
        yield "  sign of a tensor", A_log.is_neg
        yield "  mode of autograd", torch.is_grad_enabled
        yield "  shape of a tensor", lambda: v.shape
        yield "  nothing", lambda: None
    yield "paged decode, page table", lambda: paged(
        q, k, v, A_log, a, dt_bias, b, state_pool=pool, page_indices=indices, page_indptr=indptr, last_page_len=last,
        backend=backend,
    )  # fmt: skip
    yield "decode, pool and rows", lambda: unpaged(
        q, k, v, None, A_log, a, dt_bias, b, initial_state=pool, initial_state_indices=read, output_state_indices=write,
        backend=backend,
    )  # fmt: skip


def prefill_calls(backend: str, T: int = 64, hq: int = 4, hv: int = 16, dtype=torch.bfloat16, device="cuda"):
    q, k = (torch.nn.functional.normalize(torch.randn(T, hq, 128, device=device), dim=-1).to(dtype) for _ in range(2))
    v, g, beta = torch.randn(T, hv, 128, device=device).to(dtype), *torch.rand(2, T, hv, device=device)
    pool, initial = torch.zeros(5, hv, 128, 128, device=device).split((4, 1))
    tokens = dict(q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=ints([0, T], device), backend=backend)
    table = dict(page_indices=ints([1], device), page_indptr=ints([0, 1], device), page_size=128, last_page_len=ints([T], device))
    yield "prefill, 64 tokens", lambda: gdn_multi.chunk_gated_delta_rule(
        **tokens, initial_state=initial, output_final_state=True
    )
    yield "paged prefill, 64 tokens", lambda: gdn_multi.chunk_gated_delta_rule_paged(**tokens, state_pool=pool, **table)


def without_launches() -> None:
    """From now on Triton's launches do nothing, and calls on the CPU are remembered as those on a GPU are."""
    os.environ["TRITON_INTERPRET"] = "1"  # else `triton` refuses the CPU
    from gdn_multi.backends.triton import launch

    def nothing(*arguments):
        pass

    def launched(self, tensors, hooked):
        if self._compiled is None:
            self.device, self._compiled, self._run, self._middle = 0, nothing, nothing, (None,) * 5
        of_a_card(self, tensors, hooked)

    of_a_card, launch.Launch._launch = launch.Launch._launch, launched
    launch.current_device, launch._raw_stream = lambda: 0, lambda device: 0
    dispatch._looked_into = lambda name, tensor: False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="cuda,triton")
    parser.add_argument("--steps", action="store_true", help="what parts of the first call take, too")
    parser.add_argument("--dry", action="store_true", help="without a GPU and without launches: the prefill with `triton`")
    args = parser.parse_args()
    if args.dry:
        without_launches()
        print(f"on the CPU, without launches, torch {torch.__version__}; us of host time a call, median and least")
        with torch.no_grad():
            for name, call in prefill_calls("triton", dtype=torch.float16, device="cpu"):
                print("triton   {:<28} {:6.2f} {:6.2f}".format(name, *microseconds(call)), flush=True)
        return
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}; us of host time a call, median and least")
    with torch.no_grad():
        for backend in args.backends.split(","):
            for name, call in chain(decode_calls(backend, 1, 2, 8, args.steps), prefill_calls(backend)):
                median, least = microseconds(call)
                print(f"{backend:<8} {name:<28} {median:6.2f} {least:6.2f}", flush=True)


if __name__ == "__main__":
    main()
