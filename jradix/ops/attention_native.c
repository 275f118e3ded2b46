// Paged attention on CPUs, as XLA FFI handlers: decode, extend and shared_prefix of attention_native.py.
//
// A call is a list of items: some queries on one context, for some kv heads. Items are done by the calling thread and
// by idle threads of XLA's pool, whoever comes first.
//
//     item     queries                       keys
//     decode   one token                     up to the next multiple of SPLIT
//     extend   up to TILE rows of a chunk    all
//     shared   the members of a group        up to the next multiple of SPLIT
//
// Blocks of keys begin at multiples of KEYS and items end at multiples of SPLIT, however many threads there are and
// whatever else is in the batch, so that each result has the same bits always.
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "attention_native_block.h"
#include "attention_native_call.h"

enum { SPLIT = 1024 };

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
  int is_decode;
  Item *items;
  int64_t num_items, max_count, max_rows;
  atomic_int_fast64_t next;
  pthread_mutex_t mutex;
  pthread_cond_t idle;
  int references, active, is_closed;       // under the mutex
} Job;

typedef struct {
  Scratch scratch;
  int64_t *tokens, *places;                // [max_count] of the item's queries
  void *memory;
} Worker;

static void finish(const float *sums, float top, float total, int64_t dim, float *out, float *lse) {
  for (int64_t d = 0; d < dim; d++) out[d] = sums[d] / total;
  *lse = LN2 * (top + log2f(total));
}

// Queries of an item become rows of the scratch. Returns how many tokens there are.
static int64_t load_queries(const Job *job, const Item *item, Worker *worker) {
  const Setting *s = &job->setting;
  Scratch *w = &worker->scratch;
  int64_t count = 0, row = 0;
  for (int64_t i = 0; i < item->count; i++) {
    int64_t token = item->members ? item->members[i] : item->token + i;
    if (token < 0 || token >= job->num_tokens) continue;
    worker->tokens[count] = token;
    worker->places[count++] = i;
  }
  for (int64_t head = item->first_head; head < item->first_head + item->num_heads; head++)
    for (int64_t i = 0; i < count; i++)
      for (int64_t g = 0; g < s->group; g++, row++) {
        const float *q = job->q + (worker->tokens[i] * s->heads + head * s->group + g) * s->cache.dim;
        for (int64_t d = 0; d < s->cache.dim; d++) w->q[row * w->pitch + d] = q[d] * s->factor;
        w->tops[row] = NEVER;
        w->totals[row] = 0;
      }
  memset(w->sums, 0, sizeof(float) * (size_t)(row * w->pitch));
  return count;
}

static void store_results(const Job *job, const Item *item, const Worker *worker, int64_t count) {
  const Scratch *w = &worker->scratch;
  const int64_t dim = job->setting.cache.dim, heads = job->setting.heads, group = job->setting.group;
  int64_t row = 0;
  for (int64_t head = item->first_head; head < item->first_head + item->num_heads; head++)
    for (int64_t i = 0; i < count; i++)
      for (int64_t g = 0; g < group; g++, row++) {
        const float *sums = w->sums + row * w->pitch;
        int64_t at = worker->places[i] * heads + head * group + g;
        if (item->partial) {
          float *partial = item->partial + at * (dim + 2);
          memcpy(partial, sums, sizeof(float) * (size_t)dim);
          partial[dim] = w->tops[row];
          partial[dim + 1] = w->totals[row];
        } else {
          at += item->place * heads;
          finish(sums, w->tops[row], w->totals[row], dim, job->out + at * dim, job->lse + at);
        }
      }
}

