"""Engines on tiny models, in process and without files; a model with prescribed logits; checked stepping; poison.

Compiling is what these tests cost, so runners are made once per process and shared: `make_engine` gives a fresh engine
on the runner's zeroed state. An engine may be smaller than its runner, so one runner serves tight and ample pools.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import oracle
from jradix.cache.node import Tier
from jradix.config import EngineConfig, SharingCost, StepShapes
from jradix.engine import Engine
from jradix.models.config import ModelConfig, RopeConfig
from jradix.models.decoder import Decoder, abstract_parameters, build_decoder
from jradix.models.layers import Attend
from jradix.ops.kv_cache import KVCache
from jradix.outputs import RequestOutput
from jradix.runner.runner import ModelRunner
from jradix.sampling_params import SamplingParams
from jradix.weights.loader import parameter_sources
from toy_models import FAMILIES, toy_config, toy_weights

CPU = jax.devices("cpu")[0]
POOL_TOKENS = 1024
FREE_SHARING = SharingCost(read=0.01, member=0.01, part=0.0)     # rows that share a page always read it together
SIZES = dict(max_model_len=128, max_num_seqs=8, prefill_chunk_tokens=64, grammar_bytes=2**18)
RIGGED_SHAPE = (16, 64)   # first tokens, positions
TIE = 1e-4   # float32 sums of 64 terms over 2 layers are exact to about 1e-5: closer logits may change places
MAX_STEPS = 2000


def toy_model_config(architecture: str = "llama", **overrides: Any) -> ModelConfig:
    """The `ModelConfig` of `toy_models.toy_config`, without transformers."""
    hf = toy_config(architecture, **overrides)
    head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    window = hf.get("sliding_window") if architecture == "mistral" else None
    return ModelConfig(
        architecture=FAMILIES[architecture], vocab_size=hf["vocab_size"], hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"], num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"], num_kv_heads=hf["num_key_value_heads"], head_dim=head_dim,
        rms_norm_eps=hf["rms_norm_eps"], tie_embeddings=hf["tie_word_embeddings"],
        attention_bias=architecture == "qwen2", attention_out_bias=False, mlp_bias=False,
        qk_norm=architecture == "qwen3", rope=RopeConfig(theta=hf["rope_theta"], dim=head_dim),
        layer_windows=(window,) * hf["num_hidden_layers"], max_model_len=hf["max_position_embeddings"])


def toy_decoder(config: ModelConfig, weights: Mapping[str, np.ndarray]) -> Decoder:
    """A float32 decoder with these Hugging Face tensors."""
    arrays = {}
    for parameter in parameter_sources(config):
        value = np.concatenate([weights[name] for name, _ in parameter.parts])
        arrays[parameter.path] = jax.device_put(value, CPU)
    assert set(arrays) == set(abstract_parameters(config, jnp.float32))
    return build_decoder(config, jnp.float32, arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class ToyLM:
    """A random model with the tensors it was made of."""
    config: ModelConfig
    weights: Mapping[str, np.ndarray]

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """REF: float64[T, V] of one whole sequence, no cache, no padding."""
        return oracle.forward(self.weights, self.config, tokens)

    def assert_greedy(self, prompt: Sequence[int], output: Sequence[int], num_tokens: int | None = None) -> None:
        """Each output token is the best one of REF, or within `TIE` of it."""
        assert len(output) == num_tokens or num_tokens is None and output, (num_tokens, output)
        behind = _behind_the_best(self, tuple(prompt), tuple(output))
        worst = int(behind.argmax())
        assert behind[worst] <= TIE, f"token {worst} of {list(output)} is {behind[worst]:.3g} behind the best"

    def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """float64[T, V]."""
        logits = self.logits(tokens)
        top = logits.max(axis=1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))


@functools.lru_cache(maxsize=4096)
def _behind_the_best(lm: ToyLM, prompt: tuple[int, ...], output: tuple[int, ...]) -> np.ndarray:
    logits = lm.logits([*prompt, *output])[len(prompt) - 1:-1]
    return logits.max(axis=1) - logits[np.arange(len(output)), list(output)]


@functools.cache
def toy_lm(architecture: str = "llama", seed: int = 0, **overrides: Any) -> ToyLM:
    hf = toy_config(architecture, **overrides)
    return ToyLM(toy_model_config(architecture, **overrides), toy_weights(hf, seed))


def new_runner(lm: ToyLM | None = None, *, all_shapes: bool = False, **sizes: Any) -> ModelRunner:
    """A runner of its own, for tests that close it, break it or replace its weights.

    Args:
      all_shapes: every bucket of the engine, not one of rows and one of chunk tokens (two forward programs in all).
    """
    lm = lm or toy_lm()
    return _few_shapes(ModelRunner(toy_decoder(lm.config, lm.weights), lm.config,
                                   _config(**sizes), device=CPU, kv_dtype=jnp.dtype(jnp.float32)), all_shapes)


def _config(page_size: int = 4, **sizes: Any) -> EngineConfig:
    return EngineConfig(page_size=page_size, **{**SIZES, "num_pages": POOL_TOKENS // page_size, **sizes})


def _few_shapes(runner: ModelRunner, all_shapes: bool = False) -> ModelRunner:
    runner.sharing_cost = FREE_SHARING
    if not all_shapes:
        runner.shapes = StepShapes(runner.shapes.row_buckets[-1:], runner.shapes.row_buckets[-1:],
                                   runner.shapes.chunk_buckets[-1:])
    return runner


@functools.cache
def toy_runner(lm: ToyLM | None = None, **sizes: Any) -> ModelRunner:
    """A shared runner; its compiled programs stay between tests."""
    return new_runner(lm, **sizes)


class RiggedLM(nnx.Module):
    """A model whose logits are a table over (first token of the prompt, position of the input token).

    It finds the first token through the paged KV: keys are zero, so attention is the mean over all values, and only
    the value at position 0 is not zero. A wrong page table therefore gives the logits of another prompt.

    Args:
      table: float32[F, L, V], `table[f, p]` are the logits after position p of a prompt that begins with token f.
    """

    def __init__(self, table: np.ndarray) -> None:
        self.table = nnx.Param(jax.device_put(np.asarray(table, np.float32), CPU))

    def __call__(self, tokens: jax.Array, positions: jax.Array, attend: Attend,
                 num_tokens: jax.Array | None = None) -> jax.Array:
        first = jnp.where(positions == 0, tokens + 1, 0).astype(jnp.float32)
        zeros = jnp.zeros((len(tokens), 1, 2))
        mean = attend(0, zeros, zeros, zeros.at[:, 0, 0].set(first))[:, 0, 0]
        return jnp.stack([jnp.round(mean * (positions + 1)) - 1, positions.astype(jnp.float32)], axis=1)

    def logits(self, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        first, position = hidden.astype(jnp.int32).T
        return self.table[...].at[first, position].get(mode="clip")


def rigged_config(vocab_size: int) -> ModelConfig:
    """One layer of one head with two numbers per token."""
    return dataclasses.replace(toy_model_config(vocab_size=vocab_size), num_layers=1, num_heads=1, num_kv_heads=1,
                               head_dim=2, hidden_size=2, layer_windows=(None,))


def rigged_runner(table: np.ndarray, *, num_valid_tokens: int | None = None, **sizes: Any) -> ModelRunner:
    """A runner over a `RiggedLM`; its `replace_weights(RiggedLM(...))` changes the logits without compiling again."""
    return _few_shapes(ModelRunner(
        RiggedLM(table), rigged_config(table.shape[-1]), _config(**sizes),
        device=CPU, kv_dtype=jnp.dtype(jnp.float32), num_valid_tokens=num_valid_tokens))


@functools.cache
def _shared_rigged_runner(vocab_size: int, num_valid_tokens: int | None) -> ModelRunner:
    return rigged_runner(np.zeros(RIGGED_SHAPE + (vocab_size,), np.float32), num_valid_tokens=num_valid_tokens,
                         max_model_len=RIGGED_SHAPE[1], prefill_chunk_tokens=32)


def rigged_engine(table: np.ndarray | Mapping[int, Sequence[int]], *, prompt_len: int = 3, vocab_size: int = 64,
                  num_valid_tokens: int | None = None, **options: Any) -> Engine:
    """An engine over a `RiggedLM` on a shared runner.

    Args:
      table: logits of shape RIGGED_SHAPE + (vocab_size,), or what `table_for` makes them from.
      options: of `make_engine`.
    """
    if isinstance(table, Mapping):
        table = table_for(table, prompt_len=prompt_len, vocab_size=vocab_size)
    assert table.shape == RIGGED_SHAPE + (vocab_size,), table.shape
    runner = _shared_rigged_runner(vocab_size, num_valid_tokens)
    runner.replace_weights(RiggedLM(table))
    return make_engine(runner, **options)


def table_for(outputs: Mapping[int, Sequence[int]], *, prompt_len: int, vocab_size: int = 64) -> np.ndarray:
    """Logits under which a prompt of `prompt_len` tokens that begins with token f greedily gives `outputs[f]`.

    All other positions prefer token 0 a little; the chosen tokens lead by 10.
    """
    table = np.zeros(RIGGED_SHAPE + (vocab_size,), np.float32)
    table[:, :, 0] = 1
    for first, tokens in outputs.items():
        for i, token in enumerate(tokens):
            table[first, prompt_len - 1 + i, token] = 11
    return table


def make_engine(runner: ModelRunner, *, tokenizer: Any = None, eos_ids: Sequence[int] = (),
                generation_config: Mapping[str, Any] | None = None, seed: int | None = 0,
                clock: Callable[[], float] | None = None, **sizes: Any) -> Engine:
    """A fresh engine on a zeroed runner; `sizes` are fields of `EngineConfig` that differ from the runner's."""
    runner.reset_state()
    extra = {} if clock is None else {"clock": clock}
    return Engine(runner, dataclasses.replace(runner.config, **sizes), tokenizer=tokenizer, eos_ids=eos_ids,
                  generation_config=generation_config, seed=seed, model_name="toy", **extra)


