/* Share out a loop among the threads of torch's own OpenMP. */
#pragma once
#include <cstdint>

/* OpenMP's way of running something once in each of so many threads, as torch's own copy of it does; null for none. */
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

template <class Loop> struct Parts {
    const Loop &loop;
    int64_t next, to, part;

    static void work(void *parts)
    {
        Parts *p = (Parts *)parts;
        for (int64_t i; (i = __atomic_fetch_add(&p->next, p->part, __ATOMIC_RELAXED)) < p->to;)
            p->loop(i, p->to - i < p->part ? p->to : i + p->part);
    }
};

/* Call `loop` on parts of [from, to), which start at multiples of `part` from the first. */
template <class Loop>
static void in_threads(int64_t from, int64_t to, int64_t part, Parallel parallel, uint32_t threads, const Loop &loop)
{
    Parts<Loop> parts{loop, from, to, part};
    if (parallel) parallel(parts.work, &parts, threads, 0);
    else parts.work(&parts);
}
