"""Paged attention over ragged rows: one operation, several implementations, chosen by name or by device.

An implementation is a module with the functions `decode`, `extend` and `shared_prefix` of `attention_xla`. What it
cannot serve it refuses with `UnsupportedKernel`.
"""
from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jradix.ops.kv_cache import write_kv
from pallas_kernels.errors import UnsupportedKernel
from pallas_kernels.merge import merge

logger = logging.getLogger("jradix")

IMPLEMENTATIONS = ("mosaic_gpu", "pallas_tpu", "native", "xla")
_MODULES = dict(mosaic_gpu="pallas_kernels.mosaic_gpu", pallas_tpu="pallas_kernels.pallas_tpu",
                native="jradix.ops.attention_native", xla="jradix.ops.attention_xla")
_PLATFORMS = dict(mosaic_gpu=("gpu", "cuda"), pallas_tpu=("tpu",), native=("cpu",))     # xla: all


class SharedPrefixes(NamedTuple):
    """Groups of decode rows whose contexts begin with the same pages.

    Attributes:
      pages: int32[P, M], pages of each group's prefix.
      lens: int32[P], tokens of the prefix, whole pages; 0 for padding groups, which stand last.
      members: int32[P, R], the group's rows, among the decode rows, each row in at most one group; padded with numbers
        beyond all rows. A group of more than R rows is given in parts.
    """
    pages: Array
    lens: Array
    members: Array


def paged_attention(q: Array, k_pages: Array, v_pages: Array, page_table: Array, kv_lens: Array, cu_q_lens: Array,
                    num_decode: Array, *, sm_scale: float, sliding_window: int | None = None,
                    soft_cap: float | None = None, shared: SharedPrefixes | None = None, has_chunks: bool = True,
                    implementation: str | None = None, platform: str | None = None) -> Array:
    """Causal attention of each row's new tokens over its whole context, which is in the pages already.

    Args:
      q: float32[T, Hq, D] queries, rows one after the other, decode rows first.
      k_pages, v_pages: [N, page_size, Hkv * D].
      page_table: int32[S, M] pages of each row.
      kv_lens: int32[S] context lengths including the new tokens; 0 for padding rows.
      cu_q_lens: int32[S + 1] first token of each row.
      num_decode: int32[] leading rows with exactly one token.
      sm_scale: factor on the scores.
      sliding_window: a token sees this many tokens, itself included; None: all.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap); None: as they are.
      shared: prefixes that are read once for all rows that share them; None: each row reads its own.
      has_chunks: False promises that all rows are decode rows.
      implementation: one of `IMPLEMENTATIONS`, used or refused; None takes the first that serves the platform, and says
        in the log which one.
      platform: of the device that will run it; None: the default device's.

    Returns:
      float32[T, Hq, D]; padding tokens hold finite garbage.

    Raises:
      ValueError: an unknown implementation, or shared prefixes together with a window.
      UnsupportedKernel: the named implementation does not serve these arguments.
    """
    check_implementation(implementation, platform)
    if shared is not None and sliding_window is not None:
        raise ValueError("shared prefixes with a sliding window: its rows do not see the whole prefix; "
                         "pass shared=None")
    platform = platform or jax.default_backend()
    settings = dict(sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap)
    arguments = q, k_pages, v_pages, page_table, kv_lens, cu_q_lens, num_decode, shared, has_chunks
    if implementation is not None:
        return _attend(implementation, platform, *arguments, **settings)
    reasons = []
    for name in IMPLEMENTATIONS:
        if platform not in _PLATFORMS.get(name, (platform,)):
            continue
        try:
            out = _attend(name, platform, *arguments, **settings)
        except UnsupportedKernel as error:
            reasons.append(f"{name}: {error}")
            continue
        _say(name, tuple(reasons))
        return out
    raise AssertionError("the XLA form serves everything")


