"""The torch backend beside the pure-PyTorch fallback of transformers' Qwen3-Next module, on the CPU, in one run.

    python benchmarks/torch_vs_transformers.py [--tokens 2048] [--rounds 5]

Same inputs (one sequence, 16 q/k heads, 32 v heads, K = V = 128, bfloat16, float32 state, normalised keys). The two
take turns, so that the machine's drift hits both; the ratio is of medians. Peak memory is what each adds to the
resident set of a process of its own (Linux). Needs transformers (pip install transformers).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time

import torch


def inputs(tokens: int):
    torch.manual_seed(0)
    q = torch.nn.functional.normalize(torch.randn(tokens, 16, 128), dim=-1).bfloat16()
    k = torch.nn.functional.normalize(torch.randn(tokens, 16, 128), dim=-1).bfloat16()
    v = torch.randn(tokens, 32, 128).bfloat16()
    rate, dt = torch.rand(32) * 15 + 1, torch.rand(tokens, 32) * 0.1
    return q, k, v, -rate * dt, torch.rand(tokens, 32), torch.randn(1, 32, 128, 128) * 0.1


def ours(q, k, v, log_alpha, beta, state):
    import gdn_multi

    cu = torch.tensor([0, q.shape[0]])
    return lambda: gdn_multi.chunk_gated_delta_rule(
        q, k, v, log_alpha, beta, initial_state=state, output_final_state=True, cu_seqlens=cu, gate_domain="log",
        backend="torch",
    )  # fmt: skip


def theirs(q, k, v, log_alpha, beta, state):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    def call():
        # as the module calls it: q and k repeated to the v heads, a batch dimension in front, states K-major
        wide = [x.repeat_interleave(2, dim=1)[None] for x in (q, k)]
        out, final = torch_chunk_gated_delta_rule(
            *wide, v[None], g=log_alpha[None], beta=beta[None], initial_state=state.transpose(-1, -2),
            output_final_state=True,
        )  # fmt: skip
        return out[0], final.transpose(-1, -2)

    return call


CALLS = {"gdn_multi torch": ours, "transformers fallback": theirs}


def status_kib(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field))


def peak_mib(name: str, tokens: int) -> float:
    """Growth of the peak resident set over one call, in a fresh process, warmed up on 128 tokens."""
    command = [sys.executable, __file__, "--peak-of", name, "--tokens", str(tokens)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak-of", choices=list(CALLS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    tensors = inputs(args.tokens)
    if args.peak_of:
        CALLS[args.peak_of](*inputs(128))()
        call = CALLS[args.peak_of](*tensors)
        ctypes.CDLL(None).malloc_trim(0)  # freed memory goes back, or the call would hide in it
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")  # the peak counts from here
        before = status_kib("VmRSS")
        kept = call()
        print((status_kib("VmHWM") - before) / 1024)
        del kept
        return

    calls = {name: make(*tensors) for name, make in CALLS.items()}
    results = {name: call() for name, call in calls.items()}
    (out, final), (other, other_final) = results.values()
    for what, x, y in (("output", out, other), ("final state", final, other_final)):
        print(f"{what}: relative difference {float((x.double() - y.double()).norm() / y.double().norm()):.1e}")
    times = {name: [] for name in calls}
    for _ in range(args.rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    print(f"{args.tokens} tokens, 16/32 heads, 128, bfloat16, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name in calls:
        median = statistics.median(times[name])
        print(f"{name:<22} median {median * 1e3:8.1f} ms   peak memory {peak_mib(name, args.tokens):8.1f} MiB")
    a, b = (statistics.median(t) for t in times.values())
    print(f"transformers / gdn_multi: {b / a:.2f} times the time")


if __name__ == "__main__":
    main()
