"""Plots of what the cache did for a batch. Needs matplotlib, which is imported when a plot is made."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jradix.outputs import RequestOutput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Blue and vermillion of the Okabe-Ito palette; the two series differ in shape as well.
HIT_COLOR, TTFT_COLOR = "#0072b2", "#d55e00"


def plot_cache_use(outputs: Sequence[RequestOutput], *, ax: Axes | None = None) -> Axes:
    """Draws, request by request, the share of the prompt found in the cache and the time to the first token.

    Requests that failed leave a gap.

    Args:
      outputs: what `generate`, `chat` or `generate_iter` returned, in the order to show.
      ax: axes to draw into; None: new ones.

    Returns:
      The axes of the hit rate (0 to 100 %, left). The times (right) are on a twin of it.

    Raises:
      ValueError: no outputs.
      ImportError: matplotlib is not installed.
    """
    if not outputs:
        raise ValueError("no outputs to plot; give the list that generate() or chat() returned")
    try:
        from matplotlib import pyplot
        from matplotlib.ticker import MaxNLocator, PercentFormatter
    except ImportError as error:
        raise ImportError('plot_cache_use needs matplotlib: pip install "jradix[plots]"') from error
    if ax is None:
        _, ax = pyplot.subplots(figsize=(8, 3.5), layout="constrained")
    rates = [_hit_rate(output) for output in outputs]
    scale, unit = _time_unit(outputs)
    times = [math.nan if output.metrics.ttft_s is None else output.metrics.ttft_s * scale for output in outputs]

    edges = [i - 0.5 for i in range(len(outputs) + 1)]
    ax.fill_between(edges, [*rates, rates[-1]], step="post", color=HIT_COLOR, alpha=0.35, linewidth=0,
                    label="prompt found in the cache")
    ax.set(xlabel="request, in the order given", ylabel="prompt tokens cached (%)", xlim=(edges[0], edges[-1]),
           ylim=(0, 1.02))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
    ax.yaxis.label.set_color(HIT_COLOR)

    right = ax.twinx()
    right.plot(range(len(outputs)), times, linestyle="none", marker="o", markersize=4, color=TTFT_COLOR,
               label="time to first token")
    right.set_ylabel(f"time to first token ({unit})")
    right.set_ylim(bottom=0)
    right.yaxis.label.set_color(TTFT_COLOR)
    handles = [*ax.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    right.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    return ax


def _hit_rate(output: RequestOutput) -> float:
    if output.error is not None or not output.prompt_token_ids:
        return math.nan
    return output.num_cached_tokens / len(output.prompt_token_ids)


def _time_unit(outputs: Sequence[RequestOutput]) -> tuple[float, str]:
    """Factor and name of the unit that keeps the longest time short to write."""
    longest = max((output.metrics.ttft_s or 0.0 for output in outputs), default=0.0)
    return (1.0, "s") if longest >= 1 else (1e3, "ms")
