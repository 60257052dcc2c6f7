"""cuDNN's gated delta net, through nvidia-cudnn-frontend: prefill without slot arguments and checkpoints.

Two engines stand behind one function. FROST (sm_100, 103, 107) takes raw gates and logits as they are; cuTile (every
other GPU) takes log gates, float32 states and int32 cu_seqlens. What an engine does not take and can be converted
exactly is converted here, in a few small launches that ``detail`` names:

- gates to log alpha, computed in float32; alpha = 0 becomes exp(-110), which is 0 in float32, so that no infinity
  enters the sums of a chunk (FROST's own linear gates would floor alpha at 1e-10);
- logits to beta, with the rounding of the contract; a missing gate to log alpha 0, a missing beta to 1;
- grouped heads that the engine has no kernel for: q, k or v repeated once a state head;
- states to float32 and back, rounded once (float8 saturating);
- a state pool: its rows are gathered before and scattered after, so that row -1 and zero-length sequences keep the
  contract's meaning.

cuDNN returns tensors of its own; output and states are copied from there to where the call wants them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import logging
import os
import shutil
import threading
import warnings
from importlib import metadata
from typing import NamedTuple

import torch

from gdn_multi.backend import Backend, Reasons
from gdn_multi.request import PrefillRequest, Request, SlotsRequest

logger = logging.getLogger("gdn_multi")

FROST = "FROST"
CUTILE = "cuTile"
#: Compute capabilities with a FROST engine; cuTile serves the others.
FROST_CAPABILITIES = ((10, 0), (10, 3), (10, 7))

MIN_FRONTEND = (1, 31)
MIN_RUNTIME = 13030  #: CUDA 13.3, as cuda-bindings reports it
INSTALL_FRONTEND = 'pip install "nvidia-cudnn-frontend>=1.31"'
#: One command: pip calls that install cuda-tile and cuda-bindings into one folder separately lose one of the two.
INSTALL_TILE = 'pip install "cuda-tile>=1.7" "cuda-bindings>=13.3"'
INSTALL_TILEIRAS = "pip install nvidia-cuda-tileiras nvidia-cuda-nvcc nvidia-nvvm"
INSTALL_DSL = 'pip install "nvidia-cutlass-dsl>=4.7"'

#: exp(-110) is 0 in float32 (the smallest denormal is exp(-103.3)), and 64 of it still leave a sum exact to 5e-4.
LOG_ZERO = -110.0

_HALF = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _numbers(version: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in version.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a parent that cannot be imported
        return False


@functools.cache
def _frontend_reason() -> str:
    """Why the frontend cannot be used; empty when it can."""
    if not _has_module("cudnn"):
        return f"nvidia-cudnn-frontend is not installed: {INSTALL_FRONTEND}"
    version = _version("nvidia-cudnn-frontend")
    if version and _numbers(version) < MIN_FRONTEND:
        return f"nvidia-cudnn-frontend {version} is too old, 1.31 is needed: {INSTALL_FRONTEND}"
    try:
        _gated_delta_net()
    except Exception as error:  # a half-installed dependency raises anything
        return f"nvidia-cudnn-frontend cannot be imported: {type(error).__name__}: {error}: {INSTALL_FRONTEND}"
    return ""


def _gated_delta_net():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("cudnn.linear_attention").gated_delta_net


@functools.cache
def _cutile_reasons() -> Reasons:
    """What the cuTile engine lacks."""
    reasons: list[str] = []
    if not _has_module("cuda.tile"):
        reasons.append(f"cuDNN's cuTile engine needs cuda-tile, which is not importable: {INSTALL_TILE}")
    runtime = _runtime_version()
    if runtime is None:
        reasons.append(f"cuDNN's cuTile engine needs cuda-bindings, which is not importable: {INSTALL_TILE}")
    elif runtime < MIN_RUNTIME:
        found = f"{runtime // 1000}.{runtime % 1000 // 10}"
        reasons.append(
            f"cuDNN's cuTile engine needs the CUDA runtime 13.3, cuda-bindings brings {found}: {INSTALL_TILE}"
        )
    if not _has_tileiras():
        reasons.append(
            f"cuDNN's cuTile engine needs the compiler tileiras (in pip packages of one version, on PATH, or in "
            f"$CUDA_HOME/bin): {INSTALL_TILEIRAS}"
        )
    return tuple(reasons)


def _runtime_version() -> int | None:
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
        error, version = runtime.cudaRuntimeGetVersion()
    except Exception:  # not installed, or no driver library to load
        return None
    return int(version) if int(error) == 0 else None


def _has_tileiras() -> bool:
    """Where cuda-tile looks: three pip packages of one version, PATH, the CUDA toolkit."""
    versions = {_numbers(_version(f"nvidia-{name}"))[:2] for name in ("cuda-tileiras", "cuda-nvcc", "nvvm")}
    if len(versions) == 1 and () not in versions:
        return True
    if shutil.which("tileiras"):
        return True
    from gdn_multi.env import cuda_home

    return bool(shutil.which("tileiras", path=os.path.join(cuda_home() or "/usr/local/cuda", "bin")))


@functools.cache
def _frost_reasons() -> Reasons:
    if not _has_module("cutlass"):
        return (f"cuDNN's FROST engine needs nvidia-cutlass-dsl, which is not importable: {INSTALL_DSL}",)
    return ()


@functools.cache
def _engine_of(index: int) -> str:
    return FROST if torch.cuda.get_device_capability(index) in FROST_CAPABILITIES else CUTILE


def engine(device: torch.device) -> str:
    """FROST or cuTile: which engine serves ``device``; cuTile where there is no GPU to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return CUTILE
    return _engine_of(torch.cuda.current_device() if device.index is None else device.index)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Plan(NamedTuple):
    """What is converted for a request, as sentences for ``detail`` and as flags for ``prefill``."""

    engine: str
    log_gates: bool  #: compute log alpha here
    sigmoid: bool  #: apply the sigmoid here
    repeat: tuple[str, ...]  #: which of q, k, v are repeated to one head a state head
    state_dtype: torch.dtype  #: of the states that the engine sees
    int32: bool  #: convert cu_seqlens
    said: tuple[str, ...]


