"""What only a GPU can show: CUDA graphs, no synchronization, the current stream, model sizes, several devices.

Rule 5 and field notes kind 11 (a hidden synchronization) and 12 (the slow path without a word).
"""

from __future__ import annotations

import contextlib

import cases
import pytest
import tolerances
import torch
from cases import DecodeStep, Dims, PagedBatch, PagedDecode, Tokens, index, random_states, same_bits

import gdn_multi

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_gpu")]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def capture(function):
    """(graph, what ``function`` returned in it), after one warm-up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@contextlib.contextmanager
def no_synchronization():
    """Any operation of torch that waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def copy_tokens(to: Tokens, source: Tokens) -> None:
    for name in ("q", "k", "v", "g", "beta", "cu_seqlens"):
        getattr(to, name).copy_(getattr(source, name))


def copy_batch(to: PagedBatch, source: PagedBatch) -> None:
    copy_tokens(to.tokens, source.tokens)
    to.pool.storage.copy_(source.pool.storage)
    for name in ("page_indices", "page_indptr", "last_page_len"):
        getattr(to, name).copy_(getattr(source, name))


def two_batches(door, **options):
    """Two paged batches of the same sizes (200 tokens, 4 sequences, 24 entries of page ids) and different contents."""
    plans = [((100, 70), (0, 0), (128, 64), (60, 5)), ((64, 1), (0, 130), (33, 0), (63, 66))]
    batches = []
    for seed, plan in enumerate(plans):
        batch = PagedBatch(door.sizes.dims)
        for prefix, new in plan:
            batch.add(prefix=prefix, new=new)
        ids = torch.randperm(24, generator=torch.Generator().manual_seed(seed)).tolist()
        after = 200 - sum(new for _, new in plan)
        batch.build(door.device, dtype=door.sizes.dtype, seed=seed, page_ids=ids, after=after, **options)
        spare = torch.full((24 - batch.page_indices.shape[0],), 10**6, device=door.device, dtype=torch.int32)
        batch.page_indices = torch.cat([batch.page_indices, spare])
        batches.append(batch)
    return batches


# --- CUDA graphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True], ids=["output allocated", "output given"])
def test_rule_5_a_captured_paged_prefill_replays_with_new_values(door, given):
    """Other lengths, prefixes, page tables and gates in the same buffers: the bits of the eager call."""
    eager = []
    for batch in two_batches(door):
        output = batch.tokens.new_output() if given else None
        eager.append((batch.run(door, **({"output": output} if given else {})), batch.pool.storage.clone()))
    static, other = two_batches(door)
    fresh, _ = two_batches(door)
    more = {"output": static.tokens.new_output()} if given else {}
    arguments = dict(static.arguments(**more), backend=door.name)
    graph, output = capture(lambda: gdn_multi.chunk_gated_delta_rule_paged(**arguments))
    for batch, (wanted, storage) in ((fresh, eager[0]), (other, eager[1]), (fresh, eager[0])):
        copy_batch(static, batch)
        output.fill_(cases.NAN)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(output, wanted)
        assert same_bits(static.pool.storage, storage)


def test_rule_5_a_captured_step_of_several_layers(door, monkeypatch):
    """Slots computed once and given to every layer's call, all in one graph."""
    monkeypatch.setenv("GDN_MULTI_BACKEND", door.name)

    two_batches(door)[0].run(door)  # skips what the backend refuses

    def step(batch, pools):
        slots = gdn_multi.gdn_paged_prefill_slots(cu_seqlens=batch.tokens.cu_seqlens, **batch.table())
        arguments = batch.arguments()
        return [gdn_multi.chunk_gated_delta_rule_paged(**{**arguments, "state_pool": p}, slots=slots) for p in pools]

    eager = []
    for batch in two_batches(door):
        pools = [batch.pool.tensor.clone() for _ in range(3)]
        eager.append((step(batch, pools), pools))
    static, other = two_batches(door)
    pools = [static.pool.tensor.clone() for _ in range(3)]
    graph, outputs = capture(lambda: step(static, pools))
    for batch, (wanted, wanted_pools) in zip((two_batches(door)[0], other), eager):
        copy_batch(static, batch)
        for pool in pools:
            pool.copy_(batch.pool.tensor)
        graph.replay()
        torch.cuda.synchronize()
        for x, y in zip([*outputs, *pools], [*wanted, *wanted_pools]):
            assert same_bits(x, y)


