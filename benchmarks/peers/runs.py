"""One run of a workload on one peer, and all that is known about it afterwards."""
from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Callable, NamedTuple

from peers.peer_process import PeerProcess
from peers.protocol import Answer, Job
from peers.usage import busy_s
from workloads import Request, Workload, drive


@dataclass
class Run:
    """One workload from its first batch to its last output.

    Attributes:
      round: number of the round it belongs to; the runs of one round followed one another.
      wall_s: what the peer took for all batches, its own work on requests and outputs included.
      cpu_s: CPU seconds of all its processes in that time.
      peak_bytes: most memory it held in that time.
      others_cores: cores that all other programs of this machine kept busy meanwhile, on average.
      ttft_s: per batch, the median over its requests; None where the engine does not tell.
      num_computed: prompt tokens that went through the model; None where the engine does not tell.
      done: requests and outputs, in order.
      batch_sizes: how many of them were submitted together each time.
    """
    round: int
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    others_cores: float = 0.0
    ttft_s: list[float | None] = field(default_factory=list)
    num_computed: int | None = 0
    done: list[tuple[Request, list[int]]] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)

    @property
    def batches(self) -> list[list[tuple[Request, list[int]]]]:
        rest = iter(self.done)
        return [list(islice(rest, size)) for size in self.batch_sizes]

    def add(self, answer: Answer) -> None:
        self.wall_s += answer.wall_s
        self.batch_sizes.append(len(answer.outputs))
        self.ttft_s.append(None if answer.ttft_s is None else statistics.median(answer.ttft_s))
        self.num_computed = (None if answer.num_computed is None or self.num_computed is None
                             else self.num_computed + answer.num_computed)


class JsonRun(NamedTuple):
    """Documents under a schema, and as many free tokens.

    Attributes:
      round: as in `Run`.
      constrained_s, free_s: wall seconds of each.
      outputs: token ids of the documents.
    """
    round: int
    constrained_s: float
    free_s: float
    outputs: list[list[int]]

    @property
    def ratio(self) -> float:
        """Constrained tokens per second as a share of free ones."""
        return self.free_s / self.constrained_s


def run_workload(peer: PeerProcess, workload: Workload, round: int, *, is_warmup: bool = False) -> Run:
    """Lets a peer answer a workload, from an empty cache."""
    run = Run(round)

    def run_batch(batch: list[Request]) -> list[list[int]]:
        answer = peer.generate(Job([request.prompt for request in batch], [request.num_output for request in batch]))
        run.add(answer)
        return answer.outputs

    with peer.turn():
        peer.start(is_warmup=is_warmup)
        peer.forget_peak()
        before, busy, own, at = peer.usage(), busy_s(), time.process_time(), time.monotonic()
        run.done = drive(workload, run_batch)
        after, elapsed = peer.usage(), time.monotonic() - at
        run.cpu_s, run.peak_bytes = after.cpu_s - before.cpu_s, after.peak_bytes
        known = run.cpu_s + time.process_time() - own
        run.others_cores = max(busy_s() - busy - known, 0.0) / elapsed
    return run


def run_json(peer: PeerProcess, prompts: list[list[int]], schema: dict[str, Any], max_tokens: int, round: int, *,
             is_warmup: bool = False) -> JsonRun:
    """Documents under a schema, then the same numbers of free tokens, each from an empty cache."""
    with peer.turn():
        peer.start(is_warmup=is_warmup)
        bound = peer.generate(Job(prompts, [max_tokens] * len(prompts), schema))
        peer.start(is_warmup=False)
        free = peer.generate(Job(prompts, [len(output) for output in bound.outputs]))
    return JsonRun(round, bound.wall_s, free.wall_s, bound.outputs)


def num_json(outputs: list[list[int]], decode: Callable[[list[int]], str]) -> int:
    """How many outputs are whole JSON documents; the others were cut off."""
    def is_json(text: str) -> bool:
        try:
            json.loads(text)
        except json.JSONDecodeError:
            return False
        return True
    return sum(is_json(decode(output)) for output in outputs)


def agreement(a: Run, b: Run) -> tuple[int, int]:
    """Output tokens up to the first difference, and all, over the requests with the same prompt in both runs."""
    same = total = 0
    for (request, ours), (other, theirs) in zip(a.done, b.done):
        if request.prompt == other.prompt:
            same += next((i for i, (x, y) in enumerate(zip(ours, theirs)) if x != y), len(ours))
            total += len(ours)
    return same, total
