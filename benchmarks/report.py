"""How a benchmark takes times, names the machine and prints: a table for people, one JSON line for programs.

It imports no jax, so that the host-only benchmarks do not either.
"""
from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np


class Summary(NamedTuple):
    """Median and 90th percentile of repeated measurements, in the unit they came in."""
    median: float
    p90: float


class Watch:
    """Wall and CPU time of the same stretches of code. CPU time is what other programs on the machine do not change.

    Args:
      cpu_clock: `time.process_time` counts all threads, `time.thread_time` the calling one.

    Attributes:
      wall_s, cpu_s: seconds of each stretch so far, divided by its count.
    """

    def __init__(self, cpu_clock: Callable[[], float] = time.process_time):
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self._cpu_clock = cpu_clock
        self._started = 0.0, 0.0

    def start(self) -> None:
        self._started = self._cpu_clock(), time.perf_counter()

    def stop(self, count: int = 1) -> None:
        """Ends a stretch in which the thing to measure happened `count` times."""
        wall = time.perf_counter()
        self.cpu_s.append((self._cpu_clock() - self._started[0]) / count)
        self.wall_s.append((wall - self._started[1]) / count)


def summarise(values: Sequence[float], scale: float = 1.0) -> Summary:
    """Summary of `values`, each times `scale`: 1e3 turns seconds into milliseconds."""
    array = np.asarray(values, np.float64) * scale
    return Summary(float(np.median(array)), float(np.quantile(array, 0.9)))


def machine(device: str | None = None) -> dict[str, Any]:
    """What the numbers were measured on, and how busy it was.

    Args:
      device: the accelerator, or None for a benchmark of the host alone.
    """
    found = dict(cpu=_cpu_name(), cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
                 else os.cpu_count(), load=round(os.getloadavg()[0], 2), python=platform.python_version())
    if device is not None:
        found |= dict(device=device, jax=importlib.metadata.version("jax"))
    return found


def print_table(title: str, rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()) -> None:
    """Prints rows in columns, the first row being the headers, and notes below them."""
    print(title)
    cells = [[_shown(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        print("  " + "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                               for column, (cell, width) in enumerate(zip(row, widths))))
    for note in notes:
        print(f"  {note}")
    sys.stdout.flush()      # into a file, the next part may take an hour


def print_result(name: str, result: dict[str, Any], device: str | None = None) -> None:
    """Names the machine and prints everything in one JSON line; the last thing a benchmark prints."""
    where = machine(device)
    print(f"measured on {where['cpu']}, {where['cores']} cores, load {where['load']}"
          + (f"; device {device}" if device else "; no device used"))
    print(json.dumps(dict(benchmark=name, machine=where, **_rounded(result))), flush=True)


def _shown(cell: Any) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "NO"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    if isinstance(cell, int):
        return f"{cell:,}"
    return "" if cell is None else str(cell)


def _rounded(value: Any) -> Any:
    """Floats to five significant digits; containers all the way down."""
    if isinstance(value, Summary):
        return _rounded(value._asdict())
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
