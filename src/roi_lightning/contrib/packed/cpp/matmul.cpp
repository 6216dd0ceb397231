/* Products of small batches with a packed 2:4 matrix: y[r, o] = sum of values[o, k] * x[r, input of (o, k)] + bias[o]; and
 * with a dense one, whose weight k belongs to input k. With INT8 the values are int8, and a row's sum is multiplied by
 * the row's scale before the bias is added.
 *
 * The order of every sum: (kept) weight k of a matrix row goes to partial sum k mod 16, in fp32, in the order of k; the
 * 16 are added by halves (i and i + 8, then i and i + 4, and so on), then the bias; the result is rounded once. It
 * depends on neither the number of threads nor what other rows there are. Where a CPU can multiply and add in one
 * rounding, it does.
 */
#include <cstdlib>
#include "numbers.hpp"
#include "packed.hpp"
#include "threads.hpp"

/* Rows of x that one pass over the matrix takes at most; lines of the matrix that share what is loaded of x. */
#define ROWS 8
#define LINES 2
/* Bytes of the values that are fetched ahead: lines are too short for the CPU to predict. */
#define AHEAD 4096
#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
#define EACH_LINE _Pragma("GCC unroll 2") for (int w = 0; w < LINES; w++)

/* A number of the matrix, sixteen of them, and what a line of them is multiplied by. */
#ifdef INT8
typedef int8_t value_t;
typedef bytes_t values_t;
#else
typedef weight_t value_t;
typedef weights_t values_t;
#endif

/* A matrix of `kept` weights a line, with indices or dense; its scales and bias, or null; where the product goes. */
struct Product {
    const value_t *values;
    const uint8_t *indices;
    const float *scales;
    const weight_t *bias;
    weight_t *y;
    int64_t outputs, kept;
};

/* The values and indices of some lines of the matrix. */
struct Lines {
    const value_t *values[LINES];
    const uint8_t *indices[LINES];
};

template <bool PACKED, int R>
static inline void add_step(const float *x, const Lines &lines, int64_t step, vec sum[LINES][R])
{
    EACH_LINE {
        const value_t *from = lines.values[w] + step * LANES;
        values_t values;
        uvec index = {};
        __builtin_prefetch((const char *)from + AHEAD);
        std::memcpy(&values, from, sizeof values);
        if (PACKED) {
            const uint8_t *indices = lines.indices[w] + step * LANES / 4;
            __builtin_prefetch(indices + AHEAD / (4 * sizeof *from));
            index = sixteen_indices(indices);
        }
        vec value = widen(values);
        EACH_ROW sum[w][r] += value * (PACKED ? picked(x + r * INPUTS, index) : sixteen(x + r * INPUTS));
    }
}

/* What is left of some lines behind the last whole step, with zeros behind. */
struct Rest {
    value_t values[LINES][LANES] = {};
    uint8_t indices[LINES][LANES / 4] = {};
    Lines lines;

    Rest(const Lines &whole, int64_t step, int64_t left)
    {
        EACH_LINE {
            std::memcpy(values[w], whole.values[w] + step * LANES, left * sizeof(value_t));
            if (whole.indices[w]) std::memcpy(indices[w], whole.indices[w] + step * LANES / 4, (left + 3) / 4);
            lines.values[w] = values[w], lines.indices[w] = indices[w];
        }
    }
};

/* One number of the product for each of the first `rows` rows of x. */
template <int R> static inline void finish(const vec sum[R], const Product &p, int64_t row, int64_t rows, int64_t o)
{
    vec total = {};
    weights_t bias = {}, out;
    EACH_ROW total[r] = added_up(sum[r]);
#ifdef INT8
    total *= p.scales[o];
#endif
    if (p.bias) {
        bias[0] = p.bias[o];
        total += widen(bias)[0];
    }
    narrow(total, out);
    for (int64_t r = 0; r < rows; r++) p.y[(row + r) * p.outputs + o] = out[r];
}

/* Where the inputs of a step begin, among R rows that `widen_rows` has laid out. */
template <bool PACKED, int R> static inline const float *inputs_of(const float *x, int64_t step)
{
    return PACKED ? x + step * R * INPUTS : x + step / 2 * R * INPUTS + step % 2 * LANES;
}

