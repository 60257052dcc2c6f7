"""Cold start: how long a fresh process takes from torch imported to its first answers, the library built ahead of time.

    python -m gdn_multi build
    python benchmarks/cold_start.py [--runs 3] [--limit 1.0]

Each run is a process of its own. torch is imported, the device touched and the inputs made before the clock starts;
then gdn_multi is imported and one prefill and one decode call of the cuda backend are made and waited for. The table
also says what touching the device took. Fails where the median of the sum is above the limit. --device cpu tries the
script with the torch backend.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
PARTS = ("import gdn_multi", "first prefill", "first decode")


def child(device: str, backend: str) -> dict:
    start = time.perf_counter()
    import torch

    parts = {"import torch": time.perf_counter() - start}
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def lap(name: str) -> None:
        nonlocal start
        wait()
        parts[name] = time.perf_counter() - start
        start = time.perf_counter()

    start = time.perf_counter()
    torch.zeros(1, device=device)
    lap("touch the device")

    def rand(*shape, dtype=torch.bfloat16):
        return torch.rand(*shape, device=device).to(dtype)

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    T, H, HV, d = 256, 4, 16, 128
    tokens = [rand(T, h, d) for h in (H, H, HV)]
    gates = [rand(T, HV, dtype=torch.float32) for _ in range(2)]
    bounds, states = ints(0, T), torch.zeros(1, HV, d, d, device=device)
    token = [rand(1, 1, h, d) for h in (H, H, HV)]
    A_log, dt_bias = torch.zeros(HV, device=device), torch.zeros(HV, device=device)
    a, b = rand(1, 1, HV), rand(1, 1, HV)
    lap("make the inputs")

    sys.path.insert(0, ROOT)
    import gdn_multi

    lap("import gdn_multi")
    output, final = gdn_multi.chunk_gated_delta_rule(
        *tokens, *gates, initial_state=states, output_final_state=True, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True,
        backend=backend,
    )  # fmt: skip
    lap("first prefill")
    last, _ = gdn_multi.gated_delta_rule_decode_pretranspose(*token, final, A_log, a, dt_bias, b, backend=backend)
    lap("first decode")
    assert bool(output.isfinite().all()) and bool(last.isfinite().all())
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1.0, help="seconds (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    backend = "cuda" if args.device == "cuda" else "torch"
    if args.child:
        print(json.dumps(child(args.device, backend)))
        return 0
    runs = []
    for _ in range(args.runs):
        command = [sys.executable, os.path.abspath(__file__), "--child", "--device", args.device]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr[-3000:])
            return 1
        if "compil" in done.stderr or "build" in done.stderr:
            print(f"this run built the library, and does not count:\n{done.stderr}")
            continue
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    if not runs:
        print("no run without a build; run `python -m gdn_multi build` before")
        return 1
    print(f"{'seconds':22}" + "".join(f"{f'run {i + 1}':>8}" for i in range(len(runs))) + "  median")
    sums = [sum(run[part] for part in PARTS) for run in runs]
    rows = {**{part: [run[part] for run in runs] for part in runs[0]}, "from import to answers": sums}
    for name, values in rows.items():
        print(f"{name:22}" + "".join(f"{x:8.3f}" for x in values) + f"{statistics.median(values):8.3f}")
    total = statistics.median(sums)
    good = total <= args.limit
    print(f"{' + '.join(PARTS)}: {total:.2f} s, {'within' if good else 'ABOVE'} {args.limit:g} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
