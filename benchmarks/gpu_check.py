"""Check of the attention kernels on a GPU: are they right, how fast, and what do they do for the seed workloads.

    python benchmarks/gpu_check.py --json gpu_check.json
    python benchmarks/gpu_check.py --size tiny       # on any machine: the XLA form stands in for the kernels

Sections, in this order:
  correctness  every kernel against the float64 reference of tests/kernels; long contexts against float32 in XLA
  decode       GB/s of keys and values that are read, against a copy on the same device
  extend       TFLOP/s, against a bfloat16 matrix product on the same device
  sharing      decode rows that read one prefix together, against each by itself
  workloads    the seed workloads on an 8B-shaped model with random weights, cache on, then cache off

Cases run in a process beside this one. When it hangs or dies, the case at fault is recorded and a new process goes on
with the next one. The file is written after every case, so that a cut leaves what was done. Exit code 1: a case failed.
"""
from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from gpu_correctness import correctness_cases
from gpu_inputs import SIZES, Fields, kernels, make_pages
from gpu_speed import decode_cases, extend_cases, sharing_cases
from gpu_workloads import workload_cases
from report import machine, print_result, print_table

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 350.0
FAULTS = RuntimeError, ValueError, TypeError, LookupError, AssertionError     # others end the process, and only that


@dataclass(frozen=True)
class Section:
    """Attributes:
      cases: of a size: name -> what measures it, or prepares its measurement where there are threads for that.
      budget_s: seconds after which the rest of its cases is left out.
      stall_s: seconds without a result after which a case counts as hung.
      num_threads: that prepare cases ahead, compiling above all; 0: none.
      is_timed: cases wait until all are prepared, because compiling disturbs the clock.
    """
    cases: Callable[[str], dict[str, Callable[[], Any]]]
    budget_s: float
    stall_s: float
    num_threads: int = 0
    is_timed: bool = False


SECTIONS = dict(
    correctness=Section(correctness_cases, 110.0, 45.0, num_threads=8),
    decode=Section(decode_cases, 60.0, 50.0, num_threads=8, is_timed=True),
    extend=Section(extend_cases, 30.0, 25.0, num_threads=8, is_timed=True),
    sharing=Section(sharing_cases, 45.0, 40.0, num_threads=8, is_timed=True),
    workloads=Section(workload_cases, 240.0, 200.0))


def plan_cases(size: str) -> list[tuple[str, str]]:
    """Section and name of every case, in order."""
    return [(section, case) for section in SECTIONS for case in SECTIONS[section].cases(size)]


def serve(size: str, first: int) -> int:
    """Runs the cases from number `first` on, and prints one JSON line for each; 3 when the device is unusable."""
    if size == "tiny":
        jax.config.update("jax_disable_most_optimizations", True)      # compiling is what it costs
    print(json.dumps(dict(device=str(jax.devices()[0].device_kind), platform=jax.default_backend())), flush=True)
    for name, members in itertools.groupby(plan_cases(size)[first:], key=lambda case: case[0]):
        section = SECTIONS[name]
        cases = [section.cases(size)[case] for _, case in members]
        with ThreadPoolExecutor(section.num_threads or 1) as pool:
            ahead = [pool.submit(case) for case in cases] if section.num_threads else []
            wait(ahead if section.is_timed else ())
            for i, case in enumerate(cases):
                try:
                    fields = ahead[i].result()() if ahead else case()
                except FAULTS as error:
                    traceback.print_exc()
                    fields = dict(ok=False, error=f"{type(error).__name__}: {error}"[:2000])
                print(json.dumps(fields), flush=True)
                if "error" in fields and not is_device_usable():
                    pool.shutdown(wait=False, cancel_futures=True)
                    return 3
        make_pages.cache_clear()       # the memory is the next section's
    return 0


def is_device_usable() -> bool:
    """Whether a fault left the device's context intact: one wild access ends it for the whole process."""
    try:
        return int(jnp.arange(3).sum()) == 3
    except RuntimeError:
        return False


class Worker:
    """A process that runs the cases from one on.

    Args:
      size: a key of `SIZES`.
      first: number of the first case.
    """

    def __init__(self, size: str, first: int) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--size", size, "--serve-from", str(first)],
            stdout=subprocess.PIPE, text=True, env=dict(os.environ, PYTHONPATH=os.pathsep.join(paths)))
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self, timeout_s: float) -> Fields | None:
        """The next line, None when the process has ended. Raises queue.Empty when none comes in time."""
        line = self._lines.get(timeout=max(timeout_s, 0.0))
        return None if line is None else json.loads(line)

    def stop(self) -> int:
        """Ends the process, unless it has ended by itself; returns its exit code."""
        self._process.kill()
        return self._process.wait()

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put(None)


