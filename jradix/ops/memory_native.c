// Pools of pages in the CPU's memory, as XLA FFI handlers: see memory_native.py.
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "native_frame.h"

// Of its axes from the first one given on; 0 for a type that is not served.
static uint64_t bytes_of(const XLA_FFI_Buffer *buffer, int64_t first_axis) {
  const int is_half = buffer->dtype == XLA_FFI_DataType_F16 || buffer->dtype == XLA_FFI_DataType_BF16;
  uint64_t size = buffer->dtype == XLA_FFI_DataType_F32 ? 4 : is_half ? 2 : 0;
  for (int64_t i = first_axis; i < buffer->rank; i++) size *= (uint64_t)buffer->dims[i];
  return size;
}

// The kernel is told to forget what the memory holds, and hands out empty pages when it is touched.
static void clear(char *memory, uint64_t size) {
#ifdef __linux__      // elsewhere the advice does not promise zeros
  const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), start = (uint64_t)(uintptr_t)memory, end = start + size;
  const uint64_t first = (start + page - 1) / page * page, last = end / page * page;
  if (first < last && !madvise((void *)(uintptr_t)first, last - first, MADV_DONTNEED)) {
    memset(memory, 0, first - start);
    memset((void *)(uintptr_t)last, 0, end - last);
    return;
  }
#endif
  memset(memory, 0, size);
}

XLA_FFI_Error *jradix_zeros(XLA_FFI_CallFrame *frame) {
  if (answers_metadata(frame)) return NULL;
  const XLA_FFI_Buffer *out = frame->rets.size == 1 ? frame->rets.rets[0] : NULL;
  const uint64_t size = out ? bytes_of(out, 0) : 0;
  if (!size)
    return make_error(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                      "zeros: expected one result of float32, float16 or bfloat16, not empty");
  clear(out->data, size);
  return NULL;
}

// Copies row t to place slots[t] of an array of such rows; a place outside of it: nowhere.
XLA_FFI_Error *jradix_write_rows(XLA_FFI_CallFrame *frame) {
  if (answers_metadata(frame)) return NULL;
  if (frame->args.size != 3 || frame->rets.size != 1)
    return make_error(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "write_rows: expected array, rows and slots");
  const XLA_FFI_Buffer *array = frame->args.args[0], *rows = frame->args.args[1], *slots = frame->args.args[2];
  const XLA_FFI_Buffer *out = frame->rets.rets[0];
  const uint64_t size = bytes_of(out, 0), row_size = rows->rank ? bytes_of(rows, 1) : 0;
  if (array->data != out->data || array->dtype != out->dtype || rows->dtype != out->dtype || !row_size ||
      size % row_size || slots->dtype != XLA_FFI_DataType_S32 || slots->rank != 1 || slots->dims[0] != rows->dims[0])
    return make_error(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                      "write_rows: expected an array that the result takes the memory of, rows of its type whose size "
                      "divides the array's, and an int32 slot for each");
  const int32_t *to = slots->data;
  for (int64_t t = 0; t < rows->dims[0]; t++)
    if (to[t] >= 0 && (uint64_t)to[t] < size / row_size)
      memcpy((char *)out->data + (uint64_t)to[t] * row_size, (const char *)rows->data + (uint64_t)t * row_size,
             row_size);
  return NULL;
}
