/* RoI's sampler in one pass over memory each way: the arithmetic of `recursive_mask` in soft_masks.py, sixteen groups at
 * a time.
 *
 * Compiled by utils/cpp_extension.py for one pattern and dtype: -DM= elements of a group, -DN= picks, -DWEIGHT= 0 float,
 * 1 bfloat16, 2 float16.
 */
#include "keys.hpp"

/* Of a pick, after dividing by tau: see `soft_masks.py`. */
#define MAX_LEAD (40.0f * LOG2_E)

struct Pick {
    vec mu[M], others[M], left[M], rest; /* left: 1 - mu, free of cancellation */
    yes leads[M];
};

static inline vec largest(const vec key[M])
{
    vec first = key[0];
    for (int m = 1; m < M; m++) first = larger(first, key[m]);
    return first;
}

/* One pick, and its keys pushed down for the next. */
static inline void pick(vec key[M], const Draw *d, Pick *p)
{
    vec first = larger(key[0], key[1]), second = smaller(key[0], key[1]), total = {};
    for (int m = 2; m < M; m++) {
        second = larger(second, smaller(first, key[m]));
        first = larger(first, key[m]);
    }
    vec lead = first - second, high = all(MAX_LEAD / d->over_tau), low = all(MIN_EXPONENT / d->over_tau);
    p->rest = vec{};
    ELEMENTS {
        vec e = exp2_(smaller(high, larger(low, key[m] - second)), d->over_tau);
        p->leads[m] = above(e, all(1.0f));
        p->mu[m] = e;
        p->rest = add_where(none_of(p->leads[m]), p->rest, e, p->rest);
        total += e;
    }
    total = over(total);
    vec leader_left = p->rest * total, beyond = larger(vec{}, lead * d->over_tau - MAX_LEAD) * -d->push;
    ELEMENTS {
        p->others[m] = choose(p->leads[m], vec{}, p->mu[m]);
        p->mu[m] *= total;
        p->left[m] = add_where(none_of(p->leads[m]), all(1.0f), -p->mu[m], leader_left);
        key[m] = add_where(p->leads[m], key[m], beyond, key[m]) + log2_(p->left[m]) * d->push;
    }
}

/* The last pick's probabilities; `flaw` shows in all of them. */
static inline void last_pick(const vec key[M], const Draw *d, vec flaw, vec mu[M])
{
    vec first = largest(key), low = all(MIN_EXPONENT / d->over_tau), total = flaw;
    ELEMENTS {
        mu[m] = exp2_(larger(low, key[m] - first), d->over_tau);
        total += mu[m];
    }
    total = over(total);
    ELEMENTS mu[m] *= total;
}

static inline void all_picks(vec key[M], const Draw *d, Pick picks[N], vec last[M])
{
    vec flaw = settled<M>(key, N);
    for (int k = 0; k < N - 1; k++) pick(key, d, &picks[k]);
    last_pick(key, d, flaw, last);
}

static inline void soft_mask(const Pick picks[N], const vec last[M], vec mask[M])
{
    ELEMENTS {
        mask[m] = last[m];
        for (int k = 0; k < N - 1; k++) mask[m] += picks[k].mu[m];
    }
}

static inline void hard_mask(vec key[M], vec mask[M])
{
    vec flaw = settled<M>(key, N);
    ELEMENTS {
        ivec better = {};
        for (int o = 0; o < M; o++)
            if (o != m) better -= o < m ? key[o] >= key[m] : key[o] > key[m];
        mask[m] = (better < N ? all(1.0f) : vec{}) + flaw;
    }
}

static inline void masked_weight_part(
    const float *logits, const weight_t *weight, weight_t *out, int64_t from, int64_t to, Draw draw)
{
    const Draw *d = &draw; /* a copy, which no store can reach */
    for (int64_t g = from; g < to; g += LANES) {
        Block b = block_at(g, to, d);
        vec key[M], mask[M], value[M], last[M];
        Pick picks[N];
        keys_of(logits, b, d, key);
        if (d->hard) hard_mask(key, mask);
        else all_picks(key, d, picks, last), soft_mask(picks, last, mask);
        load<weight_t, weights_t>(weight, b, value);
        ELEMENTS value[m] *= mask[m];
        store<weight_t, weights_t>(out, b, value);
    }
}

static inline void softmax_gradient(const vec mu[M], const vec grad[M], vec out[M])
{
    vec mean = {};
    ELEMENTS mean += mu[m] * grad[m];
    ELEMENTS out[m] = (grad[m] - mean) * mu[m];
}

static inline void keys_gradient(
    const Pick picks[N], const vec last[M], const vec of_mask[M], const Draw *d, vec total[M])
{
    softmax_gradient(last, of_mask, total);
    ELEMENTS total[m] *= d->over_tau;
    for (int k = N - 2; k >= 0; k--) {
        const Pick *p = &picks[k];
        vec odds[M], step[M], leader = {}, others = {};
        ELEMENTS {
            /* μ/(1 - μ) of the others; for the leader, whose odds may overflow, μ. */
            odds[m] = choose(p->leads[m], all(1.0f), over(p->left[m])) * p->mu[m] * total[m];
            leader += choose(p->leads[m], odds[m], vec{});
            others += choose(p->leads[m], vec{}, odds[m]);
        }
        leader *= over(p->rest);
        softmax_gradient(p->mu, of_mask, step);
        ELEMENTS
            total[m] += (step[m] + (p->others[m] * leader + p->mu[m] * others - odds[m]) * d->push) * d->over_tau;
    }
}

static inline void logits_gradient_part(
    const float *logits, const weight_t *weight, const weight_t *grad, float *out, int64_t from, int64_t to,
    Draw draw)
{
    const Draw *d = &draw;
    for (int64_t g = from; g < to; g += LANES) {
        Block b = block_at(g, to, d);
        vec key[M], value[M], of_mask[M], total[M], last[M];
        Pick picks[N];
        keys_of(logits, b, d, key);
        all_picks(key, d, picks, last);
        load<weight_t, weights_t>(weight, b, value);
        load<weight_t, weights_t>(grad, b, of_mask);
        ELEMENTS of_mask[m] *= value[m];
        keys_gradient(picks, last, of_mask, d, total);
        ELEMENTS total[m] *= d->over_lam;
        store<float, vec>(out, b, total);
    }
}

#include "entries.hpp"
