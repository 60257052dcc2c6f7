"""The rules of the contract that hold on every backend, by their numbers.

Rules 1 to 3 are at work in every other conformance test too: all that must not be read is poison there, all that must
not be written is compared to the bit. Rule 5 needs a GPU: test_conf_gpu.py. Rule 9 is refused by the front end.
"""

from __future__ import annotations

import cases
import numpy
import pytest
import tolerances
import torch
from cases import DecodeStep, PagedBatch, PagedDecode, Pool, Tokens, bits, index, random_states, same_bits

import gdn_multi

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INVARIANT = "GDN_MULTI_BATCH_INVARIANT"
CHECK = "GDN_MULTI_CHECK"


# --- rule 3: contents that must not reach a result -------------------------------------------------


def test_rule_3_contents_of_unused_rows_never_matter(door):
    """Numbers instead of NaN in every page and token that must not be read: the same bits come out."""
    results = []
    for clean in (False, True):
        batch = PagedBatch(door.sizes.dims).add(prefix=100, new=70).add(prefix=0, new=65).add(prefix=64, new=1)
        batch.build(door.device, dtype=door.sizes.dtype, before=3, after=70, seed=4)
        if clean:
            storage = batch.pool.storage
            storage.copy_(torch.where(torch.isfinite(storage), storage, torch.full_like(storage, 0.25)))
            for x in (batch.tokens.q, batch.tokens.k, batch.tokens.v, batch.tokens.g, batch.tokens.beta):
                x[:3], x[-70:] = 0.5, 0.5
        results.append((batch.run(door), batch))
    (a, poisoned), (b, plain) = results
    assert same_bits(a, b)
    for page in (s.pages[-1] for s in plain.sequences):
        assert same_bits(poisoned.pool.tensor[page], plain.pool.tensor[page])


# --- rule 4 ---------------------------------------------------------------------------------------


def refused(function, match: str, pools: list[torch.Tensor], **arguments) -> None:
    before = [bits(p) for p in pools]
    with pytest.raises(ValueError, match=match):
        function(**arguments)
    assert all(torch.equal(x, bits(p)) for x, p in zip(before, pools)), "a refused call wrote"


def prefill_arguments(door, lengths=(70, 5, 64), **rows):
    tokens = Tokens(door.sizes.dims, lengths, device=door.device, dtype=door.sizes.dtype)
    pool = random_states(8, door.sizes.dims).to(door.device)
    arguments = tokens.arguments(initial_state=pool, output_state=pool, output_final_state=True, backend=door.name)
    arguments.update({n: index(v, torch.int32, door.device) for n, v in rows.items()})
    return arguments, pool


@pytest.mark.parametrize(
    "rows,words",
    [
        (dict(state_indices=[1, 8, 2]), r"state_indices\[1\].*sequence 1.*8"),
        (dict(state_indices=[1, 2, 3], output_state_indices=[1, 2, 99]), r"output_state_indices\[2\].*sequence 2.*99"),
        (dict(state_indices=[1, 2, 1]), r"sequence 2.*sequence 0"),
        (dict(state_indices=[1, 2, 3], output_state_indices=[4, 5, 4]), r"state_indices\[2\].*state_indices\[0\]"),
        (dict(state_indices=[1, 2, 3], output_state_indices=[4, 1, 5]), r"sequence 0.*sequence 1"),
    ],
    ids=["read row out of range", "write row out of range", "in place twice", "written twice", "read and written"],
)  # fmt: skip
def test_rule_4_check_names_the_sequence_and_the_entry(door, monkeypatch, rows, words):
    arguments, pool = prefill_arguments(door, **rows)
    monkeypatch.setenv(CHECK, "1")
    refused(gdn_multi.chunk_gated_delta_rule, words, [pool], **arguments)


def test_rule_4_check_of_checkpoint_rows(door, monkeypatch):
    monkeypatch.setenv(CHECK, "1")
    more = dict(checkpoint_every_n_tokens=64, checkpoint_cu_starts=index([0, 1, 1, 2], torch.int32, door.device))
    for rows, words in (([8, 1], r"checkpoint_state_indices\[0\].*sequence 0.*8"), ([3, 3], r"sequence 2.*sequence 0")):
        arguments, pool = prefill_arguments(door, checkpoint_state_indices=rows)
        arguments.update(more, initial_state=None, output_state=None, output_final_state=False, state_checkpoints=pool)
        refused(gdn_multi.chunk_gated_delta_rule, words, [pool], **arguments)


