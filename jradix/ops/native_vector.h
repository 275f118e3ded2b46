// Vectors of float32, in GCC's and Clang's extensions: powers, sums, and loads of the types of pages.
#include <stdint.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#ifndef LANES
#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#endif
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef float v8 __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(mask, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#if defined(__F16C__) && __has_builtin(__builtin_ia32_vcvtph2ps256)
#define WIDEN(x) __builtin_ia32_vcvtph2ps256((short __attribute__((vector_size(16))))(x))
#elif defined(__F16C__) && defined(__clang__)
#define WIDEN(x) __builtin_convertvector((_Float16 __attribute__((vector_size(16))))(x), v8)
#endif
#endif
#ifndef SHUFFLE
#define SHUFFLE(mask, a, b, ...) __builtin_shuffle(a, b, (mask){__VA_ARGS__})
#endif

INLINE vf spread(float x) { return x - (vf){0}; }
INLINE vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf only(vi mask, vf a) { return (vf)(mask & (vi)a); }

// `larger`: b where one of them is NaN. KEEP: in a register, where GCC would read it from memory at each use.
#ifdef __AVX__
#define KEEP(x) __asm__("" : "+v"(x))
INLINE vf larger(vf a, vf b) {
  __asm__("vmaxps %1, %2, %0" : "=v"(a) : "v"(b), "v"(a));
  return a;
}
#else
#define KEEP(x) (void)(x)
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }
#endif

// 2^x to 1 ulp for x <= 0, 0 below the normal numbers, NaN for NaN. Minimax polynomial on [-0.5, 0.5].
INLINE vf exp2_of(vf x) {
  const vf magic = spread(12583039.0f);  // 1.5 * 2^23 + 127: the low bits of x + magic are the exponent of 2^round(x)
  vf shifted = x + magic, f = x - (shifted - magic);
  vf p = 1.53458124e-4f * f + 1.33999309e-3f;
  p = p * f + 9.61848907e-3f;
  p = p * f + 5.55032864e-2f;
  p = p * f + 2.40226462e-1f;
  p = p * f + 6.93147182e-1f;
  p = p * f + 1.0f;
  return (vf)(~(x < -126.0f) & (vi)(p * (vf)((vu)shifted << 23)));
}

// tanh(x * ln2 / 2), to 1e-7.
INLINE vf tanh_of(vf x) {
  vi sign = (vi)x & INT32_MIN;
  vf power = exp2_of((vf)((vi)x | INT32_MIN));
  return (vf)((vi)((1.0f - power) / (1.0f + power)) | sign);
}

// Eight numbers from p on, as float32.
INLINE v8 load8(int dtype, const char *p) {
  if (dtype == XLA_FFI_DataType_F32) {
    v8 x;
    memcpy(&x, p, sizeof x);
    return x;
  }
  h8 half;
  memcpy(&half, p, sizeof half);
#ifdef WIDEN
  if (dtype == XLA_FFI_DataType_F16) return WIDEN(half);
#endif
  u8 bits = __builtin_convertvector(half, u8);
  if (dtype == XLA_FFI_DataType_BF16) return (v8)(bits << 16);
  // float16: exponents are rebiased; subnormal numbers are normalised by a subtraction that is exact.
  u8 exponent = bits & 0x7c00, wide = ((bits & 0x7fff) << 13) + (112u << 23);
  wide += (u8)(exponent == 0x7c00) & (112u << 23);
  v8 small = (v8)(wide + (1u << 23)) - (v8)((u8){0} + (113u << 23));
  u8 is_small = (u8)(exponent == 0);
  return (v8)((is_small & (u8)small) | (~is_small & wide) | (bits & 0x8000) << 16);
}

// The sums of four vectors.
INLINE v4 sums_of(const v8 x[4]) {
  v8 a = SHUFFLE(u8, x[0], x[1], 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(u8, x[0], x[1], 2, 10, 3, 11, 6, 14, 7, 15);
  v8 b = SHUFFLE(u8, x[2], x[3], 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(u8, x[2], x[3], 2, 10, 3, 11, 6, 14, 7, 15);
  v8 c = SHUFFLE(u8, a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(u8, a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  v4 d[2];
  memcpy(d, &c, sizeof d);
  return d[0] + d[1];
}
