// Products by AMX, the matrix unit of Intel's server processors (Intel SDM, volume 1, chapter 18): see matmul_native.c.
//
// It multiplies bfloat16 numbers and sums them in float32. A float32 number is the sum of three bfloat16 ones, exactly,
// so x is taken apart, and w if it is float32; of the nine products of parts the six larger ones are summed, as by XLA
// on TPUs for Precision.HIGHEST. What is left out is below 2^-22 of each product. Outputs lie in the rows of tiles, so
// that weights stay in their order; x is turned, once for a block of its rows.
#include <immintrin.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
  SIDE = 16,                               // rows of a tile, and numbers in a row of float32
  DEPTH = 32,                              // bfloat16 numbers in a row
  PARTS = 3,                               // of a float32 number
  TILE = SIDE * DEPTH,
  FEW_ROWS = 64,
  TILES_BYTES = 3 << 19                    // of the parts of a block of x: they stay in the second cache
};

typedef uint16_t bf16;

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} Shapes;

typedef struct {                           // weights of the thread's next item, read into the cache meanwhile
  const char *from, *end;
  int64_t bytes;                           // at a time
} Coming;

static int has_tiles;

static void ask_for_tiles(void) {          // Linux gives a process the unit's registers when it asks for them
  enum { REQUEST = 0x1023, TILE_DATA = 18 };
  has_tiles = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

static int may_use_tiles(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, ask_for_tiles);
  return has_tiles;
}

static void configure_tiles(void) {
  Shapes shapes = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    shapes.row_bytes[i] = 2 * DEPTH;
    shapes.rows[i] = SIDE;
  }
  _tile_loadconfig(&shapes);
}

INLINE void read_ahead(Coming *coming) {
  const char *stop = coming->end - coming->from < coming->bytes ? coming->end : coming->from + coming->bytes;
  for (; coming->from < stop; coming->from += 64) __builtin_prefetch(coming->from, 0, 2);
}

INLINE void turn(__m512 rows[SIDE]) {      // transposes
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
  for (int s = 1; s < SIDE; s *= 2) {
    const __m512i bit = _mm512_set1_epi32(s), other = _mm512_set1_epi32(SIDE);
    const __mmask16 upper = _mm512_test_epi32_mask(lane, bit);
    const __m512i first = _mm512_mask_add_epi32(lane, upper, _mm512_sub_epi32(lane, bit), other);
    const __m512i second = _mm512_mask_add_epi32(_mm512_add_epi32(lane, bit), upper, lane, other);
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) {
      if (i & s) continue;
      const __m512 a = rows[i], b = rows[i + s];
      rows[i] = _mm512_permutex2var_ps(a, first, b);
      rows[i + s] = _mm512_permutex2var_ps(a, second, b);
    }
  }
}

// The upper halves of a, and what they leave of it.
INLINE __m512i take(__m512 *a) {
  const __m512i upper = _mm512_and_si512(_mm512_castps_si512(*a), _mm512_set1_epi32((int)0xffff0000));
  *a = _mm512_sub_ps(*a, _mm512_castsi512_ps(upper));
  return upper;
}

// `count` rows of x as tiles [depth / 32][part][16 pairs of numbers][16 rows].
static void turn_panel(const float *x, int64_t count, int64_t depth, bf16 *to) {
  for (int64_t k = 0; k < depth; k += DEPTH, to += PARTS * TILE) {
    __m512 numbers[DEPTH];
    for (int half = 0; half < 2; half++) {
      const int64_t start = k + half * SIDE, left = limit(depth - start, 0, SIDE);
      for (int64_t r = 0; r < SIDE; r++)
        numbers[half * SIDE + r] = _mm512_maskz_loadu_ps((__mmask16)(r < count ? (1u << left) - 1 : 0),
                                                         x + r * depth + start);
      turn(numbers + half * SIDE);
    }
    for (int pair = 0; pair < SIDE; pair++)
      for (int part = 0; part < PARTS; part++) {
        const __m512i low = _mm512_srli_epi32(take(numbers + 2 * pair), 16), high = take(numbers + 2 * pair + 1);
        _mm512_store_si512(to + part * TILE + pair * DEPTH, _mm512_or_si512(low, high));
      }
  }
}

// Rows of w from n on as tiles [output / 16][depth / 32][part][16 outputs][32 numbers]; bfloat16 has one part.
static void part_weights(const Product *p, int64_t n, int64_t count, int64_t tiles, int64_t blocks, Coming *coming,
                         bf16 *to) {
  const int parts = p->dtype == XLA_FFI_DataType_F32 ? PARTS : 1;
  const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                       23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  for (int64_t row = 0; row < tiles * SIDE; row++) {
    bf16 *tile = to + row / SIDE * blocks * parts * TILE + row % SIDE * DEPTH;
    const char *from = p->w + (n + row) * p->depth * p->size;
    read_ahead(coming);
    for (int64_t k = 0; k < p->depth; k += DEPTH, tile += parts * TILE) {
      const int64_t left = row < count ? limit(p->depth - k, 0, DEPTH) : 0;
      const uint32_t mask = (uint32_t)((1ull << left) - 1);
      if (parts == 1) {
        _mm512_store_si512(tile, _mm512_maskz_loadu_epi16(mask, from + k * 2));
        continue;
      }
      const float *numbers = (const float *)from + k;
      __m512 a = _mm512_maskz_loadu_ps((__mmask16)mask, numbers);
      __m512 b = _mm512_maskz_loadu_ps((__mmask16)(mask >> SIDE), numbers + SIDE);
      for (int part = 0; part < PARTS; part++) {
        const __m512i low = take(&a), high = take(&b);
        _mm512_store_si512(tile + part * TILE, _mm512_permutex2var_epi16(low, odd, high));
      }
    }
  }
}

