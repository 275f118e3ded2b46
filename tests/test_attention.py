"""Paged attention against a float64 oracle that reads no page table: ragged rows, windows, caps, poisoned slots."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix.ops import attention, attention_native
from jradix.ops.attention import SharedPrefixes, paged_attention, sound_implementation
from jradix.ops.attention_native import why_not
from pallas_kernels.errors import UnsupportedKernel

TOLERANCE = 2e-5   # float32 softmax sums over up to 300 keys of unit variance; 3e-6 is seen


FORMS = ("xla", pytest.param("native", marks=pytest.mark.skipif(why_not() is not None, reason=str(why_not()))))
on_each_form = pytest.mark.parametrize("form", FORMS)


@dataclass(frozen=True)
class Rows:
    """A ragged batch: context and new tokens of each row, decode rows (one new token) first."""
    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]

    @property
    def num_decode(self) -> int:
        return next((i for i, n in enumerate(self.q_lens) if n != 1), len(self.q_lens))


MIXED = Rows((1, 37, 300, 5, 70, 129), (1, 1, 1, 5, 65, 3))     # several key blocks, and two query blocks
DECODE = Rows((1, 2, 140, 257), (1, 1, 1, 1))


def oracle(q: np.ndarray, keys: Sequence[np.ndarray], values: Sequence[np.ndarray], rows: Rows, *, sm_scale: float,
           sliding_window: int | None, soft_cap: float | None) -> np.ndarray:
    """float64[sum(q_lens), Hq, D] from contiguous keys and values [kv_len, Hkv, D] of each row."""
    out = np.zeros(q.shape)
    start = 0
    for length, n, k, v in zip(rows.kv_lens, rows.q_lens, keys, values):
        heads, kv_heads = q.shape[1], k.shape[1]
        for i in range(n):
            position = length - n + i
            first = 0 if sliding_window is None else max(position + 1 - sliding_window, 0)
            for head in range(heads):
                own = head * kv_heads // heads
                seen = k[first:position + 1, own].astype(np.float64)
                scores = seen @ q[start + i, head].astype(np.float64) * sm_scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                weights = np.exp(scores - scores.max())
                out[start + i, head] = weights / weights.sum() @ v[first:position + 1, own].astype(np.float64)
        start += n
    return out


@functools.cache
def compiled(**settings: object) -> object:
    return jax.jit(functools.partial(paged_attention, **settings))


def check(rows: Rows, *, page_size: int = 16, heads: int = 4, kv_heads: int = 2, head_dim: int = 16,
          sliding_window: int | None = None, soft_cap: float | None = None, num_padding_rows: int = 2,
          num_padding_tokens: int = 3, fill: float = np.nan, max_pages: int | None = None,
          dtype: object = jnp.float32, tolerance: float = TOLERANCE, form: str = "xla") -> np.ndarray:
    """Runs one batch with every slot that nobody may see set to `fill`; returns the output."""
    random = np.random.default_rng(len(rows.kv_lens) * page_size + heads)
    num_tokens = sum(rows.q_lens)
    q = random.standard_normal((num_tokens, heads, head_dim)).astype(np.float32)
    keys = [random.standard_normal((n, kv_heads, head_dim)).astype(np.float32) for n in rows.kv_lens]
    values = [random.standard_normal((n, kv_heads, head_dim)).astype(np.float32) for n in rows.kv_lens]

    num_pages = [-(-n // page_size) for n in rows.kv_lens]
    width = max(num_pages) if max_pages is None else max_pages
    ids = iter(random.permutation(np.arange(1, sum(num_pages) + 4)))
    num_rows = len(rows.kv_lens) + num_padding_rows
    table = np.zeros((num_rows, width), np.int32)
    k_pages = np.full((sum(num_pages) + 4, page_size, kv_heads * head_dim), fill, np.float32)
    v_pages = k_pages.copy()
    for row, (length, q_len, n) in enumerate(zip(rows.kv_lens, rows.q_lens, num_pages)):
        table[row, :n] = [next(ids) for _ in range(n)]
        oldest = 0 if sliding_window is None else max(length - q_len + 1 - sliding_window, 0)
        for position in range(oldest, length):
            page, offset = table[row, position // page_size], position % page_size
            k_pages[page, offset] = keys[row][position].reshape(-1)
            v_pages[page, offset] = values[row][position].reshape(-1)
    padding = ((0, num_padding_tokens + num_padding_rows), (0, 0), (0, 0))
    has_chunks = any(n != 1 for n in rows.q_lens)
    padded = np.pad(q, padding, constant_values=1.0) if has_chunks else np.pad(
        q, ((0, num_padding_rows), (0, 0), (0, 0)), constant_values=1.0)
    cu_q_lens = np.cumsum([0, *rows.q_lens, *[0] * num_padding_rows]).astype(np.int32)
    kv_lens = np.array([*rows.kv_lens, *[0] * num_padding_rows], np.int32)
    settings = dict(sm_scale=head_dim ** -0.5, sliding_window=sliding_window, soft_cap=soft_cap)
    run = compiled(has_chunks=has_chunks, implementation=form, **settings)
    out = np.asarray(run(padded, jnp.asarray(k_pages, dtype), jnp.asarray(v_pages, dtype), table, kv_lens, cu_q_lens,
                         np.int32(rows.num_decode)))
    expected = oracle(q, keys, values, rows, **settings)
    np.testing.assert_allclose(out[:num_tokens], expected, atol=tolerance)
    assert np.isfinite(out).all(), "padding tokens are not finite"
    return out


@on_each_form
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_attention_mixed_ragged_rows_match_the_oracle(page_size: int, form: str) -> None:
    """N05: decode rows, chunks and padding rows in one batch; permuted pages; NaN wherever nobody may look."""
    check(MIXED, page_size=page_size, form=form)


@on_each_form
@pytest.mark.parametrize("group, head_dim", [(1, 64), (3, 16), (8, 64)])
def test_attention_grouped_heads_match_the_oracle(group: int, head_dim: int, form: str) -> None:
    check(Rows((3, 150, 20), (1, 1, 9)), heads=2 * group, kv_heads=2, head_dim=head_dim, form=form)


@on_each_form
@pytest.mark.parametrize("window", [1, 7, 130])
def test_attention_sliding_window_sees_no_older_key(window: int, form: str) -> None:
    """Keys older than the window of all of a row's queries are NaN."""
    check(MIXED, page_size=4, sliding_window=window, form=form)