@pytest.mark.parametrize(
    "change,words",
    [
        (dict(page_indices=[7, 3, 16]), r"page_indices\[2\].*sequence 1.*16"),
        (dict(page_indices=[7, -1, 12]), r"page_indices\[1\].*sequence 0.*-1"),
        (dict(page_indices=[7, 3, 3]), r"sequence 1.*sequence 0"),
        (dict(page_indptr=[0, 2, 4]), r"sequence 1.*4"),
        (dict(page_indptr=[0, 3, 3]), r"sequence 1.*3"),
        (dict(last_page_len=[65, 9]), r"last_page_len\[0\].*sequence 0.*65"),
        (dict(last_page_len=[5, 0]), r"last_page_len\[1\].*sequence 1.*0"),
        (dict(cu_seqlens=[0, 5, 30]), r"sequence 1.*25.*9"),
    ],
    ids=lambda x: "" if isinstance(x, str) else "-".join(f"{n}={v}" for n, v in x.items()),
)
def test_rule_4_check_of_page_tables(door, monkeypatch, change, words):
    """Sequence 0 owns pages 7 and 3 (69 tokens, 5 of them new), sequence 1 owns page 12 (9 tokens, all new)."""
    tokens = Tokens(door.sizes.dims, (5, 25), device=door.device, dtype=door.sizes.dtype)
    pool = random_states(16, door.sizes.dims).to(door.device)
    table = dict(cu_seqlens=[0, 5, 14], page_indices=[7, 3, 12], page_indptr=[0, 2, 3], last_page_len=[5, 9])
    table.update(change)
    arguments = tokens.arguments(state_pool=pool, page_size=64, backend=door.name)
    arguments.update({n: index(v, torch.int32, door.device) for n, v in table.items()})
    monkeypatch.setenv(CHECK, "1")
    refused(gdn_multi.chunk_gated_delta_rule_paged, words, [pool], **arguments)


@pytest.mark.parametrize(
    "change,words",
    [
        (dict(page_indices=[7, 3, 16]), r"page_indices\[2\].*sequence 1.*16"),
        (dict(page_indices=[7, 3, 7]), r"sequence 1.*sequence 0|sequence 0.*sequence 1"),
        (dict(last_page_len=[1, 1]), r"sequence 1.*last_page_len\[1\]"),
        (dict(last_page_len=[1, 0]), r"last_page_len\[1\].*sequence 1.*0"),
    ],
    ids=["out of range", "shared", "no page before", "empty page"],
)
def test_rule_4_check_of_decode_page_tables(door, monkeypatch, change, words):
    """Sequence 0 opens page 3 after page 7, sequence 1 continues page 12."""
    step = DecodeStep(door.sizes.dims, 2, device=door.device, dtype=door.sizes.dtype)
    pool = random_states(16, door.sizes.dims).to(door.device)
    table = dict(page_indices=[7, 3, 12], page_indptr=[0, 2, 3], last_page_len=[1, 9])
    table.update(change)
    arguments = step.arguments(state_pool=pool, backend=door.name)
    arguments.update({n: index(v, torch.int32, door.device) for n, v in table.items()})
    monkeypatch.setenv(CHECK, "1")
    refused(gdn_multi.gated_delta_rule_decode_paged, words, [pool], **arguments)


@pytest.mark.parametrize(
    "rows,words",
    [
        (dict(initial_state_indices=[1, 8, 2]), r"initial_state_indices\[1\].*sequence 1.*8"),
        (dict(initial_state_indices=[1, 2, 1]), r"sequence 2.*sequence 0"),
        (dict(initial_state_indices=[1, 2, 3], output_state_indices=[4, 5, 1]), r"sequence 0.*sequence 2"),
        (
            dict(initial_state_indices=[1, 2, 3], output_state_indices=[4, 50, 5]),
            r"output_state_indices\[1\].*sequence 1.*50",
        ),
    ],
    ids=["out of range", "twice", "read and written", "write row out of range"],
)
def test_rule_4_check_of_decode_rows(door, monkeypatch, rows, words):
    step = DecodeStep(door.sizes.dims, 3, device=door.device, dtype=door.sizes.dtype)
    pool = random_states(8, door.sizes.dims).to(door.device)
    arguments = step.arguments(initial_state=pool, state=None, backend=door.name)
    arguments.update({n: index(v, torch.int32, door.device) for n, v in rows.items()})
    monkeypatch.setenv(CHECK, "1")
    refused(gdn_multi.gated_delta_rule_decode_pretranspose, words, [pool], **arguments)


