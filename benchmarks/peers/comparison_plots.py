"""Plots of a comparison. Needs matplotlib (the extra `plots`), which is imported when they are drawn."""
from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from peers.figures import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The Okabe-Ito palette; lines differ in their marks as well.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKS = "osD^vPX"


def write_plots(rows: Mapping[str, Sequence[Row]], folder: Path, title: str) -> list[Path]:
    """Draws TTFT against turn, throughput, and prompt tokens computed over the fewest possible.

    Args:
      rows: of each workload.
      folder: where the PNG files go.
      title: size and machine.

    Returns:
      The files, those left out for which there is nothing to draw.

    Raises:
      ImportError: matplotlib is not installed.
    """
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row.name for each in rows.values() for row in each))
    style = {name: (COLORS[i % len(COLORS)], MARKS[i % len(MARKS)]) for i, name in enumerate(names)}
    with_turns = {workload: each for workload, each in rows.items() if max(len(row.ttft_s) for row in each) > 2}
    drawn = []
    for file, chosen, draw in (("ttft.png", with_turns, draw_ttft), ("throughput.png", rows, draw_throughput),
                               ("computed.png", rows, draw_computed)):
        if not chosen:
            continue
        figure, axes = pyplot.subplots(1, len(chosen), figsize=(1.5 + 3.6 * len(chosen), 4.2), squeeze=False,
                                       layout="constrained")
        for ax, (workload, each) in zip(axes[0], chosen.items()):
            draw(ax, each, style)
            ax.set_title(workload)
        figure.suptitle(title)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
        figure.savefig(folder / file, dpi=130)
        pyplot.close(figure)
        drawn.append(folder / file)
    return drawn


def draw_ttft(ax: Axes, rows: Sequence[Row], style: Mapping[str, tuple[str, str]]) -> None:
    for row in rows:
        known = [(turn, value) for turn, value in enumerate(row.ttft_s, 1) if value is not None]
        if known:
            color, mark = style[row.name]
            ax.plot(*zip(*known), color=color, marker=mark, label=row.name)
    ax.set(xlabel="turn", ylabel="time to first token (s), median of its requests", yscale="log",
           xticks=range(1, 1 + max(len(row.ttft_s) for row in rows)))


def draw_throughput(ax: Axes, rows: Sequence[Row], style: Mapping[str, tuple[str, str]]) -> None:
    """Bars at the median, whiskers from the slowest to the fastest run."""
    for i, row in enumerate(rows):
        num_tokens = row.output_tokens_per_s * statistics.median(row.wall_s)
        low, high = num_tokens / max(row.wall_s), num_tokens / min(row.wall_s)
        ax.bar(i, row.output_tokens_per_s, color=style[row.name][0], label=row.name,
               yerr=[[row.output_tokens_per_s - low], [high - row.output_tokens_per_s]], capsize=3)
    ax.set(ylabel="output tokens per second", xticks=[])


def draw_computed(ax: Axes, rows: Sequence[Row], style: Mapping[str, tuple[str, str]]) -> None:
    for i, row in enumerate(rows):
        if row.over_minimum is not None:
            bar = ax.bar(i, row.over_minimum, color=style[row.name][0], label=row.name)
            ax.bar_label(bar, [f"{row.over_minimum:.2f}"], fontsize="x-small")
    ax.axhline(1, color="0.4", linewidth=1)
    ax.set(ylabel="prompt tokens computed / the trie's minimum", xticks=[])
