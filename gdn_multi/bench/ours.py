"""The calls of this library that are measured: ``backend`` or ``backend:variant``.

plain   alpha, beta, normalised q and k; one state a sequence in, one out (decode: a pool with row indices)
paged   the same through a page table, rows derived by the call
slots   the same with the rows computed beforehand, as for every layer of a step
model   as a model makes it: raw gates, logits and unnormalised q and k, one state a sequence
model-slots   the same through a page table with rows computed beforehand
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .calls import Call, Contender, Unavailable
from .inputs import DecodeInputs, PrefillInputs

VARIANTS = ("plain", "paged", "slots", "model", "model-slots")
DEFAULT_VARIANTS = ("plain", "paged", "slots", "model")


def contenders(backends: Sequence[str], variants: Sequence[str]) -> list[Contender]:
    """``backends`` may name a variant themselves (``cuda:model``); the others get ``variants``."""
    made = []
    for name in backends:
        backend, _, variant = name.partition(":")
        for which in [variant] if variant else variants:
            if which not in VARIANTS:
                raise ValueError(f"unknown variant {which!r} of {backend!r}; there are {', '.join(VARIANTS)}")
            has_decode = which in ("plain", "paged", "slots")
            made.append(
                Contender(
                    name=backend if which == "plain" else f"{backend}:{which}",
                    is_ours=True,
                    prefill=lambda inputs, b=backend, w=which: _prefill(inputs, b, w),
                    decode=(lambda inputs, b=backend, w=which: _decode(inputs, b, w)) if has_decode else None,
                )
            )
    return made


def _refused(explanation, backend: str) -> None:
    against = explanation.reasons.get(backend, ())
    if against:
        raise Unavailable("; ".join(against))


def _prefill(inputs: PrefillInputs, backend: str, variant: str) -> Call:
    import gdn_multi

    if backend not in gdn_multi.registered_backends():
        raise Unavailable(f"no backend named {backend!r}")
    raw, v = variant.startswith("model"), inputs.v
    if raw and inputs.a is None:
        raise Unavailable("these gates were drawn as alpha, there are no raw ones")
    keywords = dict(scale=inputs.scale, output=inputs.output, backend=backend, cu_seqlens=inputs.cu_seqlens)
    if raw:
        q, k, g, beta = inputs.q_raw, inputs.k_raw, inputs.a, inputs.b
        keywords.update(
            use_gate_in_kernel=True, A_log=inputs.A_log, dt_bias=inputs.dt_bias, beta_is_logit=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
    else:
        q, k, g, beta = inputs.q, inputs.k, inputs.alpha, inputs.beta
    if variant in ("plain", "model"):
        keywords.update(
            initial_state=inputs.initial_state, output_final_state=True, output_state=inputs.final_state,
            max_seqlen=inputs.max_seqlen,
        )  # fmt: skip
        function = gdn_multi.chunk_gated_delta_rule

        def reset():
            inputs.output.fill_(float("nan"))
            inputs.final_state.fill_(float("nan"))

        def read():
            return inputs.output, inputs.final_state
    else:
        pages = inputs.pages
        table = dict(
            page_indices=pages.page_indices, page_indptr=pages.page_indptr, page_size=pages.page_size,
            last_page_len=pages.last_page_len,
        )  # fmt: skip
        slots = None
        if variant.endswith("slots"):
            slots = gdn_multi.gdn_paged_prefill_slots(inputs.cu_seqlens, **table)
        keywords.update(table, state_pool=pages.pool, slots=slots, max_seqlen=inputs.max_seqlen)
        function = gdn_multi.chunk_gated_delta_rule_paged
        reset, read = paged_reset_and_read(inputs)

    _refused(gdn_multi.explain(function, q, k, v, g, beta, **keywords), backend)
    return Call(run=lambda: function(q, k, v, g, beta, **keywords), read=read, reset=reset)


def paged_reset_and_read(inputs: PrefillInputs):
    """For a call that reads and writes ``inputs.pages``: only the pages of the initial states hold numbers."""
    pages = inputs.pages
    kept = torch.tensor(pages.read, device=pages.pool.device)
    last = torch.tensor(pages.last, device=pages.pool.device)

    def reset():
        inputs.output.fill_(float("nan"))
        pages.pool.fill_(float("nan"))
        pages.pool[kept] = inputs.initial_state

    def read():
        return inputs.output, pages.pool[last]

    return reset, read


def decode_reset_and_read(inputs: DecodeInputs):
    pages = inputs.pages
    read_rows, write_rows = inputs.read_rows.long(), inputs.write_rows.long()

    def reset():
        inputs.output.fill_(float("nan"))
        pages.pool.fill_(float("nan"))
        pages.pool[read_rows] = inputs.states

    def read():
        return inputs.output, pages.pool[write_rows]

    return reset, read


def _decode(inputs: DecodeInputs, backend: str, variant: str) -> Call:
    import gdn_multi

    if backend not in gdn_multi.registered_backends():
        raise Unavailable(f"no backend named {backend!r}")
    pages = inputs.pages
    q, k, v = inputs.q, inputs.k, inputs.v
    common = dict(scale=inputs.scale, output=inputs.output, use_qk_l2norm=True, backend=backend)
    gates = (inputs.A_log, inputs.a, inputs.dt_bias, inputs.b)
    if variant == "plain":
        function = gdn_multi.gated_delta_rule_decode_pretranspose
        arguments = (q, k, v, None) + gates
        common.update(
            initial_state=pages.pool, initial_state_indices=inputs.read_rows, output_state_indices=inputs.write_rows
        )
    else:
        function = gdn_multi.gated_delta_rule_decode_paged
        arguments = (q, k, v) + gates
        table = dict(page_indices=pages.page_indices, page_indptr=pages.page_indptr, last_page_len=pages.last_page_len)
        slots = gdn_multi.gdn_paged_decode_slots(**table) if variant == "slots" else None
        common.update(table, state_pool=pages.pool, slots=slots)
    _refused(gdn_multi.explain(function, *arguments, **common), backend)
    reset, read = decode_reset_and_read(inputs)
    return Call(run=lambda: function(*arguments, **common), read=read, reset=reset)