def test_rule_4_check_accepts_what_is_right(door, monkeypatch):
    """Shared prefix pages, padding, sequences without tokens whose rows others use, rows read by several."""
    monkeypatch.setenv(CHECK, "1")
    batch = PagedBatch(door.sizes.dims).add(prefix=128, new=5).add(prefix=128, new=70, shares=0).add().add(prefix=9)
    batch.build(door.device, dtype=door.sizes.dtype, before=2, after=3).run(door)
    PagedDecode(door.sizes.dims).add(65).add(66).add(2).build(door.device, dtype=door.sizes.dtype).run(door)
    arguments, _ = prefill_arguments(door, (70, 0, 5), state_indices=[1, 1, 2], output_state_indices=[3, 3, -1])
    del arguments["backend"]
    door(gdn_multi.chunk_gated_delta_rule, **arguments)
    step = DecodeStep(door.sizes.dims, 3, device=door.device, dtype=door.sizes.dtype)
    pool = random_states(8, door.sizes.dims).to(door.device)
    rows = index([3, -1, -1], torch.int64, door.device)
    arguments = step.arguments(state=None, initial_state=pool, initial_state_indices=rows)
    door(gdn_multi.gated_delta_rule_decode_pretranspose, **arguments)


# --- rule 6: offsets past 2^31 --------------------------------------------------------------------


class Vast:
    """Views with strides so large that offsets pass 2^31, of memory that is mostly never touched."""

    def __init__(self, door, folder) -> None:
        self.door, self.folder, self.count = door, folder, 0

    def view(self, shape, strides, dtype=F16) -> torch.Tensor:
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides))
        assert extent > 2**31
        size = torch.empty(0, dtype=dtype).element_size()
        if self.door.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.door.device)[0]
            if free < extent * size + 2**30:
                pytest.skip(f"needs {extent * size >> 30} GiB of free GPU memory")
            return torch.empty(extent, dtype=dtype, device=self.door.device).as_strided(shape, strides)
        # A sparse file: pages that are never touched take neither disk nor memory.
        path = self.folder / f"vast{self.count}"
        self.count += 1
        kind = {2: numpy.float16, 4: numpy.float32}[size]
        memory = numpy.memmap(path, dtype=kind, mode="w+", shape=(extent,))
        path.unlink()  # the mapping keeps it alive
        return torch.from_numpy(memory).view(dtype).as_strided(shape, strides)


@pytest.fixture
def vast(door, tmp_path):
    yield Vast(door, tmp_path)
    if door.device.type == "cuda":
        torch.cuda.empty_cache()


def vast_pool(vast, dims, padded: bool) -> torch.Tensor:
    """A float16 pool of more than 2^31 elements: few rows far apart, or many dense ones."""
    block = dims.heads * dims.V * dims.K
    inner = (dims.V * dims.K, dims.K, 1)
    shape = (dims.heads, dims.V, dims.K)
    if padded:
        return vast.view((4, *shape), (2**30 + 64, *inner))
    rows = 2**31 // block + 4
    return vast.view((rows, *shape), (block, *inner))


POOLS = pytest.mark.parametrize("padded", [True, False], ids=["few rows far apart", "many rows"])


@pytest.mark.small
@POOLS
def test_rule_6_prefill_rows_past_2_31_elements(door, vast, padded):
    """State rows, final states and checkpoints on the last rows of the pool."""
    dims = door.sizes.dims
    pool = vast_pool(vast, dims, padded)
    last = pool.shape[0] - 1
    tokens = Tokens(dims, (66,), device=door.device, dtype=door.sizes.dtype)
    pool[last].copy_(random_states(1, dims)[0])
    expected, states = tokens.reference(pool[last : last + 1].double().cpu())
    rows = {"state_indices": [last], "output_state_indices": [last - 1], "checkpoint_state_indices": [last - 2]}
    rows.update(prefix_lens=[64], checkpoint_cu_starts=[0, 1])
    output, _ = door(
        gdn_multi.chunk_gated_delta_rule,
        **tokens.arguments(
            initial_state=pool, output_state=pool, state_checkpoints=pool, output_final_state=True,
            checkpoint_every_n_tokens=64, **{n: index(v, torch.int64, door.device) for n, v in rows.items()},
        ),
    )  # fmt: skip
    tokens.check_output(output, expected)
    allowed = tolerances.prefill_state(tokens.dtype, F16)
    tolerances.assert_close(pool[last - 1], states[0][66], allowed, "final state")
    tolerances.assert_close(pool[last - 2], states[0][64], allowed, "checkpoint")


