// One block of keys: how the queries of an item attend to up to KEYS keys, with an online softmax (Milakov and
// Gimelshein 2018) that goes on from block to block. "Row" is a query head of a token.
//
// Many rows: a vector is one number of each of LANES rows, for which a number of a key or value is a common factor, so
// that keys and values are used as they lie. Few rows: a vector is a part of one row, key or value.
// Where there is a matrix unit, it takes many rows: see attention_native_tiles.h.
// Scores and weights are [keys, rows] in all cases, and softmax works on the rows of a vector side by side.
// Slots that no query of the item sees are read as zeros: whatever they hold is never computed with.
#include "native_vector.h"
#include "native_tiles.h"

#define NEVER (-1e30f)  // below all scores; finite, so that differences are never NaN

enum { KEYS = 64, FEW = 4, MAX_DIM = 256 };

// ---- What is attended to, and the scratch of a thread

typedef struct {
  const char *k, *v;                       // [num_pages, page_size, width]
  int64_t page_size, width, dim, bytes;    // bytes of a number
  int dtype;
} Cache;

typedef struct {
  Cache cache;
  int64_t heads, group, window;            // query heads, of them per kv head; 0: no window
  int with_tiles;                          // many rows, by a matrix unit
  float factor, cap;                       // on q, which puts scores in units of log2; 0: no cap
} Setting;

typedef struct {
  int64_t rows;                            // of `scores`, in whole vectors
  int64_t next_head, next_row, next;       // steps: rows to the next kv head; in q and sums to the next row, number
  float *keys, *values;                    // as float32: eight keys and a block of values, [8, dim] and [KEYS, dim]
  float *scores;                           // [KEYS, rows], weights afterwards
  float *q, *sums;                         // many: [dim, rows] of each kv head; few: [rows of all heads, dim]
  float *tops, *totals, *scales;           // of each row: maximum, sum of weights, factor on what was before the block
  bf16 *q_tiles, *key_tiles, *value_tiles, *weight_tiles;   // with a matrix unit: see there
  int64_t slots[KEYS], ahead[KEYS];        // offsets in the cache of this block's keys and the next's, -1: not seen
} Scratch;

