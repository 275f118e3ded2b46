// A call as a list of items: some queries on one context, for some kv heads.
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "attention_native_block.h"
#include "attention_native_call.h"
#include "native_crew.h"

// Of a chunk, to an item. A matrix unit takes keys and values apart before it takes rows.
enum { ROWS = 48, ROWS_OF_TILES = 192 };

typedef struct {
  const int32_t *pages;                    // of the context
  int64_t first, end;                      // keys that are read
  int64_t first_head, num_heads;           // kv heads
  int64_t token, place, count;             // queries: tokens of q, and where their results go
  const int32_t *members;                  // tokens of q instead, those out of range left out; NULL: from `token` on
  int64_t position;                        // of the first query, the others follow; -1: all queries see all keys
  float *partial;                          // [count, Hq, dim + 2] sums, maximum and total; NULL: the result goes out
} Item;

typedef struct {
  Setting setting;
  const float *q;
  float *out, *lse;
  int64_t num_tokens;                      // of q
  int is_few;                              // rows to a head, in all items
  Item *items;
  int64_t num_items, max_count, max_rows, max_lines;   // rows of an item and of its scores, in whole vectors
  atomic_int_fast64_t next;
} Job;

typedef struct {
  Scratch scratch;
  int64_t *tokens, *places;                // [max_count] of the item's queries
  void *memory;
} Worker;

INLINE int64_t whole_vectors(int64_t rows) { return (rows + LANES - 1) / LANES * LANES; }

static void finish(const float *sums, int64_t step, float top, float total, int64_t dim, float *out, float *lse) {
  const float share = 1 / total;
  for (int64_t d = 0; d < dim; d++) out[d] = sums[d * step] * share;
  *lse = LN2 * (top + log2f(total));
}

// Queries of an item become rows of the scratch. Returns how many tokens there are.
static int64_t load_queries(const Job *job, const Item *item, Worker *worker) {
  const Setting *s = &job->setting;
  const int64_t dim = s->cache.dim, group = s->group;
  Scratch *w = &worker->scratch;
  int64_t count = 0;
  for (int64_t i = 0; i < item->count; i++) {
    int64_t token = item->members ? item->members[i] : item->token + i;
    if (token < 0 || token >= job->num_tokens) continue;
    worker->tokens[count] = token;
    worker->places[count++] = i;
  }
  w->rows = whole_vectors((job->is_few ? item->num_heads : count) * group);
  w->next_head = job->is_few ? group : w->rows;
  w->next_row = job->is_few ? dim : 1;
  w->next = job->is_few ? 1 : w->rows;
  const int64_t rows = job->is_few ? w->rows : w->rows * item->num_heads;
  memset(w->q, 0, sizeof(float) * (size_t)(rows * dim));
  memset(w->sums, 0, sizeof(float) * (size_t)(rows * dim));
  memset(w->totals, 0, sizeof(float) * (size_t)rows);
  for (int64_t row = 0; row < rows; row++) w->tops[row] = NEVER;
  for (int64_t head = 0; head < item->num_heads; head++) {
    float *to = w->q + head * w->next_head * dim;
    for (int64_t i = 0; i < count; i++) {
      const float *from = job->q + (worker->tokens[i] * s->heads + (item->first_head + head) * group) * dim;
      for (int64_t g = 0; g < group; g++, from += dim, to += w->next_row)
        for (int64_t d = 0; d < dim; d++) to[d * w->next] = from[d] * s->factor;
    }
  }
  return count;
}

static void store_results(const Job *job, const Item *item, const Worker *worker, int64_t count) {
  const Scratch *w = &worker->scratch;
  const int64_t dim = job->setting.cache.dim, heads = job->setting.heads, group = job->setting.group;
  for (int64_t head = 0; head < item->num_heads; head++) {
    const float *sums = w->sums + head * w->next_head * dim;
    for (int64_t i = 0, row = head * w->next_head; i < count; i++)
      for (int64_t g = 0; g < group; g++, row++, sums += w->next_row) {
        int64_t at = worker->places[i] * heads + (item->first_head + head) * group + g;
        if (item->partial) {
          float *partial = item->partial + at * (dim + 2);
          for (int64_t d = 0; d < dim; d++) partial[d] = sums[d * w->next];
          partial[dim] = w->tops[row];
          partial[dim + 1] = w->totals[row];
        } else {
          at += item->place * heads;
          finish(sums, w->next, w->tops[row], w->totals[row], dim, job->out + at * dim, job->lse + at);
        }
      }
  }
}

static void visit(const Job *job, const Item *item, Worker *worker) {
  const Setting *s = &job->setting;
  Scratch *w = &worker->scratch;
  const int64_t count = load_queries(job, item, worker);
  if (count == 0) return;
  for (int64_t head = 0; s->with_tiles && head < item->num_heads; head++)
    part_queries(s->cache.dtype, w, head * w->next_head, s->cache.dim);
  for (int64_t base = item->first / KEYS * KEYS; base < item->end; base += KEYS) {
    const int64_t low = item->first > base ? item->first - base : 0, left = item->end - base;
    Block block = {item->first_head, item->num_heads, count, item->position, base, low, left < KEYS ? left : KEYS};
    if (base > item->first) memcpy(w->slots, w->ahead, sizeof w->slots);
    else locate(&s->cache, item->pages, base, low, block.high, w->slots);
    if (left > KEYS) locate(&s->cache, item->pages, base + KEYS, 0, left < 2 * KEYS ? left - KEYS : KEYS, w->ahead);
    else memset(w->ahead, -1, sizeof w->ahead);
    attend(job->is_few, s, w, &block);
  }
  store_results(job, item, worker, count);
}