@POOLS
def test_rule_6_paged_prefill_past_2_31_elements(door, vast, padded):
    dims = door.sizes.dims
    pool = vast_pool(vast, dims, padded)
    last = pool.shape[0] - 1
    tokens = Tokens(dims, (66,), device=door.device, dtype=door.sizes.dtype)
    pool[last].copy_(random_states(1, dims)[0])
    expected, states = tokens.reference(pool[last : last + 1].double().cpu())
    output = door(
        gdn_multi.chunk_gated_delta_rule_paged,
        **tokens.arguments(
            state_pool=pool, page_size=64, page_indices=index([last, last - 1, last - 2], torch.int32, door.device),
            page_indptr=index([0, 3], torch.int32, door.device), last_page_len=index([2], torch.int32, door.device),
        ),
    )  # fmt: skip
    tokens.check_output(output, expected)
    allowed = tolerances.prefill_state(tokens.dtype, F16)
    tolerances.assert_close(pool[last - 1], states[0][64], allowed, "page that was filled")
    tolerances.assert_close(pool[last - 2], states[0][66], allowed, "last page")


@pytest.mark.small
@POOLS
def test_rule_6_decode_rows_past_2_31_elements(door, vast, padded):
    dims = door.sizes.dims
    pool = vast_pool(vast, dims, padded)
    last = pool.shape[0] - 1
    step = DecodeStep(dims, 1, device=door.device, dtype=door.sizes.dtype)
    pool[last].copy_(random_states(1, dims)[0])
    expected, states = step.reference(pool[last : last + 1].double().cpu())
    output, _ = door(
        gdn_multi.gated_delta_rule_decode_pretranspose,
        **step.arguments(
            state=None, initial_state=pool, initial_state_indices=index([last], torch.int32, door.device),
            output_state_indices=index([last - 1], torch.int32, door.device),
        ),
    )  # fmt: skip
    step.check_output(output, expected)
    tolerances.assert_close(pool[last - 1], states[0, -1], tolerances.decode_state(F16), "state")


@pytest.mark.parametrize("names", [("q",), ("k",), ("v",), ("g", "beta"), ("output",)], ids="+".join)
def test_rule_6_tokens_past_2_31_elements(door, vast, names):
    """token * heads * dim does not fit 32 bits on long packed batches; here the token stride is long instead."""
    tokens = Tokens(door.sizes.dims, (70,), device=door.device, dtype=F16)
    more = {}
    for name in names:
        x = tokens.new_output() if name == "output" else getattr(tokens, name)
        y = vast.view(x.shape, (2**25, *x.stride()[1:]), x.dtype)
        y.copy_(x)
        if name == "output":
            more["output"] = y
        else:
            setattr(tokens, name, y)
    expected, _ = tokens.reference()
    tokens.check_output(door(gdn_multi.chunk_gated_delta_rule, **tokens.arguments(**more)), expected, untouched=None)


def test_rule_6_intermediate_states_past_2_31_elements(door, vast):
    dims = door.sizes.dims
    step = DecodeStep(dims, 2, 2, device=door.device, dtype=door.sizes.dtype)
    strides = (2**31 + 64, 2**30, dims.V * dims.K, dims.K, 1)
    buffer = vast.view((2, 2, dims.heads, dims.V, dims.K), strides)
    state = random_states(2, dims).to(F16).to(door.device)
    _, states = step.reference(state)
    door(
        gdn_multi.gated_delta_rule_decode_pretranspose, **step.arguments(state=state, intermediate_states_buffer=buffer)
    )
    tolerances.assert_close(buffer, states, tolerances.decode_state(F16), "intermediate states")


# --- rule 7: float32 inside -----------------------------------------------------------------------