static void visit(const Job *job, const Item *item, Worker *worker) {
  const Setting *s = &job->setting;
  Scratch *w = &worker->scratch;
  const int64_t count = load_queries(job, item, worker);
  const int is_few = job->is_decode && s->group <= FEW;
  for (int64_t base = item->first / KEYS * KEYS; base < item->end; base += KEYS) {
    const int64_t low = item->first > base ? item->first - base : 0, left = item->end - base;
    Block block = {item->first_head, item->num_heads, count * s->group, item->position,
                   base, low, left < KEYS ? left : KEYS};
    if (base > item->first) memcpy(w->slots, w->ahead, sizeof w->slots);
    else locate(&s->cache, item->pages, base, low, block.high, w->slots);
    if (left > KEYS) locate(&s->cache, item->pages, base + KEYS, 0, left < 2 * KEYS ? left - KEYS : KEYS, w->ahead);
    else memset(w->ahead, -1, sizeof w->ahead);
    attend(is_few, s, w, &block);
  }
  store_results(job, item, worker, count);
}

static int open_worker(const Job *job, Worker *worker) {
  Scratch *w = &worker->scratch;
  const size_t dim = (size_t)job->setting.cache.dim, pitch = (dim + PANEL - 1) / PANEL * PANEL;
  const size_t rows = (size_t)job->max_rows, count = (size_t)job->max_count, lines = rows > TILE ? rows : TILE;
  const size_t sizes[] = {dim * STRIDE, KEYS * (pitch + LANES), lines * KEYS, rows * pitch, rows * pitch, rows, rows};
  float **parts[] = {&w->keys, &w->values, &w->scores, &w->q, &w->sums, &w->tops, &w->totals};
  size_t floats = 0;
  for (int i = 0; i < 7; i++) floats += (sizes[i] + 15) / 16 * 16;
  char *memory = aligned_alloc(64, (floats * sizeof(float) + 2 * count * sizeof(int64_t) + 63) / 64 * 64);
  worker->memory = memory;
  if (!memory) return 0;
  for (int i = 0; i < 7; i++) {
    *parts[i] = (float *)memory;
    memory += (sizes[i] + 15) / 16 * 16 * sizeof(float);
  }
  worker->tokens = (int64_t *)memory;
  worker->places = worker->tokens + count;
  w->pitch = (int64_t)pitch;
  memset(w->values, 0, sizes[1] * sizeof(float));
  return 1;
}

static int work(Job *job) {
  Worker worker;
  if (!open_worker(job, &worker)) return 0;
  for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->num_items;) visit(job, job->items + i, &worker);
  free(worker.memory);
  return 1;
}

// ---- Threads. A helper that the pool starts late, or never while the caller waits, must not be waited for: it finds
// the job closed, and the last one who holds the job frees it.

static void release(Job *job) {  // with the mutex held
  int is_last = --job->references == 0;
  pthread_mutex_unlock(&job->mutex);
  if (!is_last) return;
  pthread_mutex_destroy(&job->mutex);
  pthread_cond_destroy(&job->idle);
  free(job);
}

static void help(void *data) {
  Job *job = data;
  pthread_mutex_lock(&job->mutex);
  if (!job->is_closed) {
    job->active++;
    pthread_mutex_unlock(&job->mutex);
    work(job);  // without memory for it the others do the items
    pthread_mutex_lock(&job->mutex);
    if (--job->active == 0) pthread_cond_signal(&job->idle);
  }
  release(job);
}

// ---- Jobs

static int64_t limit(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

static int64_t num_splits(int64_t first, int64_t end) {
  return first < end ? (end + SPLIT - 1) / SPLIT - first / SPLIT : 0;
}

static int64_t num_threads(const Call *call) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, call->frame->ctx,
                                             &threads};
  XLA_FFI_Error *error = call->frame->api->XLA_FFI_ThreadPool_NumThreads(&args);
  if (!error) return threads;
  XLA_FFI_Error_Destroy_Args destroyed = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  call->frame->api->XLA_FFI_Error_Destroy(&destroyed);  // a backend without a pool
  return 1;
}

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
  job->is_decode = is_decode;
  job->items = items;
  pthread_mutex_init(&job->mutex, NULL);
  pthread_cond_init(&job->idle, NULL);
  job->references = 1;
  return job;
}

static void add_item(Job *job, Item item) {
  job->items[job->num_items++] = item;
  int64_t rows = item.count * item.num_heads * job->setting.group;
  if (item.count > job->max_count) job->max_count = item.count;
  if (rows > job->max_rows) job->max_rows = rows;
}

