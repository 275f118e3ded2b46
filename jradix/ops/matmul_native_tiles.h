// Products by a matrix unit: see matmul_native.c. Outputs lie in the rows of tiles, so that weights stay in their
// order; x is turned, once for a block of its rows. Beside bfloat16 weights it is rounded to bfloat16, otherwise both
// have three parts.

enum {
  FEW_ROWS = 64,
  TILES_BYTES = 3 << 19                    // of the parts of a block of x: they stay in the second cache
};

typedef struct {                           // weights of the thread's next item, read into the cache meanwhile
  const char *from, *end;
  int64_t bytes;                           // at a time
} Coming;

INLINE void read_ahead(Coming *coming) {
  const char *stop = coming->end - coming->from < coming->bytes ? coming->end : coming->from + coming->bytes;
  for (; coming->from < stop; coming->from += 64) __builtin_prefetch(coming->from, 0, 2);
}

static int parts_of(const Product *p) { return p->dtype == XLA_FFI_DataType_F32 ? PARTS : 1; }

// `count` rows of x as tiles [depth / 32][part], whose columns they are.
INLINE void turn_rows(const int parts, const float *x, int64_t count, int64_t depth, bf16 *to) {
  for (int64_t k = 0; k < depth; k += DEPTH, to += parts * NUMBERS) {
    __m512 low[SIDE], high[SIDE];
    const uint32_t mask = (uint32_t)((1ull << limit(depth - k, 0, DEPTH)) - 1);
    for (int64_t r = 0; r < SIDE; r++) {
      const uint32_t taken = r < count ? mask : 0;
      low[r] = _mm512_maskz_loadu_ps((__mmask16)taken, x + r * depth + k);
      high[r] = _mm512_maskz_loadu_ps((__mmask16)(taken >> SIDE), x + r * depth + k + SIDE);
    }
    if (parts == 1) {                      // rounded first: a pair of numbers then moves as one
      for (int r = 0; r < SIDE; r++) low[r] = (__m512)_mm512_cvtne2ps_pbh(high[r], low[r]);
      turn(low);
      for (int pair = 0; pair < SIDE; pair++) _mm512_store_ps(to + pair * DEPTH, low[pair]);
      continue;
    }
    turn(low);
    turn(high);
    for (int pair = 0; pair < SIDE / 2; pair++) {
      part_pair(parts, low[2 * pair], low[2 * pair + 1], to + pair * DEPTH);
      part_pair(parts, high[2 * pair], high[2 * pair + 1], to + (SIDE / 2 + pair) * DEPTH);
    }
  }
}

static void turn_panel(const Product *p, int64_t row, int64_t end, bf16 *to) {
  const float *x = p->x + row * p->depth;
  const int64_t count = limit(end - row, 0, SIDE);
  if (parts_of(p) == 1) turn_rows(1, x, count, p->depth, to);
  else turn_rows(PARTS, x, count, p->depth, to);
}

// Rows of w from n on as tiles [output / 16][depth / 32][part], whose rows they are.
static void part_weights(const Product *p, int64_t n, int64_t count, int64_t tiles, int64_t blocks, Coming *coming,
                         bf16 *to) {
  const int parts = parts_of(p);
  for (int64_t row = 0; row < tiles * SIDE; row++) {
    bf16 *tile = to + row / SIDE * blocks * parts * NUMBERS + row % SIDE * DEPTH;
    const char *from = p->w + (n + row) * p->depth * p->size;
    read_ahead(coming);
    for (int64_t k = 0; k < p->depth; k += DEPTH, tile += parts * NUMBERS) {
      const int64_t left = row < count ? limit(p->depth - k, 0, DEPTH) : 0;
      const uint32_t mask = (uint32_t)((1ull << left) - 1);
      const float *numbers = (const float *)from + k;
      if (parts == 1) _mm512_store_si512(tile, _mm512_maskz_loadu_epi16(mask, from + k * 2));
      else part_row(PARTS, _mm512_maskz_loadu_ps((__mmask16)mask, numbers),
                    _mm512_maskz_loadu_ps((__mmask16)(mask >> SIDE), numbers + SIDE), tile);
    }
  }
}

#define STORE(tile) _tile_stored(tile, sums + (tile) * SIDE * SIDE, 4 * SIDE)

// sums[panel][t] = tile t of w times a panel of x, for two tiles and two panels.
INLINE void multiply_four(const int parts, const bf16 *w, const bf16 *x, int64_t blocks, Coming *coming, float *sums) {
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  for (int64_t b = 0; b < blocks; b++, w += parts * NUMBERS, x += parts * NUMBERS) {
    read_ahead(coming);
    multiply_2_by_2(parts, w, w + blocks * parts * NUMBERS, x, x + blocks * parts * NUMBERS);
  }
  STORE(0); STORE(1); STORE(2); STORE(3);
}

// sums[t] = tile t of bfloat16 weights times the only panel of x, for three tiles.
static void multiply_three(const bf16 *w, const bf16 *x, int64_t blocks, Coming *coming, float *sums) {
  _tile_zero(0); _tile_zero(1); _tile_zero(2);
  for (int64_t b = 0; b < blocks; b++, w += NUMBERS, x += NUMBERS) {
    read_ahead(coming);
    LOAD(4, x) LOAD(5, w) LOAD(6, w + blocks * NUMBERS) LOAD(7, w + 2 * blocks * NUMBERS)
    _tile_dpbf16ps(0, 5, 4); _tile_dpbf16ps(1, 6, 4); _tile_dpbf16ps(2, 7, 4);
  }
  STORE(0); STORE(1); STORE(2);
}

