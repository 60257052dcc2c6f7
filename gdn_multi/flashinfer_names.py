"""Functions of FlashInfer's GDN modules that are not here, for code that imports this package in its place."""

from __future__ import annotations

from typing import NoReturn

_OTHER = "which is another recurrence; there is nothing for it here"
_FUSED = "which does more than the recurrence; there is nothing for it here"

NOT_SERVED = {
    "gated_delta_rule_decode": "whose states are K-major, [B, HV, K, V]; gated_delta_rule_decode_pretranspose takes V-major ones, "
    "[B, HV, V, K]",
    "gated_delta_rule_decode_kv": "whose states are K-major, [B, HV, K, V]; gated_delta_rule_decode_pretranspose takes V-major ones, "
    "[B, HV, V, K]",
    "gated_delta_rule_mtp": "instead of which gated_delta_rule_decode_pretranspose takes T > 1 tokens: with state=None, initial_state=, "
    "initial_state_indices=, intermediate_states_buffer= and disable_state_update=True, which is the default there and not here",
    "chunk_gated_delta_rule2": _OTHER,
    "chunk_gated_delta_product": _OTHER,
    "gated_delta_product_mtp": _OTHER,
    "gdn_fused_decode_step": _FUSED,
    "gdn_fused_decode_step_supported": _FUSED,
}


def missing(module: str, name: str) -> NoReturn:
    """The AttributeError of a name that ``module`` has not."""
    message = f"module {module!r} has no attribute {name!r}"
    if name in NOT_SERVED:
        message += f": a function of FlashInfer's, {NOT_SERVED[name]} (docs/contract.md, FlashInfer)"
    raise AttributeError(message, name=name)