// Does all items on this thread and on idle ones of the pool, and frees the job. Returns whether all were done.
static int run(Call *call, Job *job, int64_t threads) {
  const XLA_FFI_Api *api = call->frame->api;
  Item *items = job->items;
  int64_t pairs = 0;
  for (int64_t i = 0; i < job->num_items; i++)
    pairs += (items[i].end - items[i].first) * items[i].count * items[i].num_heads;
  const int64_t worth = pairs * job->setting.group * job->setting.cache.dim >> 17;  // a helper takes 5 to 20 us to come
  const int64_t helpers = limit(threads - 1, 0, worth < job->num_items - 1 ? worth : job->num_items - 1);
  for (int64_t i = 0; i < helpers; i++) {
    XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, call->frame->ctx, help,
                                             job};
    pthread_mutex_lock(&job->mutex);
    job->references++;
    pthread_mutex_unlock(&job->mutex);
    XLA_FFI_Error *error = api->XLA_FFI_ThreadPool_Schedule(&args);
    if (!error) continue;
    XLA_FFI_Error_Destroy_Args destroyed = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
    api->XLA_FFI_Error_Destroy(&destroyed);
    pthread_mutex_lock(&job->mutex);
    job->references--;
    pthread_mutex_unlock(&job->mutex);
    break;
  }
  int is_done = work(job);
  pthread_mutex_lock(&job->mutex);
  job->is_closed = 1;
  while (job->active) pthread_cond_wait(&job->idle, &job->mutex);
  is_done |= atomic_load(&job->next) >= job->num_items;
  release(job);
  free(items);
  if (!is_done) fail(call, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "paged attention: no memory for scratch");
  return is_done;
}

static void clear(const Call *call, int64_t first, int64_t end) {
  const int64_t heads = call->sizes['H'], dim = call->sizes['D'];
  if (first >= end) return;
  float *out = call->results[0]->data, *lse = call->results[1]->data;
  memset(out + first * heads * dim, 0, sizeof(float) * (size_t)((end - first) * heads * dim));
  for (int64_t i = first * heads; i < end * heads; i++) lse[i] = -INFINITY;
}

// ---- Decode rows and groups that share a prefix: contexts that are split, and merged by log-sum-exp

typedef struct {
  int64_t row, first, end;                 // of the page table; keys
  int64_t place, count;                    // of results
  const int32_t *members;                  // as in Item
} Context;

static void merge(const Call *call, const Context *context, const float *partial, int64_t splits) {
  const int64_t heads = call->sizes['H'], dim = call->sizes['D'], rows = context->count * heads;
  float *out = call->results[0]->data, *lse = call->results[1]->data;
  for (int64_t r = 0; r < rows; r++) {
    if (context->members) {
      int64_t token = context->members[r / heads];
      if (token < 0 || token >= call->sizes['S']) continue;
    }
    float sums[MAX_DIM] = {0}, top = NEVER, total = 0;
    for (int64_t s = 0; s < splits; s++) {
      const float *part = partial + (s * rows + r) * (dim + 2);
      float new_top = part[dim] > top ? part[dim] : top, old = exp2f(top - new_top), scale = exp2f(part[dim] - new_top);
      for (int64_t d = 0; d < dim; d++) sums[d] = sums[d] * old + part[d] * scale;
      total = total * old + part[dim + 1] * scale;
      top = new_top;
    }
    int64_t at = context->place * heads + r;
    finish(sums, top, total, dim, out + at * dim, lse + at);
  }
}

