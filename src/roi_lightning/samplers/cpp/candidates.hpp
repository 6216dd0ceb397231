/* The candidate masks of a group, in lexicographic order: -DC= of them, -DN= elements kept by each. */
#pragma once
#include "math.hpp"
#include "memory.hpp"

struct Candidates {
    int members[C][N];
    constexpr Candidates() : members()
    {
        int now[N] = {};
        for (int j = 0; j < N; j++) now[j] = j;
        for (int c = 0; c < C; c++) {
            for (int j = 0; j < N; j++) members[c][j] = now[j];
            int j = N - 1;
            while (j > 0 && now[j] == M - N + j) j--;
            now[j]++;
            for (int i = j + 1; i < N; i++) now[i] = now[i - 1] + 1;
        }
    }
};
static constexpr Candidates candidates;

#if C <= 32
#define CANDIDATES _Pragma("GCC unroll 32") for (int c = 0; c < C; c++)
#else
#define CANDIDATES for (int c = 0; c < C; c++)
#endif
#define KEPT_BY_C _Pragma("GCC unroll 8") for (int j = 0; j < N; j++)

/* Scores to each candidate's probability, not yet divided by their sum; returns one over it. */
static inline vec probabilities_of(vec e[C], const Draw *d)
{
    vec best = all(-3e38f), total = settled<C>(e, 1);
    CANDIDATES best = larger(best, e[c]);
    CANDIDATES {
        e[c] = exp2_(larger(all(MIN_EXPONENT / d->over_tau), e[c] - best), d->over_tau);
        total += e[c];
    }
    return over(total);
}

static inline void soft_mask(const vec e[C], vec scale, vec mask[M])
{
    ELEMENTS mask[m] = vec{};
    CANDIDATES KEPT_BY_C mask[candidates.members[c][j]] += e[c];
    ELEMENTS mask[m] *= scale;
}

/* The sum over the elements that a candidate keeps. */
static inline vec sum_over(const vec of_element[M], int c)
{
    vec sum = {};
    KEPT_BY_C sum += of_element[candidates.members[c][j]];
    return sum;
}