@on_each_form
def test_attention_soft_cap_and_window_match_the_oracle(form: str) -> None:
    check(MIXED, soft_cap=0.7, sliding_window=20, page_size=4, form=form)


@on_each_form
def test_attention_decode_only_with_window_matches_the_oracle(form: str) -> None:
    check(DECODE, page_size=4, sliding_window=9, form=form)


@on_each_form
def test_attention_chunks_only_match_the_oracle(form: str) -> None:
    check(Rows((64, 128, 10), (64, 63, 10)), page_size=16, kv_heads=1, num_padding_rows=0, num_padding_tokens=0,
          form=form)


@on_each_form
def test_attention_only_padding_rows_give_zeros(form: str) -> None:
    out = check(Rows((), ()), num_padding_rows=4, max_pages=3, form=form)
    assert out.shape == (4, 4, 16) and (out == 0).all()


@on_each_form
@pytest.mark.parametrize("rows", [MIXED, DECODE])
def test_attention_output_bits_do_not_depend_on_invisible_slots(rows: Rows, form: str) -> None:
    """N05: 0, 1e4, NaN and infinity give the same bits."""
    outputs = [check(rows, page_size=4, fill=fill, form=form) for fill in (0.0, 1e4, np.nan, np.inf, -np.inf)]
    assert all(np.array_equal(outputs[0], other) for other in outputs[1:])


