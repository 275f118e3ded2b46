"""Benchmark of where a step's time goes: on the host per running row, and on the device by kind of work.

    python benchmarks/step_profile.py --part host --part device

Host: CPU seconds of the engine's thread for schedule, build and output of decode steps, without overlap, against
0.3 ms + 25 us per row. Device: the whole forward pass, and its parts as programs of their own with the same shapes
(all linear layers; attention of all layers; the writes into the KV pages; head and most probable token). What the parts
leave of the whole is "rest": norms, rotary embedding, activation, page arithmetic. "contiguous" is the attention over
one page per row that holds its whole context; the whole step over the same step with that is what paging costs. The
baseline is the least time that this machine's reading speed and matrix product, measured in the same run, allow.
Compiling takes longer than measuring; with JAX_COMPILATION_CACHE_DIR set it happens once.
"""
from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jradix.config import EngineConfig
from jradix.engine import Engine
from jradix.model_files import resolve
from jradix.models.config import ModelConfig
from jradix.models.decoder import Decoder, split_model
from jradix.ops.attention import paged_attention
from jradix.ops.kv_cache import KVCache, write_kv
from jradix.ops.matmul import matmul
from jradix.ops.sampling import argmax
from jradix.runner.runner import ModelRunner
from jradix.sampling_params import SamplingParams
from jradix.weights.dtype import kv_dtype
from jradix.weights.loader import load_config, load_model
from report import Summary, print_result, print_table, summarise

BASE_MS, PER_ROW_US = 0.3, 25.0
HOST_ROWS = (1, 8, 32)
HOST_PROMPT = 64
PAGE_SIZE = 16
MATMUL = (512, 576, 3072)     # tokens, inputs, outputs of the matrix product that stands for the machine


@dataclass(frozen=True)
class Case:
    """Decode steps of `rows` rows (chunk 0), or one prefill chunk; `context` is the KV length with the new tokens."""
    rows: int
    context: int
    chunk: int = 0

    @property
    def name(self) -> str:
        return f"chunk {self.chunk} to {self.context}" if self.chunk else f"decode {self.rows}x{self.context}"


CASES = {"tiny": (Case(1, 48), Case(1, 64, chunk=32)),
         "default": (Case(1, 512), Case(8, 512), Case(8, 2048), Case(32, 512), Case(1, 512, chunk=512),
                     Case(1, 1024, chunk=512), Case(1, 2048, chunk=512))}
PREFILL = 1024     # tokens of a prompt whose chunks together are compared with the same without attention


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(CASES), default="default")
    parser.add_argument("--part", choices=("host", "device"), action="append", help="default: both")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help='only these, such as "decode 8x512"')
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"))
    parser.add_argument("--repeats", type=int, help="of each part; default 10, tiny 3")
    options = parser.parse_args(argv)
    parts = options.part or ["host", "device"]
    cases = tuple(case for case in CASES[options.size] if options.cases is None or case.name in options.cases)
    if len(cases) < len(options.cases or ()) or not cases:
        parser.error(f"--cases {options.cases}: expected names among {[case.name for case in CASES[options.size]]}")
    repeats = options.repeats or (3 if options.size == "tiny" else 10)
    device = jax.devices(options.device)[0]
    with jax.default_device(device):
        runner, model, model_config = make_runner(options, cases, device, num_host_steps=5 * repeats)
        result: dict[str, Any] = dict(size=options.size, model=options.model, dtype=options.dtype, repeats=repeats)
        if "host" in parts:
            row_counts = [rows for rows in HOST_ROWS if rows <= runner.config.max_num_seqs]
            table, result["host"] = profile_host(runner, row_counts, num_steps=5 * repeats)
            print_table("host", table, [
                f"CPU ms of the engine's thread per decode step, medians of {5 * repeats} steps; bound: {BASE_MS} ms + "
                f"{PER_ROW_US:g} us per row on schedule + build + output"])
        if "device" in parts:
            table, result["device"] = profile_device(runner, model, model_config, cases, repeats)
            speed = result["device"]["machine"]
            print_table("device", table, [
                f"wall ms, medians of {repeats} calls in turn, each waited for, after one that compiles; rest: the "
                "whole less linear, attention, KV write and head",
                f"least: at {speed['read_gb_per_s']:.3g} GB/s and {speed['matmul_gflop_per_s']:.4g} GFLOP/s, both "
                "measured in the same turns",
                f"prefill of {PREFILL} tokens: {result['device']['prefill_rate_kept']:.3g} of the rate without "
                "attention"])
    print_result("step_profile", result, f"{device.platform}:{device.id} ({device.device_kind})")
    return 0


