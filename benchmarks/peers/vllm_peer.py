"""vLLM on the CPU as a peer: its `LLM` class, the engine in a process of its own as by default."""
from __future__ import annotations

import sys
import time

import torch
import vllm
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

from peers.protocol import Answer, Job, Settings, serve


class VllmEngine:
    """An engine with KV memory, longest request and number of rows as told, everything else as it comes."""

    def __init__(self, settings: Settings):
        self._llm = LLM(settings.weights, dtype=settings.dtype, enable_prefix_caching=settings.prefix_caching,
                        max_model_len=settings.max_model_len, max_num_seqs=settings.max_num_seqs,
                        kv_cache_memory_bytes=settings.kv_bytes, generation_config="vllm", disable_log_stats=False)
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        self.notes = [f"kernels for {torch.backends.cpu.get_cpu_capability()}"]

    def generate(self, job: Job) -> Answer:
        grammar = None if job.schema is None else StructuredOutputsParams(json=job.schema)
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=grammar is None, detokenize=False,
                                 structured_outputs=grammar) for n in job.num_outputs]
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in job.prompts]
        started = time.perf_counter()
        found = self._llm.generate(prompts, params, use_tqdm=False)
        wall_s = time.perf_counter() - started
        first_arrival = min(output.metrics.arrival_time for output in found)
        return Answer([list(output.outputs[0].token_ids) for output in found], wall_s,
                      [output.metrics.arrival_time - first_arrival + output.metrics.first_token_latency
                       for output in found],
                      sum(len(output.prompt_token_ids) - output.num_cached_tokens for output in found))

    def start(self, is_warmup: bool) -> None:
        self._llm.reset_prefix_cache()

    def close(self) -> None: ...


if __name__ == "__main__":
    sys.exit(serve(VllmEngine))
