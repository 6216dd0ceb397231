/* RoI's sampler in one pass over memory each way: the arithmetic of `unrolled`, sixteen groups at a time.
 *
 * Compiled for one pattern and weight type: -DM= members of a group, -DN= picks, -DWEIGHT= 0 float, 1 bfloat16.
 * Member m of group g lies at (g / columns) * M * columns + g % columns + m * columns: columns is 1 where the
 * inputs are the weight's last axis, and the number of outputs where they are its first.
 */
#include "lanes.hpp"

/* What a draw needs: see `Draw` and `KeptNorm` for the numbers. */
struct Draw {
    int64_t columns;
    uint32_t first, key0, key1;
    float over_lam, over_tau, push, pull;
    int32_t hard, kept_norm;
};

struct Pick {
    vec mu[M], others[M], rest, leader_log;
    ivec leads[M];
};

static inline void keys_of(const float *logits, const Block &b, const Draw *d, vec key[M])
{
    uvec index = b.index + d->first;
    load<float, vec>(logits, b, key);
    MEMBERS
        key[m] = key[m] * d->over_lam + gumbel(index + (uint32_t)(m * d->columns), d->key0, d->key1);
}

static inline void pick(const vec key[M], const Draw *d, Pick *p)
{
    vec first = larger(key[0], key[1]), second = smaller(key[0], key[1]), total = {};
    for (int m = 2; m < M; m++) {
        second = larger(second, smaller(first, key[m]));
        first = larger(first, key[m]);
    }
    p->rest = vec{};
    MEMBERS {
        vec e = exp_(smaller(larger((key[m] - second) * d->over_tau, all(LEAST)), all(MAX_LEAD)));
        p->mu[m] = e;
        p->leads[m] = e > 1.0f;
        p->others[m] = p->leads[m] ? vec{} : e;
        total += e;
        p->rest += p->others[m];
    }
    total = 1.0f / total;
    MEMBERS p->mu[m] *= total;
    p->rest = larger(p->rest, all(TINY)); /* of no use where nobody leads */
    p->leader_log = log_(p->rest * total) - larger((first - second) * d->over_tau - MAX_LEAD, all(0.0f));
}

static inline void push_down(vec key[M], const Pick *p, float push)
{
    MEMBERS
        key[m] += choose(p->leads[m], p->leader_log, log_(1.0f - smaller(p->mu[m], all(0.5f)))) * push;
}

static inline void all_picks(vec key[M], const Draw *d, Pick picks[N])
{
    for (int k = 0; k < N; k++) {
        pick(key, d, &picks[k]);
        if (k < N - 1) push_down(key, &picks[k], d->push);
    }
}

static inline void soft_mask(const Pick picks[N], vec mask[M])
{
    MEMBERS {
        mask[m] = picks[0].mu[m];
        for (int k = 1; k < N; k++) mask[m] += picks[k].mu[m];
    }
}

static inline void hard_mask(const vec key[M], vec mask[M])
{
    MEMBERS {
        ivec better = {};
        for (int o = 0; o < M; o++)
            if (o != m) better -= o < m ? key[o] >= key[m] : key[o] > key[m];
        mask[m] = better < N ? all(1.0f) : vec{};
    }
}

static inline void masked_weight_part(
    const float *logits, const weight_t *weight, weight_t *out, int64_t from, int64_t to, const Draw *d)
{
    for (int64_t g = from; g < to; g += LANES) {
        Block b = block_at(g, to, d->columns);
        vec key[M], mask[M], value[M];
        Pick picks[N];
        keys_of(logits, b, d, key);
        if (d->hard) hard_mask(key, mask);
        else all_picks(key, d, picks), soft_mask(picks, mask);
        MEMBERS mask[m] += key[m] - key[m]; /* logits that are no numbers must not go unnoticed */
        load<weight_t, weights_t>(weight, b, value);
        MEMBERS value[m] *= mask[m];
        store<weight_t, weights_t>(out, b, value);
    }
}

static inline void softmax_gradient(const vec mu[M], const vec grad[M], vec out[M])
{
    vec mean = {};
    MEMBERS mean += mu[m] * grad[m];
    MEMBERS out[m] = (grad[m] - mean) * mu[m];
}

static inline void keys_gradient(const Pick picks[N], const vec of_mask[M], const Draw *d, vec total[M])
{
    softmax_gradient(picks[N - 1].mu, of_mask, total);
    MEMBERS total[m] *= d->over_tau;
    for (int k = N - 2; k >= 0; k--) {
        const Pick *p = &picks[k];
        vec pull[M], step[M], leader = {}, others = {};
        MEMBERS {
            /* μ/(1 - μ) of the others; for the leader, whose odds may overflow, μ. */
            vec odds = choose(p->leads[m], p->mu[m], p->mu[m] / (1.0f - smaller(p->mu[m], all(0.75f))));
            pull[m] = odds * total[m];
            leader += p->leads[m] ? pull[m] : vec{};
            others += p->leads[m] ? vec{} : pull[m];
        }
        leader /= p->rest;
        softmax_gradient(p->mu, of_mask, step);
        MEMBERS
            total[m] += (step[m] + (p->others[m] * leader + p->mu[m] * others - pull[m]) * d->push) * d->over_tau;
    }
}

static inline void logits_gradient_part(
    const float *logits, const weight_t *weight, const weight_t *grad, float *out, int64_t from, int64_t to,
    const Draw *d)
{
    for (int64_t g = from; g < to; g += LANES) {
        Block b = block_at(g, to, d->columns);
        vec key[M], mask[M] = {}, value[M], of_mask[M], total[M];
        Pick picks[N];
        keys_of(logits, b, d, key);
        if (d->hard) hard_mask(key, mask);
        all_picks(key, d, picks);
        if (!d->hard) soft_mask(picks, mask);
        load<weight_t, weights_t>(weight, b, value);
        load<weight_t, weights_t>(grad, b, of_mask);
        MEMBERS {
            of_mask[m] *= value[m];
            if (d->kept_norm) of_mask[m] -= d->pull * mask[m] * value[m] * value[m];
        }
        keys_gradient(picks, of_mask, d, total);
        MEMBERS total[m] *= d->over_lam;
        store<float, vec>(out, b, total);
    }
}

extern "C" void masked_weight(
    const float *logits, const weight_t *weight, weight_t *out, int64_t from, int64_t to, const Draw *d,
    Parallel parallel, uint32_t threads)
{
    in_threads(from, to, parallel, threads, [=](int64_t from, int64_t to) {
        masked_weight_part(logits, weight, out, from, to, d);
    });
}

extern "C" void logits_gradient(
    const float *logits, const weight_t *weight, const weight_t *grad, float *out, int64_t from, int64_t to,
    const Draw *d, Parallel parallel, uint32_t threads)
{
    in_threads(from, to, parallel, threads, [=](int64_t from, int64_t to) {
        logits_gradient_part(logits, weight, grad, out, from, to, d);
    });
}