def test_rule_5_a_captured_plain_prefill(door):
    """No slots: the final state allocated by the call, sequences of other lengths at the replay."""
    dims, dtype = door.sizes.dims, door.sizes.dtype
    tokens = [
        Tokens(dims, lengths, after=200 - sum(lengths), device=door.device, dtype=dtype, seed=seed)
        for seed, lengths in enumerate([(70, 0, 64), (1, 190, 3), (0, 0, 199)])
    ]
    states = [random_states(3, dims, seed).to(door.device) for seed in range(3)]
    eager = []
    for t, state in zip(tokens, states):
        expected, after = t.reference(state)
        output, final = door(
            gdn_multi.chunk_gated_delta_rule, **t.arguments(initial_state=state, output_final_state=True)
        )
        t.check_output(output, expected)
        eager.append((output, final))
    static = Tokens(dims, (70, 0, 64), after=66, device=door.device, dtype=dtype)
    state = states[0].clone()
    arguments = static.arguments(initial_state=state, output_final_state=True, backend=door.name)
    graph, (output, final) = capture(lambda: gdn_multi.chunk_gated_delta_rule(**arguments))
    for t, s, wanted in zip(tokens, states, eager):
        copy_tokens(static, t)
        state.copy_(s)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(output, wanted[0]) and same_bits(final, wanted[1])


def test_rule_5_captured_decodes(door):
    """Pool rows and padding change between replays (kind 6: a graph padded to its batch size writes nowhere)."""
    dims, dtype, device = door.sizes.dims, door.sizes.dtype, door.device
    rows = [([4, -1, 5, 0], [4, 2, 1, 3]), ([-1, 2, -1, 3], [1, 6, -1, -1]), ([-1] * 4, [-1] * 4)]
    steps = [DecodeStep(dims, 4, device=device, dtype=dtype, seed=seed) for seed in range(3)]
    pool = random_states(7, dims).to(device)

    def arguments(step, pool, read, write):
        return step.arguments(
            state=None, initial_state=pool, initial_state_indices=index(read, torch.int32, device),
            output_state_indices=index(write, torch.int32, device),
        )  # fmt: skip

    eager = []
    for step, (read, write) in zip(steps, rows):
        mine = pool.clone()
        output, _ = door(gdn_multi.gated_delta_rule_decode_pretranspose, **arguments(step, mine, read, write))
        eager.append((output, mine))
    static_step, static_pool = DecodeStep(dims, 4, device=device, dtype=dtype), pool.clone()
    static = arguments(static_step, static_pool, *rows[0])
    graph, (output, _) = capture(lambda: gdn_multi.gated_delta_rule_decode_pretranspose(**static, backend=door.name))
    for step, (read, write), (wanted, wanted_pool) in zip(steps, rows, eager):
        for name in ("q", "k", "v", "a", "b"):
            static[name].copy_(getattr(step, name))
        static["A_log"].copy_(step.A_log)
        static["dt_bias"].copy_(step.dt_bias)
        static["initial_state_indices"].copy_(index(read, torch.int32, device))
        static["output_state_indices"].copy_(index(write, torch.int32, device))
        static_pool.copy_(pool)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(output, wanted) and same_bits(static_pool, wanted_pool)


@pytest.mark.parametrize("with_slots", [False, True], ids=["table", "slots"])
def test_rule_5_a_captured_paged_decode(door, monkeypatch, with_slots):
    monkeypatch.setenv("GDN_MULTI_BACKEND", door.name)

    def build(totals, seed):
        batch = PagedDecode(door.sizes.dims)
        for total in totals:
            batch.add(total)
        return batch.build(door.device, dtype=door.sizes.dtype, seed=seed)

    def call(batch):
        slots = {"slots": gdn_multi.gdn_paged_decode_slots(**batch.table())} if with_slots else {}
        return gdn_multi.gated_delta_rule_decode_paged(**batch.arguments(), **slots)

    plans = [((65, 100, 2, 129), 1), ((66, 128, 5, 140), 2)]  # the same number of pages each
    eager = []
    for plan in plans:
        batch = build(*plan)
        eager.append((batch.run(door), batch.pool.storage))
    static = build(*plans[0])
    graph, output = capture(lambda: call(static))
    for plan, (wanted, storage) in zip(plans, eager):
        batch = build(*plan)
        for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias"):
            getattr(static.step, name).copy_(getattr(batch.step, name))
        for name in ("page_indices", "page_indptr", "last_page_len"):
            getattr(static, name).copy_(getattr(batch, name))
        static.pool.storage.copy_(batch.pool.storage)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(output, wanted) and same_bits(static.pool.storage, storage)


