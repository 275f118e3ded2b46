"""Which number type the weights and the KV cache use on a device, and why."""
from __future__ import annotations

import logging
import statistics
import time

import jax
import jax.numpy as jnp

from jradix.errors import DeviceError
from jradix.ops import memory_native
from jradix.ops.matmul import matmul

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")
BF16_CAPABILITY = 8.0  # Ampere
MIN_GAIN = 1.1  # bfloat16 loses precision, so it has to be faster by more than the noise
MEASURED_ROWS = 8
MEASURED_LAYERS = 8  # several layers, so that weights come from memory and not from cache
MEASURED_WEIGHTS = 24_000_000  # but not so many that it takes long
MAX_MEASURED_SIZES = (1024, 4096)
MEASURED_RUNS = 7
BF16_SCATTER_FIXED = (0, 11, 2)  # first jax whose CPU scatter into a bfloat16 array is not O(array)


def resolve_dtype(dtype: str, device: jax.Device, *, hidden: int, intermediate: int, may_measure: bool = True
                  ) -> tuple[jnp.dtype, str]:
    """Chooses the weights' type.

    "auto" is bfloat16 on TPUs and on GPUs that have it, float16 with a warning on older GPUs, and on CPUs the faster
    of float32 and bfloat16 as measured here in about half a second (which one wins depends on the CPU and its load).

    Args:
      dtype: one of `DTYPES`.
      device: where the model will run.
      hidden, intermediate: the model's sizes, for the measurement.
      may_measure: False: float32 where "auto" would measure, so that every run chooses the same.

    Returns:
      The type and one sentence on why.

    Raises:
      ValueError: an unknown name.
      DeviceError: bfloat16 was asked for on a GPU without it.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(DTYPES)}")
    capability = _capability(device)
    if dtype == "bfloat16" and capability is not None and capability < BF16_CAPABILITY:
        raise DeviceError(f"dtype='bfloat16': {device.device_kind} (compute capability {capability}) has no bfloat16, "
                          f"which needs {BF16_CAPABILITY}; use dtype='float16' or dtype='auto'")
    if dtype != "auto":
        return jnp.dtype(dtype), "asked for"
    if device.platform == "tpu":
        return jnp.dtype(jnp.bfloat16), "the TPU's own type"
    if device.platform != "cpu":
        if capability is None or capability >= BF16_CAPABILITY:
            return jnp.dtype(jnp.bfloat16), f"{device.device_kind} has bfloat16"
        reason = f"{device.device_kind} (compute capability {capability}) has no bfloat16"
        logger.warning("%s: using float16. If outputs are not finite, use dtype='float32'", reason)
        return jnp.dtype(jnp.float16), reason
    if not may_measure:
        return jnp.dtype(jnp.float32), "the same in every run"
    hidden, intermediate = min(hidden, MAX_MEASURED_SIZES[0]), min(intermediate, MAX_MEASURED_SIZES[1])
    wide = _measure(jnp.float32, device, hidden, intermediate)
    narrow = _measure(jnp.bfloat16, device, hidden, intermediate)
    chosen = jnp.bfloat16 if wide >= MIN_GAIN * narrow else jnp.float32
    return jnp.dtype(chosen), (f"measured: {MEASURED_ROWS} rows through MLPs of {hidden} x {intermediate} take "
                               f"{wide * 1e3:.1f} ms in float32, {narrow * 1e3:.1f} ms in bfloat16")


def kv_dtype(dtype: jnp.dtype, device: jax.Device) -> jnp.dtype:
    """Type of the KV pool: the weights', except bfloat16 on a CPU below jax 0.11.2 without a C compiler.

    There XLA turns a scatter into a bfloat16 array into one that rewrites all of it, so each step would cost the whole
    pool; float32 costs twice the memory and only the written rows.
    """
    if device.platform == "cpu" and dtype == jnp.bfloat16 and jax.__version_info__ < BF16_SCATTER_FIXED:
        reason = memory_native.why_not(dtype)
        if reason is not None:
            logger.info("KV cache: float32 beside bfloat16 weights; jax %s, and %s", jax.__version__, reason)
            return jnp.dtype(jnp.float32)
    return jnp.dtype(dtype)


def _capability(device: jax.Device) -> float | None:
    """CUDA compute capability; None for devices that have no such number."""
    if device.platform not in ("gpu", "cuda"):
        return None
    try:
        return float(device.compute_capability)
    except (AttributeError, ValueError):  # other makers' GPUs
        return None


def _measure(dtype: jnp.dtype, device: jax.Device, hidden: int, intermediate: int) -> float:
    """Median seconds of the model's MLP matmuls with weights of this type."""
    num_layers = min(max(MEASURED_WEIGHTS // (3 * hidden * intermediate), 1), MEASURED_LAYERS)
    with jax.default_device(device):
        layers = [(jnp.full((2 * intermediate, hidden), 0.01, dtype), jnp.full((hidden, intermediate), 0.01, dtype))
                  for _ in range(num_layers)]
        x = jnp.ones((MEASURED_ROWS, hidden), jnp.float32)

        @jax.jit
        def run(x: jax.Array, layers: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
            for up, down in layers:
                x = jnp.tanh(matmul(matmul(x, up)[:, :intermediate], down))
            return x

        run(x, layers).block_until_ready()
        times = []
        for _ in range(MEASURED_RUNS):
            start = time.perf_counter()
            run(x, layers).block_until_ready()
            times.append(time.perf_counter() - start)
    return statistics.median(times)
