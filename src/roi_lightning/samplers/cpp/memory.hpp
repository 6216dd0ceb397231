/* Sixteen groups between memory and a vector per element. */
#pragma once
#include "numbers.hpp"

/* What all groups share: see `Draw` in base.py. */
struct Draw {
    int64_t groups, first; /* how many are here, and how many of the tensor come before */
    uint32_t key0, key1;
    float over_lam, over_tau, push;
    int32_t hard;
};

/* Loops over the elements of a group are unrolled, so that they stay in registers. */
#define ELEMENTS _Pragma("GCC unroll 16") for (int m = 0; m < M; m++)
#define POWER_OF_TWO ((M & (M - 1)) == 0)

/* Sixteen groups that one pass works on. Element m of lane w is at first + w * M + m. */
struct Block {
    int64_t first;
    int lanes, full; /* lanes in use; whether they are loaded and stored as one run */
    uvec index;      /* the lanes' first elements, as the noise counts */
};

static inline Block block_at(int64_t group, int64_t to, const Draw *d)
{
    int lanes = to - group < LANES ? (int)(to - group) : LANES;
    uvec index = count_up() * M + (uint32_t)((d->first + group) * M);
    return {group * M, lanes, lanes == LANES && POWER_OF_TWO, index};
}

static inline vec evens(vec a, vec b) { return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30); }
static inline vec odds(vec a, vec b) { return SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31); }
static inline vec low(vec a, vec b) { return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
static inline vec high(vec a, vec b)
{
    return SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

/* 16 groups as they are in memory, K things each, to a vector per thing: halve by even and odd positions, log2(K) times.
 * After s rounds, vector i of each of 2^s runs of K / 2^s holds positions whose last s bits are the run's, reversed. */
template <int K> static inline void part(vec v[K])
{
    _Pragma("GCC unroll 4") for (int run = K; run > 1; run /= 2) {
        vec next[K];
        _Pragma("GCC unroll 16") for (int r = 0; r < K; r += run)
            _Pragma("GCC unroll 16") for (int i = 0; i < run / 2; i++) {
                next[r + i] = evens(v[r + 2 * i], v[r + 2 * i + 1]);
                next[r + run / 2 + i] = odds(v[r + 2 * i], v[r + 2 * i + 1]);
            }
        std::memcpy(v, next, sizeof next);
    }
}
template <int K> static inline void join(vec v[K])
{
    _Pragma("GCC unroll 4") for (int run = 2; run <= K; run *= 2) {
        vec next[K];
        _Pragma("GCC unroll 16") for (int r = 0; r < K; r += run)
            _Pragma("GCC unroll 16") for (int i = 0; i < run / 2; i++) {
                next[r + 2 * i] = low(v[r + i], v[r + run / 2 + i]);
                next[r + 2 * i + 1] = high(v[r + i], v[r + run / 2 + i]);
            }
        std::memcpy(v, next, sizeof next);
    }
}
template <int K> static inline constexpr int reversed(int k)
{
    int r = 0;
    for (int bit = 1; bit < K; bit *= 2) r = 2 * r + (k & bit ? 1 : 0);
    return r;
}

/* All elements of sixteen groups, side by side in memory. */
static inline void load_run(const float *from, vec to[M])
{
    vec v[M];
    std::memcpy(v, from, sizeof v);
    part<M>(v);
    ELEMENTS to[m] = v[reversed<M>(m)];
}
static inline void store_run(float *to, const vec from[M])
{
    vec v[M];
    ELEMENTS v[reversed<M>(m)] = from[m];
    join<M>(v);
    std::memcpy(to, v, sizeof v);
}
#if WEIGHT == 2
static inline void load_run(const _Float16 *from, vec to[M])
{
    weights_t half[M];
    vec v[M];
    std::memcpy(half, from, sizeof half);
    ELEMENTS v[m] = widen(half[m]);
    load_run((const float *)v, to);
}
static inline void store_run(_Float16 *to, const vec from[M])
{
    weights_t half[M];
    vec v[M];
    store_run((float *)v, from);
    ELEMENTS narrow(v[m], half[m]);
    std::memcpy(to, half, sizeof half);
}
#elif WEIGHT == 1
/* Two elements go together, as one number of 32 bits. */
static inline void load_run(const uint16_t *from, vec to[M])
{
    constexpr int K = M / 2;
    vec v[K];
    std::memcpy(v, from, sizeof v);
    part<K>(v);
    _Pragma("GCC unroll 8") for (int k = 0; k < K; k++) {
        uvec pair = (uvec)v[reversed<K>(k)];
        to[2 * k] = (vec)(pair << 16), to[2 * k + 1] = (vec)(pair & 0xFFFF0000u);
    }
}
static inline void store_run(uint16_t *to, const vec from[M])
{
    constexpr int K = M / 2;
    vec v[K];
    _Pragma("GCC unroll 8") for (int k = 0; k < K; k++)
        v[reversed<K>(k)] = (vec)(rounded(from[2 * k]) >> 16 | (rounded(from[2 * k + 1]) & 0xFFFF0000u));
    join<K>(v);
    std::memcpy(to, v, sizeof v);
}
#endif

/* Of a last few groups, or of groups of another size than a power of two. Out of line where it is rare: a twentieth
 * faster. */
#if POWER_OF_TWO
#define BY_LANE __attribute__((noinline)) static
#else
#define BY_LANE static inline
#endif
template <class Number, class Vector>
BY_LANE void load_lanes(const Number *from, int lanes, vec to[M])
{
    Vector x;
    ELEMENTS {
        for (int w = 0; w < LANES; w++) x[w] = from[(w < lanes ? w : lanes - 1) * M + m]; /* unused: the last again */
        to[m] = widen(x);
    }
}
template <class Number, class Vector>
BY_LANE void store_lanes(Number *to, int lanes, const vec from[M])
{
    Vector x;
    ELEMENTS {
        narrow(from[m], x);
        for (int w = 0; w < lanes; w++) to[w * M + m] = x[w];
    }
}

template <class Number, class Vector> static inline void load(const Number *from, const Block &b, vec to[M])
{
    if (b.full) load_run(from + b.first, to);
    else load_lanes<Number, Vector>(from + b.first, b.lanes, to);
}
template <class Number, class Vector> static inline void store(Number *to, const Block &b, const vec from[M])
{
    if (b.full) store_run(to + b.first, from);
    else store_lanes<Number, Vector>(to + b.first, b.lanes, from);
}