# --- no synchronization, the current stream -------------------------------------------------------


def calls(door):
    """(name, function, arguments) of one call of each kind."""
    dims, dtype, device = door.sizes.dims, door.sizes.dtype, door.device
    tokens = Tokens(dims, (70, 0, 64), after=9, device=device, dtype=dtype, gate="raw", beta="logit", l2norm=True)
    pool = random_states(12, dims).to(device)
    rows = dict(state_indices=[4, 2, -1], output_state_indices=[1, 3, 0], prefix_lens=[30, 60, 128])
    rows.update(checkpoint_state_indices=[9, 8], checkpoint_cu_starts=[0, 1, 1, 2])
    slot_arguments = tokens.arguments(
        initial_state=pool, output_state=pool, state_checkpoints=pool, output_final_state=True,
        checkpoint_every_n_tokens=64, **{n: index(v, torch.int32, device) for n, v in rows.items()},
    )  # fmt: skip
    paged = two_batches(door)[0]
    step = DecodeStep(dims, 3, 2, device=device, dtype=dtype)
    decode = PagedDecode(dims).add(65).add(2).build(device, dtype=dtype)
    return [
        ("plain", gdn_multi.chunk_gated_delta_rule, tokens.arguments(output_final_state=True)),
        ("slots", gdn_multi.chunk_gated_delta_rule, slot_arguments),
        ("paged", gdn_multi.chunk_gated_delta_rule_paged, paged.arguments()),
        ("prefill slots", gdn_multi.gdn_paged_prefill_slots, dict(cu_seqlens=paged.tokens.cu_seqlens, **paged.table())),
        (
            "decode",
            gdn_multi.gated_delta_rule_decode_pretranspose,
            step.arguments(
                state=None, initial_state=pool, initial_state_indices=index([5, -1, 6], torch.int64, device),
                intermediate_states_buffer=torch.zeros(3, 2, *pool.shape[1:], device=device),
            ),
        ),
        ("paged decode", gdn_multi.gated_delta_rule_decode_paged, decode.arguments()),
        ("decode slots", gdn_multi.gdn_paged_decode_slots, decode.table()),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["plain", "slots", "paged", "prefill slots", "decode", "paged decode", "decode slots"])
def test_kind_11_a_hidden_synchronization(door, name, monkeypatch):
    """Kind 11: after a warm-up no call waits for the device. (Torch's own waits; a graph refuses all others.)"""
    function, arguments = next((f, a) for n, f, a in calls(door) if n == name)
    (door if "q" in arguments else door.page_slots)(function, **arguments)  # skips what the backend refuses
    monkeypatch.setenv("GDN_MULTI_BACKEND", door.name)
    function(**arguments)
    with no_synchronization():
        function(**arguments)
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", ["plain", "paged", "decode", "paged decode"])
def test_rule_5_launches_on_the_current_stream(door, name, monkeypatch):
    """Right inputs arrive late, on a side stream: a launch on any other stream would see NaN."""
    monkeypatch.setenv("GDN_MULTI_BACKEND", door.name)
    function, arguments = next((f, a) for n, f, a in calls(door) if n == name)
    door(function, **arguments)
    function, arguments = next((f, a) for n, f, a in calls(door) if n == name)  # fresh states

    def result():
        returned = function(**arguments)
        return returned[0] if isinstance(returned, tuple) else returned

    pools = [n for n in ("state_pool", "initial_state") if n in arguments]
    kept = {n: arguments[n].clone() for n in pools}
    wanted = result().clone()
    for n in pools:
        arguments[n].copy_(kept[n])
    values = {n: arguments[n].clone() for n in ("q", "k", "v")}
    for n in values:
        arguments[n].fill_(cases.NAN)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        for n, x in values.items():
            arguments[n].copy_(x)
        output = result()
    stream.synchronize()
    assert same_bits(output, wanted)


