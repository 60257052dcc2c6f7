"""torch.compile: a graph breaks at each call of ours, whose insides are never traced."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gdn_multi

ROOT = Path(__file__).resolve().parents[2]
INT = dict(dtype=torch.int32)


def prefill():
    q, v = torch.randn(5, 1, 8), torch.randn(5, 2, 8)
    return dict(q=q, k=q.clone(), v=v, cu_seqlens=torch.tensor([0, 2, 5], **INT))


def decode():
    q, v, gate, head = torch.randn(2, 1, 1, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2), torch.zeros(2)
    return dict(q=q, k=q.clone(), v=v, A_log=head, a=gate, dt_bias=head, b=gate)


def table():
    return dict(
        page_indices=torch.tensor([2, 0], **INT), page_indptr=torch.tensor([0, 1, 2], **INT), last_page_len=torch.tensor([2, 3], **INT)
    )  # fmt: skip


def slots():
    return dict(**table(), page_size=64, cu_seqlens=torch.tensor([0, 2, 5], **INT))


CALLS = {
    "chunk_gated_delta_rule": lambda: dict(**prefill(), output_final_state=True),
    "chunk_gated_delta_rule_paged": lambda: dict(**prefill(), state_pool=torch.zeros(3, 2, 8, 8), page_size=64, **table()),
    "gated_delta_rule_decode_pretranspose": lambda: dict(**decode(), state=torch.zeros(2, 2, 8, 8)),
    "gated_delta_rule_decode_paged": lambda: dict(**decode(), state_pool=torch.zeros(3, 2, 8, 8), **table()),
    "gdn_paged_prefill_slots": slots,
    "gdn_paged_decode_slots": table,
}


def flat(result) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


class Graphs:
    """A backend for torch.compile that runs graphs as they are and keeps the names of what they call."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def __call__(self, graph, inputs):
        self.seen.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("whole", [False, True], ids=["a function around it", "the function itself"])
def test_like_calls_break_the_graph_and_are_not_traced(name, whole):
    torch._dynamo.reset()
    function, graphs = getattr(gdn_multi, name), Graphs()

    def around(call):
        results = flat(function(**call))
        return [torch.add(x, 1) for x in results]

    compiled = torch.compile(function if whole else around, backend=graphs)
    for _ in range(4):
        call, own = CALLS[name](), CALLS[name]()
        for one, value in call.items():
            own[one] = value.clone() if isinstance(value, torch.Tensor) else value
        expected = flat(function(**own) if whole else around(own))
        results = flat(compiled(**call) if whole else compiled(call))
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
        for one, value in own.items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, call[one]), f"{one} differs"
    called = set(sum(graphs.seen, []))
    assert called <= {"add"} and ("add" in called) is not whole, graphs.seen


def test_an_error_is_that_of_the_call():
    call = dict(CALLS["gated_delta_rule_decode_paged"](), scale="big")
    with pytest.raises(TypeError, match="scale must be a number or None, got str 'big'"):
        torch.compile(lambda: gdn_multi.gated_delta_rule_decode_paged(**call), backend="eager")()


def test_a_graph_that_must_be_whole_says_what_broke_it():
    call = CALLS["gated_delta_rule_decode_paged"]()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="gdn_multi launches its kernels from Python"):
        torch.compile(lambda: gdn_multi.gated_delta_rule_decode_paged(**call), backend="eager", fullgraph=True)()


def test_importing_does_not_import_the_compiler():
    program = "import sys; sys.path.insert(0, {!r}); import gdn_multi; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program.format(str(ROOT))], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