def make_runner(options: argparse.Namespace, cases: tuple[Case, ...], device: jax.Device, *, num_host_steps: int
                ) -> tuple[ModelRunner, Decoder, ModelConfig]:
    """A runner with room for every case, and the model it runs."""
    files = resolve(options.model)
    model_config = load_config(files)
    model = load_model(files, dtype=options.dtype, device=device)
    num_pages = max(case.rows * -(-case.context // PAGE_SIZE) for case in cases)
    max_num_seqs = max(case.rows for case in cases)
    num_pages = max(num_pages, max_num_seqs * -(-(2 * HOST_PROMPT + num_host_steps) // PAGE_SIZE))
    config = EngineConfig(page_size=PAGE_SIZE, num_pages=num_pages, max_num_seqs=max_num_seqs, overlap=False,
                          max_model_len=min(model_config.max_model_len, num_pages * PAGE_SIZE),
                          prefill_chunk_tokens=max(max(case.chunk for case in cases), 32))
    pool_dtype = kv_dtype(jnp.dtype(options.dtype), device)
    return ModelRunner(model, model_config, config, device=device, kv_dtype=pool_dtype), model, model_config


# -- host


def profile_host(runner: ModelRunner, row_counts: list[int], num_steps: int
                 ) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """The host's table, and a record per number of rows."""
    table: list[list[Any]] = [["running rows", "schedule", "build", "output", "sum", "sum p90", "bound", "holds",
                               "dispatch"]]
    lines = []
    for num_rows in row_counts:
        parts = host_time(runner, num_rows, num_steps)
        total = summarise(np.sum([parts["schedule"], parts["build"], parts["output"]], axis=0), 1e3)
        bound = BASE_MS + num_rows * PER_ROW_US / 1e3
        medians = {name: summarise(values, 1e3) for name, values in parts.items()}
        table.append([num_rows, *(medians[name].median for name in ("schedule", "build", "output")), *total, bound,
                      total.median <= bound, medians["dispatch"].median])
        lines.append(dict(rows=num_rows, **{f"{name}_ms": value for name, value in medians.items()}, sum_ms=total,
                          bound_ms=bound, holds=total.median <= bound))
    return table, lines


def host_time(runner: ModelRunner, num_rows: int, num_steps: int) -> dict[str, list[float]]:
    """CPU seconds by part of each of `num_steps` decode steps with this many running rows."""
    engine = Engine(runner, runner.config, seed=0)
    rng = np.random.default_rng(num_rows)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_steps + HOST_PROMPT)
    for _ in range(num_rows):
        engine.add_request(rng.integers(0, runner.num_valid_tokens, HOST_PROMPT), params)
    while engine.scheduler.num_waiting or any(request.is_prefilling for request in engine.scheduler.requests()):
        engine.step()
    engine.step()
    parts: dict[str, list[float]] = {"schedule": [], "build": [], "output": [], "dispatch": []}
    for _ in range(num_steps):
        before = {name: getattr(engine.host_time, f"{name}_s") for name in parts}
        engine.step()
        for name, values in parts.items():
            values.append(getattr(engine.host_time, f"{name}_s") - before[name])
    assert engine.scheduler.num_running == num_rows, "a request ended while it was measured"
    engine.drop_all()
    return parts


# -- device


def profile_device(runner: ModelRunner, model: Decoder, model_config: ModelConfig, cases: tuple[Case, ...], repeats: int
                   ) -> tuple[list[list[Any]], dict[str, Any]]:
    """The device's table, and what the machine can do with a record per case."""
    names = ("whole", "linear", "attention", "kv_write", "head")
    table: list[list[Any]] = [["ms", *(name.replace("_", " ") for name in names), "rest", "whole p90",
                               "whole without attention", "contiguous", "paging costs", "least", "whole / least"]]
    lines = []
    _, leaves, _ = split_model(model)
    matrices = [leaf for leaf in leaves if leaf.ndim == 2]
    speeds: dict[str, list[float]] = {"read": [], "matmul": []}
    yardsticks = make_yardsticks(matrices)
    prefill = np.zeros(2)
    for case in cases:
        pieces = make_pieces(runner, model, model_config, case) | yardsticks
        times: dict[str, list[float]] = {name: [] for name in pieces}
        for piece in pieces.values():
            piece()
        for _ in range(repeats):
            for name, piece in pieces.items():
                start = time.perf_counter()
                piece()
                times[name].append(time.perf_counter() - start)
        found = {name: summarise(values, 1e3) for name, values in times.items()}
        speeds["read"].append(found["read"].median)
        speeds["matmul"].append(found["matmul"].median)
        rest = found["whole"].median - sum(found[name].median for name in names[1:])
        least = least_ms(matrices, model_config, runner, case, found)
        whole = found["whole"].median
        over_contiguous = whole / (whole - found["attention"].median + found["contiguous"].median)
        table.append([case.name, *(found[name].median for name in names), rest, found["whole"].p90,
                      found["without_attention"].median, found["contiguous"].median, over_contiguous, least,
                      whole / least])
        lines.append(dict(case=case.name, rest_ms=rest, least_ms=least, over_least=whole / least,
                          over_contiguous=over_contiguous,
                          **{f"{name}_ms": found[name] for name in (*names, "without_attention", "contiguous")}))
        if case.chunk and case.context <= PREFILL:
            prefill += np.array([found["without_attention"].median, whole])
    num_bytes = sum(matrix.nbytes for matrix in matrices)
    speed = dict(read_gb_per_s=num_bytes / np.median(speeds["read"]) / 1e6,
                 matmul_gflop_per_s=2 * np.prod(MATMUL) / np.median(speeds["matmul"]) / 1e6)
    return table, dict(machine={name: float(value) for name, value in speed.items()}, cases=lines,
                       prefill_rate_kept=float(prefill[0] / prefill[1]) if prefill[1] else float("nan"))


def make_pieces(runner: ModelRunner, model: Decoder, model_config: ModelConfig, case: Case
                ) -> dict[str, Callable[[], None]]:
    """The whole step of a case and its parts; each call runs one of them and waits for it."""
    num_tokens, context = case.chunk or case.rows, case.context
    shape = runner.shapes.fit(case.rows, num_tokens, 0 if case.chunk else case.rows)
    assert case.chunk or shape.num_rows == case.rows, f"{case.name}: no such row bucket in {runner.shapes.row_buckets}"
    packed = runner.layout(shape).allocate()
    batch = runner.layout(shape).step_batch(packed.ints)
    pages = -(-context // PAGE_SIZE)
    rng = np.random.default_rng(0)
    batch.tokens[:num_tokens] = rng.integers(0, runner.num_valid_tokens, num_tokens)
    batch.token_src.fill(-1)
    batch.cu_q_lens[1:] = num_tokens if case.chunk else np.arange(1, case.rows + 1)
    batch.kv_lens[:case.rows] = context
    batch.page_table[:, :case.rows, :pages] = 1 + rng.permutation(case.rows * pages).reshape(case.rows, pages)
    batch.row_slots[:] = runner.spare_slot
    batch.row_slots[:case.rows] = np.arange(case.rows)
    batch.is_sampled[:case.rows] = 1
    batch.num_decode[0] = 0 if case.chunk else case.rows

    _, leaves, merge = split_model(model)
    q_width, inner = model_config.num_heads * model_config.head_dim, model_config.intermediate_size
    x, values = (jnp.asarray(rng.standard_normal((shape.num_tokens, size)), jnp.float32)
                 for size in (model_config.hidden_size, model_config.kv_width))
    q = jnp.asarray(rng.standard_normal((shape.num_tokens, model_config.num_heads, model_config.head_dim)), jnp.float32)
    tokens, positions = jnp.asarray(batch.tokens.copy()), jnp.arange(shape.num_tokens, dtype=jnp.int32)
    write_slots = jnp.asarray(PAGE_SIZE * np.resize(batch.page_table[0, :, 0], shape.num_tokens), jnp.int32)
    ragged = [jnp.asarray(array.copy()) for array in (batch.page_table[0], batch.kv_lens, batch.cu_q_lens)]
    num_decode = jnp.int32(batch.num_decode[0])

    @jax.jit
    def linear(leaves: list[Array], x: Array) -> Array:
        for layer in merge(leaves).layers:
            x = x + 1e-3 * layer.attention.out(layer.attention.qkv(x)[:, :q_width])
            x = x + 1e-3 * layer.mlp.down(layer.mlp.gate_up(x)[:, :inner])
        return x

    @jax.jit
    def attention(kv: KVCache, q: Array, table: Array, kv_lens: Array, cu_q_lens: Array, num_decode: Array) -> Array:
        for layer, (keys, values) in enumerate(zip(kv.k, kv.v)):
            q = paged_attention(q, keys, values, table, kv_lens, cu_q_lens, num_decode,
                                sm_scale=model_config.head_dim ** -0.5, has_chunks=case.chunk > 0,
                                sliding_window=model_config.layer_windows[layer])
        return q

    def write(kv: KVCache, values: Array, write_slots: Array) -> KVCache:
        written = [write_kv(k_pages, v_pages, values, values, write_slots) for k_pages, v_pages in zip(kv.k, kv.v)]
        return KVCache(*zip(*written))

    write = jax.jit(write, donate_argnums=0)
    row_pages = np.zeros((shape.num_rows, 1), np.int32)
    row_pages[:case.rows, 0] = 1 + np.arange(case.rows)
    whole_rows = KVCache(*(tuple(jnp.zeros((case.rows + 1, pages * PAGE_SIZE, pages_of.shape[2]), pages_of.dtype)
                                 for pages_of in side) for side in runner.kv))

    @jax.jit
    def head(leaves: list[Array], hidden: Array) -> Array:
        return argmax(merge(leaves).logits(hidden))

    @jax.jit
    def without_attention(leaves: list[Array], tokens: Array, positions: Array) -> Array:
        model = merge(leaves)
        hidden = model(tokens, positions, lambda layer, q, k, v: q)
        return argmax(model.logits(hidden[-case.rows:]))

    def write_once() -> None:
        runner.kv = jax.block_until_ready(write(runner.kv, values, write_slots))

    def whole() -> None:
        jax.block_until_ready(runner.dispatch(packed, shape).tokens)

    return dict(
        whole=whole, kv_write=write_once,
        linear=lambda: jax.block_until_ready(linear(leaves, x)),
        attention=lambda: jax.block_until_ready(attention(runner.kv, q, *ragged, num_decode)),
        contiguous=lambda: jax.block_until_ready(
            attention(whole_rows, q, jnp.asarray(row_pages), *ragged[1:], num_decode)),
        head=lambda: jax.block_until_ready(head(leaves, x[:case.rows])),
        without_attention=lambda: jax.block_until_ready(without_attention(leaves, tokens, positions)))


def make_yardsticks(matrices: list[Array]) -> dict[str, Callable[[], None]]:
    """What the machine can do: reading every weight once as a matrix-vector product, and one large matrix product."""
    @jax.jit
    def read(matrices: list[Array]) -> list[Array]:
        return [matmul(jnp.ones((1, matrix.shape[1])), matrix).sum() for matrix in matrices]

    tokens, num_in, num_out = MATMUL
    a = jnp.ones((tokens, num_in))
    b = jnp.ones((num_out, num_in), matrices[0].dtype)
    product = jax.jit(matmul)
    return dict(read=lambda: jax.block_until_ready(read(matrices)), matmul=lambda: jax.block_until_ready(product(a, b)))


def least_ms(matrices: list[Array], model_config: ModelConfig, runner: ModelRunner, case: Case,
             found: dict[str, Summary]) -> float:
    """Milliseconds that reading weights and KV once, or the arithmetic of the linear layers, takes at least."""
    weight_bytes = sum(matrix.nbytes for matrix in matrices)
    kv_bytes = case.rows * case.context * sum(pages.nbytes / (pages.shape[0] * pages.shape[1])
                                              for side in runner.kv for pages in side)
    vocabulary = model_config.vocab_size * model_config.hidden_size
    body = sum(matrix.size for matrix in matrices if matrix.size != vocabulary)
    flop = 2 * ((case.chunk or case.rows) * body + case.rows * vocabulary)
    reading = (weight_bytes + kv_bytes) / weight_bytes * found["read"].median
    return max(reading, flop / (2 * float(np.prod(MATMUL))) * found["matmul"].median)


if __name__ == "__main__":
    sys.exit(main())