// The queries of an item, at one block of keys: those of [low, high) are seen, counted from `base`.
typedef struct {
  int64_t first_head, num_heads, count;    // kv heads; tokens
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

// ---- Softmax

// Scores of keys [low, high) become weights. `is_masked`: tokens see keys up to their position, of their window.
INLINE void soften_vectors(int is_masked, const Setting *s, Scratch *w, const Block *b, int64_t first,
                           int64_t start_row, int64_t end_row) {
  const float cap = s->cap;
  for (int64_t row = start_row; row < end_row; row += LANES) {
    vf *top = (vf *)(w->tops + first + row), *total = (vf *)(w->totals + first + row), most = *top, sum = {0};
    vi end, start;
    for (int j = 0; is_masked && j < LANES; j++) {
      end[j] = (int32_t)(b->position + (row + j) / s->group + 1 - b->base);
      start[j] = s->window ? (int32_t)(end[j] - s->window) : 0;
    }
    for (int64_t key = b->low; key < b->high; key++) {
      vf *score = (vf *)(w->scores + key * w->rows + row), x = *score;
      if (cap != 0) x = cap * tanh_of(x);
      if (is_masked) x = choose((start <= (int32_t)key) & (end > (int32_t)key), x, spread(NEVER));
      if (is_masked || cap != 0) *score = x;
      most = larger(x, most);
    }
    for (int64_t key = b->low; key < b->high; key++) {
      vf *score = (vf *)(w->scores + key * w->rows + row), weight = exp2_of(*score - most);
      if (is_masked) weight = only((start <= (int32_t)key) & (end > (int32_t)key), weight);
      *score = weight;
      sum += weight;
    }
    vf scale = exp2_of(*top - most);
    *(vf *)(w->scales + row) = scale;
    *total = *total * scale + sum;
    *top = most;
  }
}

// Rows [start_row, end_row) of `scores`, whose first row is row `first` of the item.
static __attribute__((noinline)) void soften(const Setting *s, Scratch *w, const Block *b, int64_t first,
                                             int64_t start_row, int64_t end_row) {
  int64_t end = b->position + 1 - b->base, last_start = s->window ? end + b->count - 1 - s->window : 0;
  if (b->position >= 0 && (end < b->high || last_start > b->low)) soften_vectors(1, s, w, b, first, start_row, end_row);
  else soften_vectors(0, s, w, b, first, start_row, end_row);
}

// ---- Many rows

// A tile of products fills the registers: three vectors of rows by four lines, or by eight where there are 32 registers
// or few vectors.
INLINE int lines_of(int vectors) { return LANES == 16 || vectors == 1 ? 8 : 4; }

INLINE int64_t vectors_at(int64_t row, int64_t rows) {
  int64_t left = (rows - row) / LANES;
  return left == 4 ? 2 : left < 3 ? left : 3;
}

INLINE void score_tile(int vectors, const float *const *k, const float *q, int64_t rows, int64_t dim, float *scores) {
  const int lines = lines_of(vectors);
  vf sum[8][3];
  for (int i = 0; i < lines; i++)
    for (int j = 0; j < vectors; j++) sum[i][j] = (vf){0};
  for (int64_t d = 0; d < dim; d++) {
    vf x[3];
    for (int j = 0; j < vectors; j++) x[j] = *(const vf *)(q + d * rows + j * LANES);
    for (int j = 0; j < vectors; j++) KEEP(x[j]);
    for (int i = 0; i < lines; i++) {
      vf factor = spread(k[i][d]);
      for (int j = 0; j < vectors; j++) sum[i][j] += factor * x[j];
    }
  }
  for (int i = 0; i < lines; i++)
    for (int j = 0; j < vectors; j++) *(vf *)(scores + i * rows + j * LANES) = sum[i][j];
}

// Scores of eight keys and all rows of a head.
static __attribute__((noinline)) void score(const float *const k[8], const float *q, int64_t rows, int64_t dim,
                                            float *scores) {
  for (int64_t row = 0, taken; row < rows; row += taken * LANES) {
    taken = vectors_at(row, rows);
    for (int i = 0; i < 8; i += lines_of((int)taken))
      if (taken == 1) score_tile(1, k + i, q + row, rows, dim, scores + i * rows + row);
      else if (taken == 2) score_tile(2, k + i, q + row, rows, dim, scores + i * rows + row);
      else score_tile(3, k + i, q + row, rows, dim, scores + i * rows + row);
  }
}

// `values` from a column on: lines are columns, which the weights of keys [0, keys) multiply.
INLINE void add_tile(int vectors, const float *values, const float *weights, const float *scales, int64_t rows,
                     int64_t dim, int64_t keys, float *sums) {
  const int lines = lines_of(vectors);
  vf sum[8][3];
  for (int j = 0; j < vectors; j++) {
    vf scale = *(const vf *)(scales + j * LANES);
    for (int i = 0; i < lines; i++) sum[i][j] = scale * *(const vf *)(sums + i * rows + j * LANES);
  }
  for (int64_t key = 0; key < keys; key++) {
    vf x[3];
    for (int j = 0; j < vectors; j++) x[j] = *(const vf *)(weights + key * rows + j * LANES);
    for (int j = 0; j < vectors; j++) KEEP(x[j]);
    for (int i = 0; i < lines; i++) {
      vf factor = spread(values[key * dim + i]);
      for (int j = 0; j < vectors; j++) sum[i][j] += factor * x[j];
    }
  }
  for (int i = 0; i < lines; i++)
    for (int j = 0; j < vectors; j++) *(vf *)(sums + i * rows + j * LANES) = sum[i][j];
}

// Adds the weighted values of keys [low, high) to the sums of all rows of a head, which begin at `first`.
static __attribute__((noinline)) void add(const Scratch *w, int64_t low, int64_t high, int64_t first, int64_t dim) {
  const float *values = w->values + low * dim, *weights = w->scores + low * w->rows;
  float *sums = w->sums + first * dim;
  for (int64_t row = 0, taken; row < w->rows; row += taken * LANES) {
    taken = vectors_at(row, w->rows);
    const float *x = weights + row, *scales = w->scales + row;
    for (int64_t d = 0; d < dim; d += lines_of((int)taken)) {
      float *sum = sums + d * w->rows + row;
      if (taken == 1) add_tile(1, values + d, x, scales, w->rows, dim, high - low, sum);
      else if (taken == 2) add_tile(2, values + d, x, scales, w->rows, dim, high - low, sum);
      else add_tile(3, values + d, x, scales, w->rows, dim, high - low, sum);
    }
  }
}

// A key or value as float32.
INLINE const float *widen(int dtype, const char *from, float *to, int64_t dim) {
  const int64_t bytes = dtype == XLA_FFI_DataType_F32 ? 4 : 2;
  for (int64_t d = 0; d < dim; d += 8) *(v8 *)(to + d) = load8(dtype, from + d * bytes);
  return to;
}

INLINE void attend_many(int dtype, const Setting *s, Scratch *w, const Block *b) {
  const Cache *cache = &s->cache;
  const int64_t dim = cache->dim;
  for (int64_t head = 0; head < b->num_heads; head++) {
    const int64_t column = (b->first_head + head) * dim, first = head * w->next_head;
    for (int64_t key = b->low & ~7; key < b->high; key += 8) {
      const float *k[8];
      for (int j = 0; j < 8; j++) {
        const char *at = row_at(cache, cache->k, w->slots[key + j], column);
        k[j] = dtype == XLA_FFI_DataType_F32 ? (const float *)at : widen(dtype, at, w->keys + j * dim, dim);
        widen(dtype, row_at(cache, cache->v, w->slots[key + j], column), w->values + (key + j) * dim, dim);
        fetch(cache, row_at(cache, cache->k, w->ahead[key + j], column));
        fetch(cache, row_at(cache, cache->v, w->ahead[key + j], column));
      }
      score(k, w->q + first * dim, w->rows, dim, w->scores + key * w->rows);
    }
    soften(s, w, b, first, 0, w->rows);
    add(w, b->low, b->high, first, dim);
  }
}

#if HAS_TILES
#include "attention_native_tiles.h"
#else
static void part_queries(int dtype, Scratch *w, int64_t first, int64_t dim) {
  (void)dtype, (void)w, (void)first, (void)dim;
}
INLINE void attend_tiles(int dtype, const Setting *s, Scratch *w, const Block *b) { attend_many(dtype, s, w, b); }
#endif

// ---- Few rows: keys and values where they lie

// Scores of `rows` rows and four keys. The values of these keys are fetched meanwhile.
INLINE void score_keys(int dtype, int rows, const float *q, const char *const k[4], const Cache *cache, float *scores,
                       int64_t pitch) {
  v8 sum[3][4];
  memset(sum, 0, sizeof sum);
  for (int64_t d = 0; d < cache->dim; d += 8) {
    v8 x[4];
    for (int j = 0; j < 4; j++) x[j] = load8(dtype, k[j] + d * cache->bytes);
    for (int r = 0; r < rows; r++) {
      v8 y = *(const v8 *)(q + r * cache->dim + d);
      for (int j = 0; j < 4; j++) sum[r][j] += y * x[j];
    }
  }
  for (int r = 0; r < rows; r++) {
    v4 score = sums_of(sum[r]);
    for (int j = 0; j < 4; j++) scores[j * pitch + r] = score[j];
  }
}

// Adds the weighted values of keys [low, high), `vectors` times eight columns from `column` on, for rows from `row` on.
// The same columns of `ahead` are fetched meanwhile.
INLINE void add_values(int dtype, int rows, int vectors, const Cache *cache, const char *const *v,
                       const char *const *ahead, const Scratch *w, const Block *b, int64_t column, int64_t row) {
  float *sums = w->sums + row * cache->dim + column;
  v8 sum[3][4];
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < vectors; j++)
      sum[r][j] = w->scales[row + r] * *(const v8 *)(sums + r * cache->dim + j * 8);
  for (int64_t k = b->low; k < b->high; k++) {
    v8 weight[3];
    for (int j = 0; j < vectors * 8; j += 16) __builtin_prefetch(ahead[k] + (column + j) * cache->bytes);
    for (int r = 0; r < rows; r++) weight[r] = w->scores[k * w->rows + row + r] - (v8){0};
    for (int j = 0; j < vectors; j++) {
      v8 x = load8(dtype, v[k] + (column + j * 8) * cache->bytes);
      for (int r = 0; r < rows; r++) sum[r][j] += weight[r] * x;
    }
  }
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < vectors; j++) *(v8 *)(sums + r * cache->dim + j * 8) = sum[r][j];
}

