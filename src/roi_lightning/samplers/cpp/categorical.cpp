/* MaskLLM's sampler in one pass over memory each way: the arithmetic of `candidates`, sixteen groups at a time.
 *
 * Compiled as gumbel_top_k.cpp is, and with -DC= candidates of a group, in lexicographic order. Weights lie as there;
 * the logit of candidate c of group g lies at c * groups + g, and its noise has the index g * C + c.
 */
#include "math.hpp"
#include "memory.hpp"

struct Draw {
    int64_t columns, groups;
    uint32_t key0, key1;
    float over_lam, over_tau, pull;
    int32_t kept_norm;
};

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
#define MEMBERS_OF_C _Pragma("GCC unroll 8") for (int j = 0; j < N; j++)

static inline vec logit_at(const float *logits, int64_t group, int lanes)
{
    vec x = {};
    if (lanes == LANES) std::memcpy(&x, logits + group, sizeof x);
    else for (int w = 0; w < lanes; w++) x[w] = logits[group + w];
    return x;
}

/* Each candidate's share, not yet divided by their sum; returns one over it. */
static inline vec shares(const float *logits, int64_t group, int lanes, const Draw *d, vec e[C])
{
    uvec index = (count_up() + (uint32_t)group) * C;
    float scale = d->over_lam * LOG2_E;
    vec best = all(-3e38f), total = {};
    vec sum = {}; /* no number where a key is none, which must not go unnoticed */
    CANDIDATES {
        vec noise = noise_log(index + (uint32_t)c, d->key0, d->key1);
        e[c] = logit_at(logits + c * d->groups, group, lanes) * scale - noise;
        best = larger(best, e[c]);
        sum += e[c];
    }
    CANDIDATES {
        e[c] = exp2_(larger(all(LEAST / d->over_tau), e[c] - best), d->over_tau);
        total += e[c];
    }
    return over(total + (sum - sum));
}

static inline void soft_mask(const vec e[C], vec share, vec mask[M])
{
    MEMBERS mask[m] = vec{};
    CANDIDATES MEMBERS_OF_C mask[candidates.members[c][j]] += e[c];
    MEMBERS mask[m] *= share;
}

static inline void masked_weight_part(
    const float *logits, const weight_t *weight, weight_t *out, int64_t from, int64_t to, Draw draw)
{
    const Draw *d = &draw; /* a copy, which no store can reach */
    for (int64_t g = from; g < to; g += LANES) {
        Block b = block_at(g, to, d->columns);
        vec e[C], mask[M], value[M];
        vec share = shares(logits, g, b.lanes, d, e);
        soft_mask(e, share, mask);
        load<weight_t, weights_t>(weight, b, value);
        MEMBERS value[m] *= mask[m];
        store<weight_t, weights_t>(out, b, value);
    }
}

static inline void logits_gradient_part(
    const float *logits, const weight_t *weight, const weight_t *grad, float *out, int64_t from, int64_t to,
    Draw draw)
{
    const Draw *d = &draw;
    for (int64_t g = from; g < to; g += LANES) {
        Block b = block_at(g, to, d->columns);
        vec e[C], mask[M], value[M], of_mask[M], mean = {};
        vec share = shares(logits, g, b.lanes, d, e);
        load<weight_t, weights_t>(weight, b, value);
        load<weight_t, weights_t>(grad, b, of_mask);
        MEMBERS of_mask[m] *= value[m];
        if (d->kept_norm) {
            soft_mask(e, share, mask);
            MEMBERS of_mask[m] -= d->pull * mask[m] * value[m] * value[m];
        }
        CANDIDATES {
            vec of_share = {};
            MEMBERS_OF_C of_share += of_mask[candidates.members[c][j]];
            mean += e[c] * of_share;
        }
        mean *= share;
        vec factor = share * d->over_lam * d->over_tau;
        CANDIDATES {
            vec of_share = {};
            MEMBERS_OF_C of_share += of_mask[candidates.members[c][j]];
            vec x = (of_share - mean) * e[c] * factor;
            float *at = out + c * d->groups + g;
            if (b.lanes == LANES) std::memcpy(at, &x, sizeof x);
            else for (int w = 0; w < b.lanes; w++) at[w] = x[w];
        }
    }
}

#include "entries.hpp"