def greedy(max_tokens: int | None = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


def steps(engine: Engine, *, before: Callable[[int], None] | None = None, poison: float | None = None
          ) -> Iterator[list[RequestOutput]]:
    """Steps to the end, checking the accounting after every step.

    Args:
      before: called with the number of the step about to run.
      poison: written to every KV slot that nobody owns, before every step.
    """
    for number in range(MAX_STEPS):
        if not engine.has_unfinished:
            return
        if before is not None:
            before(number)
        if poison is not None:
            poison_unowned(engine, poison)
        outputs = engine.step()
        engine.check_invariants()
        yield outputs
    raise AssertionError(f"not done after {MAX_STEPS} steps: {engine.stats()}")


def drain(engine: Engine, **options: Any) -> dict[str, RequestOutput]:
    """Steps to the end; finished outputs by request id. Nothing may be left running, locked or lost."""
    outputs = {out.request_id: out for batch in steps(engine, **options) for out in batch if out.finished}
    assert_idle(engine)
    return outputs


def run_all(engine: Engine, prompts: Iterable[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None,
            **options: Any) -> list[RequestOutput]:
    """Adds all prompts, steps to the end and returns the outputs in the order of the prompts."""
    prompts = list(prompts)
    each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
    names = [engine.add_request(prompt, given) for prompt, given in zip(prompts, each, strict=True)]
    outputs = drain(engine, **options)
    return [outputs[name] for name in names]


def tokens_of(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in outputs]


def assert_idle(engine: Engine) -> None:
    """All pages are free, evictable or pinned, all slots free, no lock held but by pins."""
    engine.check_invariants()
    pool, requests = engine.stats()["pool"], engine.stats()["requests"]
    assert requests["running"] == requests["waiting"] == engine.num_unfinished == 0, requests
    pins = engine.cache.pins
    assert pool["in_use"] == pins.num_pages == pool["num_pages"] - pool["free"] - pool["cached"], pool
    assert engine.cache.tree.root_locks() == len(pins)


def poison_unowned(engine: Engine, value: float) -> None:
    """Writes `value` to every KV slot that no request and no cached page has written, the scratch page included."""
    cache, runner = engine.cache, engine._runner
    size = cache.page_size
    is_valid = np.zeros((len(cache.pools), runner.kv.k[0].shape[0], size), bool)
    for node in cache.tree.nodes():
        if node.tier is Tier.DEVICE:
            position = np.arange(len(node.key) // 4)
            for group, pages in enumerate(node.pages):
                is_valid[group, pages[position // size], position % size] = True
    for request in engine.scheduler.requests():
        if request.lease is not None:
            position = np.arange(request.num_computed)
            for group, pages in enumerate(request.lease.page_table):
                is_valid[group, pages[position // size], position % size] = True
    assert len(is_valid) == 1, "the toy models have one KV group"
    keep = jnp.asarray(is_valid[0][:, :, None])
    runner.kv = KVCache(*(tuple(jax.device_put(jnp.where(keep, pages, value), CPU) for pages in side)
                          for side in runner.kv))


@contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """Collects one entry per program that XLA compiles inside the block, whatever asked for it."""
    compiled: list[str] = []

    def note(event: str, _: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(details.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def random_prompts(num: int, *, seed: int = 0, shortest: int = 5, longest: int = 40, vocab_size: int = 64
                   ) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, vocab_size, random.integers(shortest, longest + 1)).tolist() for _ in range(num)]
