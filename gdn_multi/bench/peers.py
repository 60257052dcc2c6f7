"""The calls of other packages, each in the form that its own users would write.

Layouts and gate domains that a peer wants are prepared before the clock starts. A peer that is not installed, or that
fails, becomes a note in the table.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Sequence
from importlib import metadata

import torch

from .calls import Call, Contender, Unavailable
from .inputs import DecodeInputs, PrefillInputs
from .ours import decode_reset_and_read, paged_reset_and_read

#: Distribution behind each module, for the versions in the report.
DISTRIBUTIONS = {
    "fla": "flash-linear-attention",
    "flashinfer": "flashinfer-python",
    "flash_qla": "flash-qla",
    "cudnn": "nvidia-cudnn-frontend",
}


def _module(name: str, module: str):
    """``module``, or Unavailable with the reason."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken installation raises anything
        raise Unavailable(f"{DISTRIBUTIONS[name]}: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else ""


def _need_gpu(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cuda":
        raise Unavailable("needs a GPU")


def _returned(transposed: bool, outputs: list, reset=lambda: None) -> tuple:
    """``read`` and ``reset`` for a peer that returns fresh (output [1, T, H, V], state)."""

    def read():
        output, state = outputs[0]
        if output.dim() == 4:
            output = output[0]
        return output, state.transpose(-1, -2) if transposed else state

    def forget():
        outputs[0] = None
        reset()

    return read, forget


# --- FLA ---------------------------------------------------------------------------------------------------------


def _fla_prefill(inputs: PrefillInputs, model: bool = False) -> Call:
    _need_gpu(inputs.q)
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")  # its own Triton kernels, not another peer's
    function = _module("fla", "fla.ops.gated_delta_rule").chunk_gated_delta_rule
    outputs = [None]
    keywords = dict(
        scale=inputs.scale, initial_state=inputs.initial_state_kv, output_final_state=True,
        cu_seqlens=inputs.cu_seqlens_64,
    )  # fmt: skip
    if model:
        if inputs.a is None:
            raise Unavailable("these gates were drawn as alpha, there are no raw ones")
        tensors = [x.unsqueeze(0) for x in (inputs.q_raw, inputs.k_raw, inputs.v, inputs.a, inputs.b)]
        keywords.update(
            use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_gate_in_kernel=True,
            A_log=inputs.A_log, dt_bias=inputs.dt_bias,
        )  # fmt: skip
    else:
        tensors = [x.unsqueeze(0) for x in (inputs.q, inputs.k, inputs.v, inputs.log_alpha, inputs.beta)]

    def run():
        outputs[0] = function(*tensors, **keywords)

    read, reset = _returned(True, outputs)
    return Call(run, read, reset)


def _fla_decode(inputs: DecodeInputs) -> Call:
    _need_gpu(inputs.q)
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
    function = _module("fla", "fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    outputs, state = [None], inputs.states.transpose(-1, -2).contiguous()

    def run():
        outputs[0] = function(
            inputs.q, inputs.k, inputs.v, g=inputs.a, beta=inputs.b, scale=inputs.scale, initial_state=state,
            output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=inputs.A_log,
            dt_bias=inputs.dt_bias, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip

    def read():
        output, after = outputs[0]
        return output, after.transpose(-1, -2)

    return Call(run, read, note="one state a sequence, written to a new float32 tensor")


# --- FlashInfer --------------------------------------------------------------------------------------------------


def _flashinfer_prefill(inputs: PrefillInputs, form: str) -> Call:
    _need_gpu(inputs.q)
    function = _module("flashinfer", "flashinfer.gdn_prefill").chunk_gated_delta_rule
    keywords = dict(
        scale=inputs.scale, initial_state=inputs.initial_state, output_final_state=True, cu_seqlens=inputs.cu_seqlens,
        output=inputs.output, output_state=inputs.final_state, max_seqlen=inputs.max_seqlen,
        use_cp={"native": False, "cp": True}.get(form, "auto"),
    )  # fmt: skip
    tensors = (inputs.q, inputs.k, inputs.v, inputs.alpha, inputs.beta)
    if form == "model":
        if inputs.a is None:
            raise Unavailable("these gates were drawn as alpha, there are no raw ones")
        tensors = (inputs.q_raw, inputs.k_raw, inputs.v, inputs.a, inputs.b)
        keywords.update(
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=inputs.A_log, dt_bias=inputs.dt_bias,
            beta_is_logit=True,
        )  # fmt: skip

    def reset():
        inputs.output.fill_(float("nan"))
        inputs.final_state.fill_(float("nan"))

    return Call(lambda: function(*tensors, **keywords), lambda: (inputs.output, inputs.final_state), reset)


def _flashinfer_paged_prefill(inputs: PrefillInputs, slots: bool) -> Call:
    _need_gpu(inputs.q)
    module, pages = _module("flashinfer", "flashinfer.gdn_paged"), inputs.pages
    table = dict(
        page_indices=pages.page_indices, page_indptr=pages.page_indptr, page_size=pages.page_size,
        last_page_len=pages.last_page_len,
    )  # fmt: skip
    made = module.gdn_paged_prefill_slots(inputs.cu_seqlens, **table) if slots else None

    def run():
        module.chunk_gated_delta_rule_paged(
            inputs.q, inputs.k, inputs.v, inputs.alpha, inputs.beta, inputs.scale, cu_seqlens=inputs.cu_seqlens,
            state_pool=pages.pool, output=inputs.output, slots=made, **table,
        )  # fmt: skip

    reset, read = paged_reset_and_read(inputs)
    return Call(run, read, reset)


def _flashinfer_decode(inputs: DecodeInputs, form: str) -> Call:
    _need_gpu(inputs.q)
    pages = inputs.pages
    tensors = (inputs.q, inputs.k, inputs.v)
    gates = (inputs.A_log, inputs.a, inputs.dt_bias, inputs.b, inputs.scale)
    if form == "pool":
        function = _module("flashinfer", "flashinfer.gdn_decode").gated_delta_rule_decode_pretranspose
        arguments = tensors + (None,) + gates
        keywords = dict(
            initial_state=pages.pool, initial_state_indices=inputs.read_rows, output_state_indices=inputs.write_rows
        )
    else:
        module = _module("flashinfer", "flashinfer.gdn_paged")
        function = module.gated_delta_rule_decode_paged
        arguments = tensors + gates
        table = dict(page_indices=pages.page_indices, page_indptr=pages.page_indptr, last_page_len=pages.last_page_len)
        keywords = dict(table, state_pool=pages.pool)
        if form == "slots":
            keywords["slots"] = module.gdn_paged_decode_slots(**table)
    keywords.update(output=inputs.output, use_qk_l2norm=True)
    reset, read = decode_reset_and_read(inputs)
    return Call(lambda: function(*arguments, **keywords), read, reset)


# --- FlashQLA ----------------------------------------------------------------------------------------------------


def _flash_qla_prefill(inputs: PrefillInputs) -> Call:
    _need_gpu(inputs.q)
    function = _module("flash_qla", "flash_qla").chunk_gated_delta_rule
    outputs = [None]
    tensors = [x.unsqueeze(0) for x in (inputs.q, inputs.k, inputs.v, inputs.log_alpha, inputs.beta)]

    def run():
        outputs[0] = function(
            *tensors, scale=inputs.scale, initial_state=inputs.initial_state_kv, output_final_state=True,
            cu_seqlens=inputs.cu_seqlens,
        )  # fmt: skip

    read, reset = _returned(True, outputs)
    return Call(run, read, reset)


# --- cuDNN -------------------------------------------------------------------------------------------------------


def _cudnn_prefill(inputs: PrefillInputs) -> Call:
    _need_gpu(inputs.q)
    function = _module("cudnn", "cudnn.linear_attention").gated_delta_net
    outputs, quiet = [None], [True]

    def call():
        outputs[0] = function(
            inputs.q, inputs.k, inputs.v, inputs.log_alpha, inputs.beta, inputs.cu_seqlens, scale=inputs.scale,
            initial_state=inputs.initial_state, output_final_state=True,
        )  # fmt: skip

    def run():
        if quiet[0]:  # it prints while it tunes itself, which the first call of a shape does
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                call()
            quiet[0] = False
        else:
            call()

    read, reset = _returned(False, outputs)
    return Call(run, read, reset)


# --- the list ----------------------------------------------------------------------------------------------------

_ALL = (
    Contender("flashinfer", False, lambda i: _flashinfer_prefill(i, "native"), title="FlashInfer native"),
    Contender("flashinfer-cp", False, lambda i: _flashinfer_prefill(i, "cp"), title="FlashInfer CP"),
    Contender(
        "flashinfer-paged", False, lambda i: _flashinfer_paged_prefill(i, False),
        lambda i: _flashinfer_decode(i, "paged"), title="FlashInfer paged", counts_as_best=False,
    ),
    Contender(
        "flashinfer-slots", False, lambda i: _flashinfer_paged_prefill(i, True),
        lambda i: _flashinfer_decode(i, "slots"), title="FlashInfer paged, slots", counts_as_best=False,
    ),
    Contender(
        "flashinfer-pool", False, None, lambda i: _flashinfer_decode(i, "pool"), title="FlashInfer pool",
    ),
    Contender(
        "flashinfer-model", False, lambda i: _flashinfer_prefill(i, "model"), title="FlashInfer as a model",
        counts_as_best=False,
    ),
    Contender("flash_qla", False, _flash_qla_prefill, title="FlashQLA"),
    Contender("fla", False, _fla_prefill, _fla_decode, title="FLA"),
    Contender(
        "fla-model", False, lambda i: _fla_prefill(i, True), title="FLA as a model", counts_as_best=False,
    ),
    Contender("cudnn-frontend", False, _cudnn_prefill, title="cuDNN"),
)  # fmt: skip
PEERS: dict[str, Contender] = {peer.name: peer for peer in _ALL}

#: Without the peers that repeat another one in a different form, and without cuDNN, which tunes itself for a long
#: time on each shape.
DEFAULT = ("flashinfer", "flashinfer-cp", "flashinfer-paged", "flashinfer-slots", "flash_qla", "fla")


def contenders(names: Sequence[str], cudnn_rows: Sequence[str] | None = None) -> list[Contender]:
    """The peers of that name; ``default`` and ``all`` stand for lists, ``none`` for nothing."""
    chosen: list[str] = []
    for name in names:
        if name == "none":
            continue
        expanded = DEFAULT if name == "default" else tuple(PEERS) if name == "all" else (name,)
        for each in expanded:
            if each not in PEERS:
                raise ValueError(f"unknown peer {each!r}; there are {', '.join(PEERS)}, default, all and none")
            if each not in chosen:
                chosen.append(each)
    peers = [PEERS[name] for name in chosen]
    if cudnn_rows is not None:
        for peer in peers:
            if peer.name == "cudnn-frontend":
                peer.only_rows = tuple(cudnn_rows)
    return peers


def versions() -> dict[str, str]:
    """Installed versions of the peers and of what they and we run on."""
    found = {}
    for name in (*DISTRIBUTIONS.values(), "torch", "triton", "nvidia-cutlass-dsl", "cuda-tile", "tilelang"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found