def test_strided_inputs_are_not_copied(door):
    """Slices of one fused projection need no more memory in a call than dense inputs do."""

    def extra(fused: bool) -> int:
        tokens = Tokens(Dims(4, 4, 8, 128, 128), (4096,), device=door.device, dtype=BF16, fused=fused)
        output = tokens.new_output()
        for _ in range(2):  # the first call may allocate what is kept
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(door.device)
            before = torch.cuda.memory_allocated(door.device)
            door(gdn_multi.chunk_gated_delta_rule, **tokens.arguments(output=output))
            torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(door.device) - before

    size_of_q = 4096 * 4 * 128 * 2
    assert extra(fused=True) <= extra(fused=False) + size_of_q // 2


def test_the_device_of_q_counts_not_the_current_one(door):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    other = torch.device("cuda", (door.device.index + 1) % torch.cuda.device_count())
    with torch.cuda.device(door.device):
        tokens = Tokens(door.sizes.dims, (70, 5), device=other, dtype=door.sizes.dtype)
        expected, _ = tokens.reference()
        tokens.check_output(door(gdn_multi.chunk_gated_delta_rule, **tokens.arguments()), expected)
        step = DecodeStep(door.sizes.dims, 2, device=other, dtype=door.sizes.dtype)
        state = random_states(2, door.sizes.dims).to(other)
        expected, _ = step.reference(state)
        output, _ = door(gdn_multi.gated_delta_rule_decode_pretranspose, **step.arguments(state=state))
        step.check_output(output, expected)


# --- the policy -----------------------------------------------------------------------------------


def test_kind_12_the_policy_takes_a_kernel_where_there_is_one(door):
    """Kind 12: a call that a kernel backend serves on this GPU does not fall to ``torch``."""
    if door.name not in ("cuda", "triton"):
        pytest.skip("about backends with kernels of their own")
    tokens = Tokens(Dims(2, 2, 4, 128, 128), (70,), device=door.device, dtype=BF16)
    explanation = gdn_multi.explain(gdn_multi.chunk_gated_delta_rule, **tokens.arguments())
    assert explanation.backend != "torch", str(explanation)


# --- model sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("gate", ["linear", "raw"])
def test_model_sizes(door, dtype, gate):
    dims = Dims(2, 2, 8, 128, 128)
    beta, l2norm = ("logit_half", True) if gate == "raw" else ("plain", False)
    batch = PagedBatch(dims, 128).add(prefix=1000, new=1500).add(prefix=0, new=20).add(prefix=4096, new=600).add()
    batch.build(door.device, dtype=dtype, gate=gate, beta=beta, l2norm=l2norm).run(door)


@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=str)
def test_model_sizes_of_decode(door, state_dtype):
    dims = Dims(16, 16, 64, 128, 128)
    batch = PagedDecode(dims, 128)
    for i in range(32):
        batch.add(127 + i)
    batch.build(door.device, dtype=BF16, pool_dtype=state_dtype).run(door)


@pytest.mark.parametrize("lengths", [(8192,), (4000, 3, 2100), tuple([256] * 16)], ids=str)
def test_long_prefills_agree_with_the_torch_backend(door, lengths):
    """Too long for the reference's memory; the torch backend in float32 stands in for it, itself tested above."""
    if door.name == "torch":
        pytest.skip("it is the one compared with")
    tokens = Tokens(Dims(2, 2, 8, 128, 128), lengths, device=door.device, dtype=BF16, gate="raw", beta="logit")
    output, final = door(gdn_multi.chunk_gated_delta_rule, **tokens.arguments(output_final_state=True))
    full = tokens.arguments(output_final_state=True, backend="torch")
    full.update({n: full[n].float() for n in ("q", "k", "v")})
    wanted, wanted_final = gdn_multi.chunk_gated_delta_rule(**full)
    tokens.check_output(output, wanted)
    for i in range(len(lengths)):
        allowed = tolerances.prefill_state(BF16, F32)
        tolerances.assert_close(final[i], wanted_final[i], allowed, f"final state of sequence {i}")