static XLA_FFI_Error *attend_contexts(Call *call, int is_decode, const Context *contexts, int64_t num_contexts) {
  const int64_t kv_heads = call->sizes['W'] / call->sizes['D'], record = call->sizes['D'] + 2;
  int64_t num_parts = 0, partial_floats = 0;
  for (int64_t i = 0; i < num_contexts; i++) {
    int64_t splits = num_splits(contexts[i].first, contexts[i].end);
    num_parts += splits;
    if (splits > 1) partial_floats += splits * contexts[i].count * call->sizes['H'] * record;
  }
  const int64_t threads = num_threads(call), heads_per_item = num_parts < 4 * threads ? 1 : kv_heads;
  float *partials = malloc(sizeof(float) * (size_t)(partial_floats + 1)), *partial = partials;
  if (!partials) {
    fail(call, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "paged attention: no memory for %lld partial sums",
         (long long)partial_floats);
    return call->error;
  }
  Job *job = open_job(call, is_decode, num_parts * (kv_heads / heads_per_item));
  if (!job) {
    free(partials);
    return call->error;
  }
  for (int64_t i = 0; i < num_contexts; i++) {
    const Context *c = contexts + i;
    int64_t splits = num_splits(c->first, c->end);
    for (int64_t first = c->first; first < c->end; first = (first / SPLIT + 1) * SPLIT) {
      int64_t end = (first / SPLIT + 1) * SPLIT;
      for (int64_t head = 0; head < kv_heads; head += heads_per_item)
        add_item(job, (Item){ints(call, 3) + c->row * call->sizes['M'], first, end < c->end ? end : c->end,
                             head, heads_per_item, c->place, c->place, c->count, c->members, -1,
                             splits > 1 ? partial : NULL});
      if (splits > 1) partial += c->count * call->sizes['H'] * record;
    }
  }
  if (run(call, job, threads)) {
    partial = partials;
    for (int64_t i = 0; i < num_contexts; i++) {
      int64_t splits = num_splits(contexts[i].first, contexts[i].end);
      if (splits < 2) continue;
      merge(call, contexts + i, partial, splits);
      partial += splits * contexts[i].count * call->sizes['H'] * record;
    }
  }
  free(partials);
  return call->error;
}

XLA_FFI_Error *jradix_decode(XLA_FFI_CallFrame *frame) {
  static const char *const specs[] = {"q fSHD", "k_pages kNPW", "v_pages kNPW", "page_table iSM", "kv_lens iS",
                                      "kv_starts iS", "num_rows i", "out fSHD", "lse fSH"};
  Call call;
  if (!open_call(&call, frame, 9, specs)) return call.error;
  const int64_t num_rows = limit(*ints(&call, 6), 0, call.sizes['S']);
  Context *contexts = calloc((size_t)num_rows + 1, sizeof *contexts);
  if (!contexts) {
    fail(&call, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "paged attention: no memory for %lld rows", (long long)num_rows);
    return call.error;
  }
  for (int64_t row = 0; row < num_rows && !call.error; row++) {
    int64_t end = limit(ints(&call, 4)[row], 0, INT32_MAX), first = limit(ints(&call, 5)[row], 0, end);
    if (call.window && end - call.window > first) first = end - call.window;
    contexts[row] = (Context){row, first, end, row, 1, NULL};
    if (first == end) clear(&call, row, row + 1);
    else check_pages(&call, row, first, end);
  }
  clear(&call, num_rows, call.sizes['S']);
  if (!call.error) attend_contexts(&call, 1, contexts, num_rows);
  free(contexts);
  return call.error;
}

XLA_FFI_Error *jradix_shared_prefix(XLA_FFI_CallFrame *frame) {
  static const char *const specs[] = {"q fSHD", "k_pages kNPW", "v_pages kNPW", "prefix_pages iGM", "prefix_lens iG",
                                      "members iGR", "out fGRHD", "lse fGRH"};
  Call call;
  if (!open_call(&call, frame, 8, specs)) return call.error;
  const int64_t num_groups = call.sizes['G'], num_places = call.sizes['R'];
  Context *contexts = calloc((size_t)num_groups + 1, sizeof *contexts);
  if (!contexts) {
    fail(&call, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "paged attention: no memory for %lld groups",
         (long long)num_groups);
    return call.error;
  }
  for (int64_t group = 0; group < num_groups && !call.error; group++) {
    const int32_t *members = ints(&call, 5) + group * num_places;
    int64_t end = limit(ints(&call, 4)[group], 0, INT32_MAX), count = 0;
    for (int64_t i = 0; i < num_places; i++) {
      int is_row = end > 0 && members[i] >= 0 && members[i] < call.sizes['S'];
      if (is_row) count++;
      else clear(&call, group * num_places + i, group * num_places + i + 1);
    }
    contexts[group] = (Context){group, 0, count ? end : 0, group * num_places, num_places, members};
    if (count) check_pages(&call, group, 0, end);
  }
  if (!call.error) attend_contexts(&call, 0, contexts, num_groups);
  free(contexts);
  return call.error;
}