/* R rows of x, of which `rows` count, with lines [from, to) of the matrix. */
template <bool PACKED, int R>
static void multiply(const float *x, Product p, int64_t row, int64_t rows, int64_t from, int64_t to)
{
    int64_t steps = p.kept / LANES, left = p.kept % LANES, indices_line = (p.kept + 3) / 4;
    for (int64_t o = from; o < to; o += LINES) {
        Lines lines;
        vec sum[LINES][R] = {};
        EACH_LINE {
            int64_t line = o + w < to ? o + w : o; /* an odd last one is taken twice */
            lines.values[w] = p.values + line * p.kept;
            lines.indices[w] = PACKED ? p.indices + line * indices_line : nullptr;
        }
        for (int64_t s = 0; s < steps; s++) add_step<PACKED, R>(inputs_of<PACKED, R>(x, s), lines, s, sum);
        if (left) {
            Rest rest(lines, steps, left);
            add_step<PACKED, R>(inputs_of<PACKED, R>(x, steps), rest.lines, 0, sum);
        }
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

template <bool PACKED> static int product_of(const Call *call)
{
    if (call->rows == 0) return 0;
    Product product = call->product;
    int64_t rows = call->rows, inputs = (PACKED ? 2 : 1) * product.kept;
    int64_t wide_row = (inputs + INPUTS - 1) / INPUTS * INPUTS, all_rows = rows / ROWS * ROWS + wide_for(rows % ROWS);
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
            case 1: multiply<PACKED, 1>(here, product, row, some, from, to); break;
            case 2: multiply<PACKED, 2>(here, product, row, some, from, to); break;
            case 4: multiply<PACKED, 4>(here, product, row, some, from, to); break;
            default: multiply<PACKED, ROWS>(here, product, row, some, from, to);
            }
        }
    });
    std::free(wide);
    return 0;
}

/* Non-zero where there is no memory for the rows of x in fp32. */
extern "C" int multiply_packed(const Call *call) { return product_of<true>(call); }
#ifndef INT8
extern "C" int multiply_dense(const Call *call) { return product_of<false>(call); }
#endif

/* Up to sixteen kept weights as the dense matrix has them, perhaps in `room`. */
#ifdef INT8
static inline const weight_t *in_full(const int8_t *values, int64_t count, float scale, weight_t room[LANES])
{
    int8_t some[LANES] = {};
    values_t numbers;
    weights_t full;
    std::memcpy(some, values, count);
    std::memcpy(&numbers, some, sizeof numbers);
    narrow(widen(numbers) * scale, full);
    std::memcpy(room, &full, sizeof full);
    return room;
}
#else
static inline const weight_t *in_full(const weight_t *values, int64_t, float, weight_t *) { return values; }
#endif

/* Two kept weights of each group of four, to their indices among zeros. */
static inline void scatter(const weight_t *values, const uint8_t *indices, int64_t kept, weight_t *to)
{
    std::memset(to, 0, 2 * kept * sizeof *to);
    for (int64_t k = 0; k < kept; k++) to[k / 2 * 4 + (indices[k / 4] >> 2 * (k % 4) & 3)] = values[k];
}

/* Which of eight inputs the four indices of a byte keep, a bit for each. */
struct KeptBits {
    uint8_t of[256];
    constexpr KeptBits() : of()
    {
        for (int byte = 0; byte < 256; byte++)
            for (int k = 0; k < 4; k++) of[byte] |= 1 << (k / 2 * 4 + (byte >> 2 * k & 3));
    }
};
static constexpr KeptBits kept_bits;

/* Sixteen kept weights to their indices among zeros. */
static inline void scatter_sixteen(const weight_t *values, const uint8_t *indices, weight_t *to)
{
#if WEIGHT != 0 && defined __AVX512VBMI2__
    uint32_t bits = 0;
    for (int b = 0; b < LANES / 4; b++) bits |= (uint32_t)kept_bits.of[indices[b]] << 8 * b;
    __m512i some = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)values));
    _mm512_storeu_si512(to, _mm512_maskz_expand_epi16(bits, some));
#else
    scatter(values, indices, LANES, to);
#endif
}

/* The dense matrix, to `y` of the product. */
extern "C" int unpack_packed(const Call *call)
{
    Product p = call->product;
    in_threads(call->from, call->to, call->part, call->parallel, call->threads, [=](int64_t from, int64_t to) {
        int64_t whole = p.kept / LANES * LANES;
        weight_t room[LANES];
        for (int64_t o = from; o < to; o++) {
            const value_t *values = p.values + o * p.kept;
            float scale = p.scales ? p.scales[o] : 1;
            const uint8_t *indices = p.indices + o * ((p.kept + 3) / 4);
            weight_t *line = p.y + o * 2 * p.kept;
            for (int64_t k = 0; k < whole; k += LANES)
                scatter_sixteen(in_full(values + k, LANES, scale, room), indices + k / 4, line + 2 * k);
            int64_t left = p.kept - whole;
            scatter(in_full(values + whole, left, scale, room), indices + whole / 4, left, line + 2 * whole);
        }
    });
    return 0;
}
