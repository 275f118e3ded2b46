"""From runs to figures: medians, ratios within a round, and the tables that show them."""
from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peers.runs import JsonRun, Run, agreement
from peers.variants import DTYPES
from workloads import minimum_computed_tokens

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """What a table says of one variant on one workload.

    Attributes:
      name: of the variant.
      wall_s: of each run, in order.
      ratios: its wall time over that of the reference in the same round; above 1 the reference is faster.
      same_type_ratios: over that of the reference's own variant with the same number type.
      output_tokens_per_s: by the median of the wall times.
      num_computed: prompt tokens computed, as the engine tells.
      over_minimum: these, divided by the fewest that an unlimited cache would compute.
      ttft_s: per turn, the median over runs of the median over requests.
      cpu_s, peak_bytes, others_cores: medians; of the last one the largest.
      agree: output tokens up to the first difference from the reference, over the tokens compared.
      least_s: what the workload must take on this machine; None: not known.
    """
    name: str
    wall_s: list[float]
    ratios: list[float]
    same_type_ratios: list[float]
    output_tokens_per_s: float
    num_computed: int | None
    over_minimum: float | None
    ttft_s: list[float | None]
    cpu_s: float
    peak_bytes: float
    others_cores: float
    agree: tuple[int, int] | None
    least_s: float | None = None

    @property
    def roofline_share(self) -> float | None:
        """The least time as a share of the median wall time."""
        return None if self.least_s is None else self.least_s / statistics.median(self.wall_s)

    @property
    def ratio(self) -> float | None:
        return _median(self.ratios)

    @property
    def same_type_ratio(self) -> float | None:
        return _median(self.same_type_ratios)


def workload_rows(runs: Mapping[str, Sequence[Run]], reference: str,
                  least_s: Callable[[str, Run], float] | None = None) -> list[Row]:
    """A row for each variant that has runs, in order. Counts are those of its first run.

    Args:
      least_s: what a run of the variant of this name must take.
    """
    theirs = {run.round: run for run in runs.get(reference, ())}
    rows = []
    for name, own in runs.items():
        if not own:
            continue
        same_type = {run.round: run for run in runs.get(_of_same_type(reference, name), ())}
        first = own[0]
        num_output = sum(request.num_output for request, _ in first.done)
        walls = [run.wall_s for run in own]
        fewest = minimum_computed_tokens(first.done)
        rows.append(Row(
            name, walls, *([run.wall_s / others[run.round].wall_s for run in own if run.round in others]
                           for others in (theirs, same_type)),
            num_output / statistics.median(walls), first.num_computed,
            None if first.num_computed is None else first.num_computed / fewest,
            [_median(turn) for turn in zip(*(run.ttft_s for run in own))],
            statistics.median(run.cpu_s for run in own), statistics.median(run.peak_bytes for run in own),
            max(run.others_cores for run in own),
            agreement(theirs[first.round], first) if first.round in theirs and name != reference else None,
            least_s and least_s(name, first)))
    return rows


WORKLOAD_HEADERS = ("", "ratio", "of each round", "ratio, same type", "wall s", "best", "share of the roofline",
                    "tokens/s", "prompt tokens computed", "/ minimum", "TTFT first turn s", "last turn", "CPU s",
                    "peak GiB", "tokens as the reference's", "cores busy elsewhere")


def workload_cells(rows: Sequence[Row]) -> list[list[Any]]:
    """The table of one workload, headers first."""
    return [list(WORKLOAD_HEADERS)] + [
        [row.name, _round(row.ratio, 2), _span(row.ratios), _round(row.same_type_ratio, 2),
         _round(statistics.median(row.wall_s), 3), _round(min(row.wall_s), 3), _round(row.roofline_share, 2),
         _round(row.output_tokens_per_s, 1), row.num_computed, _round(row.over_minimum, 2),
         _round(row.ttft_s[0], 3), _round(row.ttft_s[-1], 3), _round(row.cpu_s, 1), _round(row.peak_bytes / GIB, 2),
         f"{row.agree[0]} of {row.agree[1]}" if row.agree else None, _round(row.others_cores, 2)] for row in rows]


JSON_HEADERS = ("", "constrained / free", "of each round", "against the reference's", "constrained s", "free s",
                "tokens", "whole documents")


def json_cells(runs: Mapping[str, Sequence[JsonRun]], num_whole: Mapping[str, int], reference: str) -> list[list[Any]]:
    """The table of structured output, headers first: a variant's tokens per second under the schema as a share of its
    own free ones, and that share over the reference's in the same round."""
    theirs = {run.round: run for run in runs.get(reference, ())}
    cells: list[list[Any]] = [list(JSON_HEADERS)]
    for name, own in runs.items():
        if own:
            against = [run.ratio / theirs[run.round].ratio for run in own if run.round in theirs]
            cells.append([
                name, _round(statistics.median(run.ratio for run in own), 3), _span([run.ratio for run in own]),
                _round(_median(against), 2), _round(statistics.median(run.constrained_s for run in own), 3),
                _round(statistics.median(run.free_s for run in own), 3), sum(map(len, own[0].outputs)),
                f"{num_whole[name]} of {len(own[0].outputs)}"])
    return cells


def markdown(cells: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, headers first; numbers to the right."""
    lines = ["| " + " | ".join("" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell)
                               for cell in row) + " |" for row in cells]
    lines.insert(1, "|---|" + "---:|" * (len(cells[0]) - 1))
    return "\n".join(lines) + "\n"


def _of_same_type(reference: str, name: str) -> str:
    """The reference's variant, "jradix/float32", with the number type of the variant of this name."""
    dtype = next((word for word in name.split("/") if word in DTYPES), "")
    return "/".join(dtype if word in DTYPES else word for word in reference.split("/"))


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _span(ratios: Sequence[float]) -> str | None:
    return f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else None
