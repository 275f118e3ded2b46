// Zeros that take no memory until they are written: the kernel is told to forget what the pages of the result hold,
// and hands out empty ones when they are touched.
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "native_frame.h"

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
  uint64_t size = 0;
  if (out && out->dtype == XLA_FFI_DataType_F32) size = 4;
  if (out && (out->dtype == XLA_FFI_DataType_F16 || out->dtype == XLA_FFI_DataType_BF16)) size = 2;
  if (!size)
    return make_error(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                      "zeros: expected one result of float32, float16 or bfloat16");
  for (int64_t i = 0; i < out->rank; i++) size *= (uint64_t)out->dims[i];
  clear(out->data, size);
  return NULL;
}
