"""What the compiler makes of the prefill kernels for sm_90; needs no GPU."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton", reason="needs triton")

from gdn_multi.backends.triton import heuristics  # noqa: E402
from gdn_multi.backends.triton import prefill_kernels as kernels  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, compile  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="compiles the kernel, which TRITON_INTERPRET=1 prevents"
)


def test_float32_states_need_no_shared_memory():
    """A thread reads and writes what it has of a state, two neighbours at a time."""
    constants = dict(
        Q_STRIDE=256, K_STRIDE=256, V_STRIDE=1024, O_STRIDE=1024, K=128, V=128, BLOCK_K=128, BLOCK_V=64,
        PART=kernels.WHOLE.value, PREFIX=kernels.PAGES.value, EXTRA=2, RECORD=2 * 64 * 64 * 2 + 512, INITIAL=True,
        READ_ROWS=False, FINAL_STATE=True, WRITE_ROWS=False, FILL_EMPTY=False, CHECKPOINTS=True, CHECKPOINT_ROWS=True,
        DOT="tf32x3", AFTER=False, RELEASE=False,
    )  # fmt: skip
    names = kernels.recur.arg_names
    types = dict.fromkeys(("q", "k", "v", "output"), "*bf16") | dict.fromkeys(
        ("initial", "final", "checkpoints"), "*fp32"
    )
    types |= {name: "*i32" for name in kernels._INDICES} | {"records": "*u8", "segments": "*fp32", "scale": "fp32"}
    types |= {name: "i32" for name in kernels._COUNTS}
    source = ASTSource(
        fn=kernels.recur,
        signature={name: "constexpr" if name in constants else types.get(name, "i64") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name not in (*constants, *kernels._INDICES, *kernels._COUNTS, "scale")
        },
    )
    tile = heuristics._TILES["sm_90", True, True]
    options = {"num_warps": tile.recur_warps, "num_stages": tile.recur_stages}
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    pairs = 64 * 128 // (32 * tile.recur_warps) // 2
    # The state of the start; a checkpoint's and the last one.
    assert len([line for line in ptx.splitlines() if "ld.global.v2" in line]) == pairs
    assert len([line for line in ptx.splitlines() if "st.global.v2" in line]) == 2 * pairs
    # Tiles and operands of the loop; a state that went through shared memory would have a dozen more.
    assert ptx.count("bar.sync") <= 6