def _plan(request: PrefillRequest) -> _Plan:
    which = engine(request.device)
    said: list[str] = []
    raw_ok = which == FROST
    log_gates = request.gate in ("linear", "none") or (request.gate == "raw" and not raw_ok)
    if request.gate == "none":
        said.append("log alpha 0 made")
    elif log_gates:
        said.append(f"{'raw gates' if request.gate == 'raw' else 'alpha'} converted to log alpha in float32")
    elif request.gate == "log":
        said.append("log alpha limited to -110, which is alpha 0 in float32")
    elif not request.g.is_contiguous():
        said.append("g copied to be contiguous")
    sigmoid = request.beta_is_logit and not raw_ok
    if request.beta is None:
        said.append("beta 1 made")
    elif sigmoid:
        said.append("logits converted to beta")
    elif not request.beta.is_contiguous():
        said.append("beta copied to be contiguous")
    hq, hk, hv, ho = request.num_q_heads, request.num_k_heads, request.num_v_heads, request.num_heads
    repeat: tuple[str, ...] = ()
    if which == CUTILE and hq != hk:
        repeat = tuple(n for n, heads in (("q", hq), ("k", hk), ("v", hv)) if heads != ho)
    elif which == FROST and hk not in (hq, hv):
        repeat = ("k",)
    if repeat:
        said.append(f"heads of {', '.join(repeat)} repeated to {ho}")
    state = request.initial_state if request.initial_state is not None else request.final_state
    state_dtype = torch.float32
    if which == FROST and state is not None and state.dtype in _FLOATS:
        if request.final_state is None or request.final_state.dtype == state.dtype:
            state_dtype = state.dtype
    if request.initial_state is None:
        state_dtype = torch.float32  # its final state is float32 then
    for label, tensor in (("initial_state", request.initial_state), ("final state", request.final_state)):
        if tensor is not None and tensor.dtype != state_dtype:
            said.append(f"{label} converted {'from' if label[0] == 'i' else 'to'} {_name(tensor.dtype)}")
    if request.read_rows is not None:
        said.append("pool rows gathered")
    if request.write_rows is not None:
        said.append("final states scattered to pool rows")
    int32 = which == CUTILE and request.cu_seqlens.dtype != torch.int32
    if int32:
        said.append("cu_seqlens converted to int32")
    return _Plan(which, log_gates, sigmoid, repeat, state_dtype, int32, tuple(said))


