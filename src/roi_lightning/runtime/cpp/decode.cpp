/* Products of few rows with a packed 2:4 matrix: y[r, o] = sum of values[o, k] * x[r, input of (o, k)] + bias[o].
 *
 * The order of every sum: kept weight k of a matrix row goes to partial sum k mod 16, in fp32, in the order of k; the
 * 16 are added by halves (i and i + 8, then i and i + 4, and so on), then the bias; the result is rounded once. It
 * depends on neither the number of threads nor what other rows there are.
 */
#include <cstdlib>
#include "numbers.hpp"
#include "threads.hpp"

/* Inputs of one step, of which it keeps a vector. */
#define INPUTS (2 * LANES)
/* Rows of x that one pass over the matrix takes at most; lines of the matrix that share what is loaded of x. */
#define ROWS 8
#define LINES 2
/* Bytes of the values that are fetched ahead: lines are too short for a processor to see where it is going. */
#define AHEAD 4096
#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
#define EACH_LINE _Pragma("GCC unroll 2") for (int w = 0; w < LINES; w++)

/* A packed matrix, the bias that goes with it (or null), and where the product goes. */
struct Product {
    const weight_t *values;
    const uint8_t *places;
    const weight_t *bias;
    weight_t *y;
    int64_t outputs, kept;
};

/* Of 32 inputs in eight groups, those at sixteen places, two of each group. */
static inline vec picked(const float *x, uvec place)
{
#if defined __AVX512F__
    uvec at = place | (count_up() >> 1 << 2);
    return (vec)_mm512_permutex2var_ps(_mm512_loadu_ps(x), (__m512i)at, _mm512_loadu_ps(x + LANES));
#elif defined __AVX2__
    __m256i at[2];
    __m256 found[2];
    uvec in_eight = place | ((count_up() >> 1 & 1) << 2);
    std::memcpy(at, &in_eight, sizeof at);
    for (int h = 0; h < 2; h++, x += LANES) {
        __m256 first = _mm256_permutevar8x32_ps(_mm256_loadu_ps(x), at[h]);
        found[h] = _mm256_blend_ps(first, _mm256_permutevar8x32_ps(_mm256_loadu_ps(x + LANES / 2), at[h]), 0xF0);
    }
    vec both;
    std::memcpy(&both, found, sizeof both);
    return both;
#else
    uint32_t at[LANES];
    float found[LANES];
    vec all;
    std::memcpy(at, &place, sizeof at);
    _Pragma("GCC unroll 1") for (int l = 0; l < LANES; l++) found[l] = x[l / 2 * 4 + at[l]];
    std::memcpy(&all, found, sizeof all);
    return all;
#endif
}

/* Sixteen places of two bits each. */
static inline uvec sixteen_places(const uint8_t *from)
{
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    return ((uvec{} + word) >> (2 * count_up())) & 3u;
}

/* Where the values and places of some lines of the matrix lie. */
struct Lines {
    const weight_t *values[LINES];
    const uint8_t *places[LINES];
};

template <int R> static inline void add_step(const float *x, const Lines &lines, int64_t step, vec sum[LINES][R])
{
    EACH_LINE {
        const weight_t *from = lines.values[w] + step * LANES;
        const uint8_t *places = lines.places[w] + step * LANES / 4;
        __builtin_prefetch((const char *)from + AHEAD);
        __builtin_prefetch(places + AHEAD / (4 * sizeof *from));
        weights_t values;
        std::memcpy(&values, from, sizeof values);
        vec value = widen(values);
        uvec place = sixteen_places(places);
        EACH_ROW sum[w][r] += value * picked(x + r * INPUTS, place);
    }
}

/* What is left of some lines behind the last whole step, with zeros behind. */
struct Rest {
    weight_t values[LINES][LANES] = {};
    uint8_t places[LINES][LANES / 4] = {};
    Lines lines;

    Rest(const Lines &whole, int64_t step, int64_t left)
    {
        EACH_LINE {
            std::memcpy(values[w], whole.values[w] + step * LANES, left * sizeof(weight_t));
            std::memcpy(places[w], whole.places[w] + step * LANES / 4, (left + 3) / 4);
            lines.values[w] = values[w], lines.places[w] = places[w];
        }
    }
};