INLINE void add_rows(int dtype, int rows, const Cache *cache, const char *const *v, const char *const *ahead,
                     const Scratch *w, const Block *b, int64_t row) {
  int64_t d = 0;
  for (; d + 32 <= cache->dim; d += 32) add_values(dtype, rows, 4, cache, v, ahead, w, b, d, row);
  for (; d < cache->dim; d += 8) add_values(dtype, rows, 1, cache, v, ahead, w, b, d, row);
}

// Up to three rows at a time, for the registers: four are two and two.
INLINE void attend_few(int dtype, const Setting *s, Scratch *w, const Block *b) {
  const Cache *cache = &s->cache;
  const int64_t dim = cache->dim, rows = s->group, taken = rows == 4 ? 2 : rows;
  for (int64_t key = b->low & ~3; key < b->high; key += 4)
    for (int64_t head = 0; head < b->num_heads; head++) {
      const char *k[4];
      for (int j = 0; j < 4; j++) {
        k[j] = row_at(cache, cache->k, w->slots[key + j], (b->first_head + head) * dim);
        fetch(cache, row_at(cache, cache->v, w->slots[key + j], (b->first_head + head) * dim));
      }
      for (int64_t row = head * rows; row < (head + 1) * rows; row += taken) {
        const float *q = w->q + row * dim;
        float *scores = w->scores + key * w->rows + row;
        if (taken == 1) score_keys(dtype, 1, q, k, cache, scores, w->rows);
        else if (taken == 2) score_keys(dtype, 2, q, k, cache, scores, w->rows);
        else score_keys(dtype, 3, q, k, cache, scores, w->rows);
      }
    }
  soften(s, w, b, 0, 0, w->rows);
  for (int64_t head = 0; head < b->num_heads; head++) {
    const char *v[KEYS], *ahead[KEYS];
    for (int64_t i = 0; i < KEYS; i++) {
      v[i] = row_at(cache, cache->v, w->slots[i], (b->first_head + head) * dim);
      ahead[i] = row_at(cache, cache->k, w->ahead[i], (b->first_head + head) * dim);
    }
    for (int64_t row = head * rows; row < (head + 1) * rows; row += taken)
      if (taken == 1) add_rows(dtype, 1, cache, v, ahead, w, b, row);
      else if (taken == 2) add_rows(dtype, 2, cache, v, ahead, w, b, row);
      else add_rows(dtype, 3, cache, v, ahead, w, b, row);
  }
}

// ---- The block

INLINE void attend_as(int dtype, int is_few, const Setting *s, Scratch *w, const Block *b) {
  if (is_few) attend_few(dtype, s, w, b);
  else if (s->with_tiles) attend_tiles(dtype, s, w, b);
  else attend_many(dtype, s, w, b);
}

// `is_few`: up to FEW rows to a head, all of which see [low, high).
static void attend(int is_few, const Setting *s, Scratch *w, const Block *b) {
  if (s->cache.dtype == XLA_FFI_DataType_F32) attend_as(XLA_FFI_DataType_F32, is_few, s, w, b);
  else if (s->cache.dtype == XLA_FFI_DataType_F16) attend_as(XLA_FFI_DataType_F16, is_few, s, w, b);
  else attend_as(XLA_FFI_DataType_BF16, is_few, s, w, b);
}
