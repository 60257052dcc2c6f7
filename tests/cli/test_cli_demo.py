"""``demo``: on small files, right; with a planted fault, a non-zero exit."""

import re

import pytest
import torch

import gdn_multi
from gdn_multi import cli
from gdn_multi.cli.demo import check
from gdn_multi.registry import registry

#: Small enough for a second: 2 heads of 64, pages of 64 tokens.
SMALL = "--device cpu --heads 1/2 --head-size 64 --page-size 64 --tokens 120 --decode 6".split()


@pytest.fixture
def files(tmp_path):
    texts = {
        "system.txt": "You answer questions about rivers, briefly and in plain words. " * 3,
        "rhine.txt": "Where does the Rhine rise, through which lake does it flow, and where does it end? " * 3,
        "elbe.txt": "Which cities lie on the Elbe between its source and the sea? " * 3,
        "one.txt": "?",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    paths = {name: str(tmp_path / name) for name in texts}
    return ["--system", paths["system.txt"], paths["rhine.txt"], paths["elbe.txt"], paths["one.txt"]]


def rows(printed):
    """The table's rows: name -> list of its cells."""
    table = printed[printed.index("\nrequest") :].split("\n\n")[0].strip().splitlines()
    cells = [re.split(r"  +", line) for line in table[2:]]
    return {row[0].rpartition("/")[2]: row for row in cells}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_it_serves_files_and_is_right(files, capsys, dtype):
    assert cli.main(["demo", *SMALL, "--dtype", dtype, *files]) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("ok")
    table = rows(printed)
    assert set(table) == {"system.txt", "rhine.txt", "elbe.txt", "one.txt", "rhine.txt, again"}
    # the system prompt is 189 bytes, cut at 2 * 120 tokens: two full pages of 64 are reused by everybody
    assert table["elbe.txt"][1] == "128" and table["one.txt"][1] == "128"
    # asked again, it reuses pages of the first time too
    assert int(table["rhine.txt, again"][1]) > 128
    # every long request opened a page while it decoded
    assert table["rhine.txt"][6] == "1" and table["elbe.txt"][6] == "1"
    assert all(row[7] == "torch" for row in table.values())
    assert " 0 changed" in printed


def test_the_same_seed_gives_the_same_table(files, capsys):
    def errors():
        assert cli.main(["demo", *SMALL, "--seed", "3", *files]) == 0
        return {name: row[:9] for name, row in rows(capsys.readouterr().out).items()}

    assert errors() == errors()


@pytest.mark.parametrize("page_size, state_dtype", [(128, "float32"), (64, "bfloat16"), (64, "float16")])
def test_other_pages_and_states(files, capsys, page_size, state_dtype):
    options = [*SMALL, "--page-size", str(page_size), "--state-dtype", state_dtype]
    assert cli.main(["demo", *options, *files]) == 0, capsys.readouterr().out


def test_by_default_it_serves_this_projects_documents(capsys):
    assert cli.main(["demo", *SMALL]) == 0
    table = rows(capsys.readouterr().out)
    assert "system: README.md" in table and "contract.md" in table and "design.md" in table


class Planted(gdn_multi.Backend):
    """The torch backend with a fault that the test plants."""

    name = "planted"

    def __init__(self, fault):
        self._inner, self._fault = registry.get("torch"), fault

    def prefill(self, request):
        before = request.final_state.clone()
        self._inner.prefill(request)
        self._fault(request, before)

    def decode(self, request):
        self._inner.decode(request)
        self._fault(request, None)


def one_wrong_output(request, before):
    if request.kind == "prefill":
        request.output[-1, 0, 0] += request.output.abs().max() / 10


def wrong_decode(request, before):
    if request.kind == "decode":
        request.output.mul_(1.2)


def nan_output(request, before):
    request.output[0, 0, 0] = float("nan")


def one_wrong_state_entry(request, before):
    if request.kind == "prefill":
        changed = (request.final_state != before).flatten(1).any(1) & ~request.final_state.isnan().flatten(1).any(1)
        row = changed.nonzero()[-1, 0]
        request.final_state[row, -1, 5, 7] += request.final_state[row].abs().max() / 10


def touches_a_shared_page(request, before):
    if request.kind == "decode":  # the first page of the first sequence: full, and shared
        request.state[request.pages.page_indices[0], 0, 0, 0] += 1e-7


def touches_an_unused_page(request, before):
    if request.kind == "decode":
        request.state[request.state.isnan().flatten(1).all(1)] = 0


@pytest.mark.parametrize(
    "fault, says",
    [
        (one_wrong_output, "against the reference"),
        (wrong_decode, "against the reference"),
        (nan_output, "error inf against the reference"),
        (one_wrong_state_entry, "against the reference"),
        (touches_a_shared_page, "changed after it was complete"),
        (touches_an_unused_page, "no request owns it"),
    ],
)
def test_a_planted_fault_is_found(files, capsys, fault, says):
    gdn_multi.register_backend(Planted(fault))
    try:
        code = cli.main(["demo", *SMALL, "--backend", "planted", *files])
    finally:
        gdn_multi.unregister_backend("planted")
    printed = capsys.readouterr().out
    failures = [line for line in printed.splitlines() if line.startswith("FAILED")]
    assert code == 1 and failures and any(says in line for line in failures), printed
    assert not printed.rstrip().endswith("ok")


@pytest.mark.parametrize(
    "options, says",
    [
        (["--heads", "four"], "--heads"),
        (["--heads", "3/4"], "multiple"),
        (["--page-size", "100"], "multiple of 64"),
        (["--tokens", "0"], "--tokens"),
        (["--device", "nowhere"], "nowhere"),
        (["--backend", "nowhere"], "unknown backend 'nowhere'"),
        (["--backend", "cake_gdn"], "cake_gdn"),
        (["no/such/file.txt"], "no/such/file.txt"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(capsys, options, says):
    assert cli.main(["demo", *SMALL, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("demo: ") and says in error


def test_an_empty_file_is_refused(tmp_path, capsys):
    (tmp_path / "empty.txt").write_bytes(b"")
    assert cli.main(["demo", *SMALL, str(tmp_path / "empty.txt")]) == 2
    assert "is empty" in capsys.readouterr().err


def test_errors_are_relative_to_the_largest_entry_and_see_nan():
    reference = torch.tensor([1.0, -4.0], dtype=torch.float64)
    assert check.error_of(torch.tensor([1.0, -4.0]), reference) == 0
    assert check.error_of(torch.tensor([1.4, -4.0]), reference) == pytest.approx(0.1)
    assert check.error_of(torch.tensor([float("nan"), -4.0]), reference) == float("inf")
    assert check.tolerance(torch.float32, torch.bfloat16) == check.TOLERANCES[torch.bfloat16]
