"""The memory plan: what weights, KV pages and a step's temporaries take, decided before anything is allocated."""
from __future__ import annotations

import os
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jradix.batch import LOGIT_BLOCK
from jradix.errors import DeviceError
from jradix.models.config import ModelConfig
from jradix.ops.kv_cache import kv_page_bytes

CPU_DEFAULT_POOL_BYTES = 2 * 2**30
DEFAULT_FRACTION = {"cpu": 0.5}
_OTHER_FRACTION = 0.9


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, and the pool that results.

    Attributes:
      available_bytes: free on the device before loading.
      weight_bytes, step_bytes, kv_bytes: weights, temporaries of the largest step, KV pages.
      num_pages: KV pages, the scratch page not counted.
    """
    device: str
    available_bytes: int
    weight_bytes: int
    step_bytes: int
    kv_bytes: int
    num_pages: int
    page_size: int

    def describe(self, model_name: str, weight_dtype: str, kv_dtype: str) -> str:
        """One line for the user."""
        return (f"{model_name} on {self.device}: weights {_size(self.weight_bytes)} ({weight_dtype}), KV pool "
                f"{_size(self.kv_bytes)} ({kv_dtype}, {self.num_pages} pages of {self.page_size} = "
                f"{self.num_pages * self.page_size:,} tokens), step {_size(self.step_bytes)}, "
                f"of {_size(self.available_bytes)} free")


def plan_memory(config: ModelConfig, *, device: jax.Device, weight_dtype: jnp.dtype, kv_dtype: jnp.dtype,
                page_size: int, max_num_seqs: int, step_tokens: int, kv_cache_bytes: int | None = None,
                memory_fraction: float | None = None, grammar_bytes: int = 0) -> MemoryPlan:
    """Fits the KV pool into what the device has free.

    Args:
      step_tokens: flat tokens of the largest step.
      kv_cache_bytes: size of the pool; None: what `memory_fraction` of the free memory leaves beside weights and step,
        on CPU at most `CPU_DEFAULT_POOL_BYTES` unless a fraction was given.
      grammar_bytes: tables of grammars, counted as part of the step.
      memory_fraction: share of the free memory to use, in (0, 1]; None: 0.5 on CPU, 0.9 elsewhere.

    Raises:
      DeviceError: weights and the smallest useful pool do not fit; the message has the numbers.
      ValueError: a size outside its range.
    """
    if memory_fraction is not None and not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction={memory_fraction!r}: expected a number in (0, 1]")
    page_bytes = kv_page_bytes(num_layers=config.num_layers, page_size=page_size, kv_width=config.kv_width,
                               dtype=kv_dtype)
    if kv_cache_bytes is not None and kv_cache_bytes < 2 * page_bytes:
        raise ValueError(f"kv_cache_bytes={kv_cache_bytes}: one page of {page_size} tokens takes {page_bytes} bytes; "
                         f"expected at least {2 * page_bytes}")
    available = free_bytes(device)
    weights = config.num_parameters * jnp.dtype(weight_dtype).itemsize
    step = _step_bytes(config, max_num_seqs, step_tokens) + grammar_bytes
    fraction = memory_fraction or DEFAULT_FRACTION.get(device.platform, _OTHER_FRACTION)
    room = int(available * (1.0 if kv_cache_bytes else fraction)) - weights - step
    if room < (kv_cache_bytes or 2 * page_bytes):
        raise DeviceError(
            f"the model does not fit: weights {_size(weights)} + step {_size(step)} + KV pool "
            f"{_size(kv_cache_bytes or 2 * page_bytes)}, but {device.platform} has {_size(available)} free"
            + ("" if kv_cache_bytes else f", of which {fraction:.0%} may be used")
            + "; take a smaller model, a smaller dtype or a smaller pool, or free memory")
    if kv_cache_bytes is None:
        kv_cache_bytes = room
        if device.platform == "cpu" and memory_fraction is None:
            kv_cache_bytes = min(room, CPU_DEFAULT_POOL_BYTES)
    num_pages = kv_cache_bytes // page_bytes - 1     # one page is the scratch page
    return MemoryPlan(device.platform, available, weights, step, (num_pages + 1) * page_bytes, num_pages, page_size)


def plan_host_pages(config: ModelConfig, plan: MemoryPlan, *, host_cache_bytes: int, kv_dtype: jnp.dtype) -> int:
    """Pages that fit into `host_cache_bytes` of the machine's memory.

    Args:
      plan: of the device, made just before and nothing of it allocated yet; on CPU its bytes come from the same memory.

    Raises:
      DeviceError: the machine has less memory available than that.
      ValueError: not even one page fits into it.
    """
    page_bytes = kv_page_bytes(num_layers=config.num_layers, page_size=plan.page_size, kv_width=config.kv_width,
                               dtype=kv_dtype)
    if host_cache_bytes < page_bytes:
        raise ValueError(f"host_cache_bytes={host_cache_bytes}: one page of {plan.page_size} tokens takes {page_bytes} "
                         f"bytes; expected at least that, or None for no pages on the host")
    if plan.device == "cpu":
        room = plan.available_bytes - plan.weight_bytes - plan.step_bytes - plan.kv_bytes
        where = "beside weights, step and KV pool the machine has"
    else:
        room, where = machine_free_bytes(), "the machine has"
    if host_cache_bytes > room:
        raise DeviceError(f"host_cache_bytes={host_cache_bytes} ({_size(host_cache_bytes)}), but {where} "
                          f"{max(room, 0)} bytes ({_size(max(room, 0))}) available; give at most that, or free memory")
    return host_cache_bytes // page_bytes


def machine_free_bytes() -> int:
    """Memory of the machine that a program can have without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as info:
            fields = dict(line.split(":", 1) for line in info)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def free_bytes(device: jax.Device) -> int:
    """Memory that is really free: of the device, or of the machine for CPU."""
    if device.platform == "cpu":
        return machine_free_bytes()
    stats = device.memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"]


def _step_bytes(config: ModelConfig, max_num_seqs: int, step_tokens: int) -> int:
    """Float32 temporaries of the largest step (a rough upper bound) and the per-slot state."""
    per_token = 4 * (6 * config.hidden_size + 3 * config.intermediate_size + 2 * config.num_heads * config.head_dim)
    logits = 4 * 4 * max(max_num_seqs, LOGIT_BLOCK) * config.vocab_size
    row_state = 9 * (max_num_seqs + 1) * config.vocab_size
    return per_token * step_tokens + logits + row_state


def _size(num_bytes: int) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.0f} MiB"
