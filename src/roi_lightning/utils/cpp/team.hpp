/* Threads of torch's own OpenMP that go through the same steps, and wait for one another between them. */
#pragma once
#include <cstdint>
#include <sched.h>
#include "threads.hpp"

/* OpenMP's ways of asking which thread this is, and how many there are. */
typedef int (*AskTeam)(void);

struct Team {
    alignas(64) uint32_t arrived = 0;
    alignas(64) uint32_t round = 0;
    uint32_t threads = 1;

    /* Until all threads have come here. They spin: a round of waiting is shorter than going to sleep. */
    void wait()
    {
        uint32_t now = __atomic_load_n(&round, __ATOMIC_ACQUIRE);
        if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == threads) {
            __atomic_store_n(&arrived, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&round, now + 1, __ATOMIC_RELEASE);
            return;
        }
        for (uint32_t spins = 0; __atomic_load_n(&round, __ATOMIC_ACQUIRE) == now; spins++)
            if (spins > 10000) sched_yield(); /* another process may have the core of the last one */
#ifdef __SSE__
            else __builtin_ia32_pause();
#endif
    }
};

/* What Python knows of OpenMP; all null where torch has none. */
struct OpenMP {
    Parallel parallel;
    AskTeam number, count;
};

template <class Job> struct TeamWork {
    const Job &job;
    const OpenMP &openmp;
    Team team;

    static void work(void *all)
    {
        TeamWork *w = (TeamWork *)all;
        /* Fewer may come than were asked for. */
        __atomic_store_n(&w->team.threads, (uint32_t)w->openmp.count(), __ATOMIC_RELAXED);
        w->job(w->openmp.number(), w->openmp.count(), w->team);
    }
};

/* Call `job` with the number of each thread, how many there are, and what they wait with. */
template <class Job> static void in_team(const OpenMP &openmp, uint32_t threads, const Job &job)
{
    TeamWork<Job> all{job, openmp, {}};
    if (openmp.parallel) openmp.parallel(all.work, &all, threads, 0);
    else job(0, 1, all.team);
}
