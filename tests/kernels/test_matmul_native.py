"""The C form of matmul: values against float64, the same bits in every batch, and padding."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jradix.ops import matmul_native as native
from jradix.ops.matmul import matmul, matmul_xla
from matrix_unit import HAS_MATRIX_UNIT
from pallas_kernels.errors import UnsupportedKernel

DTYPES = ("float32", "float16", "bfloat16")

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))


def operands(rows: int, depth: int, width: int, dtype: str, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Beside bfloat16 weights x is of bfloat16 numbers, which no form rounds."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((rows, depth)), jnp.bfloat16 if dtype == "bfloat16" else jnp.float32)
    return x.astype(jnp.float32), jnp.asarray(rng.standard_normal((width, depth)), dtype)


def product(x: jax.Array, w: jax.Array, num_rows: int | None = None) -> np.ndarray:
    return np.asarray(native.matmul(x, w, jnp.int32(len(x) if num_rows is None else num_rows)))


def exact(x: jax.Array, w: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(w.astype(jnp.float32), np.float64).T


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 70), depth=st.integers(1, 70), width=st.integers(1, 230), dtype=st.sampled_from(DTYPES))
def test_matmul_equals_the_product_in_float64(rows: int, depth: int, width: int, dtype: str) -> None:
    x, w = operands(rows, depth, width, dtype)
    np.testing.assert_allclose(product(x, w), exact(x, w), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_of_a_models_sizes_equals_the_product_in_float64(dtype: str) -> None:
    x, w = operands(150, 1536, 577, dtype)
    np.testing.assert_allclose(product(x, w), exact(x, w), atol=3e-4)


@pytest.mark.parametrize("dtype, sizes", [
    ("float32", (64, 1, 2, 3, 4, 5, 8, 9, 16, 17, 25, 33)), ("float32", (300, 65, 97, 200)),
    ("float16", (300, 1, 2, 3, 4, 5, 8, 9, 16, 17, 25, 33, 200)),
    ("bfloat16", (300, 1, 2, 3, 4, 5, 8, 9, 16, 17, 25, 33, 200)),
])
def test_a_row_has_the_same_bits_alone_among_others_and_in_any_place(dtype: str, sizes: tuple[int, ...]) -> None:
    """float32 apart where x has more than 64 rows, which the matrix unit takes if there is one."""
    most, *others = sizes
    x, w = operands(most, 131, 205, dtype)
    together = product(x, w)
    for rows in others:
        for start in {0, 3, min(100, most - rows)}:
            np.testing.assert_array_equal(product(x[start:start + rows], w), together[start:start + rows])


def test_padding_leaves_the_bits_of_a_step_as_they_are() -> None:
    """How a compiled step sums depends on its size, not on how many rows are in use."""
    x, w = operands(200, 131, 205, "float32")
    together = product(x, w)
    for rows in (1, 16, 17, 64, 65, 130):
        np.testing.assert_array_equal(product(x, w, rows)[:rows], together[:rows])


@pytest.mark.parametrize("rows", (16, 65, 300))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_errors_are_those_of_sums_in_float32(dtype: str, rows: int) -> None:
    """Also by a unit that multiplies bfloat16: numbers of all sizes, whose sums would show a lost part."""
    rng = np.random.default_rng(1)
    x, w = operands(rows, 1536, 64, dtype)
    x = x * jnp.asarray(2.0 ** rng.integers(-12, 12, x.shape), jnp.float32)
    scale = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w.astype(jnp.float32), np.float64)).T
    assert np.max(np.abs(product(x, w) - exact(x, w)) / scale) < 1e-6


def test_a_matrix_unit_rounds_x_beside_bfloat16_weights_as_xla_does() -> None:
    """To the nearest number, ties to even; infinite and undefined numbers stay what they are."""
    x = jnp.asarray([[1 + 2.0 ** -8], [1 + 3 * 2.0 ** -8], [-(1 + 2.0 ** -8 + 2.0 ** -16)], [jnp.inf], [jnp.nan]])
    w = jnp.ones((3, 1), jnp.bfloat16)
    expected = x.astype(jnp.bfloat16) if HAS_MATRIX_UNIT else x
    np.testing.assert_array_equal(product(x, w), np.broadcast_to(np.asarray(expected.astype(jnp.float32)), (5, 3)))


def test_threads_change_no_bits() -> None:
    """A narrow part of a wide product is too little work for a second thread."""
    x, w = operands(16, 512, 4096, "float32")
    together = product(x, w)
    np.testing.assert_array_equal(product(x, w[960:968]), together[:, 960:968])


@pytest.mark.parametrize("num_rows, expected", [(0, 0), (5, 5), (20, 20), (99, 20), (-3, 0)])
def test_rows_of_padding_are_zeros(num_rows: int, expected: int) -> None:
    x, w = operands(20, 32, 24, "float32")
    got = product(x, w, num_rows)
    np.testing.assert_array_equal(got[:expected], product(x, w)[:expected])
    assert not got[expected:].any()


def test_infinite_and_undefined_numbers_stay_in_their_row() -> None:
    x, w = operands(20, 16, 40, "float32")
    got = product(x.at[3].set(jnp.nan).at[17].set(jnp.inf), w)
    clean = product(x, w)
    others = np.setdiff1d(np.arange(20), (3, 17))
    assert np.isnan(got[3]).all() and not np.isfinite(got[17]).any()
    np.testing.assert_array_equal(got[others], clean[others])


def test_what_does_not_fit_is_refused() -> None:
    x, w = operands(2, 8, 4, "float32")
    count = jnp.int32(2)
    for a, b in ((x[0], w), (x, w[:, :7]), (x[:, :0], w[:, :0])):
        with pytest.raises(UnsupportedKernel, match=r"expected \[M, K\] and \[N, K\]"):
            native.matmul(a, b, count)
    with pytest.raises(UnsupportedKernel, match="weights of int8; expected one of float32, float16, bfloat16"):
        native.matmul(x, w.astype(jnp.int8), count)


@pytest.mark.parametrize("rows", (1, 2, 64, 65))
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_xla_form_agrees(rows: int, dtype: str) -> None:
    x, w = operands(rows, 96, 40, dtype)
    x = x.astype(dtype).astype(jnp.float32)     # XLA rounds x to the type of the weights
    np.testing.assert_allclose(jax.jit(matmul)(x, w), jax.jit(matmul_xla)(x, w), atol=1e-4)
