"""What processes take of this machine, read from Linux's /proc: CPU seconds, peak memory, and how busy the rest is.

CPU seconds come in ticks of a hundredth of a second. The peak of a tree is the sum of the peaks of its processes, which
counts pages they share more than once. Standard library only.
"""
from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Callable, NamedTuple

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
QUIET_CORES = 0.1      # what a machine at rest takes for itself
SAMPLE_S = 2.0


class Usage(NamedTuple):
    """CPU seconds and peak bytes of resident memory of a process and all its descendants, ended ones included."""
    cpu_s: float
    peak_bytes: int


class Quiet(NamedTuple):
    """How a wait ended: cores that other processes kept busy in the last sample, and seconds waited."""
    busy_cores: float
    waited_s: float

    @property
    def is_quiet(self) -> bool:
        return self.busy_cores <= QUIET_CORES


def tree_usage(pid: int, proc: Path = PROC) -> Usage:
    """Usage of a process tree. A process that ends meanwhile is counted by its parent."""
    ticks = _tree_ticks(pid, proc)
    peak_kib = sum(_peak_kib(_read(proc / str(each) / "status")) for each in ticks)
    return Usage(sum(ticks.values()) / TICKS_PER_S, peak_kib * 1024)


def forget_peak(pid: int, proc: Path = PROC) -> None:
    """Sets the peak memory of a tree's processes to what they hold now."""
    for each in _tree_ticks(pid, proc):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            (proc / str(each) / "clear_refs").write_text("5", encoding="ascii")


def busy_s(proc: Path = PROC) -> float:
    """Core seconds that this machine was not idle since it started, time taken by its host (steal) included."""
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, _read(proc / "stat").split()[1:9])
    return (user + nice + system + interrupts + soft_interrupts + stolen) / TICKS_PER_S


def wait_until_quiet(budget_s: float, *, busy: Callable[[], float] = busy_s,
                     sleep: Callable[[float], None] = time.sleep,
                     clock: Callable[[], float] = time.monotonic) -> Quiet:
    """Waits until the machine idles; to be called while all that one has started oneself does.

    Args:
      budget_s: longest wait; 0 takes one sample and goes on.
    """
    started = clock()
    while True:
        before, at = busy(), clock()
        sleep(SAMPLE_S)
        now = clock()
        found = Quiet((busy() - before) / (now - at), now - started)
        if found.is_quiet or found.waited_s + SAMPLE_S > budget_s:
            return found


def _tree_ticks(pid: int, proc: Path) -> dict[int, int]:
    """CPU ticks of a process and of each of its descendants, by process id, those of ended children included."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for folder in proc.iterdir():
        if folder.name.isdigit() and (text := _read(folder / "stat")):
            numbers = text.rpartition(")")[2].split()      # the name before may hold anything
            children.setdefault(int(numbers[1]), []).append(int(folder.name))
            ticks[int(folder.name)] = sum(map(int, numbers[11:15]))
    found, todo = {}, [pid]
    while todo:
        each = todo.pop()
        found[each] = ticks.get(each, 0)
        todo += children.get(each, [])
    return found


def _read(path: Path) -> str:
    """The file's text; empty when the process is gone."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _peak_kib(status: str) -> int:
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)
