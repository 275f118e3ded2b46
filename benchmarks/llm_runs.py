"""Workloads run through an LLM: its command-line options, one run, and what a run cost. It measures nothing else."""
from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from jradix.llm import LLM
from jradix.outputs import RequestOutput
from jradix.sampling_params import SamplingParams
from report import Watch
from workloads import Request, Workload, drive


@dataclass
class Run:
    """One workload from its first batch to its last output.

    Attributes:
      done: requests with their output ids, in order of submission.
      turns: the outputs of each batch.
      wall_s: from the first submission to the last output, the workload's own work between batches left out.
      cpu_s: CPU time of the whole process in the same stretch.
    """
    done: list[tuple[Request, list[int]]] = field(default_factory=list)
    turns: list[list[RequestOutput]] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request, _ in self.done)

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return sum(output.metrics.num_computed_tokens for turn in self.turns for output in turn)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output for request, _ in self.done)


def add_llm_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `make_llm` reads."""
    parser.add_argument("--model", default="demo", help="as for LLM; its vocabulary must hold ids up to 48,999")
    parser.add_argument("--tokenizer", help="folder or .gguf file; default: the model's own")
    parser.add_argument("--dtype", default="float32", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"))
    parser.add_argument("--page-size", type=int)
    parser.add_argument("--kv-cache-bytes", type=int)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--prefill-chunk-tokens", type=int)
    parser.add_argument("--no-compile-cache", action="store_true", help="do not keep compiled steps between runs")


def make_llm(options: argparse.Namespace, **overrides: Any) -> LLM:
    """The LLM that the options describe; `overrides` go to LLM as they are."""
    arguments = dict(
        dtype=options.dtype, tokenizer=options.tokenizer, device=options.device, page_size=options.page_size,
        kv_cache_bytes=options.kv_cache_bytes, max_model_len=options.max_model_len, max_num_seqs=options.max_num_seqs,
        prefill_chunk_tokens=options.prefill_chunk_tokens, quiet=True, progress=False,
        compile_cache_dir=None if options.no_compile_cache else "auto")
    return LLM(options.model, **{**arguments, **overrides})


def run_workload(llm: LLM, workload: Workload) -> Run:
    """Runs a workload greedily, each request to exactly its number of tokens.

    Raises:
      RuntimeError: a request was refused, for example because it is longer than the model's context.
    """
    run, watch = Run(), Watch()

    def run_batch(batch: list[Request]) -> list[list[int]]:
        params = [SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True) for request in batch]
        watch.start()
        outputs = llm.generate([request.prompt for request in batch], params)
        watch.stop()
        failed = [output.error for output in outputs if output.error is not None]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(batch)} requests failed: {failed[0]}")
        run.turns.append(outputs)
        return [output.outputs[0].token_ids for output in outputs]

    run.done = drive(workload, run_batch)
    run.wall_s, run.cpu_s = sum(watch.wall_s), sum(watch.cpu_s)
    return run


def use_cache(llm: LLM, is_enabled: bool) -> None:
    """Empties the prefix cache of an idle LLM and turns it on or off.

    Comparing one LLM with itself keeps weights, KV pages and compiled steps the same on both sides.
    """
    llm.cache.clear()
    llm.engine.cache.enabled = is_enabled
