/* Sixteen numbers of the type that WEIGHT names, in memory, and as vectors of fp32. */
#pragma once
#include "vectors.hpp"

static inline vec widen(vec x) { return x; }
static inline void narrow(vec from, vec &to) { to = from; }
#if WEIGHT == 0
typedef float weight_t;
typedef vec weights_t;
#elif WEIGHT == 1
typedef uint16_t weight_t;
typedef uint16_t weights_t __attribute__((vector_size(2 * LANES)));
/* Rounded to nearest, ties to even, in the upper half; a NaN that arithmetic made stays a NaN. */
static inline uvec rounded(vec x)
{
    uvec bits = (uvec)x;
    return bits + 0x7FFFu + ((bits >> 16) & 1u);
}
static inline vec widen(weights_t x) { return (vec)(__builtin_convertvector(x, uvec) << 16); }
static inline void narrow(vec from, weights_t &to) { to = __builtin_convertvector(rounded(from) >> 16, weights_t); }
#elif WEIGHT == 2
typedef _Float16 weight_t;
typedef _Float16 weights_t __attribute__((vector_size(2 * LANES)));
#ifdef __AVX512F__
static inline vec widen(weights_t x) { return (vec)_mm512_cvtph_ps((__m256i)x); }
#else
static inline vec widen(weights_t x) { return __builtin_convertvector(x, vec); }
#endif
static inline void narrow(vec from, weights_t &to) { to = __builtin_convertvector(from, weights_t); }
#endif
