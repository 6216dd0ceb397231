/* Sixteen numbers side by side, in GCC's and Clang's vectors, and where they have none for it in AVX-512's own words. */
#pragma once
#include <cstdint>
#include <cstring>
#ifdef __SSE__
#include <immintrin.h>
#endif

#define LANES 16

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, ivec{__VA_ARGS__})
#endif

static inline vec all(float x) { return vec{} + x; }
static inline uvec count_up() { return uvec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

/* `yes` says of every lane whether something holds. Where a number is none, `larger` and `smaller` give the second. */
#ifdef __AVX512F__
typedef __mmask16 yes;
static inline yes above(vec a, vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ); }
static inline vec choose(yes where, vec a, vec b) { return (vec)_mm512_mask_blend_ps(where, (__m512)b, (__m512)a); }
/* a + b where it holds; one operation, where a choice between two results would be another. */
static inline vec add_where(yes where, vec a, vec b, vec other)
{
    return (vec)_mm512_mask_add_ps((__m512)other, where, (__m512)a, (__m512)b);
}
static inline yes none_of(yes where) { return ~where; }
static inline vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
static inline vec smaller(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
#else
typedef ivec yes;
static inline yes above(vec a, vec b) { return a > b; }
static inline vec choose(yes where, vec a, vec b) { return where ? a : b; }
static inline vec add_where(yes where, vec a, vec b, vec other) { return where ? a + b : other; }
static inline yes none_of(yes where) { return ~where; }
static inline vec larger(vec a, vec b) { return a > b ? a : b; }
static inline vec smaller(vec a, vec b) { return a < b ? a : b; }
#endif

/* 1/x of normal numbers; relative error about 1e-7. */
static inline vec over(vec x)
{
#ifdef __AVX512F__
    vec guess = (vec)_mm512_rcp14_ps((__m512)x);
    return guess * (2.0f - x * guess);
#else
    return 1.0f / x;
#endif
}

/* A polynomial, the coefficient of the highest power first. */
template <int COUNT> static inline vec polynomial(const float (&coefficients)[COUNT], vec x)
{
    vec p = all(coefficients[0]);
    for (int i = 1; i < COUNT; i++) p = p * x + coefficients[i];
    return p;
}

/* 2 to the (x * factor) for results that are normal numbers; relative error about 1e-7, exactly 1 for x = 0. */
static inline vec exp2_(vec x, float factor)
{
    const float to_whole = 12582912.0f; /* what is added to it is rounded to whole numbers */
    const float of_r[] = {0.00132647271f, 0.00967151265f, 0.0555073374f, 0.240222421f, 0.693146978f, 1.0f};
    vec whole = x * factor + to_whole, r = x * factor - (whole - to_whole);
    return (vec)((ivec)polynomial(of_r, r) + ((ivec)whole << 23));
}