def test_rule_7_prefill_rounds_a_state_once(door):
    """Steps too small for a bfloat16 state: 512 of them add up to one unit in its last place, or to nothing."""
    dims = door.sizes.dims
    tokens = Tokens(dims, (512,), device=door.device, dtype=door.sizes.dtype, gate="none")
    tokens.k.zero_()
    tokens.k[..., 0] = 1
    tokens.v.fill_(2.0)
    tokens.beta.fill_(2.0**-16)
    for dtype in (BF16, F16):
        state = torch.ones(1, dims.heads, dims.V, dims.K, dtype=dtype, device=door.device)
        _, states = tokens.reference(state)
        door(
            gdn_multi.chunk_gated_delta_rule,
            **tokens.arguments(initial_state=state, output_state=state, output_final_state=True),
        )
        moved = state[..., 0].float()
        wanted = states[0][-1][..., 0].to(dtype).float()
        assert (moved > 1).all(), "the steps were lost: the state is rounded more than once"
        unit = torch.finfo(dtype).eps
        assert (moved.cpu() - wanted).abs().max() <= unit * (0 if dtype == BF16 else 1)


def test_rule_7_decode_rounds_a_state_once(door):
    """Eight tokens in one call, none of which moves a bfloat16 state by itself."""
    dims = door.sizes.dims
    step = DecodeStep(dims, 1, 8, device=door.device, dtype=door.sizes.dtype, l2norm=False, gate_dtype=F32)
    step.A_log.fill_(-100.0)  # alpha = 1
    step.k.zero_()
    step.k[..., 0] = 1
    step.v.fill_(2.0)
    step.b.fill_(float(torch.logit(torch.tensor(2.0**-10))))
    state = torch.ones(1, dims.heads, dims.V, dims.K, dtype=BF16, device=door.device)
    door(gdn_multi.gated_delta_rule_decode_pretranspose, **step.arguments(state=state))
    assert (state[..., 0].float() == 1 + 2.0**-7).all(), "the steps were lost: the state is rounded after each token"


# --- rule 8: the same bits ------------------------------------------------------------------------


@pytest.mark.small
def test_rule_8_prefill_is_deterministic(door, sizes):
    results = []
    for _ in range(2 if sizes.dtype == F16 else 4):
        batch = PagedBatch(sizes.dims).add(prefix=60, new=9).add(prefix=0, new=66)
        batch.build(door.device, dtype=sizes.dtype, seed=7)
        results.append((door(gdn_multi.chunk_gated_delta_rule_paged, **batch.arguments()), batch.pool.storage))
    for output, storage in results[1:]:
        assert same_bits(output, results[0][0]) and same_bits(storage, results[0][1])


def test_rule_8_long_prefill_is_deterministic(door):
    """Long enough to be split over a card."""
    results = []
    for _ in range(3):
        tokens = Tokens(door.sizes.dims, (3000,), device=door.device, dtype=door.sizes.dtype)
        results.append(door(gdn_multi.chunk_gated_delta_rule, **tokens.arguments(output_final_state=True)))
    for output, state in results[1:]:
        assert same_bits(output, results[0][0]) and same_bits(state, results[0][1])


def test_rule_8_decode_is_deterministic(door, sizes):
    results = []
    for _ in range(4):
        batch = PagedDecode(sizes.dims).add(65).add(100).build(door.device, dtype=sizes.dtype)
        results.append((door(gdn_multi.gated_delta_rule_decode_paged, **batch.arguments()), batch.pool.storage))
    for output, storage in results[1:]:
        assert same_bits(output, results[0][0]) and same_bits(storage, results[0][1])


