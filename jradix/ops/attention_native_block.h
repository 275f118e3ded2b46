// One block of keys: how the queries of an item attend to up to KEYS keys, with an online softmax (Milakov and
// Gimelshein 2018) that goes on from block to block. "Row" is a query head of a token.
//
// Many rows: the block is packed into cache-sized float32 scratch, keys transposed, and scores and weighted values are
// two small matrix products. Few rows: keys and values are used where they lie, while the next ones are fetched.
// Slots that no query of the item sees are read as zeros: whatever they hold is never computed with.
#include <math.h>

#include "attention_native_numbers.h"

#define NEVER (-1e30f)  // below all scores; finite, so that differences are never NaN

enum { KEYS = 64, TILE = 48, FEW = 4, MAX_DIM = 256, PANEL = 2 * LANES, STRIDE = KEYS + LANES };

// ---- What is attended to, and the scratch of a thread

typedef struct {
  const char *k, *v;                       // [num_pages, page_size, width]
  int64_t page_size, width, dim, bytes;    // bytes of a number
  int dtype;
} Cache;

typedef struct {
  Cache cache;
  int64_t heads, group, window;            // query heads, of them per kv head; 0: no window
  float factor, cap;                       // on q, which puts scores in units of log2; 0: no cap
} Setting;

typedef struct {
  float *keys, *values;                    // a packed block: [dim, STRIDE] and [KEYS, pitch + LANES]
  float *scores;                           // [rows, KEYS], weights afterwards
  float *q, *sums, *tops, *totals;         // rows by kv head: [rows, pitch] twice, [rows] twice
  int64_t pitch;                           // dim in whole PANELs; what lies between is never read by others
  int64_t slots[KEYS], ahead[KEYS];        // offsets in the cache of this block's keys and the next's, -1: not seen
} Scratch;

// The queries of an item, at one block of keys: those of [low, high) are seen, counted from `base`.
typedef struct {
  int64_t first_head, num_heads, head_rows;  // kv heads; rows of each
  int64_t position;                        // of the first token, -1: all tokens see all keys
  int64_t base, low, high;
} Block;

static const float zero_row[MAX_DIM];

static void locate(const Cache *cache, const int32_t *pages, int64_t base, int64_t low, int64_t high, int64_t *slots) {
  memset(slots, -1, KEYS * sizeof *slots);
  int64_t page = (base + low) / cache->page_size, in_page = (base + low) % cache->page_size;
  for (int64_t i = low; i < high; i++) {
    slots[i] = (pages[page] * cache->page_size + in_page) * cache->width;
    if (++in_page == cache->page_size) page++, in_page = 0;
  }
}

INLINE const char *row_at(const Cache *cache, const char *base, int64_t slot, int64_t column) {
  return slot < 0 ? (const char *)zero_row : base + (slot + column) * cache->bytes;
}

INLINE void fetch(const Cache *cache, const char *row) {
  for (int64_t i = 0; i < cache->dim * cache->bytes; i += 64) __builtin_prefetch(row + i);
}

// ---- Many rows: products c[rows, columns] = a[rows, depth] b[depth, columns], or c += a b, columns in whole PANELs

typedef struct {
  const float *a, *b;
  float *c;
  int64_t a_stride, b_stride, c_stride, depth;
  int adds;
} Product;

INLINE void multiply_tile(int rows, int vectors, const Product *p, int64_t row, int64_t column) {
  const float *a = p->a + row * p->a_stride, *b = p->b + column;
  float *c = p->c + row * p->c_stride + column;
  const int64_t a_stride = p->a_stride, b_stride = p->b_stride, c_stride = p->c_stride, depth = p->depth;
  vf sum[6][4];
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < vectors; j++) sum[r][j] = p->adds ? *(const vf *)(c + r * c_stride + j * LANES) : (vf){0};
  for (int64_t k = 0; k < depth; k++) {
    vf x[4];
    for (int j = 0; j < vectors; j++) x[j] = *(const vf *)(b + k * b_stride + j * LANES);
    for (int r = 0; r < rows; r++) {
      vf weight = spread(a[r * a_stride + k]);
      for (int j = 0; j < vectors; j++) sum[r][j] += weight * x[j];
    }
  }
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < vectors; j++) *(vf *)(c + r * c_stride + j * LANES) = sum[r][j];
}