class CudnnBackend(Backend):
    name = "cudnn"
    priority = None
    summary = (
        "nvidia-cudnn-frontend: prefill without slot arguments and checkpoints; FROST engine on sm_100, 103 and 107, "
        "cuTile engine elsewhere"
    )

    def __init__(self) -> None:
        self._announced = False
        self._known: set = set()  # shapes whose first call is over
        self._lock = threading.Lock()

    # --- what it serves ----------------------------------------------------------------------

    def reasons_unusable(self, device: torch.device) -> Reasons:
        reasons: list[str] = []
        if device.type != "cuda":
            reasons.append(f"needs an NVIDIA GPU, the tensors are on {device.type}")
        elif torch.version.cuda is None:
            reasons.append("needs a CUDA build of torch, this one has none: pip install torch from a CUDA index")
        frontend = _frontend_reason()
        if frontend:
            reasons.append(frontend)
        reasons += _frost_reasons() if engine(device) == FROST else _cutile_reasons()
        return tuple(reasons)

    def reasons_against(self, request: Request) -> Reasons:
        if isinstance(request, SlotsRequest):
            return ("derives no rows from page tables",)
        if not isinstance(request, PrefillRequest):
            return ("serves prefill only",)
        which = engine(request.device)
        reasons: list[str] = []
        if request.slot_arguments:
            reasons.append(f"does not take slot arguments, got {', '.join(request.slot_arguments)}")
        if request.is_paged:
            reasons.append("does not take slot arguments, which a paged call stands for")
        if request.checkpoint_every:
            reasons.append(f"does not store checkpoints, got checkpoint_every_n_tokens = {request.checkpoint_every}")
        if request.use_cp is True:
            reasons.append("use_cp=True asks for a path that it does not have")
        if request.num_tokens == 0:
            reasons.append("there are no tokens, and its kernels are not launched on none")
        if request.q.dtype not in _HALF:
            reasons.append(f"serves bfloat16 and float16 inputs, got {_name(request.q.dtype)}")
        k, v = request.head_size_k, request.head_size_v
        if which == FROST:
            if k not in (64, 128) or v not in (64, 128):
                reasons.append(f"the FROST engine serves K and V of 64 and 128, got K = {k}, V = {v}")
        else:
            if k > 256:
                reasons.append(f"the cuTile engine serves K up to 256, got {k}")
            if request.scale == 0:
                reasons.append("scale = 0 means the default scale to the cuTile engine")
            if request.batch_invariant:
                reasons.append(
                    "the cuTile engine tunes itself for each shape, so GDN_MULTI_BATCH_INVARIANT=1 cannot be kept"
                )
            for name in ("q", "k", "v"):
                tensor = getattr(request, name)
                if not tensor.is_contiguous():
                    reasons.append(f"the cuTile engine needs contiguous {name}, got strides {tuple(tensor.stride())}")
        return tuple(reasons)

    def detail(self, request: Request) -> str:
        if not isinstance(request, PrefillRequest):
            return ""
        plan = _plan(request)
        return "; ".join((f"{plan.engine} engine",) + plan.said)

    # --- running it --------------------------------------------------------------------------

    def prefill(self, request: PrefillRequest) -> None:
        plan = _plan(request)
        tensors = {name: getattr(request, name) for name in ("q", "k", "v")}
        for name, tensor in tensors.items():
            if plan.engine == CUTILE and tensor.data_ptr() % 16:  # an address is no reason against: it differs call by call
                tensors[name] = tensor.clone()
        for name in plan.repeat:
            times = request.num_heads // tensors[name].shape[1]
            tensors[name] = tensors[name].repeat_interleave(times, dim=1)
        arguments = dict(
            tensors,
            g=_gate(request, plan.log_gates),
            beta=_beta(request, plan.sigmoid),
            cu_seqlens=request.cu_seqlens.int() if plan.int32 else request.cu_seqlens,
            scale=request.scale,
            initial_state=_initial_states(request, plan.state_dtype),
            output_final_state=request.final_state is not None,
            use_qk_l2norm_in_kernel=request.use_qk_l2norm,
            batch_invariant=request.batch_invariant,
            use_beta_sigmoid_in_kernel=request.beta_is_logit and not plan.sigmoid,
            gate_domain="log",
        )
        if request.gate == "raw" and not plan.log_gates:
            arguments.update(safe_gate=True, a_log=request.A_log, dt_bias=request.dt_bias)
        output, final_state = self._call(request, plan, arguments)
        with torch.inference_mode():  # tensors made under it can be written only there
            _store_output(request, output)
            if request.final_state is not None:
                _store_states(request, final_state, arguments["initial_state"])

    def _call(self, request: PrefillRequest, plan: _Plan, arguments: dict):
        function = _gated_delta_net()
        shape = (
            request.device, request.q.shape, request.k.shape, request.v.shape, request.q.dtype, request.num_seqs,
            request.use_qk_l2norm, request.final_state is None, request.initial_state is None, plan,
        )  # fmt: skip
        if shape in self._known:
            return function(**arguments)[:2]
        if plan.engine == CUTILE:
            self._announce()
        # The tuner prints its progress; nothing else may be lost, so only Python's own standard output is held back.
        printed = io.StringIO()
        try:
            with self._lock, contextlib.redirect_stdout(printed):
                result = function(**arguments)[:2]
        finally:
            if printed.getvalue().strip():
                logger.debug("cudnn, first call of a shape: %s", printed.getvalue().replace("\r", "\n").strip())
        self._known.add(shape)
        return result

    def _announce(self) -> None:
        if self._announced:
            return
        self._announced = True
        warnings.warn(
            "cuDNN's cuTile engine tunes itself on the first call of each shape, which takes many seconds; its "
            "progress goes to the logger 'gdn_multi' at level DEBUG",
            RuntimeWarning,
            stacklevel=2,
        )


