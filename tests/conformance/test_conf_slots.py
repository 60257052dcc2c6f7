"""The slot arguments of chunk_gated_delta_rule: rows to read, rows to write, rows of checkpoints, prefix lengths."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tolerances
import torch
from cases import Dims, Pool, Tokens, index, random_states

import gdn_multi

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
N_TOKENS = 64  # checkpoint interval of most tests here


class SlotCall:
    """A call on one pool (or two, or three) with any of the slot arguments, and the rows that it must write."""

    def __init__(self, door, lengths: Sequence[int], *, rows: int = 24, dims: Dims | None = None, **options) -> None:
        self.door = door
        self.pool_options = {n: options.pop(n) for n in ("pool_dtype", "padding") if n in options}
        options.setdefault("dtype", door.sizes.dtype)
        self.tokens = Tokens(dims or door.sizes.dims, lengths, device=door.device, **options)
        self.num_rows = rows
        self.pool = self.new_pool()
        self.states = random_states(rows, self.tokens.dims)

    def new_pool(self, **options) -> Pool:
        options = {**self.pool_options, **options}
        return Pool(
            self.num_rows, self.tokens.dims, options.get("pool_dtype", F32), self.door.device,
            padding=options.get("padding", 0),
        )  # fmt: skip

    def rows(self, values, dtype=torch.int32) -> torch.Tensor:
        return index(values, dtype, self.door.device)

    def run(
        self,
        *,
        read: Sequence[int] | None = None,
        write: Sequence[int] | None = None,
        final: Pool | None = None,
        checkpoints: Pool | None = None,
        checkpoint_rows: Sequence[int] | None = None,
        prefix: Sequence[int] | None = None,
        every: int = 0,
        dtypes: dict[str, torch.dtype] | None = None,
        starts_length: int = 1,
        **more,
    ) -> torch.Tensor:
        """``read`` and ``write`` are rows a sequence; ``final`` and ``checkpoints`` the pools they go to (this one
        when None). ``write=None`` writes to the rows that are read. Returns the output."""
        tokens, dtypes = self.tokens, dtypes or {}
        n = tokens.num_seqs

        def rows(name, values):
            return self.rows(values, dtypes.get(name, torch.int32))

        arguments: dict = dict(more)
        initial = None
        if read is not None:
            for i, row in enumerate(read):
                if row >= 0 and tokens.lengths[i]:
                    self.pool.set(row, self.states[row])
            initial = self.pool.rows([r if tokens.lengths[i] else -1 for i, r in enumerate(read)])
            arguments.update(initial_state=self.pool.tensor, state_indices=rows("state_indices", read))
        expected, after = tokens.reference(initial)

        to_final: dict[int, torch.Tensor] = {}
        final = final or self.pool
        if read is not None and more.get("output_final_state", True):
            arguments.update(output_state=final.tensor, output_final_state=True)
            if write is not None:
                arguments["output_state_indices"] = rows("output_state_indices", write)
            for i, row in enumerate(write if write is not None else read):
                if row >= 0 and tokens.lengths[i]:
                    to_final[row] = after[i][-1]

        to_checkpoint: dict[int, torch.Tensor] = {}
        checkpoints = checkpoints or self.pool
        if every:
            before = list(prefix) if prefix is not None else [0] * n
            starts = [0]
            for i, length in enumerate(tokens.lengths):
                count = (before[i] + length) // every - before[i] // every
                for j in range(count):
                    entry = starts[i] + j
                    row = checkpoint_rows[entry] if checkpoint_rows is not None else entry
                    if row >= 0:
                        to_checkpoint[row] = after[i][(before[i] // every + 1 + j) * every - before[i]]
                starts.append(starts[i] + count)
            if checkpoint_rows is not None:
                assert len(checkpoint_rows) == starts[-1], f"the case needs {starts[-1]} checkpoint rows"
                arguments["checkpoint_state_indices"] = rows("checkpoint_state_indices", checkpoint_rows)
            if prefix is not None:
                arguments["prefix_lens"] = rows("prefix_lens", prefix)
            arguments.update(
                state_checkpoints=checkpoints.tensor, checkpoint_every_n_tokens=every,
                checkpoint_cu_starts=rows("checkpoint_cu_starts", starts[: n + starts_length]),
            )  # fmt: skip

        written: dict[int, dict[int, torch.Tensor]] = {}
        pools = {id(p): p for p in (self.pool, final, checkpoints)}
        for pool, rows_ in ((final, to_final), (checkpoints, to_checkpoint)):
            written.setdefault(id(pool), {}).update(rows_)
        for pool in pools.values():
            pool.remember()
        tokens.cu_seqlens = tokens.cu_seqlens.to(dtypes.get("cu_seqlens", torch.int32))
        result = self.door(gdn_multi.chunk_gated_delta_rule, **tokens.arguments(**arguments))
        if arguments.get("output_final_state"):
            output, state = result
            assert state is final.tensor, "the final state must be the buffer that was given"
        else:
            output = result
        tokens.check_output(output, expected)
        for key, pool in pools.items():
            pool.check(written.get(key, {}), tolerances.prefill_state(tokens.dtype, pool.dtype))
        return output


# --- rows to read and to write --------------------------------------------------------------------


@pytest.mark.small
def test_state_indices_alone_update_the_pool_in_place(door):
    SlotCall(door, (70, 0, 6), rows=7).run(read=[4, 2, 0])


def test_state_indices_without_a_final_state_only_read(door):
    SlotCall(door, (70, 0, 6), rows=7).run(read=[4, 2, 0], output_final_state=False)


def test_state_indices_alone_into_another_pool(door):
    call = SlotCall(door, (70, 0, 6), rows=7)
    call.run(read=[4, 2, 0], final=call.new_pool())


def test_negative_state_indices_alone(door):
    """A read row of -1 starts from zero, and as a write row it skips the store."""
    SlotCall(door, (70, 9, 6), rows=7).run(read=[-1, 5, -1])


@pytest.mark.small
def test_output_state_indices_apart_from_read_rows(door):
    SlotCall(door, (66, 0, 3), rows=7).run(read=[4, 2, 0], write=[1, 3, 6])


@pytest.mark.parametrize(
    "read,write",
    [([-1, -1, -1], [1, 2, 3]), ([4, 5, 6], [-1, -1, -1]), ([-1, 5, 0], [3, -1, 0]), ([0, 0, 0], [1, 2, 3])],
    ids=["zero states", "no stores", "mixed", "one row read by all"],
)  # fmt: skip
def test_minus_one_in_either_row(door, read, write):
    SlotCall(door, (70, 64, 6), rows=7).run(read=read, write=write)


def test_output_state_is_another_pool_of_another_dtype(door):
    call = SlotCall(door, (70, 0, 6), rows=7)
    call.run(read=[4, 2, 0], write=[4, 2, 1], final=call.new_pool(pool_dtype=BF16))


def test_zero_length_sequences_neither_read_nor_write(door):
    """Even where their rows are ones that others use: a sequence without tokens touches nothing."""
    SlotCall(door, (0, 70, 0, 5), rows=7).run(read=[3, 4, 4, 2], write=[1, 6, 5, 2])


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.small
@pytest.mark.parametrize("every", [64, 128])
def test_plain_checkpoints(door, every):
    """As FlashInfer has them: packed rows, positions counted from the start of the call."""
    SlotCall(door, (130, 0, 63, 64)).run(every=every)


def test_plain_checkpoints_of_another_dtype(door):
    call = SlotCall(door, (200, 64))
    call.run(every=64, read=[20, 21], checkpoints=call.new_pool(pool_dtype=F16))


@pytest.mark.small
def test_checkpoint_rows(door):
    SlotCall(door, (130, 0, 64)).run(every=64, checkpoint_rows=[17, 3, 9])


def test_one_selected_checkpoint_a_sequence(door):
    """Every other entry is -1."""
    SlotCall(door, (260, 200)).run(every=64, checkpoint_rows=[-1, -1, 5, -1, -1, 7, -1])


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("prefix", [(0, 0, 0), (64, 128, 64), (63, 1, 100), (65, 64, 1000)], ids=str)
def test_prefix_lens(door, prefix, indexed):
    """Checkpoints lie at absolute positions: (prefix + n) % N == 0."""
    call = SlotCall(door, (130, 1, 70))
    count = sum((p + n) // 64 - p // 64 for p, n in zip(prefix, (130, 1, 70)))
    rows = [23 - 2 * i for i in range(count)] if indexed else None
    call.run(every=64, prefix=prefix, checkpoint_rows=rows)


@pytest.mark.parametrize("every", [128, 192, 1024])
def test_prefix_lens_with_longer_intervals(door, every):
    call = SlotCall(door, (300, 2))
    prefix = (every - 70, every - 1)
    count = sum((p + n) // every - p // every for p, n in zip(prefix, (300, 2)))
    call.run(every=every, prefix=prefix, checkpoint_rows=list(range(3, 3 + count)), read=[20, 21], write=[22, 23])


@pytest.mark.small
def test_all_slot_arguments_on_one_pool(door):
    call = SlotCall(door, (70, 0, 6))
    call.run(read=[4, 2, -1], write=[1, 3, -1], every=64, prefix=[30, 60, 61], checkpoint_rows=[9, 8])


@pytest.mark.parametrize("padding", [0, 3, 64])
@pytest.mark.parametrize("pool_dtype", [F32, BF16, F16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_all_slot_arguments_by_dtype_and_padding(door, pool_dtype, padding):
    """Rows far from any alignment too: padding says nothing about multiples of anything."""
    call = SlotCall(door, (170, 0, 64, 5), pool_dtype=pool_dtype, padding=padding)
    call.run(
        read=[4, 2, -1, 7], write=[1, 3, -1, 7], every=64, prefix=[30, 60, 128, 60], checkpoint_rows=[9, 8, -1, 11, 10]
    )


def test_three_pools(door):
    call = SlotCall(door, (170, 64, 5))
    checkpoints, final = call.new_pool(pool_dtype=F16, padding=5), call.new_pool(pool_dtype=BF16)
    call.run(
        read=[4, 2, -1], write=[1, 3, 0], every=64, prefix=[30, 0, 60], checkpoint_rows=[9, 8, 0, -1, 1],
        final=final, checkpoints=checkpoints,
    )  # fmt: skip


def test_checkpoint_of_the_last_token_is_the_final_state(door):
    """A sequence that ends on a boundary: both rows get the same state."""
    call = SlotCall(door, (128,))
    call.run(read=[4], write=[1], every=64, prefix=[64], checkpoint_rows=[9, 8])
    assert torch.equal(call.pool.tensor[1], call.pool.tensor[8])


# --- index dtypes ---------------------------------------------------------------------------------

INDEX_TENSORS = (
    "cu_seqlens", "state_indices", "output_state_indices", "checkpoint_cu_starts", "checkpoint_state_indices",
    "prefix_lens",
)  # fmt: skip


@pytest.mark.parametrize("others", [torch.int32, torch.int64], ids=["others int32", "others int64"])
@pytest.mark.parametrize("odd", INDEX_TENSORS)
def test_each_index_dtype_apart(door, odd, others):
    """Each index tensor has its own dtype, whatever the others have."""
    dtypes = {name: others for name in INDEX_TENSORS}
    dtypes[odd] = torch.int64 if others == torch.int32 else torch.int32
    call = SlotCall(door, (70, 0, 64, 5), rows=12)
    call.run(
        read=[4, 2, -1, 6], write=[1, 3, -1, 5], every=64, prefix=[30, 60, 128, 60], checkpoint_rows=[9, -1, 10],
        dtypes=dtypes,
    )  # fmt: skip


@pytest.mark.small
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_index_dtypes(door, dtype):
    call = SlotCall(door, (66, 4), rows=12)
    call.run(
        read=[4, 6], write=[1, 5], every=64, prefix=[30, 62], checkpoint_rows=[9, 10],
        dtypes={name: dtype for name in INDEX_TENSORS},
    )  # fmt: skip


@pytest.mark.parametrize(
    "gate,beta,l2norm", [("none", "none", False), ("log", "plain", False), ("raw_half", "logit_half", True)]
)
def test_all_slot_arguments_with_every_gate(door, gate, beta, l2norm):
    """Unaligned prefixes shift the chunks, and must not shift the gates."""
    call = SlotCall(door, (170, 40), gate=gate, beta=beta, l2norm=l2norm, before=3, after=70, fused=True)
    call.run(read=[4, -1], write=[1, 3], every=64, prefix=[30, 127], checkpoint_rows=[9, 8, 0, 7])


@pytest.mark.parametrize("heads", [(1, 1, 1), (1, 1, 4), (4, 2, 2)])
def test_all_slot_arguments_with_head_groups(door, heads):
    dims = Dims(*heads, door.sizes.dims.K, door.sizes.dims.V)
    call = SlotCall(door, (170, 40), dims=dims)
    call.run(read=[4, -1], write=[1, 3], every=64, prefix=[30, 127], checkpoint_rows=[9, 8, 0, 7])
