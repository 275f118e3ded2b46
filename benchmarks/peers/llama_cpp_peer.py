"""llama.cpp's HTTP server as a peer: one server, a slot per request that runs, a new server for each run.

Starting anew is the one way to be sure that nothing is cached: beside its slots the server keeps old prompts in memory.
Each slot has its own part of the KV memory (a unified one makes every row attend to all of it). Standard library only.
"""
from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from peers.protocol import Answer, Job, Settings, serve

MAX_SLOTS = 16
CONTEXT_STEP = 256
POLL_S = 0.05


class LlamaCppEngine:
    """Owns the server process."""

    def __init__(self, settings: Settings):
        if settings.server is None:
            raise ValueError("llama.cpp needs `server`, the path of llama-server")
        self._settings = settings
        self._num_slots = min(settings.max_num_seqs, MAX_SLOTS)
        self._pool = ThreadPoolExecutor(settings.max_num_seqs)
        self._server: subprocess.Popen[bytes] | None = None
        version = subprocess.run([settings.server, "--version"], capture_output=True, text=True, check=True)
        self.versions = {"llama.cpp": next(line for line in (version.stderr + version.stdout).splitlines()
                                           if line.startswith("version"))}
        self.notes = [f"{self._num_slots} slots of {self._slot_tokens} tokens, KV not unified"]

    @property
    def _slot_tokens(self) -> int:
        """Context of a slot: more than the longest request, for the server stops one that fills it."""
        return (self._settings.max_model_len // CONTEXT_STEP + 1) * CONTEXT_STEP

    def start(self, is_warmup: bool) -> None:
        self._stop()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        settings = self._settings
        command = [settings.server, "--model", settings.weights, "--host", "127.0.0.1", "--port", str(self._port),
                   "--parallel", str(self._num_slots), "--ctx-size", str(self._num_slots * self._slot_tokens),
                   "--no-kv-unified", "--threads", str(settings.threads), "--threads-batch", str(settings.threads),
                   *(() if settings.prefix_caching else ("--no-cache-prompt", "--cache-ram", "0"))]
        self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while not self._is_healthy():
            if self._server.poll() is not None:
                raise RuntimeError(f"llama-server ended with code {self._server.returncode}; its log is above")
            time.sleep(POLL_S)
        self._generate_one([1], 1, None)

    def generate(self, job: Job) -> Answer:
        started = time.perf_counter()
        futures = [self._pool.submit(self._timed, started, prompt, n, job.schema)
                   for prompt, n in zip(job.prompts, job.num_outputs)]
        found = [future.result() for future in futures]
        wall_s = time.perf_counter() - started
        return Answer([reply["tokens"] for reply, _ in found], wall_s,
                      [ended_s - reply["timings"]["predicted_ms"] / 1e3 for reply, ended_s in found],
                      sum(reply["timings"]["prompt_n"] for reply, _ in found))

    def close(self) -> None:
        self._stop()
        self._pool.shutdown()

    def _timed(self, started: float, prompt: list[int], num_output: int, schema: dict[str, Any] | None
               ) -> tuple[dict[str, Any], float]:
        reply = self._generate_one(prompt, num_output, schema)
        return reply, time.perf_counter() - started

    def _generate_one(self, prompt: list[int], num_output: int, schema: dict[str, Any] | None) -> dict[str, Any]:
        """One greedy completion. Only the best token is kept before sampling, which is the cheapest chain there is."""
        request: dict[str, Any] = dict(
            prompt=prompt, n_predict=num_output, ignore_eos=schema is None, samplers=["top_k"], top_k=1,
            temperature=0.0, cache_prompt=self._settings.prefix_caching, return_tokens=True, stream=False)
        if schema is not None:
            request["json_schema"] = schema
        status, reply = self._ask("POST", "/completion", request)
        if status != 200:
            raise RuntimeError(f"llama-server answered {status}: {reply}")
        return reply

    def _is_healthy(self) -> bool:
        try:
            return self._ask("GET", "/health", None)[0] == 200
        except ConnectionRefusedError:
            return False

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request(method, path, None if body is None else json.dumps(body),
                               {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def _stop(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait()
            self._server = None


if __name__ == "__main__":
    sys.exit(serve(LlamaCppEngine))