@on_each_form
def test_attention_table_width_does_not_change_the_bits(form: str) -> None:
    """A page table that is no multiple of the key block must not read clamped pages."""
    outputs = [check(MIXED, page_size=16, max_pages=width, form=form)[:sum(MIXED.q_lens)] for width in (19, 40)]
    assert np.array_equal(*outputs)


def test_attention_decode_row_bits_do_not_depend_on_neighbours() -> None:
    """N02: a row's own result is the same alone and beside a longer one."""
    random = np.random.default_rng(0)
    pages = jnp.asarray(random.standard_normal((40, 16, 32)), jnp.float32)
    table = np.arange(1, 39, dtype=np.int32).reshape(2, 19)
    q = jnp.asarray(random.standard_normal((2, 4, 16)), jnp.float32)
    run = compiled(sm_scale=0.25, has_chunks=False)
    alone, together = (np.asarray(run(q, pages, pages, table, np.array([40, other], np.int32), np.array(cu, np.int32),
                                      np.int32(n))) for other, cu, n in ((0, [0, 1, 1], 1), (300, [0, 1, 2], 2)))
    assert np.array_equal(alone[0], together[0])


@on_each_form
def test_attention_bfloat16_pages_stay_close_to_the_oracle(form: str) -> None:
    """Tolerance: q, keys and values rounded to 8 bits; the softmax itself is float32."""
    check(Rows((40, 20), (1, 8)), dtype=jnp.bfloat16, tolerance=0.05, form=form)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("has_chunks", [False, True])
def test_attention_xla_lowers_for_other_platforms(platform: str, has_chunks: bool) -> None:
    num_tokens = 40 if has_chunks else 8
    spec = jax.ShapeDtypeStruct
    f = functools.partial(paged_attention, sm_scale=0.25, has_chunks=has_chunks, sliding_window=100,
                          implementation="xla")
    pages = spec((32, 16, 128), jnp.bfloat16)
    traced = jax.jit(f).trace(spec((num_tokens, 4, 64), jnp.float32), pages, pages, spec((8, 20), jnp.int32),
                              spec((8,), jnp.int32), spec((9,), jnp.int32), spec((), jnp.int32))
    assert "while" in traced.lower(lowering_platforms=(platform,)).as_text()


def test_attention_unknown_implementation_is_refused() -> None:
    zeros = jnp.zeros((1, 1, 2))
    with pytest.raises(ValueError, match=r"implementation='fancy': expected one of .*'xla'.* or None"):
        paged_attention(zeros, zeros, zeros, jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32),
                        jnp.zeros(2, jnp.int32), jnp.int32(0), sm_scale=1.0, implementation="fancy")


