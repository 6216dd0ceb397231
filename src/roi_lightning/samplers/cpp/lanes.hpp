/* Sixteen groups side by side, in GCC's and Clang's vectors: loads, stores, noise, exponentials and logarithms. */
#include <cstdint>
#include <cstring>
#ifdef __SSE__
#include <immintrin.h>
#endif

/* Loops over members are unrolled, so that members stay in registers. */
#define MEMBERS _Pragma("GCC unroll 16") for (int m = 0; m < M; m++)

#define LANES 16
#define LEAST -25.0f
#define MAX_LEAD 40.0f
#define TINY 1.17549435e-38f

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));

/* Numbers too small to be normal count as zero while this lives: a processor takes a hundred times as long over them. */
struct FlushDenormals {
#ifdef __SSE__
    unsigned before = _mm_getcsr();
    FlushDenormals() { _mm_setcsr(before | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before); }
#endif
};

/* OpenMP's way of running something once in each of so many threads, as torch's own copy of it does; null for none. */
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

/* Groups that a thread takes at a time. */
#define PART 2048

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

static inline vec all(float x) { return vec{} + x; }
static inline vec choose(ivec where, vec a, vec b) { return where ? a : b; }
static inline vec larger(vec a, vec b) { return choose(a > b, a, b); }
static inline vec smaller(vec a, vec b) { return choose(a < b, a, b); }

/* Natural logarithm of positive, normal numbers; relative error about 1e-7, close to 1 too. With x = 2^e (1 + f),
 * |f| <= 0.414, and a polynomial fitted to (log(1 + f) - f + f^2/2) / f^3. */
static inline vec log_(vec x)
{
    ivec e = ((ivec)x - 0x3F3504F3) >> 23;
    vec f = (vec)((ivec)x - (e << 23)) - 1.0f;
    vec p = 0.127123266f - f * 0.0810159519f;
    p = p * f - 0.129722342f;
    p = p * f + 0.142021701f;
    p = p * f - 0.166422471f;
    p = p * f + 0.200014681f;
    p = p * f - 0.25000298f;
    p = p * f + 0.333333284f;
    return __builtin_convertvector(e, vec) * 0.693147181f + (f + f * f * (p * f - 0.5f));
}

/* e to the x for -80 <= x <= 80; relative error about 1e-7. With x = k log 2 + r, |r| <= 0.35, and a polynomial fitted
 * to (e^r - 1 - r) / r^2; log 2 is taken in two parts, the first of which times k is exact. */
static inline vec exp_(vec x)
{
    ivec k = __builtin_convertvector(x * 1.44269504f + choose(x < 0.0f, all(-0.5f), all(0.5f)), ivec);
    vec n = __builtin_convertvector(k, vec), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 0.000199016227f + 0.00139354542f;
    p = p * r + 0.00833329558f;
    p = p * r + 0.0416664481f;
    p = p * r + 0.166666672f;
    p = p * r + 0.5f;
    return (r * r * p + r + 1.0f) * (vec)((k + 127) << 23);
}

/* Standard Gumbel noise of the elements at `index`; the same bits as in `noise`. */
static inline vec gumbel(uvec index, uint32_t key0, uint32_t key1)
{
    uvec x = index + key0;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = ((x ^ (x >> 15)) + key1) * 0x846CA68Bu;
    x = (x ^ (x >> 16)) >> 9;
    return -log_(-log_((__builtin_convertvector((ivec)x, vec) + 0.5f) * 1.1920929e-7f));
}

