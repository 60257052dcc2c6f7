"""What the tuning script does without a GPU: the fit of the costs, and the float64 result that accuracy is measured by."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from gdn_multi.backends.triton import heuristics, tune  # noqa: E402

from gdn_multi import reference  # noqa: E402

TRUE = heuristics.Costs(alone=1.5, shared=2.0, local=0.7, round=3.0, scan=1.0, launch=8.0, prepare=0.03, call=12.0)


def printed() -> str:
    """As ``tune segments`` prints a table of calls that take what ``estimate`` says."""
    lines = ["# whole calls"]
    for heads, lengths in tune.rows_of_table([], []):
        if len(lengths) > 8:
            continue
        calls = [(1, length // 64) for length in lengths]
        times = [heuristics.estimate(calls, size or max(lengths), heads[1], 2, 2, 132, TRUE) for size in tune.SEGMENTS]
        cells = "".join(f"{us:8.0f}{'*' if i == 1 else ' '}" for i, us in enumerate(times))
        lines.append(f"{heads[0]}/{heads[1]} {tune.name_of(lengths):<18}{cells}")
    return "\n".join([*lines, "2 s"])


def test_segments_are_read_back():
    measured = tune.read_segments(printed())
    assert list(measured) == [row for row in tune.rows_of_table([], []) if len(row[1]) <= 8]
    assert all(list(times) == list(tune.SEGMENTS) for times in measured.values())


def test_the_fit_comes_close_and_changes_nothing(capsys):
    before = heuristics.COSTS
    found = tune.fit(tune.read_segments(printed()))
    assert heuristics.COSTS is before
    for heads in (8, 64):
        for calls in ([(1, 512)], [(4, 128)], [(1, 64), (1, 448)]):
            for size in (16, 512):
                wanted, got = (heuristics.estimate(calls, size, heads, 2, 2, 132, costs) for costs in (TRUE, found))
                assert got == pytest.approx(wanted, rel=0.1)
    assert "fitted: Costs(" in capsys.readouterr().out


def test_a_log_without_rows_is_refused():
    with pytest.raises(SystemExit, match="nothing to fit"):
        tune.fit(tune.read_segments("2 s\n"))


def test_truth_is_the_reference():
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(5, 2, tune.K, generator=rng), dim=-1) for _ in range(2))
    v = torch.randn(5, 4, tune.V, generator=rng)
    g, beta = torch.rand(2, 5, 4, generator=rng)
    initial = torch.randn(1, 4, tune.V, tune.K, generator=rng)
    output, state = tune.truth(dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial))
    wanted, states = reference.prefill(q, k, v, g, beta, cu_seqlens=torch.tensor([0, 5]), initial_state=initial)
    torch.testing.assert_close(output, wanted.double())
    torch.testing.assert_close(state, states[0][-1])
