// Products of activations and weights on CPUs, as an XLA FFI handler: see matmul_native.py.
//
// Rows of x lie in the lanes of vectors, in panels [K, rows]; weights are read once, in the order they lie in memory,
// and spread over the lanes, so that they need no packing. Each result is one chain of fused multiply-adds in the order
// of K: it has the same bits however many rows there are, wherever its row stands and however many threads there are.
// Where the processor has a matrix unit, that takes the larger products: see matmul_native_tiles.h.
#include <stdatomic.h>

#include "native_crew.h"
#include "native_frame.h"
#include "native_vector.h"
#include "native_tiles.h"

enum {
  PANEL = 2 * LANES,                       // rows of a panel
  WIDE = LANES == 16 ? 12 : 6,             // outputs of a tile with panels of two vectors: as there are registers
  NARROW = 8,                              // of a tile where one vector holds all rows
  MAX_TILE = WIDE > NARROW ? WIDE : NARROW,
  CHUNK = 96,                              // outputs of an item of vectors
  BLOCK_BYTES = 1 << 18,                   // of the panels of an item: they stay in the second cache
  LINE = 16                                // numbers between two looks ahead
};

typedef struct {
  const float *x;
  const char *w;
  float *out;
  int dtype;                               // of w
  int64_t size;                            // bytes of one of its numbers
  int64_t rows, depth, width;              // M, K, N
  int64_t block, chunk, chunks, num_items; // rows and outputs of an item, items to a block of rows, items
  atomic_int_fast64_t next;
} Product;

typedef struct {                           // what the weights of the next tile are, read into the cache meanwhile
  const char *start;
  int64_t stride, size;
  int first, step;                         // rows of the tile that this panel looks ahead to
} Ahead;

// sums[t][row] = sum over k of panel[k][row] * w[t][k] for the first `count` rows of w. Whole tiles and parts run the
// same code, so that the compiler fuses the same operations.
INLINE void multiply(const int tile, const int vectors, const float *restrict panel, const float *restrict w,
                     int64_t count, int64_t depth, Ahead ahead, vf sums[MAX_TILE][2]) {
  const float *from[MAX_TILE];
  vf total[MAX_TILE][2] = {{{0}}};
  for (int t = 0; t < tile; t++) from[t] = w + (t < count ? t : count - 1) * depth;
  for (int64_t k = 0; k < depth;) {
    for (int t = ahead.first; t < tile; t += ahead.step)
      __builtin_prefetch(ahead.start + t * ahead.stride + k * ahead.size, 0, 2);
    for (const int64_t stop = k + LINE < depth ? k + LINE : depth; k < stop; k++) {
      vf x[2];
      for (int v = 0; v < vectors; v++) memcpy(&x[v], panel + (k * vectors + v) * LANES, sizeof x[v]);
      for (int t = 0; t < tile; t++) {
        const vf weight = spread(from[t][k]);
        for (int v = 0; v < vectors; v++) total[t][v] += weight * x[v];
      }
    }
  }
  for (int t = 0; t < tile; t++)
    for (int v = 0; v < vectors; v++) sums[t][v] = total[t][v];
}

static void store(const Product *p, vf sums[MAX_TILE][2], int64_t row, int64_t rows, int64_t n, int64_t count) {
  const float *numbers = (const float *)sums;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t t = 0; t < count; t++) p->out[(row + r) * p->width + n + t] = numbers[t * PANEL + r];
}

// Rows of x as panels; the last has one vector if that holds them. Missing rows are zeros.
static void lay_out(const Product *p, int64_t first, int64_t end, float *panel) {
  for (int64_t row = first; row < end; row += PANEL, panel += PANEL * p->depth) {
    const int64_t rows = end - row < PANEL ? end - row : PANEL, lanes = rows > LANES ? PANEL : LANES;
    if (rows < lanes) memset(panel, 0, sizeof(float) * (size_t)(lanes * p->depth));
    for (int64_t k = 0; k < p->depth; k += LINE) {
      const int64_t count = p->depth - k < LINE ? p->depth - k : LINE;
      for (int64_t r = 0; r < rows; r++) {
        const float *from = p->x + (row + r) * p->depth + k;
        for (int64_t i = 0; i < count; i++) panel[(k + i) * lanes + r] = from[i];
      }
    }
  }
}

INLINE void widen_as(const int dtype, const char *restrict from, int64_t numbers, float *restrict wide) {
  const int64_t whole = numbers / 8 * 8;
  for (int64_t i = 0; i < whole; i += 8) {
    const v8 x = load8(dtype, from + i * 2);
    memcpy(wide + i, &x, sizeof x);
  }
  char last[16] = {0};
  memcpy(last, from + whole * 2, (size_t)((numbers - whole) * 2));
  const v8 x = load8(dtype, last);
  memcpy(wide + whole, &x, (size_t)(numbers - whole) * sizeof(float));
}

// `count` rows of w as float32.
static const float *widen(const Product *p, int64_t first, int64_t count, float *wide) {
  const char *from = p->w + first * p->depth * p->size;
  if (p->dtype == XLA_FFI_DataType_F32) return (const float *)from;
  if (p->dtype == XLA_FFI_DataType_BF16) widen_as(XLA_FFI_DataType_BF16, from, count * p->depth, wide);
  else widen_as(XLA_FFI_DataType_F16, from, count * p->depth, wide);
  return wide;
}

