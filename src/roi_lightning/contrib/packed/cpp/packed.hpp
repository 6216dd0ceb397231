/* A step of a product with a packed line: its sixteen indices, and the inputs that they choose. */
#pragma once
#include "vectors.hpp"

/* Inputs of one step, of which it keeps a vector. */
#define INPUTS (2 * LANES)

typedef int8_t bytes_t __attribute__((vector_size(LANES)));
typedef int16_t shorts_t __attribute__((vector_size(2 * LANES)));
/* By one width after the other: over all at once GCC goes number by number. */
static inline vec widen(bytes_t x)
{
    return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(x, shorts_t), ivec), vec);
}

/* Of 32 inputs in eight groups, those at sixteen indices, two of each group. */
static inline vec picked(const float *x, uvec index)
{
#if defined __AVX512F__
    uvec at = index | (count_up() >> 1 << 2);
    return (vec)_mm512_permutex2var_ps(_mm512_loadu_ps(x), (__m512i)at, _mm512_loadu_ps(x + LANES));
#elif defined __AVX2__
    __m256i at[2];
    __m256 found[2];
    uvec in_eight = index | ((count_up() >> 1 & 1) << 2);
    std::memcpy(at, &in_eight, sizeof at);
    for (int h = 0; h < 2; h++, x += LANES) {
        __m256 first = _mm256_permutevar8x32_ps(_mm256_loadu_ps(x), at[h]);
        found[h] = _mm256_blend_ps(first, _mm256_permutevar8x32_ps(_mm256_loadu_ps(x + LANES / 2), at[h]), 0xF0);
    }
    vec both;
    std::memcpy(&both, found, sizeof both);
    return both;
#else
    uint32_t at[LANES];
    float found[LANES];
    vec all;
    std::memcpy(at, &index, sizeof at);
    _Pragma("GCC unroll 1") for (int l = 0; l < LANES; l++) found[l] = x[l / 2 * 4 + at[l]];
    std::memcpy(&all, found, sizeof all);
    return all;
#endif
}

/* Sixteen indices of two bits each. */
static inline uvec sixteen_indices(const uint8_t *from)
{
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    return ((uvec{} + word) >> (2 * count_up())) & 3u;
}

/* Sixteen inputs as they come. */
static inline vec sixteen(const float *x)
{
    vec inputs;
    std::memcpy(&inputs, x, sizeof inputs);
    return inputs;
}

static inline float added_up(vec s)
{
    s += SHUFFLE(s, s, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    s += SHUFFLE(s, s, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    s += SHUFFLE(s, s, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return s[0] + s[1];
}
