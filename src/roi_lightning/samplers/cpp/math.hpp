/* Noise, powers and logarithms of sixteen values, in powers of two: a shared factor of all keys costs nothing there. */
#pragma once
#include "vectors.hpp"

#define LOG2_E 1.44269504f
#define MIN_EXPONENT (-25.0f * LOG2_E) /* of a probability's exponent, after dividing by tau */
#define NEVER (-1e30f)                 /* stands for the key -inf, of a choice that is never taken */

/* x = 2^exponent (1 + f), -1/4 <= f < 1/2, of positive, normal numbers. */
struct Split {
    vec exponent, f;
};

static inline Split split(vec x)
{
#ifdef __AVX512F__
    /* The mantissa halves from 3/2 on; there, adding half a unit of it carries into the exponent. */
    __m512 carried = (__m512)((ivec)x + 0x00400000);
    return {(vec)_mm512_getexp_ps(carried),
            (vec)_mm512_getmant_ps((__m512)x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src) - 1.0f};
#else
    ivec e = (ivec)x - 0x3F400000;
    return {__builtin_convertvector(e >> 23, vec), (vec)((ivec)x - (e & (int32_t)0xFF800000)) - 1.0f};
#endif
}

/* log2 x; error about 1e-7, the polynomial's own 5e-8. */
static inline vec log2_(vec x)
{
    const float of_f[] = {-0.0908789889f, 0.201280573f, -0.251942054f, 0.290806224f,
                          -0.360261042f,  0.480801934f, -0.721352119f, 1.4426959f};
    Split s = split(x);
    return polynomial(of_f, s.f) * s.f + s.exponent;
}

/* log2 x with a relative error of about 1e-7 where x is close to 1, too. */
static inline vec log2_close_to_one(vec x)
{
    const float of_f[] = {0.0780667235f, -0.174230223f, 0.21632487f,   -0.24272352f, 0.288191504f,
                          -0.360575922f, 0.480902081f,  -0.721348478f, 1.44269503f};
    Split s = split(x);
    return polynomial(of_f, s.f) * s.f + s.exponent;
}

/* log2(-log2 u) of the uniform numbers u of the elements at `index`, the bits of which are those of `noise`. Standard
 * Gumbel noise is minus this times log 2, but for a constant: softmaxes and orders do not see it. */
static inline vec noise_log(uvec index, uint32_t key0, uint32_t key1)
{
    uvec x = index + key0;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = ((x ^ (x >> 15)) + key1) * 0x846CA68Bu;
    x = (x >> 8) ^ (x >> 24) | 1u; /* (2 k + 1) / 2^24 = (k + 1/2) / 2^23 */
    return log2_(-log2_close_to_one(__builtin_convertvector((ivec)x, vec) * 5.96046448e-8f));
}

/* Have keys of -inf be numbers. Gives zero, or NaN where a key is NaN or +inf, or too few others are left. */
template <int K> static inline vec settled(vec key[K], int taken)
{
    vec left = {}, sum = {};
    _Pragma("GCC unroll 32") for (int k = 0; k < K; k++) {
        left = add_where(above(key[k], all(NEVER)), left, all(1.0f), left);
        key[k] = larger(all(NEVER), key[k]); /* NaN if the key is */
        sum += key[k];
    }
    return choose(above(all(taken), left), all(__builtin_nanf("")), sum - sum);
}
