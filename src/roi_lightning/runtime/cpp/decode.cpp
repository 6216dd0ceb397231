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
/* Rows of x that one pass over the matrix takes at most; rows of the matrix that share what is loaded of x. */
#define ROWS 8
#define LINES 2
#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
#define EACH_LINE _Pragma("GCC unroll 4") for (int w = 0; w < W; w++)

/* A packed matrix, the bias that goes with it (or null), and where the product goes. */
struct Product {
    const weight_t *values, *bias;
    const uint8_t *places;
    weight_t *y;
    int64_t outputs, kept;
};

/* Of 32 inputs in eight groups, those at sixteen places. */
static inline vec picked(const float *x, uvec place)
{
    uvec at = place | (count_up() >> 1 << 2);
#ifdef __AVX512F__
    return (vec)_mm512_permutex2var_ps(_mm512_loadu_ps(x), (__m512i)at, _mm512_loadu_ps(x + LANES));
#else
    vec found;
    for (int l = 0; l < LANES; l++) found[l] = x[at[l]];
    return found;
#endif
}

/* Sixteen places of two bits each. */
static inline uvec sixteen_places(const uint8_t *from)
{
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    return ((uvec{} + word) >> (2 * count_up())) & 3u;
}

/* Rows of the matrix from one on: where their values and places lie. */
template <int W> struct Lines {
    const weight_t *values[W];
    const uint8_t *places[W];
};

template <int R, int W> static inline void add_step(const float *x, Lines<W> lines, int64_t step, vec sum[W][R])
{
    EACH_LINE {
        weights_t values;
        std::memcpy(&values, lines.values[w] + step * LANES, sizeof values);
        vec value = widen(values);
        uvec place = sixteen_places(lines.places[w] + step * LANES / 4);
        EACH_ROW sum[w][r] += value * picked(x + r * INPUTS, place);
    }
}

/* What is left behind the last whole step, with zeros behind. */
template <int W> struct Rest {
    weight_t values[W][LANES] = {};
    uint8_t places[W][LANES / 4] = {};

    Rest(Lines<W> lines, int64_t step, int64_t kept)
    {
        int64_t left = kept - step * LANES;
        EACH_LINE {
            std::memcpy(values[w], lines.values[w] + step * LANES, left * sizeof(weight_t));
            std::memcpy(places[w], lines.places[w] + step * LANES / 4, (left + 3) / 4);
        }
    }
    Lines<W> lines()
    {
        Lines<W> found;
        EACH_LINE found.values[w] = values[w], found.places[w] = places[w];
        return found;
    }
};

static inline float added_up(vec s)
{
    s += SHUFFLE(s, s, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    s += SHUFFLE(s, s, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    s += SHUFFLE(s, s, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return s[0] + s[1];
}

/* Of every row of x, one number of the product. */
template <int R> static inline void finish(const vec sum[R], Product p, int64_t row, int64_t o)
{
    vec total = {};
    weights_t bias = {}, out;
    EACH_ROW total[r] = added_up(sum[r]);
    if (p.bias) {
        bias[0] = p.bias[o];
        total += widen(bias)[0];
    }
    narrow(total, out);
    EACH_ROW p.y[(row + r) * p.outputs + o] = out[r];
}

/* R rows of x, as `widen_rows` lays them out, with W rows of the matrix. */
template <int R, int W> static inline void multiply_lines(const float *x, Product p, int64_t row, int64_t o)
{
    int64_t steps = p.kept / LANES, places_line = (p.kept + 3) / 4;
    Lines<W> lines;
    vec sum[W][R] = {};
    EACH_LINE lines.values[w] = p.values + (o + w) * p.kept, lines.places[w] = p.places + (o + w) * places_line;
    for (int64_t s = 0; s < steps; s++) add_step<R, W>(x + s * R * INPUTS, lines, s, sum);
    if (p.kept % LANES) add_step<R, W>(x + steps * R * INPUTS, Rest<W>(lines, steps, p.kept).lines(), 0, sum);
    EACH_LINE finish<R>(sum[w], p, row, o + w);
}

template <int R> static void multiply(const float *x, Product p, int64_t row, int64_t from, int64_t to)
{
    int64_t o = from;
    for (; o + LINES <= to; o += LINES) multiply_lines<R, LINES>(x, p, row, o);
    for (; o < to; o++) multiply_lines<R, 1>(x, p, row, o);
}

/* Rows of x in fp32: `rows` times 32 inputs side by side, then the next 32 of each; zeros behind the last. */
static void widen_rows(const weight_t *x, int64_t rows, int64_t inputs, float *to)
{
    for (int64_t start = 0; start < inputs; start += INPUTS)
        for (int64_t r = 0; r < rows; r++, to += INPUTS) {
            weight_t some[INPUTS] = {};
            std::memcpy(some, x + r * inputs + start, (inputs - start < INPUTS ? inputs - start : INPUTS) * sizeof *x);
            for (int i = 0; i < INPUTS; i += LANES) {
                weights_t part;
                std::memcpy(&part, some + i, sizeof part);
                vec wide = widen(part);
                std::memcpy(to + i, &wide, sizeof wide);
            }
        }
}

typedef void (*Multiply)(const float *, Product, int64_t, int64_t, int64_t);
static const Multiply MULTIPLY[ROWS] = {
    multiply<1>, multiply<2>, multiply<3>, multiply<4>, multiply<5>, multiply<6>, multiply<7>, multiply<8>,
};

/* Rows [from, to) of the matrix, `part` at a time. Non-zero where there is no memory for the rows of x in fp32. */
extern "C" int multiply_packed(
    const weight_t *x, int64_t rows, const weight_t *values, const uint8_t *places, const weight_t *bias, weight_t *y,
    int64_t outputs, int64_t kept, int64_t from, int64_t to, int64_t part, Parallel parallel, uint32_t threads)
{
    Product product{values, bias, places, y, outputs, kept};
    int64_t inputs = 2 * kept, wide_row = (inputs + INPUTS - 1) / INPUTS * INPUTS;
    float *wide = (float *)std::aligned_alloc(4 * LANES, rows * wide_row * sizeof(float));
    if (!wide) return 1;
    for (int64_t row = 0; row < rows; row += ROWS)
        widen_rows(x + row * inputs, rows - row < ROWS ? rows - row : ROWS, inputs, wide + row * wide_row);
    in_threads(from, to, part, parallel, threads, [=](int64_t from, int64_t to) {
        for (int64_t row = 0; row < rows; row += ROWS) {
            int64_t some = rows - row < ROWS ? rows - row : ROWS;
            MULTIPLY[some - 1](wide + row * wide_row, product, row, from, to);
        }
    });
    std::free(wide);
    return 0;
}