static void multiply(const Product *p, int64_t rows, int64_t columns) {
  int64_t column = 0;
  for (; rows <= 3 && column + 2 * PANEL <= columns; column += 2 * PANEL)
    if (rows == 1) multiply_tile(1, 4, p, 0, column);
    else if (rows == 2) multiply_tile(2, 4, p, 0, column);
    else multiply_tile(3, 4, p, 0, column);
  for (; column < columns; column += PANEL)
    for (int64_t row = 0, taken; row < rows; row += taken) {
      int64_t left = rows - row;
      taken = left == 7 || left == 8 ? 4 : left < 6 ? left : 6;
      switch (taken) {
        case 1: multiply_tile(1, 2, p, row, column); break;
        case 2: multiply_tile(2, 2, p, row, column); break;
        case 3: multiply_tile(3, 2, p, row, column); break;
        case 4: multiply_tile(4, 2, p, row, column); break;
        case 5: multiply_tile(5, 2, p, row, column); break;
        default: multiply_tile(6, 2, p, row, column);
      }
    }
}

// Copies `keys` keys and values of one kv head into the scratch, and fetches those of the next block.
INLINE void pack(int dtype, const Cache *cache, Scratch *w, int64_t column, int64_t keys) {
  const int64_t dim = cache->dim, pitch = w->pitch + LANES;
  for (int64_t i = 0; i < keys; i += 8) {
    const char *k[8], *v[8];
    for (int j = 0; j < 8; j++) {
      k[j] = row_at(cache, cache->k, w->slots[i + j], column);
      v[j] = row_at(cache, cache->v, w->slots[i + j], column);
      fetch(cache, row_at(cache, cache->k, w->ahead[i + j], column));
      fetch(cache, row_at(cache, cache->v, w->ahead[i + j], column));
    }
    for (int64_t d = 0; d < dim; d += 8) {
      v8 x[8];
      for (int j = 0; j < 8; j++) x[j] = load8(dtype, k[j] + d * cache->bytes);
      transpose8(x);
      for (int j = 0; j < 8; j++) *(v8 *)(w->keys + (d + j) * STRIDE + i) = x[j];
    }
    for (int j = 0; j < 8; j++)
      for (int64_t d = 0; d < dim; d += 8)
        *(v8 *)(w->values + (i + j) * pitch + d) = load8(dtype, v[j] + d * cache->bytes);
  }
}

// ---- Few rows: keys and values where they lie

// Scores of `rows` rows and four keys. The values of these keys are fetched meanwhile.
INLINE void score_keys(int dtype, int rows, const float *q, int64_t pitch, const char *const k[4], const Cache *cache,
                       float *scores) {
  v8 sum[3][4];
  memset(sum, 0, sizeof sum);
  for (int64_t d = 0; d < cache->dim; d += 8) {
    v8 x[4];
    for (int j = 0; j < 4; j++) x[j] = load8(dtype, k[j] + d * cache->bytes);
    for (int r = 0; r < rows; r++) {
      v8 y = *(const v8 *)(q + r * pitch + d);
      for (int j = 0; j < 4; j++) sum[r][j] += y * x[j];
    }
  }
  for (int r = 0; r < rows; r++) *(v4 *)(scores + r * KEYS) = sums_of(sum[r]);
}