def test_rule_8_a_sequences_bits_do_not_depend_on_its_batch(door, monkeypatch):
    """Prefill: each sequence alone, in the whole batch, in the batch backwards, and beside one long prompt."""
    monkeypatch.setenv(INVARIANT, "1")
    dims, lengths = door.sizes.dims, [100, 64, 1, 193, 65, 0, 30]
    tokens = Tokens(dims, lengths, device=door.device, dtype=door.sizes.dtype)
    states = random_states(len(lengths), dims).to(door.device)
    long = Tokens(dims, (900,), device=door.device, dtype=door.sizes.dtype, seed=5)

    def together(order, company=()):
        """Sequences in ``order``, after those of ``company``."""
        parts = {n: [] for n in ("q", "k", "v", "g", "beta")}
        bounds = [0]
        for source, i in [(long, 0) for _ in company] + [(tokens, i) for i in order]:
            for name, pieces in parts.items():
                pieces.append(getattr(source, name)[source.span(i)])
            bounds.append(bounds[-1] + source.lengths[i])
        initial = torch.cat([states[:1] for _ in company] + [states[i : i + 1] for i in order])
        output, final = door(
            gdn_multi.chunk_gated_delta_rule,
            **{n: torch.cat(p) for n, p in parts.items()},
            cu_seqlens=index(bounds, torch.int32, door.device), initial_state=initial, output_final_state=True,
        )  # fmt: skip
        skip = len(company)
        return {i: (output[bounds[skip + j] : bounds[skip + j + 1]], final[skip + j]) for j, i in enumerate(order)}

    alone = {i: together([i])[i] for i in range(len(lengths)) if lengths[i]}
    everyone = list(range(len(lengths)))
    for batch in (together(everyone), together(everyone[::-1]), together(everyone, company=(0,)), together([3, 0])):
        for i, (output, final) in batch.items():
            if i in alone:
                assert same_bits(output, alone[i][0]), f"output of sequence {i}"
                assert same_bits(final, alone[i][1]), f"state of sequence {i}"


@pytest.mark.parametrize("steps", [1, 3])
def test_rule_8_decode_bits_do_not_depend_on_the_batch(door, monkeypatch, steps):
    monkeypatch.setenv(INVARIANT, "1")
    dims = door.sizes.dims
    step = DecodeStep(dims, 40, steps, device=door.device, dtype=door.sizes.dtype)
    states = random_states(40, dims).to(door.device)

    def some(rows):
        part = step.arguments(state=states[rows].clone())
        for name in ("q", "k", "v", "a", "b"):
            part[name] = part[name][rows].clone()
        return door(gdn_multi.gated_delta_rule_decode_pretranspose, **part)

    output, state = some(list(range(40)))
    for rows in ([0], [17], [39], [5, 17, 2], list(range(39, 20, -1))):
        part, part_state = some(rows)
        assert same_bits(part, output[rows]) and same_bits(part_state, state[rows]), f"sequences {rows}"