#define LOAD(tile, from) _tile_loadd(tile, from, 2 * DEPTH)
#define STORE(tile) _tile_stored(tile, sums + (tile) * SIDE * SIDE, 4 * SIDE)

// sums[panel][t] = tile t of w times a panel of x, for two tiles and two panels; products of small parts come first.
INLINE void multiply_four(const int parts, const bf16 *w, const bf16 *x, int64_t blocks, Coming *coming, float *sums) {
  const int64_t next = blocks * parts * TILE, beside = blocks * PARTS * TILE;
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  for (int64_t b = 0; b < blocks; b++, w += parts * TILE, x += PARTS * TILE) {
    read_ahead(coming);
#define LOAD_W(part) LOAD(4, w + (part) * TILE); LOAD(5, w + next + (part) * TILE);
#define LOAD_X(part) LOAD(6, x + (part) * TILE); LOAD(7, x + beside + (part) * TILE);
#define MULTIPLY _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 5, 6); _tile_dpbf16ps(2, 4, 7); _tile_dpbf16ps(3, 5, 7);
    if (parts == PARTS) {
      LOAD_W(2) LOAD_X(0) MULTIPLY
      LOAD_W(1) MULTIPLY
      LOAD_X(1) MULTIPLY
      LOAD_W(0) MULTIPLY
      LOAD_X(2) MULTIPLY
      LOAD_X(0) MULTIPLY
    } else {
      LOAD_W(0) LOAD_X(2) MULTIPLY
      LOAD_X(1) MULTIPLY
      LOAD_X(0) MULTIPLY
    }
#undef LOAD_W
#undef LOAD_X
#undef MULTIPLY
  }
  STORE(0); STORE(1); STORE(2); STORE(3);
}

// sums[t] = tile t of bfloat16 weights times the only panel of x, for three tiles; summed in the same order.
static void multiply_three(const bf16 *w, const bf16 *x, int64_t blocks, Coming *coming, float *sums) {
  _tile_zero(0); _tile_zero(1); _tile_zero(2);
  for (int64_t b = 0; b < blocks; b++, w += TILE, x += PARTS * TILE) {
    read_ahead(coming);
    LOAD(5, w); LOAD(6, w + blocks * TILE); LOAD(7, w + 2 * blocks * TILE);
#define LOAD_X(part) LOAD(4, x + (part) * TILE);
#define MULTIPLY _tile_dpbf16ps(0, 5, 4); _tile_dpbf16ps(1, 6, 4); _tile_dpbf16ps(2, 7, 4);
    LOAD_X(2) MULTIPLY
    LOAD_X(1) MULTIPLY
    LOAD_X(0) MULTIPLY
#undef LOAD_X
#undef MULTIPLY
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
  __asm__ volatile("" ::: "memory");       // the loads of tiles do not say that they read memory
  for (int64_t row = first; row < end; panels += 2 * blocks * PARTS * TILE, row += 2 * SIDE) {
    if (tiles == 3) multiply_three(parted, panels, blocks, &coming, sums);
    else if (p->dtype == XLA_FFI_DataType_F32) multiply_four(PARTS, parted, panels, blocks, &coming, sums);
    else multiply_four(1, parted, panels, blocks, &coming, sums);
    for (int i = 0; i < (tiles == 3 ? 3 : 4); i++) {
      const int64_t below = tiles == 3 ? 0 : i / 2 * SIDE, beside = (tiles == 3 ? i : i % 2) * SIDE;
      store_tile(p, sums + i * SIDE * SIDE, row + below, end - row - below, start + beside, stop - start - beside);
    }
  }
}

// Up to 16 rows of x make one panel, which takes three tiles of bfloat16 at a time; pairs of panels take two. A few rows
// are multiplied by float32 weights faster in vectors: to take these apart costs more than the products. What counts is
// how many rows there may be, not how many there are, so that a compiled step always sums in one order.
static int plan_tiles(Product *p, int64_t most_rows) {
  const int is_worth_it = p->dtype == XLA_FFI_DataType_F32 ? most_rows > FEW_ROWS : p->dtype == XLA_FFI_DataType_BF16;
  if (!is_worth_it || !may_use_tiles()) return 0;
  const int64_t pairs = (p->rows + 2 * SIDE - 1) / (2 * SIDE), depth = (p->depth + DEPTH - 1) / DEPTH * DEPTH;
  const int64_t most = TILES_BYTES / (2 * SIDE * PARTS * (int64_t)sizeof(bf16) * depth);
  p->chunk = p->dtype == XLA_FFI_DataType_BF16 && p->rows <= SIDE ? 3 * SIDE : 2 * SIDE;
  p->block = 2 * SIDE * limit(most, 1, pairs > 1 ? pairs : 1);
  return 1;
}

static void work_with_tiles(void *data) {
  Product *p = data;
  const int64_t blocks = (p->depth + DEPTH - 1) / DEPTH, block_size = p->block * blocks * DEPTH * PARTS;
  const int64_t row_bytes = p->depth * p->size;
  bf16 *panels = (bf16 *)scratch((block_size + 3 * blocks * PARTS * TILE) / 2);
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
        turn_panel(p->x + row * p->depth, limit(end - row, 0, SIDE), p->depth,
                   panels + (row - first) * blocks * DEPTH * PARTS);
    }
    const int64_t from = next < p->num_items ? next % p->chunks * p->chunk : p->width;
    const Coming coming = {p->w + from * row_bytes, p->w + limit(from + p->chunk, 0, p->width) * row_bytes, 0};
    multiply_tiles(p, first, end, start, stop, coming, panels, panels + block_size);
  }
  _tile_release();
}
