/* What Python calls: both passes of a sampler, given its two functions on a part of the groups. */
#pragma once
#include "memory.hpp"
#include "threads.hpp"

/* Groups that a thread takes at a time. */
#define PART 2048

/* Values too small to be normal count as zero while this lives: a CPU takes a hundred times as long over them. */
struct FlushDenormals {
#ifdef __SSE__
    unsigned before = _mm_getcsr();
    FlushDenormals() { _mm_setcsr(before | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before); }
#endif
};

extern "C" void masked_weight(
    const float *logits, const weight_t *weight, weight_t *out, int64_t from, int64_t to, const Draw *d,
    Parallel parallel, uint32_t threads)
{
    in_threads(from, to, PART, parallel, threads, [=](int64_t from, int64_t to) {
        FlushDenormals flush;
        masked_weight_part(logits, weight, out, from, to, *d);
    });
}

extern "C" void logits_gradient(
    const float *logits, const weight_t *weight, const weight_t *grad, float *out, int64_t from, int64_t to,
    const Draw *d, Parallel parallel, uint32_t threads)
{
    in_threads(from, to, PART, parallel, threads, [=](int64_t from, int64_t to) {
        FlushDenormals flush;
        logits_gradient_part(logits, weight, grad, out, from, to, *d);
    });
}
