// Paged attention on CPUs, as XLA FFI handlers: decode, extend and shared_prefix of attention_native.py.
//
//     item of a call    queries                       keys
//     decode            one token                     up to the next multiple of SPLIT
//     extend            up to most_rows of a chunk    all
//     shared_prefix     members of a group            up to the next multiple of SPLIT
//
// Blocks of keys begin at multiples of KEYS and items end at multiples of SPLIT, however many threads there are and
// whatever else is in the batch, so that each result has the same bits always.
#include "attention_native_job.h"

enum { SPLIT = 1024 };

// ---- Decode rows and groups that share a prefix: contexts that are split, and merged by log-sum-exp

typedef struct {
  int64_t row, first, end;                 // of the page table; keys
  int64_t place, count;                    // of results
  const int32_t *members;                  // as in Item
} Context;

static int64_t num_splits(int64_t first, int64_t end) {
  return first < end ? (end + SPLIT - 1) / SPLIT - first / SPLIT : 0;
}

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
    finish(sums, 1, top, total, dim, out + at * dim, lse + at);
  }
}

static XLA_FFI_Error *attend_contexts(Call *call, int is_decode, const Context *contexts, int64_t num_contexts) {
  const int64_t kv_heads = call->sizes['W'] / call->sizes['D'], record = call->sizes['D'] + 2;
  int64_t num_parts = 0, partial_floats = 0, most_count = 0;
  for (int64_t i = 0; i < num_contexts; i++) {
    int64_t splits = num_splits(contexts[i].first, contexts[i].end);
    num_parts += splits;
    if (contexts[i].count > most_count) most_count = contexts[i].count;
    if (splits > 1) partial_floats += splits * contexts[i].count * call->sizes['H'] * record;
  }
  // Heads are taken apart for the threads' sake only: together they lie side by side in memory.
  const int64_t threads = num_threads(call->frame);
  const int is_apart = num_parts < 4 * threads && (is_decode || num_parts % threads);
  const int64_t heads_per_item = is_apart ? 1 : kv_heads;
  float *partials = malloc(sizeof(float) * (size_t)(partial_floats + 1)), *partial = partials;
  if (!partials) {
    fail(call, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "paged attention: no memory for %lld partial sums",
         (long long)partial_floats);
    return call->error;
  }
  // Large groups are halved where their items would leave threads idle: rows have the same bits in any company.
  const int64_t num_items = num_parts * (kv_heads / heads_per_item);
  const int is_halved = !is_decode && most_count * call->sizes['H'] / kv_heads >= ROWS && num_items < 4 * threads &&
                        num_items % threads;
  Job *job = open_job(call, is_decode, is_halved ? 2 * num_items : num_items);
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
        for (int64_t at = 0, count = is_halved ? (c->count + 1) / 2 : c->count; at < c->count; at += count)
          add_item(job, (Item){ints(call, 3) + c->row * call->sizes['M'], first, end < c->end ? end : c->end,
                               head, heads_per_item, c->place + at, c->place + at,
                               count < c->count - at ? count : c->count - at, c->members ? c->members + at : NULL, -1,
                               splits > 1 ? partial + at * call->sizes['H'] * record : NULL});
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
  const int64_t columns = call.sizes['M'], heads_per_kv_head = call.sizes['H'] * call.sizes['D'] / call.sizes['W'];
  const int64_t most = most_rows(&call) / heads_per_kv_head;
  int64_t num_contexts = 0, last_group = -1;
  for (int64_t group = 0; group < num_groups && !call.error; group++) {
    const int32_t *members = ints(&call, 5) + group * num_places, *pages = ints(&call, 3) + group * columns;
    int64_t end = limit(ints(&call, 4)[group], 0, INT32_MAX), count = 0;
    if (!end) clear_lse(&call, group * num_places, (group + 1) * num_places);     // there are many
    for (int64_t i = 0; i < num_places && end; i++) {
      if (members[i] >= 0 && members[i] < call.sizes['S']) count++;
      else clear(&call, group * num_places + i, group * num_places + i + 1);
    }
    if (!count || !check_pages(&call, group, 0, end)) continue;
    // A group that was given in parts is read in one, as far as an item takes its rows.
    Context *last = contexts + num_contexts - 1;
    if (group > 0 && last_group == group - 1 && last->end == end && last->count + num_places <= most &&
        !memcmp(pages, pages - columns, sizeof *pages * (size_t)((end + call.sizes['P'] - 1) / call.sizes['P'])))
      last->count += num_places;
    else
      contexts[num_contexts++] = (Context){group, 0, end, group * num_places, num_places, members};
    last_group = group;
  }
  if (!call.error) attend_contexts(&call, 0, contexts, num_contexts);
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
  const int64_t tile = group < most_rows(&call) ? most_rows(&call) / group : 1;
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
  run(&call, job, num_threads(call.frame));
  return call.error;
}