def _gate(request: PrefillRequest, convert: bool) -> torch.Tensor:
    if request.gate == "none":
        return torch.zeros(request.num_tokens, request.num_heads, dtype=torch.float32, device=request.device)
    g = request.g
    if not convert:
        if request.gate == "raw":
            return g.contiguous()
        return g.clamp_min(LOG_ZERO).contiguous()  # log alpha of -inf
    if request.gate == "raw":
        rate = torch.exp(request.A_log.float())
        log_alpha = -rate * torch.nn.functional.softplus(g.float() + request.dt_bias.float())
    else:
        log_alpha = torch.log(g)
    return log_alpha.clamp_min_(LOG_ZERO).contiguous()


def _beta(request: PrefillRequest, convert: bool) -> torch.Tensor:
    if request.beta is None:
        return torch.ones(request.num_tokens, request.num_heads, dtype=torch.float32, device=request.device)
    if convert:
        return torch.sigmoid(request.beta.float()).to(request.beta.dtype).contiguous()
    return request.beta.contiguous()


def _initial_states(request: PrefillRequest, dtype: torch.dtype) -> torch.Tensor | None:
    """[N, Ho, V, K], dense, of ``dtype``, or None for zero states."""
    states = request.initial_state
    if states is None:
        return None
    if request.read_rows is None:
        states = states.to(dtype).contiguous()
    else:
        rows = request.read_rows.long()
        if states.dtype.itemsize == 1:  # float8 has no gather of its own
            gathered = states.view(torch.uint8)[rows.clamp_min(0)].view(states.dtype)
        else:
            gathered = states[rows.clamp_min(0)]
        zero = torch.zeros((), dtype=dtype, device=states.device)
        states = torch.where((rows >= 0)[:, None, None, None], gathered.to(dtype), zero)
    if states.data_ptr() % 16:
        states = states.clone()
    return states


def _store_output(request: PrefillRequest, output: torch.Tensor) -> None:
    """Copy the rows of tokens that belong to a sequence; the others are zero or stay."""
    if request.covers_all_tokens:
        request.output.copy_(output)
        return
    token = torch.arange(request.num_tokens, device=request.device)
    inside = ((token >= request.cu_seqlens[0]) & (token < request.cu_seqlens[-1]))[:, None, None]
    rest = torch.zeros((), dtype=output.dtype, device=output.device) if request.output_is_new else request.output
    request.output.copy_(torch.where(inside, output, rest))


def _rounded(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 1:  # to float8: saturate, which a plain conversion does not
        limit = torch.finfo(dtype).max
        states = states.clamp(-limit, limit)
    return states.to(dtype)


def _store_states(request: PrefillRequest, states: torch.Tensor, initial: torch.Tensor | None) -> None:
    """Put the final states where they belong, without a synchronization and without touching another row."""
    target = request.final_state
    has_tokens = request.cu_seqlens[1:] > request.cu_seqlens[:-1]
    if request.final_state_is_new and request.write_rows is None:
        if request.may_have_empty_sequences:  # a zero-length sequence returns its initial state
            rest = torch.zeros((), dtype=states.dtype, device=states.device) if initial is None else initial
            states = torch.where(has_tokens[:, None, None, None], states, rest)
        target.copy_(_rounded(states, target.dtype))
        return
    states = _rounded(states, target.dtype)
    if target.dtype.itemsize == 1:  # float8 has no selection of its own
        states, target = states.view(torch.uint8), target.view(torch.uint8)
    if request.write_rows is None:
        if request.may_have_empty_sequences:
            states = torch.where(has_tokens[:, None, None, None], states, target)
        target.copy_(states)
        return
    # A sequence that writes nothing repeats what a writing one does, same row and same value; if no sequence
    # writes, all of them put a row's own contents back.
    rows = request.write_rows.long()
    writes = has_tokens & (rows >= 0)
    source = torch.where(writes, torch.arange(rows.shape[0], device=rows.device), writes.int().argmax())
    rows = rows.clamp_min(0)[source]
    values = torch.where(writes.any(), states[source], target[rows])
    target.index_put_((rows,), values)
