"""torch.compile: the public functions run as they are, with a break of the graph around each call.

What they do, looking at addresses and launching kernels from Python, is nothing for a graph. The usual ``torch.compiler.disable``
wraps a function in another, which costs a call more than a microsecond, and imports ``torch._dynamo``. Here a function gets
the mark that the wrapper would have, and its code is said to be skipped with all that it calls; neither costs a call anything.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_eval_frame = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_NAMES = ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")

REASON = "gdn_multi launches its kernels from Python, outside graphs"


def leave_out(function: Callable) -> None:
    """Have torch.compile leave ``function``, and all that it calls, out of its graphs."""
    function._torchdynamo_disable = True  # a graph that reaches a call of it breaks there
    function._torchdynamo_disable_msg = REASON
    if all(hasattr(_eval_frame, name) for name in _NAMES):  # torch 2.7 and newer
        skip = _eval_frame._FrameAction.SKIP
        _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