def check_implementation(name: str | None, platform: str | None = None) -> None:
    """Refuses a name that nothing has, or that cannot run on this platform; None is always good.

    Raises:
      ValueError: an unknown name.
      UnsupportedKernel: the implementation does not run there, or cannot be loaded.
    """
    if name not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation={name!r}: expected one of {IMPLEMENTATIONS} or None")
    if name is not None:
        _form(name, platform or jax.default_backend())


def sound_implementation(device: jax.Device, *, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
                         kv_dtype: jnp.dtype, sliding_window: int | None = None) -> str:
    """The first implementation that serves the device and these sizes, and computes there what the XLA form computes.

    A small ragged batch with a shared prefix and a chunk is written and attended to with both. What differs, or fails
    to compile, is left out with a warning: a kernel may meet a device or a compiler on which nobody has run it.
    """
    sizes = num_heads, num_kv_heads, head_dim, page_size, jnp.dtype(kv_dtype), sliding_window
    for name in IMPLEMENTATIONS[:-1]:
        if device.platform not in _PLATFORMS[name]:
            continue
        try:
            difference = _difference_from_xla(name, device, *sizes)
        except UnsupportedKernel as error:
            logger.info("attention: not %s: %s", name, error)
        except jax.errors.JaxRuntimeError as error:
            logger.warning("attention: not %s: it failed on %s: %s", name, device.device_kind, error)
        else:
            if difference <= (1e-4 if kv_dtype == jnp.float32 else 3e-2):
                logger.info("attention: %s", name)
                return name
            logger.warning("attention: not %s: on %s it differs from the XLA form by %.3g; please report this", name,
                           device.device_kind, difference)
    return "xla"


def _difference_from_xla(name: str, device: jax.Device, num_heads: int, num_kv_heads: int, head_dim: int,
                         page_size: int, kv_dtype: jnp.dtype, sliding_window: int | None) -> float:
    """Largest difference of one batch: three decode rows, of which the outer two share a page, and a chunk."""
    kv_lens = [page_size + 3, 1, 2 * page_size + 1, 2 * page_size]
    table = jnp.asarray([[1, 2, 0], [3, 0, 0], [1, 4, 5], [6, 7, 0]], jnp.int32)
    num_new = min(page_size + 1, kv_lens[-1])
    with jax.default_device(device):
        keys = jax.random.split(jax.random.key(0), 3)
        q = jax.random.normal(keys[0], (3 + num_new, num_heads, head_dim))
        rows = [jax.random.normal(key, (8 * page_size, num_kv_heads * head_dim)) for key in keys[1:]]
        empty = [jnp.zeros((8, page_size, num_kv_heads * head_dim), kv_dtype)] * 2
        shared = SharedPrefixes(table[:1], jnp.asarray([page_size]), jnp.asarray([[0, 2]]))
        lens = table, jnp.asarray(kv_lens), jnp.asarray([0, 1, 2, 3, 3 + num_new]), jnp.int32(3)
        worst = 0.0
        for group, window in ((shared, None), (None, sliding_window)):
            outs = []
            for each in (name, "xla"):
                write = jax.jit(functools.partial(write_kv, implementation=each))
                pools = write(*empty, *rows, jnp.arange(8 * page_size))
                outs.append(jax.jit(functools.partial(
                    paged_attention, sm_scale=head_dim ** -0.5, sliding_window=window, implementation=each,
                    platform=device.platform))(q, *pools, *lens, shared=group))
            worst = max(worst, float(jnp.nan_to_num(jnp.abs(outs[0] - outs[1]), nan=jnp.inf).max()))
    return worst