static inline vec widen(vec x) { return x; }
static inline void narrow(vec from, vec &to) { to = from; }
#if WEIGHT == 0
typedef float weight_t;
typedef vec weights_t;
#elif WEIGHT == 1
typedef uint16_t weight_t;
typedef uint16_t weights_t __attribute__((vector_size(2 * LANES)));
static inline vec widen(weights_t x) { return (vec)(__builtin_convertvector(x, uvec) << 16); }
static inline void narrow(vec from, weights_t &to) /* to nearest, ties to even; NaN stays NaN where arithmetic made it */
{
    uvec bits = (uvec)from;
    to = __builtin_convertvector((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16, weights_t);
}
#endif

#define POWER_OF_TWO ((M & (M - 1)) == 0)

/* Sixteen groups that one pass works on. Member m of lane w lies at start[w] + m * columns. */
struct Block {
    int64_t first, columns; /* of lane 0 */
    int lanes, whole;       /* lanes in use; whether a member's lanes, or all members of all groups, lie side by side */
    uvec index;             /* the starts once more, as the noise counts */
    int64_t start[LANES];   /* set only where not whole */
};

static inline uvec count_up() { return uvec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

static inline Block block_at(int64_t group, int64_t to, int64_t columns)
{
    Block b;
    int64_t row = columns == 1 ? group : group / columns, column = group - row * columns;
    b.columns = columns;
    b.lanes = to - group < LANES ? (int)(to - group) : LANES;
    b.first = row * M * columns + column;
    b.whole = b.lanes == LANES && (columns == 1 ? POWER_OF_TWO : column + LANES <= columns);
    if (b.whole) {
        b.index = count_up() * (columns == 1 ? M : 1) + (uint32_t)b.first;
        return b;
    }
    for (int w = 0; w < LANES; w++) { /* unused lanes repeat the last group */
        int64_t g = w < b.lanes ? group + w : to - 1;
        b.start[w] = (g / columns) * M * columns + g % columns;
        b.index[w] = (uint32_t)b.start[w];
    }
    return b;
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, ivec{__VA_ARGS__})
#endif
static inline vec evens(vec a, vec b) { return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30); }
static inline vec odds(vec a, vec b) { return SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31); }
static inline vec low(vec a, vec b) { return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
static inline vec high(vec a, vec b)
{
    return SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

/* 16 groups as they lie in memory, M numbers each, to a vector per member: halve by even and odd places, log2(M) times.
 * After s rounds, vector i of each of 2^s runs of M / 2^s holds places whose last s bits are the run's, reversed. */
static inline void part(vec v[M])
{
    _Pragma("GCC unroll 4") for (int run = M; run > 1; run /= 2) {
        vec next[M];
        _Pragma("GCC unroll 16") for (int r = 0; r < M; r += run)
            _Pragma("GCC unroll 16") for (int i = 0; i < run / 2; i++) {
                next[r + i] = evens(v[r + 2 * i], v[r + 2 * i + 1]);
                next[r + run / 2 + i] = odds(v[r + 2 * i], v[r + 2 * i + 1]);
            }
        std::memcpy(v, next, sizeof next);
    }
}
static inline void join(vec v[M])
{
    _Pragma("GCC unroll 4") for (int run = 2; run <= M; run *= 2) {
        vec next[M];
        _Pragma("GCC unroll 16") for (int r = 0; r < M; r += run)
            _Pragma("GCC unroll 16") for (int i = 0; i < run / 2; i++) {
                next[r + 2 * i] = low(v[r + i], v[r + run / 2 + i]);
                next[r + 2 * i + 1] = high(v[r + i], v[r + run / 2 + i]);
            }
        std::memcpy(v, next, sizeof next);
    }
}
static inline constexpr int reversed(int m)
{
    int r = 0;
    for (int bit = 1; bit < M; bit *= 2) r = 2 * r + (m & bit ? 1 : 0);
    return r;
}

template <class Number, class Vector>
static inline void load(const Number *from, const Block &b, vec to[M])
{
    Vector x;
    if (!b.whole) {
        MEMBERS {
            for (int w = 0; w < LANES; w++) x[w] = from[b.start[w] + m * b.columns];
            to[m] = widen(x);
        }
        return;
    }
    vec v[M];
    MEMBERS {
        std::memcpy(&x, from + b.first + (b.columns == 1 ? LANES : b.columns) * m, sizeof x);
        v[m] = widen(x);
    }
    if (b.columns == 1) part(v);
    MEMBERS to[b.columns == 1 ? reversed(m) : m] = v[m];
}

template <class Number, class Vector>
static inline void store(Number *to, const Block &b, const vec from[M])
{
    Vector x;
    if (!b.whole) {
        MEMBERS {
            narrow(from[m], x);
            for (int w = 0; w < b.lanes; w++) to[b.start[w] + m * b.columns] = x[w];
        }
        return;
    }
    vec v[M];
    MEMBERS v[m] = from[b.columns == 1 ? reversed(m) : m];
    if (b.columns == 1) join(v);
    MEMBERS {
        narrow(v[m], x);
        std::memcpy(to + b.first + (b.columns == 1 ? LANES : b.columns) * m, &x, sizeof x);
    }
}