static void store_tile(const Product *p, const float *sums, int64_t row, int64_t rows, int64_t n, int64_t count) {
  __m512 lines[SIDE];
  for (int i = 0; i < SIDE; i++) lines[i] = _mm512_load_ps(sums + i * SIDE);
  turn(lines);
  const __mmask16 mask = (__mmask16)((1u << limit(count, 0, SIDE)) - 1);
  for (int64_t r = 0; r < limit(rows, 0, SIDE); r++)
    _mm512_mask_storeu_ps(p->out + (row + r) * p->width + n, mask, lines[r]);
}

// Outputs start to stop of rows first to end, whose panels are given; `parted` has room for the weights of an item.
static void multiply_tiles(const Product *p, int64_t first, int64_t end, int64_t start, int64_t stop, Coming coming,
                           const bf16 *panels, bf16 *parted) {
  const int64_t blocks = (p->depth + DEPTH - 1) / DEPTH, tiles = p->chunk / SIDE;
  const int64_t bytes = coming.end - coming.from, passes = (end - first + 2 * SIDE - 1) / (2 * SIDE);
  float sums[4 * SIDE * SIDE] __attribute__((aligned(64)));
  coming.bytes = bytes / (4 * passes * tiles * SIDE);      // a quarter, where there is but one pass of x
  part_weights(p, start, stop - start, tiles, blocks, &coming, parted);
  coming.bytes = (coming.end - coming.from) / (passes * blocks) + 64;
  finish_writes();
  for (int64_t row = first; row < end; panels += 2 * blocks * parts_of(p) * NUMBERS, row += 2 * SIDE) {
    if (tiles == 3) multiply_three(parted, panels, blocks, &coming, sums);
    else if (p->dtype == XLA_FFI_DataType_F32) multiply_four(PARTS, parted, panels, blocks, &coming, sums);
    else multiply_four(1, parted, panels, blocks, &coming, sums);
    for (int i = 0; i < (tiles == 3 ? 3 : 4); i++) {
      const int64_t below = tiles == 3 ? 0 : i / 2 * SIDE, beside = (tiles == 3 ? i : i % 2) * SIDE;
      store_tile(p, sums + i * SIDE * SIDE, row + below, end - row - below, start + beside, stop - start - beside);
    }
  }
}

// Up to 16 rows of x make one panel, which takes three tiles of bfloat16 at a time; pairs of panels take two. A few
// rows are multiplied by float32 weights faster in vectors: to take these apart costs more than the products. What
// counts is how many rows there may be, not how many there are, so that a compiled step always sums in one order.
static int plan_tiles(Product *p, int64_t most_rows) {
  const int is_worth_it = p->dtype == XLA_FFI_DataType_F32 ? most_rows > FEW_ROWS : p->dtype == XLA_FFI_DataType_BF16;
  if (!is_worth_it || !may_use_tiles()) return 0;
  const int64_t pairs = (p->rows + 2 * SIDE - 1) / (2 * SIDE), depth = (p->depth + DEPTH - 1) / DEPTH * DEPTH;
  const int64_t most = TILES_BYTES / (2 * SIDE * parts_of(p) * (int64_t)sizeof(bf16) * depth);
  p->chunk = p->dtype == XLA_FFI_DataType_BF16 && p->rows <= SIDE ? 3 * SIDE : 2 * SIDE;
  p->block = 2 * SIDE * limit(most, 1, pairs > 1 ? pairs : 1);
  return 1;
}

static void work_with_tiles(void *data) {
  Product *p = data;
  const int64_t blocks = (p->depth + DEPTH - 1) / DEPTH, row_size = blocks * DEPTH * parts_of(p);
  const int64_t block_size = p->block * row_size;
  const int64_t row_bytes = p->depth * p->size;
  bf16 *panels = (bf16 *)scratch((block_size + 3 * SIDE * row_size) / 2);
  int64_t held = -1;
  if (!panels) return;
  configure_tiles();
  for (int64_t i = atomic_fetch_add(&p->next, 1), next; i < p->num_items; i = next) {
    next = atomic_fetch_add(&p->next, 1);
    const int64_t first = i / p->chunks * p->block, end = limit(first + p->block, 0, p->rows);
    const int64_t start = i % p->chunks * p->chunk, stop = limit(start + p->chunk, 0, p->width);
    if (held != first) {
      held = first;
      for (int64_t row = first; row < end || (row - first) % (2 * SIDE); row += SIDE)      // panels come in pairs
        turn_panel(p, row, end, panels + (row - first) * row_size);
    }
    const int64_t from = next < p->num_items ? next % p->chunks * p->chunk : p->width;
    const Coming coming = {p->w + from * row_bytes, p->w + limit(from + p->chunk, 0, p->width) * row_bytes, 0};
    multiply_tiles(p, first, end, start, stop, coming, panels, panels + block_size);
  }
  _tile_release();
}