// Adds the weighted values of keys [low, high), `vectors` times eight columns from `column` on. The same columns of
// `ahead` are fetched meanwhile.
INLINE void add_values(int dtype, int rows, int vectors, const Cache *cache, const char *const *v,
                       const char *const *ahead, const float *weights, const Block *b, int64_t column, float *sums,
                       int64_t pitch) {
  v8 sum[3][4];
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < vectors; j++) sum[r][j] = *(const v8 *)(sums + r * pitch + column + j * 8);
  for (int64_t k = b->low; k < b->high; k++) {
    v8 weight[3];
    for (int j = 0; j < vectors * 8; j += 16) __builtin_prefetch(ahead[k] + (column + j) * cache->bytes);
    for (int r = 0; r < rows; r++) weight[r] = weights[r * KEYS + k] - (v8){0};
    for (int j = 0; j < vectors; j++) {
      v8 x = load8(dtype, v[k] + (column + j * 8) * cache->bytes);
      for (int r = 0; r < rows; r++) sum[r][j] += weight[r] * x;
    }
  }
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < vectors; j++) *(v8 *)(sums + r * pitch + column + j * 8) = sum[r][j];
}

INLINE void add_rows(int dtype, int rows, const Cache *cache, const char *const *v, const char *const *ahead,
                     const float *weights, const Block *b, float *sums, int64_t pitch) {
  int64_t d = 0;
  for (; d + 32 <= cache->dim; d += 32) add_values(dtype, rows, 4, cache, v, ahead, weights, b, d, sums, pitch);
  for (; d < cache->dim; d += 8) add_values(dtype, rows, 1, cache, v, ahead, weights, b, d, sums, pitch);
}

// ---- Softmax

INLINE vi lanes_between(int64_t first, int64_t low, int64_t high) {
  vi lane;
  for (int j = 0; j < LANES; j++) lane[j] = j;
  return (lane >= (int32_t)(low - first)) & (lane < (int32_t)(high - first));
}

// Scores of one row become weights, those outside [low, high) 0, and its sums so far are scaled to the new maximum.
INLINE void soften(int is_masked, const Setting *s, Scratch *w, int64_t line, int64_t row, int64_t keys, int64_t low,
                   int64_t high) {
  float *scores = w->scores + line * KEYS, top = w->tops[row], scale = 1;
  vf most = spread(top), sum = {0};
  for (int64_t i = 0; i < keys; i += LANES) {
    vf x = *(vf *)(scores + i);
    if (s->cap != 0) x = s->cap * tanh_of(x);
    if (is_masked) x = choose(lanes_between(i, low, high), x, spread(NEVER));
    if (is_masked || s->cap != 0) *(vf *)(scores + i) = x;
    most = choose(x > most, x, most);
  }
  float new_top = largest_of(most);
  for (int64_t i = 0; i < keys; i += LANES) {
    vf weight = exp2_of(*(vf *)(scores + i) - new_top);
    if (is_masked) weight = only(lanes_between(i, low, high), weight);
    *(vf *)(scores + i) = weight;
    sum += weight;
  }
  if (new_top > top) {
    scale = exp2f(top - new_top);
    for (int64_t d = 0; d < w->pitch; d += LANES) *(vf *)(w->sums + row * w->pitch + d) *= scale;
  }
  w->tops[row] = new_top;
  w->totals[row] = w->totals[row] * scale + sum_of(sum);
}

// Rows [row, row + rows) of the item, whose scores are in lines [0, rows).
static __attribute__((noinline)) void soften_rows(const Setting *s, Scratch *w, const Block *b, int64_t head_row,
                                                  int64_t row, int64_t rows) {
  const int64_t keys = (b->high + LANES - 1) / LANES * LANES;
  for (int64_t r = 0; r < rows; r++) {
    int64_t low = b->low, high = b->high;
    if (b->position >= 0) {
      int64_t end = b->position + (row + r) / s->group + 1 - b->base, start = s->window ? end - s->window : low;
      if (end < high) high = end;
      if (start > low) low = start;
    }
    if (low >= high) memset(w->scores + r * KEYS, 0, sizeof(float) * (size_t)keys);
    else if (low == 0 && high == keys) soften(0, s, w, r, head_row + row + r, keys, low, high);
    else soften(1, s, w, r, head_row + row + r, keys, low, high);
  }
}

// ---- The block

