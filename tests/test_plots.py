"""Plots of cache use; those that draw are skipped where matplotlib is not installed."""
from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from jradix.outputs import RequestMetrics, RequestOutput
from jradix.plots import plot_cache_use


def output(num_tokens: int, num_cached: int, ttft_s: float | None, error: str | None = None) -> RequestOutput:
    return RequestOutput("r", prompt_token_ids=list(range(num_tokens)), num_cached_tokens=num_cached, error=error,
                         metrics=RequestMetrics(ttft_s=ttft_s))


OUTPUTS = [output(100, 0, 0.5), output(100, 75, 0.125), output(0, 0, None, "refused"), output(40, 10, 0.25)]


@pytest.fixture
def pyplot() -> Iterator[Any]:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    yield pyplot
    pyplot.close("all")


def test_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "jradix\[plots\]"'):
        plot_cache_use(OUTPUTS)


def test_plot_of_no_outputs_is_refused() -> None:
    with pytest.raises(ValueError, match="no outputs to plot"):
        plot_cache_use([])


def test_plot_shows_rates_and_times_of_every_request(pyplot: Any) -> None:
    ax = plot_cache_use(OUTPUTS)
    times_axes = next(other for other in ax.figure.axes if other is not ax)
    times = times_axes.lines[0].get_ydata().tolist()
    assert times[:2] == [500.0, 125.0] and math.isnan(times[2]) and times[3] == 250.0
    heights = {(round(x), round(y, 3)) for path in ax.collections[0].get_paths() for x, y in path.vertices}
    tops = {y for _, y in heights}
    assert tops == {0.0, 0.75, 0.25}
    assert ax.get_ylabel() == "prompt tokens cached (%)" and times_axes.get_ylabel() == "time to first token (ms)"
    assert "request" in ax.get_xlabel()
    ax.figure.canvas.draw()


def test_plot_of_slow_requests_uses_seconds(pyplot: Any) -> None:
    ax = plot_cache_use([output(10, 5, 2.5)])
    times_axes = next(other for other in ax.figure.axes if other is not ax)
    assert times_axes.get_ylabel().endswith("(s)") and times_axes.lines[0].get_ydata().tolist() == [2.5]


def test_plot_draws_into_given_axes(pyplot: Any) -> None:
    figure, ax = pyplot.subplots()
    assert plot_cache_use(OUTPUTS, ax=ax) is ax and ax.figure is figure
    assert len(pyplot.get_fignums()) == 1


def test_plot_of_failed_requests_only_is_empty_and_draws(pyplot: Any) -> None:
    ax = plot_cache_use([output(0, 0, None, "refused")] * 3)
    ax.figure.canvas.draw()


def test_plot_series_differ_in_colour_and_in_shape(pyplot: Any) -> None:
    from matplotlib.colors import to_hex
    ax = plot_cache_use(OUTPUTS)
    line = next(other for other in ax.figure.axes if other is not ax).lines[0]
    assert line.get_marker() == "o" and line.get_linestyle() == "None"
    assert to_hex(ax.collections[0].get_facecolor()[0]) == "#0072b2" and to_hex(line.get_color()) == "#d55e00"
