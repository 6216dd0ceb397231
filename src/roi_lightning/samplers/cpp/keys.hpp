/* What samplers with a logit per weight draw from. */
#pragma once
#include "math.hpp"
#include "memory.hpp"

/* The keys over log 2, but for a constant that all share. */
static inline void keys_of(const float *logits, const Block &b, const Draw *d, vec key[M])
{
    float scale = d->over_lam * LOG2_E;
    load<float, vec>(logits, b, key);
    ELEMENTS key[m] = key[m] * scale - noise_log(b.index + (uint32_t)m, d->key0, d->key1);
}