@pytest.mark.small
@pytest.mark.parametrize("page_size", [64, 128])
def test_rule_8_a_restart_from_a_page_boundary_gives_the_same_bits(door, sizes, monkeypatch, page_size):
    """A float32 pool; the prompt at once, without a pool at all, and from each of its page boundaries."""
    monkeypatch.setenv(INVARIANT, "1")
    length = page_size + 6 if door.small else 5 * page_size + 23
    dims, device = sizes.dims, door.device
    prompt = Tokens(dims, (length,), device=device, dtype=sizes.dtype, seed=31)
    count = -(-length // page_size)
    pages = list(range(count))[::-1]

    def paged(pool, start):
        x = {n: getattr(prompt, n)[start:] for n in ("q", "k", "v", "g", "beta")}
        return door(
            gdn_multi.chunk_gated_delta_rule_paged, **x, cu_seqlens=index([0, length - start], torch.int32, device),
            state_pool=pool.tensor, page_indices=index(pages, torch.int32, device),
            page_indptr=index([0, count], torch.int32, device), page_size=page_size,
            last_page_len=index([length - (count - 1) * page_size], torch.int32, device),
        )  # fmt: skip

    whole = Pool(count, dims, F32, device)
    output = paged(whole, 0)
    plain, final = door(gdn_multi.chunk_gated_delta_rule, **prompt.arguments(output_final_state=True))
    assert same_bits(plain, output), "the call without pages gives other bits"
    assert same_bits(final[0], whole.tensor[pages[-1]]), "the call without pages gives another final state"
    for cached in range(1, count):
        pool = Pool(count, dims, F32, device)
        pool.tensor[pages[cached - 1]].copy_(whole.tensor[pages[cached - 1]])
        again = paged(pool, cached * page_size)
        assert same_bits(again, output[cached * page_size :]), f"output after {cached} cached pages"
        for page in pages[cached:]:
            assert same_bits(pool.tensor[page], whole.tensor[page]), f"page {page} after {cached} cached pages"


def test_rule_8_a_restart_inside_a_batch_gives_the_same_bits(door, monkeypatch):
    """The prompt computed alone; its second half computed beside other requests, from the cached page."""
    monkeypatch.setenv(INVARIANT, "1")
    dims, size = door.sizes.dims, 64
    first = PagedBatch(dims, size).add(prefix=0, new=300).build(door.device, dtype=door.sizes.dtype, seed=3)
    output = first.run(door)
    batch = PagedBatch(dims, size).add(prefix=7, new=200).add(prefix=128, new=172).add(prefix=64, new=9)
    batch.build(door.device, dtype=door.sizes.dtype, seed=8)
    span = batch.tokens.span(1)
    for name in ("q", "k", "v", "g", "beta"):
        getattr(batch.tokens, name)[span] = getattr(first.tokens, name)[128:]
    batch.pool.tensor[batch.sequences[1].pages[1]].copy_(first.pool.tensor[first.sequences[0].pages[1]])
    again = batch.run(door)
    assert same_bits(again[span], output[128:])
    for j in range(2, 5):
        mine, theirs = batch.sequences[1].pages[j], first.sequences[0].pages[j]
        assert same_bits(batch.pool.tensor[mine], first.pool.tensor[theirs]), f"page {j}"


# --- rule 9 ---------------------------------------------------------------------------------------


def test_rule_9_inputs_that_require_grad_are_refused(door):
    tokens = Tokens(door.sizes.dims, (5,), device=door.device, dtype=door.sizes.dtype)
    tokens.v.requires_grad_()
    with pytest.raises(ValueError, match="v .*grad"):
        gdn_multi.chunk_gated_delta_rule(**tokens.arguments(backend=door.name))
    with torch.no_grad():
        door(gdn_multi.chunk_gated_delta_rule, **tokens.arguments())


@pytest.mark.small
@pytest.mark.parametrize("first", ["inside", "outside", "inference tensors"])
def test_tensors_made_under_inference_mode_are_written_outside_it(door, first):
    """Four calls of each function that are like each other but for the mode and for where their tensors were made."""
    dims, device, dtype = door.sizes.dims, door.device, door.sizes.dtype
    kinds = [(True, True), (False, False), (True, False), (False, True)]  # (tensors made, called) under inference mode
    start = {"inside": 0, "outside": 1, "inference tensors": 2}[first]
    for made, called in kinds[start:] + kinds[:start]:
        with torch.inference_mode(made):
            prefill = PagedBatch(dims).add(prefix=64, new=5).add().add(new=66).build(device, dtype=dtype, before=2, after=3)
            output = prefill.tokens.new_output()
            decode = PagedDecode(dims).add(65).add(9).build(device, dtype=dtype)
            step = DecodeStep(dims, 2, 2, device=device, dtype=dtype)
            state = random_states(2, dims).to(device)
            buffer = torch.zeros(2, 2, *state.shape[1:], device=device)
            one = torch.zeros_like(output), torch.zeros(3, *state.shape[1:], device=device)
        assert state.is_inference() is made and output.is_inference() is made
        expected, states = step.reference(state)
        with torch.inference_mode(called):
            prefill.run(door, output=output)
            decode.run(door, output=decode.step.new_output())
            result, _ = door(
                gdn_multi.gated_delta_rule_decode_pretranspose,
                **step.arguments(state=state, intermediate_states_buffer=buffer),
            )
            arguments = prefill.tokens.arguments(output=one[0], output_state=one[1], output_final_state=True)
            _, final = door(gdn_multi.chunk_gated_delta_rule, **arguments)
        step.check_output(result, expected)
        tolerances.assert_close(state, states[:, -1], tolerances.decode_state(F32), "state")
        tolerances.assert_close(buffer, states, tolerances.decode_state(F32), "intermediate states")
        assert final is one[1] and final[2].any() and not final[1].any(), "written, but for the sequence without tokens"


def test_unused_poison_is_really_poison():
    """The tests above stand on this: rows that were not set hold NaN (and infinities where the dtype has them)."""
    for dtype in (F32, BF16, F16, torch.float8_e4m3fn, torch.float8_e5m2):
        pool = Pool(2, cases.Dims(1, 1, 1, 4, 4), dtype, padding=3)
        values = pool.storage.float()
        assert not torch.isfinite(values).all(1).any()
        assert torch.isnan(values).any()
