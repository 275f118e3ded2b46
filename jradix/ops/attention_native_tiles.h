// Many rows by a matrix unit: they are columns of tiles; keys, and the columns of values, are rows of tiles.
//
// Beside pages of bfloat16, queries and the weights of keys are rounded to bfloat16 as well.

INLINE int parts_of(int dtype) { return dtype == XLA_FFI_DataType_BF16 ? 1 : PARTS; }

INLINE __m512 load16(int dtype, const char *from) {
  if (dtype == XLA_FFI_DataType_F32) return _mm512_loadu_ps(from);
  const __m256i halves = _mm256_loadu_si256((const __m256i *)from);
  if (dtype == XLA_FFI_DataType_F16) return _mm512_cvtph_ps(halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// Two lines of sixteen rows each, as a pair of numbers of these columns.
INLINE void part_lines(const int parts, const float *lines, int64_t rows, bf16 *to) {
  part_pair(parts, _mm512_load_ps(lines), _mm512_load_ps(lines + rows), to);
}

// q of the head whose first row is given, as tiles [rows / 16][dim / 32][part].
static void part_queries(int dtype, Scratch *w, int64_t first, int64_t dim) {
  const int parts = parts_of(dtype);
  bf16 *to = w->q_tiles + first * dim * parts;
  for (int64_t row = 0; row < w->rows; row += SIDE)
    for (int64_t d = 0; d < dim; d += DEPTH, to += parts * NUMBERS)
      for (int64_t pair = 0; pair < SIDE; pair++)
        part_lines(parts, w->q + first * dim + (d + 2 * pair) * w->rows + row, w->rows, to + pair * DEPTH);
}

// Values of 32 keys and 16 columns, turned: the rows of a tile.
INLINE void part_values(int dtype, const Cache *cache, const int64_t slots[DEPTH], int64_t column, bf16 *to) {
  const int parts = parts_of(dtype);
  __m512 low[SIDE], high[SIDE];
  if (parts == 1) {                        // a pair of keys moves as one
    for (int pair = 0; pair < SIDE; pair++) {
      const __m256i *v = (const __m256i *)row_at(cache, cache->v, slots[2 * pair], column);
      const __m256i *next_v = (const __m256i *)row_at(cache, cache->v, slots[2 * pair + 1], column);
      const __m512i first = _mm512_cvtepu16_epi32(_mm256_loadu_si256(v));
      const __m512i second = _mm512_cvtepu16_epi32(_mm256_loadu_si256(next_v));
      low[pair] = _mm512_castsi512_ps(_mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
    }
    turn(low);
    for (int i = 0; i < SIDE; i++) _mm512_store_ps(to + i * DEPTH, low[i]);
    return;
  }
  for (int i = 0; i < SIDE; i++) {
    low[i] = load16(dtype, row_at(cache, cache->v, slots[i], column));
    high[i] = load16(dtype, row_at(cache, cache->v, slots[SIDE + i], column));
  }
  turn(low);
  turn(high);
  for (int i = 0; i < SIDE; i++) part_row(parts, low[i], high[i], to + i * DEPTH);
}

// Keys and values of a block: tiles [key / 16][dim / 32][part] and, turned, [dim / 16][key / 32][part].
INLINE void part_block(int dtype, const Cache *cache, Scratch *w, const Block *b, int64_t column) {
  const int parts = parts_of(dtype);
  const int64_t dim = cache->dim, bytes = cache->bytes;
  for (int64_t key = b->low & -DEPTH; key < b->high; key += DEPTH) {
    for (int64_t i = key; i < key + DEPTH; i++) {
      const char *k = row_at(cache, cache->k, w->slots[i], column);
      bf16 *to = w->key_tiles + i / SIDE * SIDE * dim * parts + i % SIDE * DEPTH;
      for (int64_t d = 0; d < dim; d += DEPTH, to += parts * NUMBERS)
        if (parts == 1) _mm512_store_si512(to, _mm512_loadu_si512(k + d * bytes));
        else part_row(parts, load16(dtype, k + d * bytes), load16(dtype, k + (d + SIDE) * bytes), to);
      fetch(cache, row_at(cache, cache->k, w->ahead[i], column));
      fetch(cache, row_at(cache, cache->v, w->ahead[i], column));
    }
    for (int64_t d = 0; d < dim; d += SIDE)
      part_values(dtype, cache, w->slots + key, column + d, w->value_tiles + (d * KEYS + key * SIDE) * parts);
  }
}

// Two tiles of a panel, one below the other, and of its neighbour if there is one.
INLINE void store_pair(float *to, int64_t rows, int has_next) {
  _tile_stored(0, to, 4 * rows);
  _tile_stored(1, to + SIDE * rows, 4 * rows);
  if (!has_next) return;
  _tile_stored(2, to + SIDE, 4 * rows);
  _tile_stored(3, to + SIDE * rows + SIDE, 4 * rows);
}

// Scores of a pair of panels, which begins at `row`. A panel without a neighbour is multiplied twice, which costs no
// more than waiting for its sums.
INLINE void score_pair(const int parts, const Scratch *w, const Block *b, int64_t first, int64_t row, int64_t dim) {
  const int64_t rows = w->rows, panel = row + SIDE < rows ? dim * SIDE * parts : 0;
  for (int64_t key = b->low & -DEPTH; key < b->high; key += DEPTH) {
    const bf16 *k = w->key_tiles + key * dim * parts, *q = w->q_tiles + (first + row) * dim * parts;
    float *to = w->scores + key * rows + row;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t d = 0; d < dim; d += DEPTH, k += parts * NUMBERS, q += parts * NUMBERS)
      multiply_2_by_2(parts, k, k + dim * SIDE * parts, q, q + panel);
    store_pair(to, rows, panel != 0);
  }
}

// Slots outside [low, high) weigh whatever their scores are, and their values are zeros.
INLINE void add_pair(const int parts, const Scratch *w, const Block *b, int64_t first, int64_t row, int64_t dim) {
  const int64_t rows = w->rows, start = b->low & -DEPTH, next = row + SIDE < rows ? SIDE : 0;
  const int64_t panel = next * KEYS * parts;
  for (int64_t key = start; key < b->high; key += DEPTH)
    for (int64_t pair = 0; pair < SIDE; pair++) {
      const float *weights = w->scores + (key + 2 * pair) * rows + row;
      bf16 *to = w->weight_tiles + key * SIDE * parts + pair * DEPTH;
      part_lines(parts, weights, rows, to);
      if (next) part_lines(parts, weights + SIDE, rows, to + panel);
    }
  for (int64_t j = row; j <= row + next; j += SIDE) {       // the maximum seldom grows after the first blocks
    const __m512 scale = _mm512_load_ps(w->scales + j);
    if (_mm512_cmpneq_ps_mask(scale, _mm512_set1_ps(1))) {
      float *sums = w->sums + first * dim + j;
      for (int64_t d = 0; d < dim; d++, sums += rows) _mm512_store_ps(sums, _mm512_mul_ps(_mm512_load_ps(sums), scale));
    }
  }
  finish_writes();
  for (int64_t d = 0; d < dim; d += DEPTH) {
    float *sums = w->sums + (first * dim + d * rows) + row;
    _tile_loadd(0, sums, 4 * rows);
    _tile_loadd(1, sums + SIDE * rows, 4 * rows);
    _tile_loadd(2, sums + next, 4 * rows);
    _tile_loadd(3, sums + SIDE * rows + next, 4 * rows);
    for (int64_t key = start; key < b->high; key += DEPTH) {
      const bf16 *v = w->value_tiles + (d * KEYS + key * SIDE) * parts, *x = w->weight_tiles + key * SIDE * parts;
      multiply_2_by_2(parts, v, v + SIDE * KEYS * parts, x, x + panel);
    }
    store_pair(sums, rows, next != 0);
  }
}

INLINE void attend_tiles(int dtype, const Setting *s, Scratch *w, const Block *b) {
  const int parts = parts_of(dtype);
  const int64_t dim = s->cache.dim, pair = 2 * SIDE;
  for (int64_t head = 0; head < b->num_heads; head++) {
    const int64_t first = head * w->next_head;
    part_block(dtype, &s->cache, w, b, (b->first_head + head) * dim);
    finish_writes();
    for (int64_t row = 0; row < w->rows; row += pair) {
      score_pair(parts, w, b, first, row, dim);
      soften(s, w, b, first, row, row + pair < w->rows ? row + pair : w->rows);
      add_pair(parts, w, b, first, row, dim);
    }
  }
}