static inline float added_up(vec s)
{
    s += SHUFFLE(s, s, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    s += SHUFFLE(s, s, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    s += SHUFFLE(s, s, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return s[0] + s[1];
}

/* One number of the product for each of the first `rows` rows of x. */
template <int R> static inline void finish(const vec sum[R], const Product &p, int64_t row, int64_t rows, int64_t o)
{
    vec total = {};
    weights_t bias = {}, out;
    EACH_ROW total[r] = added_up(sum[r]);
    if (p.bias) {
        bias[0] = p.bias[o];
        total += widen(bias)[0];
    }
    narrow(total, out);
    for (int64_t r = 0; r < rows; r++) p.y[(row + r) * p.outputs + o] = out[r];
}

/* R rows of x, as `widen_rows` lays them out, of which `rows` count, with lines [from, to) of the matrix. */
template <int R> static void multiply(const float *x, Product p, int64_t row, int64_t rows, int64_t from, int64_t to)
{
    int64_t steps = p.kept / LANES, left = p.kept % LANES, places_line = (p.kept + 3) / 4;
    for (int64_t o = from; o < to; o += LINES) {
        Lines lines;
        vec sum[LINES][R] = {};
        EACH_LINE {
            int64_t line = o + w < to ? o + w : o; /* an odd last one is taken twice */
            lines.values[w] = p.values + line * p.kept, lines.places[w] = p.places + line * places_line;
        }
        for (int64_t s = 0; s < steps; s++) add_step<R>(x + s * R * INPUTS, lines, s, sum);
        if (left) add_step<R>(x + steps * R * INPUTS, Rest(lines, steps, left).lines, 0, sum);
        EACH_LINE if (o + w < to) finish<R>(sum[w], p, row, rows, o + w);
    }
}

/* Rows of x in fp32: 32 inputs of each of `wide` rows side by side, then the next 32 of each; zeros where none are. */
static void widen_rows(const weight_t *x, int64_t rows, int64_t wide, int64_t inputs, float *to)
{
    for (int64_t start = 0; start < inputs; start += INPUTS)
        for (int64_t r = 0; r < wide; r++, to += INPUTS) {
            weight_t some[INPUTS] = {};
            int64_t count = inputs - start < INPUTS ? inputs - start : INPUTS;
            if (r < rows) std::memcpy(some, x + r * inputs + start, count * sizeof *x);
            for (int i = 0; i < INPUTS; i += LANES) {
                weights_t part;
                std::memcpy(&part, some + i, sizeof part);
                vec numbers = widen(part);
                std::memcpy(to + i, &numbers, sizeof numbers);
            }
        }
}

/* As many rows of x as are multiplied at a time where so many are left. */
static inline int64_t wide_for(int64_t rows) { return rows > 4 ? ROWS : rows > 2 ? 4 : rows; }

/* What Python packs: rows [from, to) of the matrix, `part` at a time, in so many threads. */
struct Call {
    const weight_t *x;
    int64_t rows;
    Product product;
    int64_t from, to, part;
    Parallel parallel;
    int64_t threads;
};

/* Non-zero where there is no memory for the rows of x in fp32. */
extern "C" int multiply_packed(const Call *call)
{
    Product product = call->product;
    int64_t rows = call->rows, inputs = 2 * product.kept, wide_row = (inputs + INPUTS - 1) / INPUTS * INPUTS;
    int64_t all_rows = rows / ROWS * ROWS + wide_for(rows % ROWS);
    float *wide = (float *)std::aligned_alloc(4 * LANES, all_rows * wide_row * sizeof(float));
    if (!wide) return 1;
    for (int64_t row = 0; row < rows; row += ROWS) {
        int64_t some = rows - row < ROWS ? rows - row : ROWS;
        widen_rows(call->x + row * inputs, some, wide_for(some), inputs, wide + row * wide_row);
    }
    in_threads(call->from, call->to, call->part, call->parallel, call->threads, [=](int64_t from, int64_t to) {
        for (int64_t row = 0; row < rows; row += ROWS) {
            const float *here = wide + row * wide_row;
            int64_t some = rows - row < ROWS ? rows - row : ROWS;
            switch (wide_for(some)) {
            case 1: multiply<1>(here, product, row, some, from, to); break;
            case 2: multiply<2>(here, product, row, some, from, to); break;
            case 4: multiply<4>(here, product, row, some, from, to); break;
            default: multiply<ROWS>(here, product, row, some, from, to);
            }
        }
    });
    std::free(wide);
    return 0;
}
