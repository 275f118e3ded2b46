// AMX, the matrix unit of Intel's server processors since Sapphire Rapids (Intel SDM, volume 1, chapter 18): tiles of
// bfloat16 numbers, products of which are summed in float32.
//
// A float32 number is the sum of three bfloat16 ones, exactly. So operands are taken apart, and of the nine products of
// parts the six larger ones are summed, as by XLA on TPUs for Precision.HIGHEST; what is left out is below 2^-22 of
// each product. A tile of the left operand is [16 rows][32 numbers], of the right one [16 pairs][16 columns].
#include <stdint.h>

enum {
  SIDE = 16,                               // rows of a tile, and numbers in a row of float32
  DEPTH = 32,                              // bfloat16 numbers in a row
  PARTS = 3,                               // of a float32 number
  NUMBERS = SIDE * DEPTH                   // of a tile
};

typedef uint16_t bf16;

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_TILES 1
#include <immintrin.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} TileShapes;

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

// Of this thread, until `_tile_release`.
static void configure_tiles(void) {
  TileShapes shapes = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    shapes.row_bytes[i] = 2 * DEPTH;
    shapes.rows[i] = SIDE;
  }
  _tile_loadconfig(&shapes);
}

// The loads of tiles do not say that they read memory.
INLINE void finish_writes(void) { __asm__ volatile("" ::: "memory"); }

#define LOAD(tile, from) _tile_loadd(tile, from, 2 * DEPTH);
#define MULTIPLY_2_BY_2 \
  _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 5, 6); _tile_dpbf16ps(2, 4, 7); _tile_dpbf16ps(3, 5, 7);

// Tiles 0 and 1 += two tiles of the left operand times one of the right one, 2 and 3 += times a second one. Products of
// small parts come first.
INLINE void multiply_2_by_2(const int parts, const bf16 *a, const bf16 *next_a, const bf16 *b, const bf16 *next_b) {
#define LOAD_A(part) LOAD(4, a + (part) * NUMBERS) LOAD(5, next_a + (part) * NUMBERS)
#define LOAD_B(part) LOAD(6, b + (part) * NUMBERS) LOAD(7, next_b + (part) * NUMBERS)
  if (parts == PARTS) {
    LOAD_A(2) LOAD_B(0) MULTIPLY_2_BY_2
    LOAD_A(1) MULTIPLY_2_BY_2
    LOAD_B(1) MULTIPLY_2_BY_2
    LOAD_A(0) MULTIPLY_2_BY_2
    LOAD_B(2) MULTIPLY_2_BY_2
    LOAD_B(0) MULTIPLY_2_BY_2
  } else {
    LOAD_A(0) LOAD_B(0) MULTIPLY_2_BY_2
  }
#undef LOAD_A
#undef LOAD_B
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

// The upper halves of x, and what they leave of it.
INLINE __m512i take(__m512 *x) {
  const __m512i upper = _mm512_and_si512(_mm512_castps_si512(*x), _mm512_set1_epi32((int)0xffff0000));
  *x = _mm512_sub_ps(*x, _mm512_castsi512_ps(upper));
  return upper;
}

// A row of the left operand: its `parts` go to `to` and tiles behind it.
INLINE void part_row(const int parts, __m512 low, __m512 high, bf16 *to) {
  const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                       23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  for (int part = 0; part < parts; part++) {
    const __m512i first = take(&low), second = take(&high);
    _mm512_store_si512(to + part * NUMBERS, _mm512_permutex2var_epi16(first, odd, second));
  }
}

// A pair of numbers of all columns of the right operand; its only part is the rounded number.
INLINE void part_pair(const int parts, __m512 first, __m512 second, bf16 *to) {
  if (parts == 1) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second));
    _mm512_store_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    return;
  }
  for (int part = 0; part < PARTS; part++) {
    const __m512i low = _mm512_srli_epi32(take(&first), 16), high = take(&second);
    _mm512_store_si512(to + part * NUMBERS, _mm512_or_si512(low, high));
  }
}

#else
#define HAS_TILES 0
static int may_use_tiles(void) { return 0; }
static void configure_tiles(void) {}
static void _tile_release(void) {}
#endif
