// A call from XLA: its buffers and settings, checked, and its errors.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "native_frame.h"

enum { MAX_GROUP = 64 };

typedef struct {
  const XLA_FFI_CallFrame *frame;
  int64_t sizes[128];                      // by the letter of the dimension, -1 where not seen yet
  const XLA_FFI_Buffer *arguments[9], *results[2];
  float sm_scale, soft_cap;
  int32_t window;
  XLA_FFI_Error *error;
} Call;

static int fail(Call *call, XLA_FFI_Error_Code code, const char *format, ...) {
  char text[320];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  call->error = make_error(call->frame, code, text);
  return 0;
}

// `spec` is a name, a type (f: float32, k: float32, float16 or bfloat16, i: int32) and a letter for each dimension.
static int check_buffer(Call *call, const XLA_FFI_Buffer *buffer, const char *spec) {
  const char *dims = strrchr(spec, ' ') + 1, type = *dims++;
  const int64_t rank = (int64_t)strlen(dims);
  int is_right = type == 'f'   ? buffer->dtype == XLA_FFI_DataType_F32
                 : type == 'i' ? buffer->dtype == XLA_FFI_DataType_S32
                               : buffer->dtype == XLA_FFI_DataType_F32 || buffer->dtype == XLA_FFI_DataType_F16 ||
                                     buffer->dtype == XLA_FFI_DataType_BF16;
  if (!is_right || buffer->rank != rank)
    return fail(call, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                "paged attention: %.*s has XLA type %d and rank %lld; expected type %s and rank %lld",
                (int)(dims - spec - 2), spec, (int)buffer->dtype, (long long)buffer->rank,
                type == 'f' ? "float32" : type == 'i' ? "int32" : "float32, float16 or bfloat16", (long long)rank);
  int is_empty = 0;
  for (int64_t i = 0; i < rank; i++) {
    int64_t *size = call->sizes + dims[i];
    if (*size < 0) *size = buffer->dims[i];
    if (*size != buffer->dims[i])
      return fail(call, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                  "paged attention: axis %lld of %.*s is %lld; expected %lld", (long long)i,
                  (int)(dims - spec - 2), spec, (long long)buffer->dims[i], (long long)*size);
    is_empty |= *size == 0;
  }
  if (!buffer->data && !is_empty)
    return fail(call, XLA_FFI_Error_Code_INVALID_ARGUMENT, "paged attention: %.*s has no data", (int)(dims - spec - 2),
                spec);
  return 1;
}

static const void *find_scalar(const XLA_FFI_Attrs *attrs, const char *name, XLA_FFI_DataType dtype) {
  for (int64_t i = 0; i < attrs->size; i++) {
    if (attrs->names[i]->len != strlen(name) || memcmp(attrs->names[i]->ptr, name, strlen(name))) continue;
    const XLA_FFI_Scalar *scalar = attrs->attrs[i];
    return attrs->types[i] == XLA_FFI_AttrType_SCALAR && scalar->dtype == dtype ? scalar->value : NULL;
  }
  return NULL;
}

// Fills `call` from its frame. Returns 1 if the call is to be carried out; otherwise `error` is what to return.
static int open_call(Call *call, XLA_FFI_CallFrame *frame, int num_specs, const char *const *specs) {
  call->frame = frame;
  call->error = NULL;
  if (answers_metadata(frame)) return 0;
  if (frame->struct_size < XLA_FFI_CallFrame_STRUCT_SIZE || frame->args.size != num_specs - 2 || frame->rets.size != 2)
    return fail(call, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                "paged attention: a call frame of %zu bytes, %lld arguments and %lld results; expected %d, %d and 2",
                frame->struct_size, (long long)frame->args.size, (long long)frame->rets.size,
                (int)XLA_FFI_CallFrame_STRUCT_SIZE, num_specs - 2);
  memset(call->sizes, -1, sizeof call->sizes);
  for (int i = 0; i < num_specs - 2; i++) {
    call->arguments[i] = frame->args.types[i] == XLA_FFI_ArgType_BUFFER ? frame->args.args[i] : NULL;
    if (!call->arguments[i]) return fail(call, XLA_FFI_Error_Code_INVALID_ARGUMENT, "%s is no buffer", specs[i]);
    if (!check_buffer(call, call->arguments[i], specs[i])) return 0;
  }
  for (int i = 0; i < 2; i++) {
    const char *spec = specs[num_specs - 2 + i];
    call->results[i] = frame->rets.types[i] == XLA_FFI_RetType_BUFFER ? frame->rets.rets[i] : NULL;
    if (!call->results[i]) return fail(call, XLA_FFI_Error_Code_INVALID_ARGUMENT, "%s is no buffer", spec);
    if (!check_buffer(call, call->results[i], spec)) return 0;
  }
  const float *sm_scale = find_scalar(&frame->attrs, "sm_scale", XLA_FFI_DataType_F32);
  const float *soft_cap = find_scalar(&frame->attrs, "soft_cap", XLA_FFI_DataType_F32);
  const int32_t *window = find_scalar(&frame->attrs, "sliding_window", XLA_FFI_DataType_S32);
  if (!sm_scale || !soft_cap || !window || *window < 0)
    return fail(call, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                "paged attention: expected float32 sm_scale and soft_cap and an int32 sliding_window >= 0");
  call->sm_scale = *sm_scale, call->soft_cap = *soft_cap, call->window = *window;
  const int64_t dim = call->sizes['D'], width = call->sizes['W'], heads = call->sizes['H'];
  const int64_t kv_heads = dim > 0 ? width / dim : 0, group = kv_heads > 0 ? heads / kv_heads : 0;
  if (dim < 8 || dim > MAX_DIM || dim % 8 || width != kv_heads * dim || heads != group * kv_heads || group < 1 ||
      group > MAX_GROUP || call->sizes['P'] < 1 || call->sizes['N'] < 1 ||
      call->arguments[1]->dtype != call->arguments[2]->dtype)
    return fail(call, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                "paged attention: %lld query heads of %lld on pages [%lld, %lld, %lld]; expected heads of a multiple "
                "of 8 up to %d, up to %d of them to a kv head, and keys and values of one type",
                (long long)heads, (long long)dim, (long long)call->sizes['N'], (long long)call->sizes['P'],
                (long long)width, MAX_DIM, MAX_GROUP);
  return 1;
}

static const int32_t *ints(const Call *call, int i) { return call->arguments[i]->data; }

// Whether the keys [first, end) of row `row` of the page table (argument 3) are in pages that exist.
static int check_pages(Call *call, int64_t row, int64_t first, int64_t end) {
  const int64_t page_size = call->sizes['P'], columns = call->sizes['M'];
  if (end > columns * page_size)
    return fail(call, XLA_FFI_Error_Code_OUT_OF_RANGE,
                "paged attention: row %lld has %lld tokens; its page table holds %lld pages of %lld tokens",
                (long long)row, (long long)end, (long long)columns, (long long)page_size);
  const int32_t *pages = ints(call, 3) + row * columns;
  for (int64_t i = first / page_size; i * page_size < end; i++)
    if (pages[i] < 0 || pages[i] >= call->sizes['N'])
      return fail(call, XLA_FFI_Error_Code_OUT_OF_RANGE,
                  "paged attention: page %d in column %lld of row %lld; expected 0 to %lld", pages[i], (long long)i,
                  (long long)row, (long long)call->sizes['N'] - 1);
  return 1;
}
