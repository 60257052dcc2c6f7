"""Plots of a benchmark's results: ratios to the best peer, and speed over length. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from .calls import Contender
from .report import best_peer
from .runner import RowResult

#: Hues that stay apart for colour-blind readers; ours are drawn strong, peers in grey shades.
OURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
PEERS = ("#555555", "#888888", "#aaaaaa", "#777777", "#bbbbbb", "#999999")
MARKERS = "os^Dv<>pP*"


def pyplot():
    """matplotlib.pyplot without a display; RuntimeError with the line that mends its absence."""
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot(path: str, rows: Sequence[RowResult], contenders: Sequence[Contender]) -> None:
    """Ratio bars for every table of speed, and tokens a second over length for single sequences."""
    plt = pyplot()
    tables = [t for t in ("prefill", "decode") if any(r.table == t for r in rows)]
    lines = _lengths(rows)
    panels = len(tables) + (1 if lines else 0)
    if not panels:
        raise ValueError("nothing to plot: no row of speed was measured")
    longest = max(sum(r.table == t for r in rows) for t in tables)
    figure, axes = plt.subplots(panels, 1, figsize=(max(9, 0.42 * longest + 3), 4.6 * panels), squeeze=False)
    axes = list(axes[:, 0])
    for table in tables:
        _bars(axes.pop(0), table, [r for r in rows if r.table == table], contenders)
    if lines:
        _speed(axes.pop(0), lines, contenders)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _bars(axis, table: str, rows: Sequence[RowResult], contenders: Sequence[Contender]) -> None:
    ours = [c for c in contenders if c.is_ours and any(_time(r, c.name) for r in rows)]
    width = 0.8 / max(1, len(ours))
    for number, c in enumerate(ours):
        places, heights = [], []
        for i, row in enumerate(rows):
            best = best_peer(row, contenders)
            if best and _time(row, c.name):
                places.append(i + (number - (len(ours) - 1) / 2) * width)
                heights.append(row.results[best].ms / row.results[c.name].ms)
        axis.bar(places, heights, width, label=c.heading, color=OURS[number % len(OURS)])
    axis.axhline(1, color="black", linewidth=1)
    axis.set_ylabel("best peer's time / ours\n(above 1: ours is faster)")
    axis.set_title(table)
    labels = [f"{r.heads} {r.sequences}" + (f" {r.state_dtype}" if table == "decode" else "") for r in rows]
    axis.set_xticks(range(len(rows)), labels, rotation=60, ha="right", fontsize=8)
    axis.set_xlim(-0.6, len(rows) - 0.4)
    axis.grid(axis="y", alpha=0.3)
    if ours:
        axis.legend(fontsize=8, ncols=min(4, len(ours)))


def _lengths(rows: Sequence[RowResult]) -> dict[str, list[RowResult]]:
    """Prefill rows of one sequence, by heads, of the heads with most lengths (at least two)."""
    found: dict[str, list[RowResult]] = {}
    for row in rows:
        if row.table == "prefill" and row.sequences.endswith("x1") and "+" not in row.sequences:
            found.setdefault(row.heads, []).append(row)
    if not found:
        return {}
    heads = max(found, key=lambda h: (len(found[h]), -int(h.split("/")[1])))
    return {heads: found[heads]} if len(found[heads]) > 1 else {}


def _speed(axis, lines: dict[str, list[RowResult]], contenders: Sequence[Contender]) -> None:
    ((heads, rows),) = lines.items()
    rows = sorted(rows, key=lambda r: int(r.sequences[:-2]))
    counts = {True: 0, False: 0}
    for number, c in enumerate(contenders):
        points = [(int(r.sequences[:-2]), r.results[c.name].ms) for r in rows if _time(r, c.name)]
        if not points:
            continue
        colours = OURS if c.is_ours else PEERS
        axis.plot(
            [n for n, _ in points], [n / ms / 1e3 for n, ms in points], marker=MARKERS[number % len(MARKERS)],
            color=colours[counts[c.is_ours] % len(colours)], linewidth=2 if c.is_ours else 1.2,
            linestyle="-" if c.is_ours else "--", label=c.heading,
        )  # fmt: skip
        counts[c.is_ours] += 1
    axis.set_xscale("log", base=2)
    axis.set_xticks([int(r.sequences[:-2]) for r in rows], [r.sequences[:-2] for r in rows])
    axis.set_xlabel("tokens of one sequence")
    axis.set_ylabel("million tokens a second")
    axis.set_ylim(bottom=0)
    axis.set_title(f"prefill speed over length, heads {heads}")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _time(row: RowResult, name: str) -> bool:
    return name in row.results and row.results[name].ms is not None
