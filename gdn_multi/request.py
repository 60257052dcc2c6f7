"""Requests: what a validated call means, and all that a backend sees.

The public functions check their arguments once (``validate.py``) and fill in defaults; the result is
one of the records below. A backend may rely on every statement made here and need not check again.

Conventions used on this page
    T    packed tokens            N  sequences (B for decode)
    Hq, Hk, Hv                    heads of q, k and v
    Ho = max(Hq, Hv)              heads of the output and of the state ("num_heads")
    K, V                          head sizes of q/k and of v; a state head is [V, K], K contiguous
    state head h reads q head h // (Ho // Hq), k head h // (Ho // Hk) and v head h // (Ho // Hv)

Tensors arrive as the caller gave them: q, k and v may be strided views whose last dimension is
contiguous, pools may have padded rows. Everything that the call writes (``output``, ``final_state``,
``state_checkpoints``, ``intermediate_states``) is already allocated; a backend fills it and returns
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Union

import torch

#: How ``g`` is to be read; see ``PrefillRequest.gate``.
GATES = ("none", "linear", "log", "raw")

#: Tokens of one chunk; page sizes and checkpoint intervals are multiples of it.
CHUNK = 64


@dataclass(frozen=True)
class PageTable:
    """A page table in CSR form. All tensors are 1-D, contiguous, int32 or int64, on one device.

    Sequence ``b`` owns ``page_indices[page_indptr[b]:page_indptr[b + 1]]`` and holds
    ``(pages - 1) * page_size + last_page_len[b]`` tokens after the call.
    """

    page_indices: torch.Tensor  #: [num_indices], real page ids only
    page_indptr: torch.Tensor  #: [N + 1]
    last_page_len: torch.Tensor  #: [N], in [1, page_size]
    page_size: int = 0  #: tokens a page, a positive multiple of 64; 0 for decode, which does not need it


@dataclass(frozen=True)
class SlotsRequest:
    """Derive the pool rows of a batch from its page table (contract, "Slots of a page table")."""

    function: str  #: the public function's name, for messages
    table: PageTable
    cu_seqlens: torch.Tensor | None  #: [N + 1] for a prefill; None for a decode
    #: int32 [N] each, to be filled, in the order of GDNPagedPrefillSlots (4 tensors: state_indices,
    #: output_state_indices, checkpoint_cu_starts, prefix_lens) or GDNPagedDecodeSlots (2 tensors:
    #: initial_state_indices, output_state_indices)
    out: tuple[torch.Tensor, ...]
    device: torch.device

    kind = "page_slots"

    @property
    def is_prefill(self) -> bool:
        return self.cu_seqlens is not None


@dataclass(frozen=True)
class PrefillRequest:
    """One call of ``chunk_gated_delta_rule`` or ``chunk_gated_delta_rule_paged``."""

    function: str  #: the public function's name, for messages

    # --- sizes -------------------------------------------------------------------------------
    num_tokens: int  #: T, the rows of q; sequences may cover fewer
    num_seqs: int  #: N >= 1
    num_q_heads: int
    num_k_heads: int
    num_v_heads: int
    num_heads: int  #: Ho
    head_size_k: int  #: K
    head_size_v: int  #: V
    device: torch.device

    # --- inputs ------------------------------------------------------------------------------
    q: torch.Tensor  #: [T, Hq, K] bfloat16, float16 or float32, last dimension contiguous
    k: torch.Tensor  #: [T, Hk, K] q's dtype
    v: torch.Tensor  #: [T, Hv, V] q's dtype
    g: torch.Tensor | None  #: [T, Ho], any strides; None exactly when gate == "none"
    beta: torch.Tensor | None  #: [T, Ho], any strides; None is beta 1
    #: "none": alpha 1. "linear": alpha = g (float32, >= 0). "log": alpha = exp(g) (float32).
    #: "raw": alpha = exp(-exp(A_log) * softplus(g + dt_bias)), g float32 or of q's dtype, in float32.
    gate: str
    A_log: torch.Tensor | None  #: [Ho] float32, float16 or bfloat16; given exactly when gate == "raw"
    dt_bias: torch.Tensor | None  #: likewise
    #: False: beta is float32. True: beta (float32 or of q's dtype) stands for sigmoid(beta), computed in
    #: float32 and rounded to beta's dtype.
    beta_is_logit: bool
    #: Divide each q and k head by sqrt(sum(x^2) + 1e-6) in float32 and round to q's dtype, first of all.
    use_qk_l2norm: bool
    scale: float

    # --- sequences ---------------------------------------------------------------------------
    cu_seqlens: torch.Tensor  #: [N + 1] int32 or int64, contiguous, on q's device
    #: The same values on the host where the caller gave them, else None. A hint: may be used to plan, must
    #: not change results.
    cu_seqlens_cpu: tuple[int, ...] | None
    max_seqlen: int  #: an upper bound on the longest sequence (T where nothing better is known)

    # --- states ------------------------------------------------------------------------------
    #: [rows, Ho, V, K], K contiguous, any other strides; None is the zero state for every sequence.
    initial_state: torch.Tensor | None
    #: [N] int32 or int64: the row of initial_state that each sequence reads, negative for the zero state.
    #: None: sequence i reads row i (or the rows follow from ``pages``).
    read_rows: torch.Tensor | None
    #: [rows, Ho, V, K]: where final states go; None when no final state is wanted. May be initial_state.
    final_state: torch.Tensor | None
    #: [N] int32 or int64: row of final_state of each sequence, negative to skip. None: row i, or ``pages``.
    write_rows: torch.Tensor | None
    #: True when the call allocated final_state (one row a sequence): a zero-length sequence then gets its
    #: initial state there, converted. False: a zero-length sequence writes no state row.
    final_state_is_new: bool

    # --- checkpoints -------------------------------------------------------------------------
    checkpoint_every: int  #: 0, or a positive multiple of 64
    state_checkpoints: torch.Tensor | None  #: [rows, Ho, V, K]; may be the pool above
    #: [N] or [N + 1] int32 or int64. Checkpoint j of sequence i goes to row checkpoint_starts[i] + j of
    #: state_checkpoints, or to row checkpoint_rows[checkpoint_starts[i] + j] where checkpoint_rows is given.
    checkpoint_starts: torch.Tensor | None
    checkpoint_rows: torch.Tensor | None  #: 1-D int32 or int64, negative to skip
    #: [N] int32 or int64: tokens before this call; checkpoints and 64-token chunks lie at absolute positions.
    prefix_lens: torch.Tensor | None

    # --- pages -------------------------------------------------------------------------------
    #: Given for a paged call without ``slots``: read_rows, write_rows, checkpoint_starts, checkpoint_rows and
    #: prefix_lens are then None and follow from the table; ``backend.with_slots(request)`` fills them in with
    #: one launch of the backend's page_slots, or a kernel may derive them itself.
    pages: PageTable | None

    # --- output ------------------------------------------------------------------------------
    output: torch.Tensor  #: [T, Ho, V] of q's dtype, last dimension contiguous, any other strides
    #: True when the call allocated output (contents undefined): rows of tokens outside
    #: [cu_seqlens[0], cu_seqlens[-1]) must be made zero. False: they stay as they are.
    output_is_new: bool

    # --- how ---------------------------------------------------------------------------------
    use_cp: str | bool  #: "auto", True (demands the split-sequence path), False (forbids it)
    batch_invariant: bool  #: contract, rule 8
    slot_arguments: tuple[str, ...]  #: names of the slot arguments given; () when there are none
    is_paged: bool  #: chunk_gated_delta_rule_paged, with or without ``slots``
    precise: bool = False  #: the finest format that the backend has for products inside
    slots_of: PageTable | None = None  #: with GDN_MULTI_CHECK: the page table that came beside ``slots``, for the check
    #: For the backend that serves the call, under a key with its name: what it works out from sizes, dtypes, strides, devices and
    #: scalars. Calls that agree in all of that find it again here, since they share this dictionary, for as long as they are
    #: remembered. Not for what follows from contents or addresses. A request made of another (``replace``) has a new one.
    shared: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    kind = "prefill"

    @property
    def may_have_empty_sequences(self) -> bool:
        """Whether a sequence of length zero cannot be excluded from what the host knows."""
        bounds = self.cu_seqlens_cpu
        return bounds is None or any(a == b for a, b in zip(bounds, bounds[1:]))

    @property
    def covers_all_tokens(self) -> bool:
        """Whether the host knows that every token belongs to a sequence."""
        bounds = self.cu_seqlens_cpu
        return bounds is not None and bounds[0] == 0 and bounds[-1] == self.num_tokens


@dataclass(frozen=True)
class DecodeRequest:
    """One call of ``gated_delta_rule_decode_pretranspose`` or ``gated_delta_rule_decode_paged``.

    For each sequence b and token t in order, in float32 (nothing is rounded before the output and the store):
    alpha = exp(-exp(A_log) * softplus(a + dt_bias)), beta = sigmoid(b), the recurrence of the contract.
    """

    function: str

    batch: int  #: B
    num_tokens: int  #: T >= 1 tokens a sequence
    num_q_heads: int  #: H, heads of q and of k
    num_heads: int  #: HV, heads of v, output and state; a multiple of H
    head_size_k: int
    head_size_v: int
    device: torch.device

    q: torch.Tensor  #: [B, T, H, K] bfloat16, float16 or float32, last dimension contiguous
    k: torch.Tensor  #: [B, T, H, K] q's dtype
    v: torch.Tensor  #: [B, T, HV, V] q's dtype
    A_log: torch.Tensor  #: [HV] float32, float16 or bfloat16
    a: torch.Tensor  #: [B, T, HV] float32, float16 or bfloat16, any strides
    dt_bias: torch.Tensor  #: [HV] float32, float16 or bfloat16
    b: torch.Tensor  #: [B, T, HV] float32, float16 or bfloat16, any strides
    scale: float
    use_qk_l2norm: bool  #: divide q and k by sqrt(sum(x^2) + 1e-6), in float32, not rounded

    state: torch.Tensor  #: [rows, HV, V, K] float32, bfloat16 or float16, K contiguous: the pool, or one row a sequence
    #: [B] int32 or int64. A negative entry in either marks padding: output zero, no row touched. None with
    #: ``pages`` None: row b. write_rows is never None when read_rows is given.
    read_rows: torch.Tensor | None
    write_rows: torch.Tensor | None
    intermediate_states: torch.Tensor | None  #: [B, >=T, HV, V, K] of the state's dtype, K contiguous
    update_state: bool  #: False: the pool is only read
    pages: PageTable | None  #: as in PrefillRequest

    output: torch.Tensor  #: [B, T, HV, V] of q's dtype, last dimension contiguous

    batch_invariant: bool
    slot_arguments: tuple[str, ...]
    is_paged: bool
    slots_of: PageTable | None = None  #: as in PrefillRequest

    kind = "decode"


Request = Union[PrefillRequest, DecodeRequest, SlotsRequest]