def _form(name: str, platform: str) -> ModuleType:
    platforms = _PLATFORMS.get(name, (platform,))
    if platform not in platforms:
        raise UnsupportedKernel(f"implementation={name!r} runs on {platforms[0]} devices, this one is {platform!r}; "
                                f"leave implementation out, or use 'xla'")
    if name == "mosaic_gpu" and not _is_hopper():
        raise UnsupportedKernel("implementation='mosaic_gpu' is written for Hopper GPUs (compute capability 9.0), this "
                                f"one is a {jax.devices('gpu')[0].device_kind}; leave implementation out, or use 'xla'")
    try:
        module = importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise UnsupportedKernel(f"implementation={name!r} cannot be loaded: {error}") from error
    if name == "native" and (reason := module.why_not(backend=platform)):
        raise UnsupportedKernel(reason)
    return module


@functools.cache
def _is_hopper() -> bool:
    """True also where no GPU is: the program is then compiled for one that is elsewhere."""
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        return True
    return getattr(device, "compute_capability", "").startswith("9.")


@functools.cache
def _say(name: str, reasons: tuple[str, ...]) -> None:
    logger.info("attention: %s%s", name, "".join(f"; not {reason}" for reason in reasons))


def _attend(name: str, platform: str, q: Array, k_pages: Array, v_pages: Array, page_table: Array, kv_lens: Array,
            cu_q_lens: Array, num_decode: Array, shared: SharedPrefixes | None, has_chunks: bool, *, sm_scale: float,
            sliding_window: int | None, soft_cap: float | None) -> Array:
    form = _form(name, platform)
    if name == "mosaic_gpu":
        q = q.astype(k_pages.dtype)         # its products take operands of one type
    num_tokens, num_rows = q.shape[0], page_table.shape[0]
    is_decode = jnp.arange(num_rows) < num_decode
    settings = dict(sm_scale=sm_scale, soft_cap=soft_cap)
    decode, extend = (_function(form, each, sliding_window=sliding_window, **settings) for each in ("decode", "extend"))
    starts = place = None
    if shared is not None:
        place = _member_places(shared, num_rows)
        starts = shared.lens.at[place // shared.members.shape[1]].get(mode="fill", fill_value=0)
    out, lse = decode(q[:num_rows], k_pages, v_pages, page_table, jnp.where(is_decode, kv_lens, 0), starts)
    if shared is not None:
        shared_prefix = _function(form, "shared_prefix", **settings)

        def with_prefixes(out: Array, lse: Array) -> Array:
            prefix_out, prefix_lse = shared_prefix(q[:num_rows], k_pages, v_pages, shared.pages, shared.lens,
                                                   shared.members)
            prefix_out, prefix_lse = (x.reshape(-1, *x.shape[2:]).at[place].get(mode="fill", fill_value=fill)
                                      for x, fill in ((prefix_out, 0), (prefix_lse, -jnp.inf)))
            return merge((out, prefix_out), (lse, prefix_lse))[0]

        out = lax.cond(shared.lens[0] > 0, with_prefixes, lambda out, lse: out, out, lse)
    if not has_chunks:
        return out
    chunks, _ = extend(q, k_pages, v_pages, page_table, kv_lens, jnp.maximum(cu_q_lens, num_decode))
    # the decode rows were empty there
    padded = jnp.pad(out, ((0, num_tokens - num_rows), (0, 0), (0, 0)))
    return jnp.where((jnp.arange(num_tokens) < num_decode)[:, None, None], padded, chunks)


@functools.cache
def _function(form: ModuleType, name: str, **settings: float | int | None) -> Callable[..., tuple[Array, Array]]:
    """A function of an implementation, jitted once: layers of the same shapes then share one lowering of a kernel."""
    return jax.jit(functools.partial(getattr(form, name), **settings))


def _member_places(shared: SharedPrefixes, num_rows: int) -> Array:
    """int32[S], which of the P * R members each row is; P * R for a row in no group."""
    members = jnp.where(shared.lens[:, None] > 0, shared.members, num_rows)
    numbers = jnp.arange(members.size, dtype=jnp.int32).reshape(members.shape)
    return jnp.full(num_rows, members.size, jnp.int32).at[members].set(numbers, mode="drop")
