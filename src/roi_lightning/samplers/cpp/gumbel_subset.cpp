/* One logit per weight, a softmax over the candidate masks: the arithmetic of `mixed_mask` in soft_masks.py, sixteen
 * groups at a time.
 *
 * Compiled by utils/cpp_extension.py, as gumbel_top_k.cpp is, and with -DC= candidates of a group.
 */
#include "candidates.hpp"
#include "keys.hpp"

/* See `probabilities_of`. */
static inline vec probabilities(const float *logits, const Block &b, const Draw *d, vec e[C])
{
    vec key[M];
    keys_of(logits, b, d, key);
    CANDIDATES e[c] = sum_over(key, c);
    return probabilities_of(e, d);
}

static inline void masked_weight_part(
    const float *logits, const weight_t *weight, weight_t *out, int64_t from, int64_t to, Draw draw)
{
    const Draw *d = &draw; /* a copy, which no store can reach */
    for (int64_t g = from; g < to; g += LANES) {
        Block b = block_at(g, to, d);
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
        Block b = block_at(g, to, d);
        vec e[C], value[M], of_mask[M], total[M] = {}, mean = {};
        vec scale = probabilities(logits, b, d, e);
        load<weight_t, weights_t>(weight, b, value);
        load<weight_t, weights_t>(grad, b, of_mask);
        ELEMENTS of_mask[m] *= value[m];
        CANDIDATES mean += e[c] * sum_over(of_mask, c);
        mean *= scale;
        CANDIDATES {
            vec x = (sum_over(of_mask, c) - mean) * e[c];
            KEPT_BY_C total[candidates.members[c][j]] += x;
        }
        ELEMENTS total[m] *= scale * d->over_lam * d->over_tau;
        store<float, vec>(out, b, total);
    }
}

#include "entries.hpp"
