// What every handler of XLA's foreign function interface begins and fails with.
#include "xla/ffi/api/c_api.h"

// True where XLA only asks for the version of the interface, which is then answered; the handler returns NULL.
static int answers_metadata(const XLA_FFI_CallFrame *frame) {
  XLA_FFI_Metadata_Extension *asked = (XLA_FFI_Metadata_Extension *)frame->extension_start;
  if (!asked || asked->extension_base.type != XLA_FFI_Extension_Metadata) return 0;
  asked->metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  asked->metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return 1;
}

static inline XLA_FFI_Error *make_error(const XLA_FFI_CallFrame *frame, XLA_FFI_Error_Code code, const char *text) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, text, code};
  return frame->api->XLA_FFI_Error_Create(&args);
}
