"""FlashInfer's GDN kernels, through an installed flashinfer-python.

Two backends over one adapter: ``flashinfer`` (its native kernels, context-parallel ones included) and ``cake_gdn`` (its
generated kernels for sm_100a, sm_103a and sm_107a). A request goes to FlashInfer's public functions as it is; what they
cannot serve by the contract is refused here, before anything is launched. Neither is part of the automatic choice.

What is converted, each exact: strided or non-float32 gates and gate weights become dense float32 tensors of the same
values (``detail`` says so); state rows that the call must not write become write rows of -1.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from importlib import metadata
from typing import Any

import torch

from gdn_multi.backend import Backend, Reasons
from gdn_multi.request import DecodeRequest, PrefillRequest, Request, SlotsRequest

#: The first version whose functions have the slot arguments and the page functions.
MIN_VERSION = (0, 7, 4)
INSTALL = 'pip install "flashinfer-python[cu13]>=0.7.4"'

_HALF = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FP8 = tuple(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name))


def _numbers(version: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in version.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


@functools.cache
def _package() -> str:
    """Why FlashInfer cannot be imported; empty when it can."""
    if importlib.util.find_spec("flashinfer") is None:
        return f"flashinfer-python is not installed: {INSTALL}"
    try:
        version = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        version = ""
    if version and _numbers(version) < MIN_VERSION:
        return f"flashinfer-python {version} is too old, 0.7.4 is needed: {INSTALL}"
    if importlib.util.find_spec("cutlass") is None:
        return f"flashinfer-python is installed, but nvidia-cutlass-dsl, which its GDN kernels need, is not: {INSTALL}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in ("gdn_prefill", "gdn_decode", "gdn_paged"):
                importlib.import_module(f"flashinfer.{module}")
    except Exception as error:  # a half-installed dependency raises anything
        return f"flashinfer-python cannot be imported: {type(error).__name__}: {error}: {INSTALL}"
    return ""


def _function(module: str, name: str):
    return getattr(importlib.import_module(f"flashinfer.{module}"), name)


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _capability_of(device: torch.device) -> tuple[int, int]:
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dense_rows(pool: torch.Tensor) -> bool:
    _, _, v, k = pool.shape
    return pool.stride()[1:] == (v * k, k, 1)


def _same_tensor(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype)


class FlashInferBackend(Backend):
    name = "flashinfer"
    priority = None
    summary = "an installed flashinfer-python: its native and context-parallel kernels (sm_80 to sm_120)"

    #: What FlashInfer calls it.
    _backend = "flashinfer"
    _prefill_majors = (8, 9, 10, 12)

    def reasons_unusable(self, device: torch.device) -> Reasons:
        if device.type != "cuda":
            return (f"needs an NVIDIA GPU, the tensors are on {device.type}",)
        if torch.version.cuda is None:
            return ("needs a CUDA build of torch, this one has none: pip install torch from a CUDA index",)
        reason = _package()
        if reason:
            return (reason,)
        return self._device_reasons(_capability_of(device))

    def _device_reasons(self, capability: tuple[int, int]) -> Reasons:
        if capability[0] not in self._prefill_majors:
            return (f"FlashInfer has GDN kernels for sm_80 to sm_120, this GPU is sm_{capability[0]}{capability[1]}",)
        return ()

    def reasons_against(self, request: Request) -> Reasons:
        if isinstance(request, SlotsRequest):
            return ()
        reasons: list[str] = []
        if request.batch_invariant:
            reasons.append("FlashInfer does not promise batch invariance, which GDN_MULTI_BATCH_INVARIANT=1 asks for")
        if request.head_size_k != 128 or request.head_size_v != 128:
            reasons.append(f"serves K = V = 128 only, got K = {request.head_size_k}, V = {request.head_size_v}")
        for name in ("q", "k", "v", "output"):
            if not getattr(request, name).is_contiguous():
                reasons.append(f"{name} must be contiguous, got strides {tuple(getattr(request, name).stride())}")
        own = self._against_prefill if isinstance(request, PrefillRequest) else self._against_decode
        return tuple(reasons + own(request))

    # --- prefill -----------------------------------------------------------------------------

    def _needs_slots(self, request: PrefillRequest) -> bool:
        """Whether the call must go through the slot arguments, which say exactly which rows are written."""
        if request.pages is not None or request.slot_arguments or request.is_paged:
            return True
        if request.read_rows is not None or request.write_rows is not None:
            return True
        given = request.final_state is not None and not request.final_state_is_new
        return given and request.may_have_empty_sequences

    def _against_prefill(self, request: PrefillRequest) -> list[str]:
        reasons: list[str] = []
        if request.q.dtype not in _HALF:
            reasons.append(f"serves bfloat16 and float16 inputs, got {_name(request.q.dtype)}")
        if request.num_tokens == 0:
            reasons.append("there are no tokens, and its kernels are not launched on none")
        if request.scale == 0:
            reasons.append("scale = 0 means the default scale to FlashInfer")
        states = [("initial_state", request.initial_state), ("output_state", request.final_state)]
        states.append(("state_checkpoints", request.state_checkpoints))
        states = [(name, state) for name, state in states if state is not None]
        if len({state.dtype for _, state in states}) > 1:
            found = ", ".join(f"{name} {_name(state.dtype)}" for name, state in states)
            reasons.append(f"all states must have one dtype, got {found}")
        for name, state in states:
            if not _dense_rows(state):
                reasons.append(f"{name} rows must be dense [H, V, K] blocks, got strides {tuple(state.stride())}")
        if request.device.type == "cuda" and _capability_of(request.device)[0] == 8:
            if any(state.dtype in _FP8 for _, state in states):
                reasons.append("float8 states need sm_90 or newer in FlashInfer")
        checkpoints = request.state_checkpoints
        if checkpoints is not None and request.checkpoint_rows is None and request.pages is None:
            if not checkpoints.is_contiguous():
                reasons.append("state_checkpoints without checkpoint_state_indices must be contiguous")
        if request.use_cp is True:
            if self._needs_slots(request):
                reasons.append(
                    "use_cp=True excludes state pools and given output_state buffers (cu_seqlens_cpu can rule out the "
                    "zero-length sequences that make the latter a problem)"
                )
            if any(state.dtype in _FP8 for _, state in states):
                reasons.append("use_cp=True does not serve float8 states")
            if any(not state.is_contiguous() for _, state in states):
                reasons.append("use_cp=True needs contiguous states")
        return reasons

    def detail(self, request: Request) -> str:
        if isinstance(request, SlotsRequest):
            return "FlashInfer's row kernel"
        if isinstance(request, DecodeRequest):
            parts = [f"{_name(request.state.dtype)}-state kernel"]
        elif request.use_cp is True:
            parts = ["context-parallel kernels"]
        elif self._needs_slots(request):
            parts = ["native kernel, one CTA a head and sequence: a state pool excludes the context-parallel kernels"]
        elif request.use_cp is False:
            parts = ["native kernel"]
        else:
            parts = ["native or context-parallel kernel, as FlashInfer's heuristic says"]
        parts += self._conversions(request)
        return "; ".join(parts)

    def _conversions(self, request: Request) -> list[str]:
        if isinstance(request, DecodeRequest):
            weights = [n for n in ("A_log", "dt_bias") if getattr(request, n).dtype not in self._weight_dtypes[n]]
            strided = [n for n in ("a", "b", "A_log", "dt_bias") if not getattr(request, n).is_contiguous()]
        else:
            weights = []
            strided = [n for n in ("g", "beta") if (t := getattr(request, n)) is not None and not t.is_contiguous()]
        said = []
        if weights:
            said.append(f"{', '.join(weights)} converted to float32")
        if strided:
            said.append(f"{', '.join(strided)} copied to be contiguous")
        if isinstance(request, PrefillRequest) and request.output_is_new and not request.covers_all_tokens:
            said.append("output zeroed first, for tokens outside the sequences")
        if isinstance(request, PrefillRequest) and request.final_state_is_new and request.may_have_empty_sequences:
            said.append("initial states copied to the final ones first, for zero-length sequences")
        return said

    def prefill(self, request: PrefillRequest) -> None:
        if request.pages is not None:
            request = self.with_slots(request)
        with torch.inference_mode():  # tensors made under it can be written only there
            if request.output_is_new and not request.covers_all_tokens:
                request.output.zero_()
            if request.final_state_is_new and request.may_have_empty_sequences:  # what a zero-length sequence returns
                if request.initial_state is None:
                    request.final_state.zero_()
                else:
                    request.final_state.copy_(request.initial_state)
        arguments: dict[str, Any] = dict(
            q=request.q,
            k=request.k,
            v=request.v,
            g=None if request.g is None else request.g.contiguous(),
            beta=None if request.beta is None else request.beta.contiguous(),
            scale=request.scale,
            cu_seqlens=request.cu_seqlens,
            use_qk_l2norm_in_kernel=request.use_qk_l2norm,
            output=request.output,
            initial_state=request.initial_state,
            output_final_state=request.final_state is not None,
            output_state=request.final_state,
            backend=self._backend,
            use_cp=request.use_cp,
            gate_domain="log" if request.gate == "log" else "linear",
            use_gate_in_kernel=request.gate == "raw",
            A_log=request.A_log,
            dt_bias=request.dt_bias,
            beta_is_logit=request.beta_is_logit,
            cu_seqlens_cpu=request.cu_seqlens_cpu if request.covers_all_tokens else None,
        )
        shortest = -(-request.num_tokens // request.num_seqs)  # its own lower bound on max_seqlen
        arguments["max_seqlen"] = min(max(request.max_seqlen, shortest), request.num_tokens)
        if request.checkpoint_every:
            arguments.update(
                state_checkpoints=request.state_checkpoints,
                checkpoint_cu_starts=request.checkpoint_starts,
                checkpoint_every_n_tokens=request.checkpoint_every,
                checkpoint_state_indices=request.checkpoint_rows,
                prefix_lens=request.prefix_lens,
            )
        if self._needs_slots(request):
            arguments.update(self._rows(request), use_cp=False)
        _function("gdn_prefill", "chunk_gated_delta_rule")(**arguments)

    def _rows(self, request: PrefillRequest) -> dict[str, Any]:
        """Read and write rows as slot arguments: they alone promise that nothing else is written."""
        own = None

        def sequence_order() -> torch.Tensor:
            nonlocal own
            if own is None:
                own = torch.arange(request.num_seqs, dtype=torch.int32, device=request.device)
            return own

        read = request.read_rows
        if request.final_state is None:
            if request.initial_state is None:
                return {}
            nothing = torch.full((request.num_seqs,), -1, dtype=torch.int32, device=request.device)
            return dict(
                state_indices=sequence_order() if read is None else read,
                output_state_indices=nothing,
                output_state=request.initial_state,
                output_final_state=True,
            )
        write = request.write_rows
        return dict(
            state_indices=sequence_order() if read is None else read,
            output_state_indices=sequence_order() if write is None else write,
        )

    # --- decode ------------------------------------------------------------------------------

    _weight_dtypes = {"A_log": (torch.float32,), "dt_bias": (torch.float32, torch.bfloat16)}
    _decode_majors = (9, 10, 12)

    def _against_decode(self, request: DecodeRequest) -> list[str]:
        reasons: list[str] = []
        state = request.state
        if request.device.type == "cuda":
            major, minor = _capability_of(request.device)
            if major not in self._decode_majors:
                reasons.append(f"its decode kernels need sm_90 or newer, this GPU is sm_{major}{minor}")
        if request.q.dtype != torch.bfloat16:
            reasons.append(f"its decode kernels write bfloat16, got {_name(request.q.dtype)} inputs")
        if state.dtype not in (torch.float32, torch.bfloat16):
            reasons.append(f"serves float32 and bfloat16 states in decode, got {_name(state.dtype)}")
        for name in ("a", "b"):
            if getattr(request, name).dtype not in _HALF:
                reasons.append(f"{name} must be bfloat16 or float16, got {_name(getattr(request, name).dtype)}")
        if not _dense_rows(state):
            reasons.append(f"state rows must be dense [HV, V, K] blocks, got strides {tuple(state.stride())}")
        indexed = request.read_rows is not None or request.pages is not None
        if not indexed and not state.is_contiguous():
            reasons.append(f"a state without row indices must be contiguous, got strides {tuple(state.stride())}")
        if request.read_rows is not None and not request.is_paged:
            both_padded = state.dtype == torch.float32 and _same_tensor(request.read_rows, request.write_rows)
            if not both_padded or request.num_tokens > 1:
                reasons.append(
                    "a negative row index would read and write row 0 in its kernels, and the contract makes it padding "
                    "(it is served for T = 1 with float32 states where the read rows are the write rows)"
                )
        if request.num_tokens == 1:
            if request.intermediate_states is not None:
                reasons.append("intermediate_states_buffer is served for T > 1 only")
            if not request.update_state:
                reasons.append("disable_state_update is served for T > 1 only")
        elif state.dtype == torch.float32 and not indexed:
            reasons.append("float32 states with T > 1 need a pool with row indices")
        return reasons

    def decode(self, request: DecodeRequest) -> None:
        request = self.with_slots(request)
        weights = {n: getattr(request, n).contiguous() for n in ("A_log", "dt_bias")}
        for name, dtypes in self._weight_dtypes.items():
            if weights[name].dtype not in dtypes:
                weights[name] = weights[name].float()
        arguments: dict[str, Any] = dict(
            q=request.q,
            k=request.k,
            v=request.v,
            state=None,
            a=request.a.contiguous(),
            b=request.b.contiguous(),
            scale=request.scale,
            output=request.output,
            use_qk_l2norm=request.use_qk_l2norm,
            backend=self._backend,
            **weights,
        )
        if request.read_rows is None:
            arguments["state"] = request.state
        else:
            arguments.update(
                initial_state=request.state,
                initial_state_indices=request.read_rows,
                output_state_indices=request.write_rows,
            )
        if request.num_tokens > 1:
            arguments["disable_state_update"] = not request.update_state
            arguments["intermediate_states_buffer"] = request.intermediate_states
        output, _ = _function("gdn_decode", "gated_delta_rule_decode_pretranspose")(**arguments)
        if output.data_ptr() != request.output.data_ptr():
            with torch.inference_mode():
                request.output.copy_(output)

    # --- rows of a page table ----------------------------------------------------------------

    def page_slots(self, request: SlotsRequest) -> None:
        """Its kernel allocates its rows, so one more launch copies them to where they are wanted."""
        table = request.table
        if request.is_prefill:
            rows = _function("gdn_paged", "gdn_paged_prefill_slots")(
                request.cu_seqlens, table.page_indices, table.page_indptr, table.page_size, table.last_page_len
            )
        else:
            rows = _function("gdn_paged", "gdn_paged_decode_slots")(
                table.page_indices, table.page_indptr, table.last_page_len
            )
        torch._foreach_copy_(list(request.out), list(rows))


class CakeGDNBackend(FlashInferBackend):
    name = "cake_gdn"
    priority = None
    summary = "an installed flashinfer-python: its generated kernels (sm_100a, sm_103a, sm_107a), no slot arguments"

    _backend = "cake_gdn"
    _architectures = ((10, 0), (10, 3), (10, 7))

    def _device_reasons(self, capability: tuple[int, int]) -> Reasons:
        if capability not in self._architectures:
            return (
                f"its kernels exist for sm_100a, sm_103a and sm_107a, this GPU is sm_{capability[0]}{capability[1]}",
            )
        module = importlib.import_module("flashinfer.gdn_prefill")
        if not getattr(module, "_CAKE_GDN_AVAILABLE", True):
            return (f"this flashinfer-python comes without the Cake GDN kernels: {INSTALL}",)
        return ()

    def reasons_against(self, request: Request) -> Reasons:
        if isinstance(request, SlotsRequest):
            return ("has no kernel for page table rows; backend 'flashinfer' has",)
        return super().reasons_against(request)

    def _against_prefill(self, request: PrefillRequest) -> list[str]:
        reasons = super()._against_prefill(request)
        if request.slot_arguments:
            reasons.append(f"rejects slot arguments, got {', '.join(request.slot_arguments)}")
        elif request.is_paged or request.pages is not None:
            reasons.append("rejects slot arguments, which a paged call stands for")
        elif self._needs_slots(request):
            reasons.append(
                "cannot promise which state rows stay untouched: give no state_indices, and leave out output_state or "
                "give cu_seqlens_cpu without zero-length sequences"
            )
        if not request.covers_all_tokens:
            reasons.append("needs sequences that cover all tokens, which cu_seqlens_cpu must say")
        if request.checkpoint_every and request.checkpoint_rows is None and request.cu_seqlens_cpu is not None:
            bounds = request.cu_seqlens_cpu
            wanted = sum((b - a) // request.checkpoint_every for a, b in zip(bounds, bounds[1:]))
            if request.state_checkpoints.shape[0] != wanted:
                reasons.append(f"state_checkpoints must have exactly {wanted} rows here")
        return reasons

    def _against_decode(self, request: DecodeRequest) -> list[str]:
        reasons = super()._against_decode(request)
        if request.is_paged or request.pages is not None:
            reasons.append("rejects page tables; backend 'flashinfer' serves them")
        elif request.read_rows is None:
            reasons.append("its decode needs a pool with row indices")
        return reasons

    def detail(self, request: Request) -> str:
        return "; ".join(["Cake kernels"] + self._conversions(request))
