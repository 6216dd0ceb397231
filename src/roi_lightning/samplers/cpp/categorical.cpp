/* MaskLLM's sampler in one pass over memory each way: the arithmetic of `mixed_mask` in soft_masks.py, sixteen groups at
 * a time.
 *
 * Compiled by utils/cpp_extension.py, as gumbel_top_k.cpp is, and with -DC= candidates of a group, in lexicographic
 * order.
 * The logit of candidate c of group g is at c * groups + g, and its noise has the index g * C + c.
 */
#include "candidates.hpp"

static inline vec logit_at(const float *logits, int64_t group, int lanes)
{
    vec x = {};
    if (lanes == LANES) std::memcpy(&x, logits + group, sizeof x);
    else for (int w = 0; w < lanes; w++) x[w] = logits[group + w];
    return x;
}

/* See `probabilities_of`. */
static inline vec probabilities(const float *logits, int64_t group, int lanes, const Draw *d, vec e[C])
{
    uvec index = (count_up() + (uint32_t)(d->first + group)) * C;
    float sharpness = d->over_lam * LOG2_E;
    CANDIDATES {
        vec noise = noise_log(index + (uint32_t)c, d->key0, d->key1);
        e[c] = logit_at(logits + c * d->groups, group, lanes) * sharpness - noise;
    }
    return probabilities_of(e, d);
}

static inline void masked_weight_part(
    const float *logits, const weight_t *weight, weight_t *out, int64_t from, int64_t to, Draw draw)
{
    const Draw *d = &draw; /* a copy, which no store can reach */
    for (int64_t g = from; g < to; g += LANES) {
        Block b = block_at(g, to, d);
        vec e[C], mask[M], value[M];
        vec scale = probabilities(logits, g, b.lanes, d, e);
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
        vec e[C], value[M], of_mask[M], mean = {};
        vec scale = probabilities(logits, g, b.lanes, d, e);
        load<weight_t, weights_t>(weight, b, value);
        load<weight_t, weights_t>(grad, b, of_mask);
        ELEMENTS of_mask[m] *= value[m];
        CANDIDATES mean += e[c] * sum_over(of_mask, c);
        mean *= scale;
        vec factor = scale * d->over_lam * d->over_tau;
        CANDIDATES {
            vec x = (sum_over(of_mask, c) - mean) * e[c] * factor;
            float *at = out + c * d->groups + g;
            if (b.lanes == LANES) std::memcpy(at, &x, sizeof x);
            else for (int w = 0; w < b.lanes; w++) at[w] = x[w];
        }
    }
}

#include "entries.hpp"