static int open_worker(const Job *job, Worker *worker) {
  Scratch *w = &worker->scratch;
  const size_t dim = (size_t)job->setting.cache.dim, count = (size_t)job->max_count;
  const size_t rows = (size_t)job->max_rows, lines = (size_t)job->max_lines;
  const size_t per_tile = job->setting.with_tiles ? PARTS : 0, pairs = (rows * dim * per_tile + 1) / 2;
  const size_t sizes[] = {8 * dim, KEYS * dim, KEYS * lines, rows * dim, rows * dim, rows, rows, lines,
                          pairs, KEYS * dim * per_tile / 2, KEYS * dim * per_tile / 2, KEYS * SIDE * per_tile};
  float *tiles[4];
  float **parts[] = {&w->keys, &w->values, &w->scores, &w->q, &w->sums, &w->tops, &w->totals, &w->scales,
                     tiles, tiles + 1, tiles + 2, tiles + 3};
  const int num_parts = sizeof sizes / sizeof *sizes;
  size_t floats = 0;
  for (int i = 0; i < num_parts; i++) floats += (sizes[i] + 15) / 16 * 16;
  char *memory = aligned_alloc(64, (floats * sizeof(float) + 2 * count * sizeof(int64_t) + 63) / 64 * 64);
  worker->memory = memory;
  if (!memory) return 0;
  for (int i = 0; i < num_parts; i++) {
    *parts[i] = (float *)memory;
    memory += (sizes[i] + 15) / 16 * 16 * sizeof(float);
  }
  w->q_tiles = (bf16 *)tiles[0], w->key_tiles = (bf16 *)tiles[1];
  w->value_tiles = (bf16 *)tiles[2], w->weight_tiles = (bf16 *)tiles[3];
  worker->tokens = (int64_t *)memory;
  worker->places = worker->tokens + count;
  memset(w->scores, 0, sizes[2] * sizeof(float));
  return 1;
}

static void work(void *data) {
  Job *job = data;
  Worker worker;
  if (!open_worker(job, &worker)) return;  // the others do the items
  if (job->setting.with_tiles) configure_tiles();
  for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->num_items;) visit(job, job->items + i, &worker);
  if (job->setting.with_tiles) _tile_release();
  free(worker.memory);
}

// ---- Jobs

static int takes_tiles(const Call *call) { return call->sizes['D'] % DEPTH == 0 && may_use_tiles(); }

static int64_t most_rows(const Call *call) { return takes_tiles(call) ? ROWS_OF_TILES : ROWS; }

static Job *open_job(Call *call, int is_decode, int64_t num_items) {
  Job *job = calloc(1, sizeof *job);
  Item *items = calloc((size_t)num_items + 1, sizeof *items);
  if (!job || !items) {
    free(job);
    free(items);
    fail(call, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "paged attention: no memory for %lld items",
         (long long)num_items);
    return NULL;
  }
  const XLA_FFI_Buffer *k = call->arguments[1];
  Setting *s = &job->setting;
  s->cache = (Cache){k->data, call->arguments[2]->data, call->sizes['P'], call->sizes['W'], call->sizes['D'],
                     k->dtype == XLA_FFI_DataType_F32 ? 4 : 2, k->dtype};
  job->q = call->arguments[0]->data;
  job->out = call->results[0]->data;
  job->lse = call->results[1]->data;
  job->num_tokens = call->arguments[0]->dims[0];
  s->heads = call->sizes['H'];
  s->group = s->heads / (call->sizes['W'] / call->sizes['D']);
  s->window = call->window;
  s->factor = call->sm_scale * LOG2E;
  if (call->soft_cap != 0) {
    s->factor = 2 * LOG2E * call->sm_scale / call->soft_cap;
    s->cap = LOG2E * call->soft_cap;
  }
  job->is_few = is_decode && s->group <= FEW;
  s->with_tiles = !job->is_few && takes_tiles(call);
  job->items = items;
  return job;
}

static void add_item(Job *job, Item item) {
  job->items[job->num_items++] = item;
  const int64_t lines = whole_vectors((job->is_few ? item.num_heads : item.count) * job->setting.group);
  const int64_t rows = job->is_few ? lines : lines * item.num_heads;
  if (item.count > job->max_count) job->max_count = item.count;
  if (rows > job->max_rows) job->max_rows = rows;
  if (lines > job->max_lines) job->max_lines = lines;
}

// Does all items and frees the job. Returns whether all were done.
static int run(Call *call, Job *job, int64_t threads) {
  int64_t pairs = 0;
  for (int64_t i = 0; i < job->num_items; i++)
    pairs += (job->items[i].end - job->items[i].first) * job->items[i].count * job->items[i].num_heads;
  const int64_t worth = pairs * job->setting.group * job->setting.cache.dim >> 17;  // a helper takes 5 to 20 us to come
  run_crew(call->frame, work, job, limit(threads - 1, 0, worth < job->num_items - 1 ? worth : job->num_items - 1));
  const int is_done = atomic_load(&job->next) >= job->num_items;
  free(job->items);
  free(job);
  if (!is_done) fail(call, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "paged attention: no memory for scratch");
  return is_done;
}

// Places without a query: the logarithm of no weights.
static void clear_lse(const Call *call, int64_t first, int64_t end) {
  float *lse = call->results[1]->data;
  for (int64_t i = first * call->sizes['H']; i < end * call->sizes['H']; i++) lse[i] = -INFINITY;
}

static void clear(const Call *call, int64_t first, int64_t end) {
  const int64_t size = call->sizes['H'] * call->sizes['D'];
  if (first >= end) return;
  memset((float *)call->results[0]->data + first * size, 0, sizeof(float) * (size_t)((end - first) * size));
  clear_lse(call, first, end);
}