static void multiply_chunk(const Product *p, int64_t first, int64_t end, int64_t start, int64_t stop,
                           const float *panels, float *wide) {
  const int64_t depth = p->depth, tile = end - first > LANES ? WIDE : NARROW;
  const int num_panels = (int)((end - first + PANEL - 1) / PANEL);
  for (int64_t n = start; n < stop; n += tile) {
    const int64_t count = stop - n < tile ? stop - n : tile;
    const float *w = widen(p, n, count, wide), *panel = panels;
    for (int i = 0; i < num_panels; i++, panel += PANEL * depth) {
      const int64_t row = first + i * PANEL, rows = end - row < PANEL ? end - row : PANEL;
      vf sums[MAX_TILE][2];
      const Ahead ahead = {p->w + (n + tile) * depth * p->size, depth * p->size, p->size, i, num_panels};
      if (tile == NARROW) multiply(NARROW, 1, panel, w, count, depth, ahead, sums);
      else if (rows > LANES) multiply(WIDE, 2, panel, w, count, depth, ahead, sums);
      else multiply(WIDE, 1, panel, w, count, depth, ahead, sums);
      store(p, sums, row, rows, n, count);
    }
  }
}

// Memory of this thread for so many numbers. It is kept: made anew for each call, the kernel's handing out of its pages
// would cost as much as a small product.
static float *scratch(int64_t numbers) {
  static _Thread_local float *memory;
  static _Thread_local int64_t size;
  if (numbers > size) {
    free(memory);
    memory = aligned_alloc(64, (sizeof(float) * (size_t)numbers + 63) / 64 * 64);
    size = memory ? numbers : 0;
  }
  return memory;
}

#if HAS_TILES
#include "matmul_native_tiles.h"
#else
static int plan_tiles(Product *p, int64_t most_rows) { return (void)p, (void)most_rows, 0; }
static void work_with_tiles(void *data) { (void)data; }
#endif

static void plan(Product *p) {
  const int64_t panels = (p->rows + PANEL - 1) / PANEL;
  const int64_t most = BLOCK_BYTES / (PANEL * (int64_t)sizeof(float) * p->depth);
  p->chunk = CHUNK;
  p->block = PANEL * limit(most, 1, panels > 1 ? panels : 1);
}

static void work(void *data) {
  Product *p = data;
  float *panels = scratch((p->block + MAX_TILE) * p->depth);
  int64_t held = -1;
  for (int64_t i; panels && (i = atomic_fetch_add(&p->next, 1)) < p->num_items;) {
    const int64_t first = i / p->chunks * p->block, end = limit(first + p->block, 0, p->rows);
    const int64_t start = i % p->chunks * p->chunk, stop = limit(start + p->chunk, 0, p->width);
    if (held != first) lay_out(p, held = first, end, panels);
    multiply_chunk(p, first, end, start, stop, panels, panels + p->block * p->depth);
  }
}

static int is_served(const XLA_FFI_CallFrame *frame) {
  if (frame->args.size != 3 || frame->rets.size != 1) return 0;
  const XLA_FFI_Buffer *x = frame->args.args[0], *w = frame->args.args[1], *count = frame->args.args[2];
  const XLA_FFI_Buffer *out = frame->rets.rets[0];
  return x->rank == 2 && w->rank == 2 && count->rank == 0 && out->rank == 2 && x->dtype == XLA_FFI_DataType_F32 &&
         (w->dtype == XLA_FFI_DataType_F32 || w->dtype == XLA_FFI_DataType_F16 || w->dtype == XLA_FFI_DataType_BF16) &&
         count->dtype == XLA_FFI_DataType_S32 && out->dtype == XLA_FFI_DataType_F32 && x->dims[1] > 0 &&
         x->dims[1] == w->dims[1] && out->dims[0] == x->dims[0] && out->dims[1] == w->dims[0];
}

XLA_FFI_Error *jradix_matmul(XLA_FFI_CallFrame *frame) {
  if (answers_metadata(frame)) return NULL;
  if (!is_served(frame))
    return make_error(
        frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
        "matmul: expected x float32[M, K], w [N, K] of float32, float16 or bfloat16, an int32 and out [M, N]");
  const XLA_FFI_Buffer *x = frame->args.args[0], *w = frame->args.args[1], *count = frame->args.args[2];
  const XLA_FFI_Buffer *out = frame->rets.rets[0];
  Product p = {x->data, w->data, out->data, w->dtype, w->dtype == XLA_FFI_DataType_F32 ? 4 : 2,
               limit(*(const int32_t *)count->data, 0, x->dims[0]), x->dims[1], w->dims[0]};
  memset(p.out + p.rows * p.width, 0, sizeof(float) * (size_t)((x->dims[0] - p.rows) * p.width));
  const int with_tiles = plan_tiles(&p, x->dims[0]);
  if (!with_tiles) plan(&p);
  p.chunks = (p.width + p.chunk - 1) / p.chunk;
  p.num_items = (p.rows + p.block - 1) / p.block * p.chunks;
  const int64_t worth = (p.rows + LANES) * p.depth * p.width >> 19;    // a helper takes 5 to 20 us to come
  const int64_t helpers = limit(num_threads(frame) - 1, 0, worth < p.num_items - 1 ? worth : p.num_items - 1);
  run_crew(frame, with_tiles ? work_with_tiles : work, &p, helpers);
  if (atomic_load(&p.next) < p.num_items)
    return make_error(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "matmul: no memory for a block of x");
  return NULL;
}
