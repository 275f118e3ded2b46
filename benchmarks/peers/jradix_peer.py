"""jradix as a peer: its Python API with its default settings, in the environment of the repository."""
from __future__ import annotations

import importlib.metadata
import sys
import time

import jradix
from jradix import LLM, SamplingParams
from peers.protocol import Answer, Job, Settings, serve


class JradixEngine:
    """An LLM with pool and longest request as told, everything else as it comes."""

    def __init__(self, settings: Settings):
        self._llm = LLM(settings.weights, dtype=settings.dtype, enable_prefix_caching=settings.prefix_caching,
                        max_model_len=settings.max_model_len, kv_cache_bytes=settings.kv_bytes, quiet=True,
                        progress=False)
        self.versions = {"jradix": jradix.__version__, "jax": importlib.metadata.version("jax")}
        self.notes = [f"device {self._llm.stats()['device']}"]

    def generate(self, job: Job) -> Answer:
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=job.schema is None, json_schema=job.schema)
                  for n in job.num_outputs]
        started = time.perf_counter()
        found = self._llm.generate(job.prompts, params, on_error="raise")
        wall_s = time.perf_counter() - started
        failed = [output.error for output in found if output.error is not None]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(found)} requests failed: {failed[0]}")
        return Answer([output.outputs[0].token_ids for output in found], wall_s,
                      [output.metrics.ttft_s for output in found],
                      sum(output.metrics.num_computed_tokens for output in found))

    def start(self, is_warmup: bool) -> None:
        self._llm.cache.clear()

    def close(self) -> None:
        self._llm.close()


if __name__ == "__main__":
    sys.exit(serve(JradixEngine))