// ---- Chunks of prompts

XLA_FFI_Error *jradix_extend(XLA_FFI_CallFrame *frame) {
  static const char *const specs[] = {"q fTHD", "k_pages kNPW", "v_pages kNPW", "page_table iSM", "kv_lens iS",
                                      "cu_q_lens iC", "first_row i", "out fTHD", "lse fTH"};
  Call call;
  if (!open_call(&call, frame, 9, specs)) return call.error;
  const int64_t num_rows = call.sizes['S'], num_tokens = call.sizes['T'];
  const int32_t *kv_lens = ints(&call, 4), *cu_q_lens = ints(&call, 5);
  if (call.sizes['C'] != num_rows + 1) {
    fail(&call, XLA_FFI_Error_Code_INVALID_ARGUMENT, "paged attention: %lld cu_q_lens for %lld rows; expected %lld",
         (long long)call.sizes['C'], (long long)num_rows, (long long)num_rows + 1);
    return call.error;
  }
  const int64_t first_row = limit(*ints(&call, 6), 0, num_rows);
  const int64_t kv_heads = call.sizes['W'] / call.sizes['D'], group = call.sizes['H'] / kv_heads;
  const int64_t tile = group < TILE ? TILE / group : 1;
  int64_t num_items = 0;
  for (int64_t row = first_row; row < num_rows; row++) {
    const int64_t start = cu_q_lens[row], end = cu_q_lens[row + 1], kv_len = kv_lens[row];
    if (start < 0 || end < start || end > num_tokens || (kv_len > 0 && end - start > kv_len)) {
      fail(&call, XLA_FFI_Error_Code_OUT_OF_RANGE,
           "paged attention: row %lld has tokens %lld to %lld of %lld and a context of %lld; expected ascending tokens "
           "that are part of the context", (long long)row, (long long)start, (long long)end, (long long)num_tokens,
           (long long)kv_len);
      return call.error;
    }
    if (kv_len <= 0) clear(&call, start, end);
    if (kv_len <= 0 || start == end) continue;
    int64_t oldest = call.window ? kv_len - (end - start) + 1 - call.window : 0;
    if (!check_pages(&call, row, oldest > 0 ? oldest : 0, kv_len)) return call.error;
    num_items += (end - start + tile - 1) / tile * kv_heads;
  }
  clear(&call, 0, limit(cu_q_lens[first_row], 0, num_tokens));
  clear(&call, limit(cu_q_lens[num_rows], 0, num_tokens), num_tokens);
  Job *job = open_job(&call, 0, num_items);
  if (!job) return call.error;
  for (int64_t row = first_row; row < num_rows; row++) {
    const int64_t q_start = cu_q_lens[row], q_len = cu_q_lens[row + 1] - q_start;
    if (kv_lens[row] <= 0 || q_len == 0) continue;
    for (int64_t start = (q_len - 1) / tile * tile; start >= 0; start -= tile) {  // the longest first
      const int64_t count = q_len - start < tile ? q_len - start : tile, position = kv_lens[row] - q_len + start;
      int64_t first = call.window && position + 1 > call.window ? position + 1 - call.window : 0;
      for (int64_t head = 0; head < kv_heads; head++)
        add_item(job, (Item){ints(&call, 3) + row * call.sizes['M'], first, position + count, head, 1, q_start + start,
                             q_start + start, count, NULL, position, NULL});
    }
  }
  run(&call, job, num_threads(&call));
  return call.error;
}
