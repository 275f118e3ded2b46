"""Section "workloads" of `gpu_check`: the seed workloads on an engine with random weights, cache on, then cache off."""
from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gpu_inputs import SIZES, Fields, kernels
from jradix.config import EngineConfig, StepShapes
from jradix.engine import Engine
from jradix.models.config import ModelConfig, RopeConfig
from jradix.models.decoder import Decoder
from jradix.ops.attention import paged_attention
from jradix.outputs import RequestOutput
from jradix.runner.memory import plan_memory
from jradix.runner.runner import ModelRunner
from jradix.sampling_params import SamplingParams
from pallas_kernels.errors import UnsupportedKernel
from report import summarise
from workloads import WORKLOADS, Request, drive, minimum_computed_tokens

SEED_WORKLOADS = "react", "mcts", "chatbot", "noshare"
OFF_BUDGET_S = 60.0      # of all runs without the cache together


def workload_cases(size: str) -> dict[str, Callable[[], Fields]]:
    return {"model": lambda: bench(size).describe()} | {
        f"{name}, cache {'on' if is_on else 'off'}": lambda name=name, is_on=is_on: bench(size).measure(name, is_on)
        for is_on in (True, False) for name in SEED_WORKLOADS}


@functools.lru_cache(maxsize=1)
def bench(size: str) -> Bench:
    return Bench(size)


