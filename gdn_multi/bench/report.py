"""Tables a person reads, in Markdown with aligned columns, and the summary below them."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence

import torch

from .calls import Contender
from .peers import versions
from .rows import GATES
from .runner import Result, RowResult

#: An answer further from the truth than this is called wrong in the table, whatever its speed (output and state).
WRONG = {"bfloat16": 0.02, "float16": 0.01, "float32": 1e-3}


def machine(device: torch.device) -> dict[str, object]:
    """The card and the versions that the figures hold for."""
    import gdn_multi

    facts: dict[str, object] = {
        "device": "CPU, wall clock" if device.type != "cuda" else torch.cuda.get_device_name(device),
        "gdn_multi": gdn_multi.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": versions(),
    }
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        facts["capability"] = f"sm_{major}{minor}"
        facts["driver"] = _driver()
    return facts


def _driver() -> str | None:
    try:
        with open("/proc/driver/nvidia/version") as file:
            words = file.readline().split()
        return next(word for word in words if word.count(".") >= 1 and word[0].isdigit())
    except (OSError, StopIteration):
        return None


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def is_wrong(row: RowResult, result: Result) -> bool:
    """NaN and infinity count as wrong too."""
    if result.output_error is None:
        return False
    state_limit = max(WRONG[row.dtype], WRONG.get(row.state_dtype, 0.0))
    return not (result.output_error < WRONG[row.dtype] and result.state_error < state_limit)


def best_peer(row: RowResult, peers: Sequence[Contender]) -> str | None:
    """Name of the fastest peer whose answer is right; for a prefill the best unpaged one."""
    times = {
        peer.name: row.results[peer.name].ms
        for peer in peers
        if not peer.is_ours
        and (row.table == "decode" or peer.counts_as_best)
        and peer.name in row.results
        and row.results[peer.name].ms is not None
        and not is_wrong(row, row.results[peer.name])
    }
    return min(times, key=times.get) if times else None


def _cell(row: RowResult, result: Result | None) -> str:
    if result is None or result.ms is None:
        return "-"
    if row.table == "decode":
        text = f"{result.ms * 1e3:.1f} ({row.state_bytes / result.ms / 1e9:.2f})"
    else:
        text = f"{result.ms:.4f}" if result.ms < 0.1 else f"{result.ms:.3f}"
    if is_wrong(row, result):
        text += " WRONG"
    if result.recorded:
        text += " †"
    elif "not captured" in result.note:
        text += " e"
    return text


def speed_table(rows: Sequence[RowResult], contenders: Sequence[Contender]) -> str:
    """One line a row: every contender's median, and best peer over each of ours."""
    shown = [c for c in contenders if any(_has_time(row, c.name) for row in rows)]
    ours = [c for c in shown if c.is_ours]
    head = (["state", "heads q,k/v", "B"] if rows[0].table == "decode" else ["heads q,k/v", "sequences"]) + [
        c.heading for c in shown
    ]
    headings = {c.name: c.heading for c in shown}
    compared = any(best_peer(row, shown) for row in rows)
    if compared:
        head += ["best peer"] + [f"best peer / {c.name}" for c in ours]
    lines = [head]
    for row in rows:
        best = best_peer(row, shown)
        first = (
            [row.state_dtype, row.heads, row.sequences[2:]]
            if row.table == "decode"
            else [row.heads, row.sequences + ("" if row.dtype == "bfloat16" else f" {row.dtype}")]
        )
        ratios = []
        for c in ours:
            mine = row.results.get(c.name)
            known = best and mine and mine.ms
            ratios.append(f"{row.results[best].ms / mine.ms:.2f}" if known else "-")
        cells = [_cell(row, row.results.get(c.name)) for c in shown]
        lines.append(first + cells + ([headings.get(best, "-")] + ratios if compared else []))
    return aligned(lines)


def _has_time(row: RowResult, name: str) -> bool:
    return name in row.results and row.results[name].ms is not None


def accuracy_table(rows: Sequence[RowResult], contenders: Sequence[Contender]) -> str:
    shown = [c for c in contenders if any(c.name in r.results and r.results[c.name].output_error for r in rows)]
    lines = [["inputs", "gates", "heads q,k/v", "sequences"] + [c.heading for c in shown]]
    for row in rows:
        cells = []
        for c in shown:
            result = row.results.get(c.name)
            known = result is not None and result.output_error is not None
            cells.append(f"{result.output_error:.2e}, {result.state_error:.2e}" if known else "-")
        lines.append([row.dtype, GATES[row.gates], row.heads, row.sequences] + cells)
    return aligned(lines)