INLINE void attend_many(int dtype, const Setting *s, Scratch *w, const Block *b) {
  const int64_t pitch = w->pitch, keys = (b->high + PANEL - 1) / PANEL * PANEL;
  for (int64_t head = 0; head < b->num_heads; head++) {
    pack(dtype, &s->cache, w, (b->first_head + head) * s->cache.dim, keys);
    for (int64_t row = 0; row < b->head_rows; row += TILE) {
      int64_t rows = b->head_rows - row < TILE ? b->head_rows - row : TILE, first = head * b->head_rows + row;
      Product scores = {w->q + first * pitch, w->keys, w->scores, pitch, STRIDE, KEYS, s->cache.dim, 0};
      multiply(&scores, rows, keys);
      soften_rows(s, w, b, head * b->head_rows, row, rows);
      Product sums = {w->scores + b->low, w->values + b->low * (pitch + LANES), w->sums + first * pitch,
                      KEYS, pitch + LANES, pitch, b->high - b->low, 1};
      multiply(&sums, rows, pitch);
    }
  }
}

// Up to three rows at a time, for the registers: four are two and two.
INLINE void attend_few(int dtype, const Setting *s, Scratch *w, const Block *b) {
  const Cache *cache = &s->cache;
  const int64_t pitch = w->pitch, rows = b->head_rows, taken = rows == 4 ? 2 : rows;
  for (int64_t key = b->low & ~3; key < b->high; key += 4)
    for (int64_t head = 0; head < b->num_heads; head++) {
      const char *k[4];
      for (int j = 0; j < 4; j++) {
        k[j] = row_at(cache, cache->k, w->slots[key + j], (b->first_head + head) * cache->dim);
        fetch(cache, row_at(cache, cache->v, w->slots[key + j], (b->first_head + head) * cache->dim));
      }
      for (int64_t row = head * rows; row < (head + 1) * rows; row += taken) {
        const float *q = w->q + row * pitch;
        float *scores = w->scores + row * KEYS + key;
        if (taken == 1) score_keys(dtype, 1, q, pitch, k, cache, scores);
        else if (taken == 2) score_keys(dtype, 2, q, pitch, k, cache, scores);
        else score_keys(dtype, 3, q, pitch, k, cache, scores);
      }
    }
  soften_rows(s, w, b, 0, 0, b->num_heads * rows);
  for (int64_t head = 0; head < b->num_heads; head++) {
    const char *v[KEYS], *ahead[KEYS];
    for (int64_t i = 0; i < KEYS; i++) {
      v[i] = row_at(cache, cache->v, w->slots[i], (b->first_head + head) * cache->dim);
      ahead[i] = row_at(cache, cache->k, w->ahead[i], (b->first_head + head) * cache->dim);
    }
    for (int64_t row = head * rows; row < (head + 1) * rows; row += taken) {
      const float *weights = w->scores + row * KEYS;
      float *sums = w->sums + row * pitch;
      if (taken == 1) add_rows(dtype, 1, cache, v, ahead, weights, b, sums, pitch);
      else if (taken == 2) add_rows(dtype, 2, cache, v, ahead, weights, b, sums, pitch);
      else add_rows(dtype, 3, cache, v, ahead, weights, b, sums, pitch);
    }
  }
}

INLINE void attend_as(int dtype, int is_few, const Setting *s, Scratch *w, const Block *b) {
  if (is_few) attend_few(dtype, s, w, b);
  else attend_many(dtype, s, w, b);
}

// `is_few`: up to FEW rows to a head, all of which see [low, high).
static void attend(int is_few, const Setting *s, Scratch *w, const Block *b) {
  if (s->cache.dtype == XLA_FFI_DataType_F32) attend_as(XLA_FFI_DataType_F32, is_few, s, w, b);
  else if (s->cache.dtype == XLA_FFI_DataType_F16) attend_as(XLA_FFI_DataType_F16, is_few, s, w, b);
  else attend_as(XLA_FFI_DataType_BF16, is_few, s, w, b);
}