class Bench:
    """An engine on random weights with a few compiled shapes, and what its runs without the cache have left to spend.

    Args:
      size: a key of `SIZES`.
    """

    def __init__(self, size: str) -> None:
        self.workload_size = SIZES[size].workload
        config, (num_rows, chunk, longest) = model_config(size), SIZES[size].engine
        device, dtype = jax.devices()[0], jnp.dtype(jnp.float32 if size == "tiny" else jnp.bfloat16)
        self._implementation, self._refusal = serving_attention(size, config, dtype)
        plan = plan_memory(config, device=device, weight_dtype=dtype, kv_dtype=dtype, page_size=16,
                           max_num_seqs=num_rows, step_tokens=num_rows + chunk,
                           kv_cache_bytes=1 << 22 if size == "tiny" else None)
        started = time.perf_counter()
        model = jax.block_until_ready(Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
        self._init_s = time.perf_counter() - started
        engine_config = EngineConfig(page_size=16, num_pages=plan.num_pages, max_model_len=longest,
                                     max_num_seqs=num_rows, prefill_chunk_tokens=chunk, grammar_bytes=0)
        self._runner = ModelRunner(model, config, engine_config, device=device, kv_dtype=dtype,
                                   implementation=self._implementation)
        self._runner.shapes = StepShapes(tuple(sorted({min(16, num_rows), num_rows})), (num_rows,), (chunk,))
        self._engine = Engine(self._runner, engine_config, seed=0)
        self._memory = plan
        self._off_left_s = OFF_BUDGET_S
        self._outputs: dict[str, list[list[int]]] = {}
        self._warmup_s = {}
        for shape in self._runner.shapes.all():
            started = time.perf_counter()
            layout = self._runner.layout(shape)
            packed = layout.allocate()
            layout.step_batch(packed.ints).row_slots.fill(self._runner.spare_slot)
            jax.block_until_ready(self._runner.dispatch(packed, shape).tokens)
            self._warmup_s[f"{shape.num_rows} + {shape.num_chunk_tokens}"] = time.perf_counter() - started
        self._run(WORKLOADS["mcts"]("tiny", 1), float("inf"))      # what copies pages
        self._num_programs = self._runner.num_compiled

    def describe(self) -> Fields:
        return dict(implementation=self._implementation, refused=self._refusal, init_s=self._init_s,
                    weight_bytes=self._memory.weight_bytes, pool_tokens=self._memory.num_pages * 16,
                    warmup_s=self._warmup_s)

    def measure(self, name: str, is_on: bool) -> Fields:
        """One run of a workload from an empty cache."""
        self._engine.cache.clear()
        self._engine.cache.enabled = is_on
        before, started = self._engine.stats(), time.perf_counter()
        done, outputs, is_cut = self._run(WORKLOADS[name](self.workload_size),
                                          float("inf") if is_on else self._off_left_s)
        wall, after = time.perf_counter() - started, self._engine.stats()
        tokens = {key: after["tokens"][key] - before["tokens"][key] for key in before["tokens"]}
        steps = after["steps"] - before["steps"]
        fields = dict(wall_s=wall, prompt_tokens=tokens["computed_prompt"] + tokens["cached_prompt"],
                      computed_prompt_tokens=tokens["computed_prompt"], output_tokens=tokens["generated"],
                      tokens_per_s=(tokens["computed_prompt"] + tokens["generated"]) / wall, steps=steps,
                      ms_per_step=wall / max(steps, 1) * 1e3, is_cut=is_cut,
                      compiled_after_warmup=self._runner.num_compiled - self._num_programs)
        if not is_on:
            self._off_left_s -= wall
        if not is_cut:
            ttft = summarise([output.metrics.ttft_s for output in outputs], 1e3)
            fields |= dict(computed_over_fewest=tokens["computed_prompt"] / minimum_computed_tokens(done),
                           ttft_ms=ttft.median)
            ids = [output for _, output in done]
            if (known := self._outputs.setdefault(name, ids)) is not ids:
                fields["same_outputs"] = f"{sum(a == b for a, b in zip(known, ids))} of {len(ids)}"
        return fields

    def _run(self, workload: Any, seconds: float) -> tuple[list[tuple[Request, list[int]]], list[RequestOutput], bool]:
        """Requests with their output ids, the outputs, and whether time ran out; then the requests are incomplete."""
        end, finished = time.perf_counter() + seconds, []

        def run_batch(batch: list[Request]) -> list[list[int]]:
            names = [self._engine.add_request(request.prompt, SamplingParams(
                temperature=0.0, max_tokens=request.num_output, ignore_eos=True)) for request in batch]
            outputs: dict[str, RequestOutput] = {}
            while self._engine.has_unfinished:
                if time.perf_counter() > end:
                    self._engine.drop_all()
                    raise TimeoutError(f"a workload took more than {seconds:.0f} s")
                outputs |= {output.request_id: output for output in self._engine.step()}
            finished.extend(outputs[name] for name in names)
            return [outputs[name].outputs[0].token_ids for name in names]

        try:
            return drive(workload, run_batch), finished, False
        except TimeoutError:
            return [], finished, True


def model_config(size: str) -> ModelConfig:
    vocab, hidden, intermediate, layers = SIZES[size].model
    heads, kv_heads, head_dim = SIZES[size].heads
    return ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate,
        num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rms_norm_eps=1e-5,
        tie_embeddings=False, attention_bias=False, attention_out_bias=False, mlp_bias=False, qk_norm=False,
        rope=RopeConfig(theta=500_000.0, dim=head_dim), layer_windows=(None,) * layers, max_model_len=131_072)


def serving_attention(size: str, config: ModelConfig, dtype: jnp.dtype) -> tuple[str, str | None]:
    """The kernels where they serve a step of the engine, else "xla" and why not."""
    name = kernels(size)[0]
    pages = jax.ShapeDtypeStruct((4, 16, config.kv_width), dtype)
    table, lens, cu_q_lens, num_decode = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 3), (2,), (3,), ()))
    q = jax.ShapeDtypeStruct((8, config.num_heads, config.head_dim), jnp.float32)
    try:
        jax.eval_shape(functools.partial(paged_attention, sm_scale=1.0, implementation=name), q, pages, pages, table,
                       lens, cu_q_lens, num_decode)
    except UnsupportedKernel as error:
        return "xla", str(error)
    return name, None