def spread_table(rows: Sequence[RowResult], contenders: Sequence[Contender]) -> str:
    """Median, spread, host time and errors of everything measured."""
    lines = [["row", "call", "median ms", "p20", "p80", "runs", "host us", "error of output", "of state"]]
    for row in rows:
        for c in contenders:
            r = row.results.get(c.name)
            if r is None or r.ms is None or r.recorded:
                continue
            host = "-" if r.host_us is None else f"{r.host_us:.0f}"
            errors = ["-", "-"] if r.output_error is None else [f"{r.output_error:.2e}", f"{r.state_error:.2e}"]
            lines.append(
                [row.row, c.heading, f"{r.ms:.4f}", f"{r.p20:.4f}", f"{r.p80:.4f}", str(r.runs), host] + errors
            )
    return aligned(lines)


def above_neighbours(xs: Sequence[float], times: Sequence[float]) -> list[float | None]:
    """By what factor each time is above the line between its neighbours, both axes logarithmic; None at the ends.

    ``xs`` increase. A cliff of a sweep is a point with a large factor.
    """
    factors: list[float | None] = [None] * len(xs)
    for i in range(1, len(xs) - 1):
        along = math.log(xs[i] / xs[i - 1]) / math.log(xs[i + 1] / xs[i - 1])
        factors[i] = times[i] / (times[i - 1] ** (1 - along) * times[i + 1] ** along)
    return factors


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def summary(rows: Sequence[RowResult], contenders: Sequence[Contender]) -> list[str]:
    """What the table says in a few sentences: ratios to the best peer, slower rows, paged against unpaged."""
    lines: list[str] = []
    for c in contenders:
        if not c.is_ours:
            continue
        ratios = {}
        for row in rows:
            best = best_peer(row, contenders)
            if best and _has_time(row, c.name):
                ratios[row.row] = row.results[best].ms / row.results[c.name].ms
        if ratios:
            slower = sorted((name for name in ratios if ratios[name] < 1), key=ratios.get)
            text = f"{c.name}: best peer / ours {_geometric_mean(list(ratios.values())):.2f} (geometric mean of"
            text += f" {len(ratios)} rows), from {min(ratios.values()):.2f} to {max(ratios.values()):.2f}; "
            text += (
                "no row slower"
                if not slower
                else f"{len(slower)} slower: "
                + ", ".join(f"{name} ({ratios[name]:.2f})" for name in slower[:8])
                + (", ..." if len(slower) > 8 else "")
            )
            lines.append(text)
        wrong = [row.row for row in rows if c.name in row.results and is_wrong(row, row.results[c.name])]
        if wrong:
            lines.append(f"{c.name}: WRONG ANSWERS on {', '.join(wrong)}")
    names = {c.name for c in contenders if c.is_ours}
    for paged in sorted(n for n in names if n.endswith((":paged", ":slots"))):
        plain = paged.split(":")[0]
        over = {
            row.row: row.results[paged].ms / row.results[plain].ms - 1
            for row in rows
            if _has_time(row, paged) and _has_time(row, plain)
        }
        if over:
            worst = max(over, key=over.get)
            above = sum(value > 0.05 for value in over.values())
            lines.append(
                f"{paged} over {plain}: at most {100 * over[worst]:+.1f}% ({worst}), "
                f"{above} of {len(over)} rows above 5%"
            )
    host = {
        c.heading: sorted(r.results[c.name].host_us for r in rows if c.name in r.results and r.results[c.name].host_us)
        for c in contenders
    }
    said = [f"{name} {times[0]:.0f} to {times[-1]:.0f}" for name, times in host.items() if times]
    if said:
        lines.append("host time of a call, us: " + "; ".join(said))
    return lines


def notes(rows: Sequence[RowResult], contenders: Sequence[Contender]) -> list[str]:
    """Why cells are empty, each reason once."""
    lines: list[str] = []
    for c in contenders:
        said: dict[str, list[str]] = {}
        for row in rows:
            result = row.results.get(c.name)
            if result is not None and result.note:
                said.setdefault(result.note, []).append(row.row)
        for note, where in said.items():
            place = (
                "all rows" if len(where) == len(rows) else ", ".join(where[:4]) + (", ..." if len(where) > 4 else "")
            )
            lines.append(f"{c.heading} ({place}): {note}")
    return lines