@on_each_form
@pytest.mark.parametrize("fill", [np.nan, np.inf])
def test_attention_shared_prefixes_equal_each_row_by_itself(fill: float, form: str) -> None:
    """Groups of 3, 2 and 9 rows (two parts), rows of no group, a chunk behind them; other slots poisoned."""
    random = np.random.default_rng(3)
    page_size, heads, kv_heads, head_dim, width = 4, 4, 2, 16, 40
    prefix_of = [0, 0, 1, None, 1, 0, *[2] * 9]
    prefix_pages = {0: 3, 1: 35, 2: 1}
    num_rows = len(prefix_of) + 2                                       # a chunk, a padding row
    kv_lens = np.zeros(num_rows, np.int32)
    table = np.zeros((num_rows, width), np.int32)
    ids = iter(random.permutation(np.arange(1, 300)))
    shared_ids = {group: [next(ids) for _ in range(n)] for group, n in prefix_pages.items()}
    for row in range(num_rows - 1):
        group = prefix_of[row] if row < len(prefix_of) else None
        first = shared_ids.get(group, [])
        kv_lens[row] = len(first) * page_size + random.integers(1, 14)
        pages = -(-kv_lens[row] // page_size)
        table[row, :pages] = [*first, *(next(ids) for _ in range(pages - len(first)))]
    chunk = len(prefix_of)
    kv_lens[chunk] = 11
    k_pages, v_pages = (np.full((300, page_size, kv_heads * head_dim), fill, np.float32) for _ in range(2))
    for row in range(num_rows):
        for position in range(kv_lens[row]):
            place = table[row, position // page_size], position % page_size
            if not np.isfinite(k_pages[place]).all():
                k_pages[place], v_pages[place] = random.standard_normal((2, kv_heads * head_dim))
    parts = [(0, [0, 1, 5]), (1, [2, 4]), (2, list(range(6, 14)))]      # the ninth row of the last stays alone
    members = np.full((6, 8), num_rows + 5, np.int32)
    lens = np.zeros(6, np.int32)
    for part, (group, rows) in enumerate(parts):
        members[part, :len(rows)], lens[part] = rows, prefix_pages[group] * page_size
    q = random.standard_normal((chunk + 5, heads, head_dim)).astype(np.float32)
    cu_q_lens = np.array([*range(chunk + 1), chunk + 5, chunk + 5], np.int32)
    arguments = q, k_pages, v_pages, table, kv_lens, cu_q_lens, np.int32(chunk)
    run = compiled(sm_scale=0.25, soft_cap=5.0, has_chunks=True, implementation=form)
    together = np.asarray(run(*arguments, shared=SharedPrefixes(table[members[:, 0].clip(0, chunk)], lens, members)))
    np.testing.assert_allclose(together, np.asarray(run(*arguments)), atol=2e-6)
    assert np.isfinite(together).all()


def test_attention_shared_prefixes_with_a_window_are_refused() -> None:
    zeros, ints = jnp.zeros((1, 1, 2)), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="shared=None"):
        paged_attention(zeros, zeros, zeros, ints, ints[0], jnp.zeros(2, jnp.int32), jnp.int32(0), sm_scale=1.0,
                        sliding_window=3, shared=SharedPrefixes(ints, ints[0], ints))


@pytest.mark.parametrize("name", ["mosaic_gpu", "pallas_tpu"])
def test_attention_implementation_of_another_platform_is_refused_by_name(name: str) -> None:
    zeros = jnp.zeros((1, 1, 2))
    with pytest.raises(UnsupportedKernel, match=f"implementation='{name}' runs on .* this one is 'cpu'"):
        paged_attention(zeros, zeros, zeros, jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32),
                        jnp.zeros(2, jnp.int32), jnp.int32(0), sm_scale=1.0, implementation=name)


def test_attention_default_falls_back_to_xla_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """The native form does not serve head_dim 6."""
    with caplog.at_level("INFO", logger="jradix"):
        for _ in range(2):
            out = paged_attention(jnp.ones((1, 1, 6)), *[jnp.ones((2, 4, 6))] * 2, jnp.ones((1, 1), jnp.int32),
                                  jnp.ones(1, jnp.int32), jnp.arange(2), jnp.int32(1), sm_scale=1.0)
    np.testing.assert_allclose(out, 1.0)
    (line,) = [record.message for record in caplog.records if record.message.startswith("attention: xla")]
    assert "not native" in line and "6" in line


SIZES = dict(num_heads=4, num_kv_heads=2, head_dim=16, page_size=4, kv_dtype=jnp.float32, sliding_window=3)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_attention_sound_implementation_agrees_with_xla_on_the_device(caplog: pytest.LogCaptureFixture,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose results are off is left out with a warning."""
    device = jax.devices("cpu")[0]
    assert sound_implementation(device, **SIZES) == "native"
    assert sound_implementation(device, **{**SIZES, "head_dim": 6}) == "xla"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    right = attention_native.decode
    monkeypatch.setattr(attention_native, "decode", lambda *args, **settings: (right(*args, **settings)[0] + 1e-3,
                                                                               right(*args, **settings)[1]))
    attention._function.cache_clear()
    assert sound_implementation(device, **SIZES) == "xla"
    attention._function.cache_clear()
    assert "differs from the XLA form by 0.001" in caplog.text
