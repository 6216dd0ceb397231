/* Sixteen groups between memory and a vector per member. */
#pragma once
#include "numbers.hpp"

/* Loops over members are unrolled, so that members stay in registers. */
#define MEMBERS _Pragma("GCC unroll 16") for (int m = 0; m < M; m++)
#define POWER_OF_TWO ((M & (M - 1)) == 0)

/* Sixteen groups that one pass works on. Member m of lane w lies at start[w] + m * columns. */
struct Block {
    int64_t first, columns; /* of lane 0 */
    int lanes, whole;       /* lanes in use; whether a member's lanes, or all members of all groups, lie side by side */
    uvec index;             /* the starts once more, as the noise counts */
    int64_t start[LANES];   /* set only where not whole */
};

static inline Block block_at(int64_t group, int64_t to, int64_t columns)
{
    Block b;
    int64_t row = columns == 1 ? group : group / columns, column = group - row * columns;
    b.columns = columns;
    b.lanes = to - group < LANES ? (int)(to - group) : LANES;
    b.first = row * M * columns + column;
    b.whole = b.lanes == LANES && (columns == 1 ? POWER_OF_TWO : column + LANES <= columns);
    if (b.whole) {
        b.index = count_up() * (columns == 1 ? M : 1) + (uint32_t)b.first;
        return b;
    }
    for (int w = 0; w < LANES; w++) { /* unused lanes repeat the last group */
        int64_t g = w < b.lanes ? group + w : to - 1;
        b.start[w] = (g / columns) * M * columns + g % columns;
        b.index[w] = (uint32_t)b.start[w];
    }
    return b;
}

static inline vec evens(vec a, vec b) { return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30); }
static inline vec odds(vec a, vec b) { return SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31); }
static inline vec low(vec a, vec b) { return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
static inline vec high(vec a, vec b)
{
    return SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

/* 16 groups as they lie in memory, K things each, to a vector per thing: halve by even and odd places, log2(K) times.
 * After s rounds, vector i of each of 2^s runs of K / 2^s holds places whose last s bits are the run's, reversed. */
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

/* All members of sixteen groups, side by side in memory. */
static inline void load_run(const float *from, vec to[M])
{
    vec v[M];
    std::memcpy(v, from, sizeof v);
    part<M>(v);
    MEMBERS to[m] = v[reversed<M>(m)];
}
static inline void store_run(float *to, const vec from[M])
{
    vec v[M];
    MEMBERS v[reversed<M>(m)] = from[m];
    join<M>(v);
    std::memcpy(to, v, sizeof v);
}
#if WEIGHT == 1
/* Two members go together, as one number of 32 bits. */
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

template <class Number, class Vector> static inline void load(const Number *from, const Block &b, vec to[M])
{
    Vector x;
    if (!b.whole) {
        MEMBERS {
            for (int w = 0; w < LANES; w++) x[w] = from[b.start[w] + m * b.columns];
            to[m] = widen(x);
        }
        return;
    }
    if (b.columns == 1) return load_run(from + b.first, to);
    MEMBERS {
        std::memcpy(&x, from + b.first + b.columns * m, sizeof x);
        to[m] = widen(x);
    }
}

template <class Number, class Vector> static inline void store(Number *to, const Block &b, const vec from[M])
{
    Vector x;
    if (b.whole && b.columns == 1) return store_run(to + b.first, from);
    MEMBERS {
        narrow(from[m], x);
        if (b.whole) std::memcpy(to + b.first + b.columns * m, &x, sizeof x);
        else for (int w = 0; w < b.lanes; w++) to[b.start[w] + m * b.columns] = x[w];
    }
}