def watch(size: str, budget_s: float, took: Callable[[str, str, Fields, float], None]) -> Fields:
    """Runs all cases, as far as the budgets reach.

    Args:
      took: called with section, case, what became of it, and the seconds since the one before.

    Returns:
      What the worker says of its device; empty when none ever started.
    """
    plan, device, worker = plan_cases(size), {}, None
    started: dict[str, float] = {}
    last = time.monotonic()
    end, i = last + budget_s, 0
    try:
        while i < len(plan):
            section, case = plan[i]
            rule, now = SECTIONS[section], time.monotonic()
            section_end, stalled = started.setdefault(section, now) + rule.budget_s, last + rule.stall_s
            if now >= min(end, section_end):
                over = f"the total of {budget_s:g} s" if now >= end else f"{section}'s {rule.budget_s:g} s"
                fields, is_over = dict(not_run=f"{over} had passed"), True
            elif now >= stalled:
                fields, is_over = dict(ok=False, error=f"no result in {rule.stall_s:g} s; stopped"), True
            else:
                worker = worker or Worker(size, i)
                try:
                    fields = worker.next(min(stalled, end, section_end) - now)
                except queue.Empty:
                    continue
                if is_over := fields is None:
                    fields = dict(ok=False, error=f"the process ended with code {worker.stop()}")
            if is_over and worker is not None:
                worker.stop()
                worker = None
            now, last = last, time.monotonic()
            if "device" in fields:
                device = fields
            else:
                took(section, case, fields, last - now)
                i += 1
    finally:
        if worker is not None:
            worker.stop()
    return device


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(SIZES), default="default")
    parser.add_argument("--json", type=Path, help="file for the results; written after every case")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for everything")
    parser.add_argument("--serve-from", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve_from is not None:
        return serve(options.size, options.serve_from)
    sections: dict[str, Fields] = {name: dict(state="cut", wall_s=0.0, cases=[]) for name in SECTIONS}
    result: Fields = dict(size=options.size, implementation=kernels(options.size)[0], budget_s=options.budget,
                          sections=sections)
    plan = plan_cases(options.size)

    def took(section: str, case: str, fields: Fields, seconds: float) -> None:
        found = sections[section]
        found["cases"].append(dict(case=case, **fields))
        found["wall_s"] += seconds
        if len(found["cases"]) == sum(name == section for name, _ in plan):
            num_left_out = sum("not_run" in line for line in found["cases"])
            found["state"] = ("skipped" if num_left_out == len(found["cases"]) else
                              "cut" if num_left_out else "done")
            print_section(section, found)
        if options.json is not None:
            write_json(options.json, dict(benchmark="gpu_check", machine=machine(), **result))

    device = watch(options.size, options.budget, took)
    failed = [f"{name}: {line['case']}" for name, found in sections.items() for line in found["cases"]
              if line.get("ok") is False]
    result |= dict(device=device.get("device"), platform=device.get("platform"), failed=failed)
    if options.json is not None:
        write_json(options.json, dict(benchmark="gpu_check", machine=machine(device.get("device", "none")), **result))
    print_result("gpu_check", result, device.get("device", "none"))
    return 1 if failed else 0


def print_section(name: str, section: Fields) -> None:
    """A table of the numbers, and in notes what was left out or failed."""
    texts = "not_run", "error", "refused", "warmup_s"
    measured = [line for line in section["cases"] if "not_run" not in line]
    columns = list(dict.fromkeys(key for line in measured for key in line if key not in ("case", *texts)))
    rows = [[line["case"], *(line.get(key) for key in columns)] for line in measured]
    notes = [f"{line['case']}: {key.replace('_', ' ')}: {str(line[key]).splitlines()[0]}"
             for line in section["cases"] for key in texts if line.get(key)]
    print_table(f"{name}: {section['state']}, {section['wall_s']:.0f} s",
                [["", *(key.replace("_", " ") for key in columns)], *rows], notes)
    sys.stdout.flush()


def write_json(path: Path, content: Fields) -> None:
    """Replaces the file as a whole, so that it can be read at any moment."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
