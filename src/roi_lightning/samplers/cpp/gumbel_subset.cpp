/* One logit per weight, a softmax over the candidate masks: the arithmetic of `subset_eager`, sixteen groups at a time.
 *
 * Compiled as gumbel_top_k.cpp is, and with -DC= candidates of a group.
 */
#include "candidates.hpp"
#include "keys.hpp"

/* Each candidate's probability, not yet divided by their sum; returns one over it. */
static inline vec probabilities(const float *logits, const Block &b, const Draw *d, vec e[C])
{
    vec key[M], best = all(-3e38f), total = {};
    keys_of(logits, b, d, key);
    vec flaw = flaw_of(key);
    CANDIDATES {
        e[c] = of_probability(key, c);
        best = larger(best, e[c]);
    }
    CANDIDATES {
        e[c] = exp2_(larger(all(MIN_EXPONENT / d->over_tau), e[c] - best), d->over_tau);
        total += e[c];
    }
    return over(total + flaw);
}

static inline void masked_weight_part(
    const float *logits, const weight_t *weight, weight_t *out, int64_t from, int64_t to, Draw draw)
{
    const Draw *d = &draw; /* a copy, which no store can reach */
    for (int64_t g = from; g < to; g += LANES) {
        Block b = block_at(g, to);
        vec e[C], mask[M], value[M];
        vec scale = probabilities(logits, b, d, e);
        soft_mask(e, scale, mask);
        load<weight_t, weights_t>(weight, b, value);
        ELEMENTS value[m] *= mask[m];
        store<weight_t, weights_t>(out, b, value);
    }
}

static inline void logits_gradient_part(
    const float *logits, const weight_t *weight, const weight_t *grad, float *out, int64_t from, int64_t to,
    Draw draw)
{
    const Draw *d = &draw;
    for (int64_t g = from; g < to; g += LANES) {
        Block b = block_at(g, to);
        vec e[C], mask[M], value[M], of_mask[M], total[M] = {}, mean = {};
        vec scale = probabilities(logits, b, d, e);
        load<weight_t, weights_t>(weight, b, value);
        load<weight_t, weights_t>(grad, b, of_mask);
        ELEMENTS of_mask[m] *= value[m];
        if (d->factor) {
            soft_mask(e, scale, mask);
            ELEMENTS of_mask[m] -= d->factor * mask[m] * value[m] * value[m];
        }
        CANDIDATES mean += e[c] * of_probability(of_mask, c);
        mean *= scale;
        CANDIDATES {
            vec x = (of_probability(of_mask, c) - mean) * e[c];
            KEPT_BY_C total[candidates.members[c][j]] += x;
        }
        ELEMENTS total[m] *= scale * d->over_lam * d->over_tau;
        store<float, vec>(out, b, total);
    }
}

#include "entries.hpp"
