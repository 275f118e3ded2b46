// Memory that nobody writes: the result of the call is what XLA allocates for it. The kernel hands out the pages of a
// large allocation when they are first written, so a pool of which little is used costs little.
#include <stddef.h>

#include "native_frame.h"

XLA_FFI_Error *jradix_untouched(XLA_FFI_CallFrame *frame) {
  answers_metadata(frame);
  return NULL;
}
