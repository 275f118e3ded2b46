"""The comparison itself: which peer runs what, and when. It owns the peers' processes and keeps what they took."""
from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peers.environments import Environment
from peers.peer_process import PeerFailed, PeerProcess
from peers.protocol import Settings
from peers.runs import JsonRun, Run, run_json, run_workload
from peers.usage import wait_until_quiet
from peers.variants import REFERENCE, TAKE_BEST, WITH_SCHEMA, Variant, command_of, environment_of, weights_of
from workloads import PRODUCT_SCHEMA, WORKLOADS, Request, drive

JSON = "json"
LENGTH_STEP = 256


class JsonTask(NamedTuple):
    """Documents to be written under the product schema: prompts as token ids, and most tokens of each document."""
    prompts: list[list[int]]
    max_tokens: int


class Comparison:
    """Starts peers and gives them their turns.

    Args:
      environments: of each peer that is installed.
      settings: what all peers are told alike.
      weights, logs: folders.
      size, seed: of the workloads.
      json_task: what the workload "json" is.
      quiet_s: most seconds to wait for a quiet machine, in all.

    Attributes:
      runs: of each workload and variant, in order; `json_runs`: of each variant.
      dropped: wall time in the warm-up of variants that another of the same peer beat there, by workload.
      peers: what each variant that was started said of itself.
      failed: variants that died, with the reason.
      noise: cores that others kept busy before rounds that began on a machine that was not quiet.
    """

    def __init__(self, environments: dict[str, Environment], settings: Settings, *, weights: Path, logs: Path,
                 size: str, seed: int, json_task: JsonTask, quiet_s: float):
        self.runs: dict[str, dict[str, list[Run]]] = {}
        self.json_runs: dict[str, list[JsonRun]] = {}
        self.dropped: dict[str, dict[str, float]] = {}
        self.peers: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self.noise: list[float] = []
        self._environments, self._settings = environments, settings
        self._weights, self._logs = weights, logs
        self._size, self._seed, self._json = size, seed, json_task
        self._quiet_s = quiet_s
        self._num_rounds = 0
        self._is_shared = not self._wait()

    def run_pass(self, variants: Sequence[Variant], workloads: Sequence[str], reps: int) -> None:
        """Runs workloads on variants: warm-ups, then rounds of one run each.

        Raises:
          PeerFailed: the reference failed; of any other variant that is noted, and it goes on without it.
        """
        with contextlib.ExitStack() as stack:
            processes: dict[Variant, PeerProcess] = {}
            for variant in variants:
                with self._noting(variant):
                    processes[variant] = self._start(variant)
                    stack.callback(processes[variant].close)
            for workload in workloads:
                self._run_rounds(workload, processes, reps)

    def _start(self, variant: Variant) -> PeerProcess:
        environment = self._environments[variant.peer]
        settings = dataclasses.replace(
            self._settings, weights=str(weights_of(variant, self._weights)), dtype=variant.dtype,
            prefix_caching=variant.prefix_caching, method=variant.method,
            server=str(environment.server) if environment.server else None)
        say(f"starting {variant}")
        process = PeerProcess(
            str(variant), command_of(variant, environment, settings),
            environment_of(variant, environment, threads=settings.threads, is_shared=self._is_shared),
            self._logs / f"{str(variant).replace('/', '-')}.log")
        process.pause()
        self.peers[str(variant)] = dict(versions=process.versions, notes=process.notes, startup_s=process.startup_s)
        return process

    def _run_rounds(self, workload: str, processes: dict[Variant, PeerProcess], reps: int) -> None:
        chosen = [variant for variant in processes if workload != JSON or variant.peer in WITH_SCHEMA]
        warmups: dict[Variant, float] = {}
        for variant in self._alive(chosen):
            with self._noting(variant):
                warmups[variant] = self._run(processes[variant], workload, is_warmup=True)
        losers = beaten(warmups)
        for variant in losers:
            self.dropped.setdefault(workload, {})[str(variant)] = warmups[variant]
        for _ in range(reps):
            self._num_rounds += 1
            self._wait()
            for variant in self._alive(chosen):
                if variant not in losers:
                    with self._noting(variant):
                        self._run(processes[variant], workload, is_warmup=False)

    def _run(self, process: PeerProcess, workload: str, *, is_warmup: bool) -> float:
        """One run; its wall time."""
        when = "warm-up" if is_warmup else f"round {self._num_rounds}"
        if workload == JSON:
            bound = run_json(process, self._json.prompts, PRODUCT_SCHEMA, self._json.max_tokens, self._num_rounds,
                             is_warmup=is_warmup)
            if not is_warmup:
                self.json_runs.setdefault(process.name, []).append(bound)
            say(f"json, {when}: {process.name} {bound.constrained_s:.3f} s, free {bound.free_s:.3f} s")
            return bound.constrained_s
        run = run_workload(process, WORKLOADS[workload](self._size, self._seed + is_warmup), self._num_rounds,
                           is_warmup=is_warmup)
        if not is_warmup:
            self.runs.setdefault(workload, {}).setdefault(process.name, []).append(run)
        say(f"{workload}, {when}: {process.name} {run.wall_s:.3f} s, {run.others_cores:.2f} cores busy elsewhere")
        return run.wall_s

    def _wait(self) -> bool:
        """Waits for a quiet machine; whether it became one."""
        found = wait_until_quiet(self._quiet_s)
        self._quiet_s = max(self._quiet_s - found.waited_s, 0.0)
        if not found.is_quiet:
            self.noise.append(found.busy_cores)
            say(f"not quiet: {found.busy_cores:.2f} cores are busy elsewhere; going on after {found.waited_s:.0f} s")
        return found.is_quiet

    def _alive(self, variants: Sequence[Variant]) -> Iterator[Variant]:
        return (variant for variant in variants if str(variant) not in self.failed)

    @contextlib.contextmanager
    def _noting(self, variant: Variant) -> Iterator[None]:
        """Notes the failure of a variant; that of the reference goes up as well."""
        try:
            yield
        except PeerFailed as error:
            self.failed[str(variant)] = str(error)
            say(f"without {variant}: {error}")
            if variant == REFERENCE:
                raise


def beaten(warmups: dict[Variant, float]) -> list[Variant]:
    """Of peers of which only the best way counts: the variants that were slower in the warm-up than another."""
    best = {peer: min((wall_s for variant, wall_s in warmups.items() if variant.peer == peer), default=0.0)
            for peer in TAKE_BEST}
    return [variant for variant, wall_s in warmups.items() if wall_s > best.get(variant.peer, wall_s)]


def common_settings(workloads: Sequence[str], size: str, json_task: JsonTask, *, threads: int, kv_bytes: int
                    ) -> Settings:
    """What all peers are told alike: sizes that fit every workload, one budget for KV, the same threads.

    Weights, number type, caching and method are filled in for each variant.
    """
    batches: list[list[Request]] = []

    def look(batch: list[Request]) -> list[list[int]]:
        batches.append(batch)
        return [[0] * request.num_output for request in batch]

    for workload in workloads:
        if workload == JSON:
            look([Request(prompt, json_task.max_tokens) for prompt in json_task.prompts])
        else:
            drive(WORKLOADS[workload](size), look)
    longest = max(len(request.prompt) + request.num_output for batch in batches for request in batch)
    return Settings(weights="", dtype="", prefix_caching=True, max_model_len=-(-longest // LENGTH_STEP) * LENGTH_STEP,
                    max_num_seqs=max(map(len, batches)), threads=threads, kv_bytes=kv_bytes)


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)
