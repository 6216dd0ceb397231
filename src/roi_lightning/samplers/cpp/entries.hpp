/* What Python calls: both passes of a sampler, given its `Draw` and its two functions on a part of the groups. */
#pragma once
#include "memory.hpp"

/* OpenMP's way of running something once in each of so many threads, as torch's own copy of it does; null for none. */
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

/* Groups that a thread takes at a time. */
#define PART 2048

/* Numbers too small to be normal count as zero while this lives: a processor takes a hundred times as long over them. */
struct FlushDenormals {
#ifdef __SSE__
    unsigned before = _mm_getcsr();
    FlushDenormals() { _mm_setcsr(before | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before); }
#endif
};

template <class Loop> struct Parts {
    const Loop &loop;
    int64_t next, to;

    static void work(void *parts)
    {
        FlushDenormals flush;
        Parts *p = (Parts *)parts;
        for (int64_t g; (g = __atomic_fetch_add(&p->next, PART, __ATOMIC_RELAXED)) < p->to;)
            p->loop(g, p->to - g < PART ? p->to : g + PART);
    }
};

/* Call `loop` on parts of the groups in [from, to), which start at multiples of LANES from the first. */
template <class Loop>
static void in_threads(int64_t from, int64_t to, Parallel parallel, uint32_t threads, const Loop &loop)
{
    Parts<Loop> parts{loop, from, to};
    if (parallel) parallel(parts.work, &parts, threads, 0);
    else parts.work(&parts);
}

extern "C" void masked_weight(
    const float *logits, const weight_t *weight, weight_t *out, int64_t from, int64_t to, const Draw *d,
    Parallel parallel, uint32_t threads)
{
    in_threads(from, to, parallel, threads, [=](int64_t from, int64_t to) {
        masked_weight_part(logits, weight, out, from, to, *d);
    });
}

extern "C" void logits_gradient(
    const float *logits, const weight_t *weight, const weight_t *grad, float *out, int64_t from, int64_t to,
    const Draw *d, Parallel parallel, uint32_t threads)
{
    in_threads(from, to, parallel, threads, [=](int64_t from, int64_t to) {
        logits_gradient_part(logits, weight, grad, out, from, to, *d);
    });
}
