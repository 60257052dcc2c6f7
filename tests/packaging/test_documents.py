"""README and docs: their code runs, their links lead somewhere, and each variable and command is described."""

import re
from pathlib import Path

import pytest

import gdn_multi
from gdn_multi import cli, env

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]


def blocks(path):
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def execute(code, path, names):
    exec(compile(code, str(path), "exec"), names)


def test_the_readmes_code_runs(monkeypatch):
    """The paged example on the CPU, with real pages in the pool, so that «stay as they are» is seen."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    example, import_as, asking = blocks(ROOT / "README.md")
    names = {}
    filled = "pool[[7, 3]] = torch.randn(2, *pool.shape[1:])\nbefore = pool.clone()\n"
    code = example.replace("out = gdn_multi", filled + "out = gdn_multi")
    assert code != example
    execute(code, "README.md", names)
    pool, before = names["pool"], names["before"]
    changed = [page for page in range(16) if not torch.equal(pool[page], before[page])]
    assert changed == [12]
    assert names["out"].shape == (452, 4, 128) and names["out"].isfinite().all()
    execute(asking, "README.md", names)
    execute(import_as, "README.md", names)
    flashinfer = names["flashinfer"]
    assert flashinfer.gdn_prefill.chunk_gated_delta_rule is flashinfer.chunk_gated_delta_rule


def test_the_contracts_speculative_decoding_is_decoding():
    """Against one paged decode a token, of sequences that end inside a page, cross one, and have all drafts refused."""
    import torch

    (code,) = (block for block in blocks(ROOT / "docs" / "contract.md") if "after = torch.empty" in block)
    B, T, page_size = 3, 4, 64
    first, pages, accepted = [70, 126, 64], [[5, 2], [1, 6, 3], [0, 4]], [3, 4, 0]
    torch.manual_seed(0)
    q, k = torch.randn(2, B, T, 1, 8).unbind()
    v, (a, b) = torch.randn(B, T, 2, 8), torch.randn(2, B, T, 2).unbind()
    A_log, dt_bias = torch.zeros(2), torch.zeros(2)
    pool = torch.randn(8, 2, 8, 8)
    before, expected = pool.clone(), pool.clone()
    names = dict(locals(), torch=torch, gdn_multi=gdn_multi, verify=lambda output: accepted)
    execute(code, "contract.md", names)
    assert names["rows"].tolist() == [2, 6, 0]
    for i in range(B):
        for t in range(accepted[i]):
            total = first[i] + t + 1
            count = -(-total // page_size)
            step = gdn_multi.gated_delta_rule_decode_paged(
                *(x[i : i + 1, t : t + 1] for x in (q, k, v)), A_log, a[i : i + 1, t : t + 1], dt_bias, b[i : i + 1, t : t + 1],
                state_pool=expected, page_indices=torch.tensor(pages[i][:count]), page_indptr=torch.tensor([0, count]),
                last_page_len=torch.tensor([total - (count - 1) * page_size]),
            )  # fmt: skip
            torch.testing.assert_close(names["output"][i, t], step[0, 0])
    torch.testing.assert_close(pool, expected)
    assert [page for page in range(8) if not torch.equal(pool[page], before[page])] == [2, 3, 6]


def test_the_worked_backend_runs():
    names = {}
    try:
        for code in blocks(ROOT / "docs" / "adding_a_backend.md"):
            execute(code, "adding_a_backend.md", names)
        assert "simple" in gdn_multi.registered_backends()
        compare_with_torch(names)
    finally:
        gdn_multi.unregister_backend("simple")


def compare_with_torch(names):
    """The example must be right, too."""
    import torch

    call = dict(names["call"], backend="simple", q=names["q"], k=names["k"])
    pool = torch.randn(5, 4, 64, 64)
    results = []
    for backend in ("simple", "torch"):
        call.update(backend=backend, initial_state=pool.clone(), output_state_indices=torch.tensor([2, 1, 0]))
        results.append(gdn_multi.gated_delta_rule_decode_pretranspose(**call))
    (output, state), (expected, expected_state) = results
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=1e-5)
    assert torch.equal(state[[1, 3, 4]], pool[[1, 3, 4]])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    anchors = {}
    for target in re.findall(r"\]\(([^)]+)\)", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{path.name} links to {target}"
        if anchor:
            if linked not in anchors:
                anchors[linked] = {slug(line) for line in linked.read_text().splitlines() if line[:1] == "#"}
            headings = anchors[linked]
            assert anchor in headings, f"{path.name} links to {target}; headings: {sorted(headings)}"


def slug(heading):
    text = heading.lstrip("#").strip().lower().replace("`", "")
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def test_every_variable_is_described():
    text = (ROOT / "docs" / "environment.md").read_text()
    assert [name for name in env.VARIABLES if f"`{name}`" not in text] == []
    mentioned = set(re.findall(r"GDN_MULTI_[A-Z_]+[A-Z]", "".join(path.read_text() for path in DOCUMENTS)))
    assert mentioned <= set(env.VARIABLES), "the documents name variables that do not exist"


def test_only_env_reads_our_variables():
    """The room of environment variables is env.py; elsewhere their names stand in messages only."""
    sources = [*(ROOT / "gdn_multi").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]
    assert len(sources) > 20
    reads = re.compile(r"""(environ(\.get)?|getenv)\s*[\[(]\s*f?["']GDN_MULTI_""")
    assert [str(path) for path in sources if path.name != "env.py" and reads.search(path.read_text())] == []


def test_every_public_name_is_in_the_contract_or_the_guides():
    text = "".join((ROOT / "docs" / name).read_text() for name in ("contract.md", "adding_a_backend.md", "design.md"))
    functions = [name for name in gdn_multi.__all__ if callable(getattr(gdn_multi, name))]
    missing = [name for name in functions if name not in text]
    assert missing == []


def test_every_command_of_the_documents_exists():
    text = "".join(path.read_text() for path in DOCUMENTS)
    commands = set(re.findall(r"python -m gdn_multi (\w+)", text))
    assert commands and commands <= set(cli.COMMANDS)
    targets = set(re.findall(r"^ +make ([a-z-]+)", text, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert targets and [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []
