"""Host time of a call: 200 calls without a synchronization, the median of several rounds.

    python benchmarks/host_time.py [--backends cuda,triton]

Needs a CUDA device. Decode: one sequence, 2/8 heads, bfloat16, float32 state; paged with slots given, paged with the
page table, and a pool with rows. Prefill: one sequence of 64 tokens, plain and paged. The queue is empty at each start
and the calls are short, so that the host, not the device, is what is measured; front end included.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import gdn_multi


def microseconds(call, calls: int = 200, rounds: int = 15) -> float:
    for _ in range(20):
        call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def ints(values):
    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


def decode_calls(backend: str, B: int, hq: int, hv: int, dtype=torch.bfloat16):
    q, k = (torch.randn(B, 1, hq, 128, device="cuda").to(dtype) for _ in range(2))
    v = torch.randn(B, 1, hv, 128, device="cuda").to(dtype)
    a, b = (torch.randn(B, 1, hv, device="cuda").to(dtype) for _ in range(2))
    A_log, dt_bias = torch.zeros(hv, device="cuda"), torch.zeros(hv, device="cuda")
    pool = torch.zeros(B, hv, 128, 128, device="cuda")
    table = dict(page_indices=ints(range(B)), page_indptr=ints(range(B + 1)), last_page_len=ints([2] * B))
    slots = gdn_multi.gdn_paged_decode_slots(**table)
    tokens = dict(q=q, k=k, v=v, A_log=A_log, a=a, dt_bias=dt_bias, b=b, backend=backend)
    paged = gdn_multi.gated_delta_rule_decode_paged
    yield "paged decode, slots given", lambda: paged(**tokens, state_pool=pool, **table, slots=slots)
    yield "paged decode, page table", lambda: paged(**tokens, state_pool=pool, **table)
    yield "decode, pool and rows", lambda: gdn_multi.gated_delta_rule_decode_pretranspose(
        **tokens, state=None, initial_state=pool, initial_state_indices=slots[0], output_state_indices=slots[1]
    )


def prefill_calls(backend: str, T: int = 64, hq: int = 4, hv: int = 16, dtype=torch.bfloat16):
    q, k = (torch.nn.functional.normalize(torch.randn(T, hq, 128, device="cuda"), dim=-1).to(dtype) for _ in range(2))
    v, g, beta = torch.randn(T, hv, 128, device="cuda").to(dtype), *torch.rand(2, T, hv, device="cuda")
    pool = torch.zeros(4, hv, 128, 128, device="cuda")
    tokens = dict(q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=ints([0, T]), backend=backend)
    table = dict(page_indices=ints([1]), page_indptr=ints([0, 1]), page_size=128, last_page_len=ints([T]))
    yield "prefill, 64 tokens", lambda: gdn_multi.chunk_gated_delta_rule(
        **tokens, initial_state=pool[:1], output_final_state=True
    )
    yield "paged prefill, 64 tokens", lambda: gdn_multi.chunk_gated_delta_rule_paged(**tokens, state_pool=pool, **table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="cuda,triton")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}; us of host time a call")
    with torch.no_grad():
        for backend in args.backends.split(","):
            for name, call in (*decode_calls(backend, 1, 2, 8), *prefill_calls(backend)):
                print(f"{backend:<8} {name:<28} {microseconds(call):6.1f}", flush=True)


if __name__ == "__main__":
    main()
