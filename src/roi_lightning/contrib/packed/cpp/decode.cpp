/* The next token's hidden state: all blocks of a llama-like model for one token of one sequence, in one call. Decoding
 * reads every weight once; between hundreds of small operations of a framework it would wait longer than it reads.
 *
 * Hidden states and sums are fp32. What is multiplied by a matrix is rounded to bf16 first where the model is bf16 and
 * the CPU multiplies bf16; keys and values are stored in the model's own type. All sizes are multiples of sixteen.
 */
#include <cmath>
#include <cstdlib>
#include "numbers.hpp"
#include "packed.hpp"
#include "team.hpp"

/* Bytes of the values that are fetched ahead: lines are too short for the CPU to predict. */
#define AHEAD 8192
#define LOG2_E 1.44269504f
#define EACH_OF_FOUR _Pragma("GCC unroll 4") for (int s = 0; s < 4; s++)

/* What a matrix is multiplied by, and how many values of a line a step takes. */
#if WEIGHT == 1 && defined __AVX512BF16__ && defined __AVX512VBMI__
#define BF16_PRODUCTS
#define VALUES 32
typedef weight_t input_t;
typedef __m512 sum_t;
#else
#define VALUES LANES
typedef float input_t;
typedef vec sum_t;
#endif
/* Room for inputs: whole steps of a packed line. */
static inline int64_t padded(int64_t inputs) { return (inputs + 2 * VALUES - 1) / (2 * VALUES) * (2 * VALUES); }

enum Kind { DENSE, PACKED, INT8 };

/* A weight [outputs, inputs] with `kept` values a line; its bias, or null. */
struct Matrix {
    const void *values;
    const uint8_t *indices;
    const float *scales;
    const weight_t *bias;
    int64_t outputs, kept, kind;
};

/* A block. Norms of queries and keys are null where it has none. Of its cache [key-value heads, capacity, head]. */
struct Layer {
    const weight_t *attention_norm, *query_norm, *key_norm, *mlp_norm;
    Matrix query, key, value, output, gate, up, down;
    weight_t *keys, *values;
};

/* The model, and one token: `length` tokens are in the cache, and it becomes the next one. Cosines and sines [head / 2]. */
struct Token {
    const Layer *layers;
    int64_t count, hidden, inner, heads, kv_heads, head;
    double epsilon, scale;
    const weight_t *norm;
    OpenMP openmp;
    int64_t threads;
    const weight_t *embedded;
    weight_t *out;
    const float *cosines, *sines;
    int64_t length, capacity;
};

static inline vec widened(const weight_t *from)
{
    weights_t some;
    std::memcpy(&some, from, sizeof some);
    return widen(some);
}
static inline void put(vec x, float *to) { std::memcpy(to, &x, sizeof x); }
#if WEIGHT != 0
static inline void put(vec x, weight_t *to)
{
    weights_t some;
    narrow(x, some);
    std::memcpy(to, &some, sizeof some);
}
#endif

#ifdef BF16_PRODUCTS
template <int KIND> static inline __m512i values_at(const void *line, int64_t k)
{
    if (KIND != INT8) return _mm512_loadu_si512((const weight_t *)line + k);
    __m256i bytes = _mm256_loadu_si256((const __m256i *)((const int8_t *)line + k));
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* Of 64 inputs in sixteen groups those at 32 indices, two bits each. */
static inline __m512i chosen(const input_t *x, const uint8_t *indices)
{
    const ivec two_bits = 2 * ivec{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const ivec groups = 4 * ivec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    /* In each pair of 16-bit lanes: the bit where its index begins, and the first input of its group. */
    const __m512i shifts = (__m512i)(two_bits | (two_bits + 2) << 16), starts = (__m512i)(groups | groups << 16);
    uint64_t word;
    std::memcpy(&word, indices, sizeof word);
    __m512i index = _mm512_multishift_epi64_epi8(shifts, _mm512_set1_epi64(word));
    index = _mm512_ternarylogic_epi64(index, _mm512_set1_epi16(3), starts, 0xEA); /* (a & b) | c */
    return _mm512_permutex2var_epi16(_mm512_loadu_si512(x), index, _mm512_loadu_si512(x + VALUES));
}

template <int KIND>
static inline void add_step(sum_t &sum, const void *values, const uint8_t *indices, const input_t *x, int64_t k)
{
    __m512i inputs = KIND == DENSE ? _mm512_loadu_si512(x + k) : chosen(x + 2 * k, indices + k / 4);
    sum = _mm512_dpbf16_ps(sum, (__m512bh)values_at<KIND>(values, k), (__m512bh)inputs);
}
static inline float total(sum_t sum) { return added_up((vec)sum); }
#else
template <int KIND> static inline vec values_at(const void *line, int64_t k)
{
    if (KIND != INT8) return widened((const weight_t *)line + k);
    bytes_t some;
    std::memcpy(&some, (const int8_t *)line + k, sizeof some);
    return widen(some);
}

template <int KIND>
static inline void add_step(sum_t &sum, const void *values, const uint8_t *indices, const input_t *x, int64_t k)
{
    vec inputs = KIND == DENSE ? sixteen(x + k) : picked(x + 2 * k, sixteen_indices(indices + k / 4));
    sum += values_at<KIND>(values, k) * inputs;
}
static inline float total(sum_t sum) { return added_up(sum); }
#endif

/* Lines [from, to) of a product with x, to `take(line, sum)`. One line after the other: memory is read in its order. */
template <int KIND, class Take>
static void multiply(const Matrix &m, const input_t *x, int64_t from, int64_t to, const Take &take)
{
    const int64_t size = KIND == INT8 ? 1 : sizeof(weight_t), indices_line = (m.kept + 3) / 4;
    const int64_t whole = m.kept / VALUES * VALUES, left = m.kept - whole, four = whole / (4 * VALUES) * (4 * VALUES);
    for (int64_t o = from; o < to; o++) {
        const char *values = (const char *)m.values + o * m.kept * size;
        const uint8_t *indices = KIND == DENSE ? nullptr : m.indices + o * indices_line;
        sum_t sum[4] = {};
        int64_t k = 0;
        for (; k < four; k += 4 * VALUES) EACH_OF_FOUR {
                __builtin_prefetch(values + (k + s * VALUES) * size + AHEAD, 0, 1);
                if (KIND != DENSE && s == 0) __builtin_prefetch(indices + k / 4 + AHEAD / (4 * size), 0, 1);
                add_step<KIND>(sum[s], values, indices, x, k + s * VALUES);
            }
        for (int s = 0; k < whole; k += VALUES, s++) add_step<KIND>(sum[s], values, indices, x, k);
        if (left) {
            weight_t last_values[VALUES] = {};
            uint8_t last_indices[VALUES / 4] = {};
            std::memcpy(last_values, values + whole * size, left * size);
            if (KIND != DENSE) std::memcpy(last_indices, indices + whole / 4, (left + 3) / 4);
            add_step<KIND>(sum[3], last_values, last_indices, x + (KIND == DENSE ? whole : 2 * whole), 0);
        }
        float y = total(sum[0] + sum[1] + (sum[2] + sum[3]));
        if (KIND == INT8) y *= m.scales[o];
        if (m.bias) {
            weights_t bias = {};
            bias[0] = m.bias[o];
            y += widen(bias)[0];
        }
        take(o, y);
    }
}

template <class Take>
static void lines_of(const Matrix &m, const input_t *x, int64_t from, int64_t to, const Take &take)
{
    if (m.kind == DENSE) multiply<DENSE>(m, x, from, to, take);
    else if (m.kind == PACKED) multiply<PACKED>(m, x, from, to, take);
    else multiply<INT8>(m, x, from, to, take);
}

/* x over its root mean square, times the weight. */
template <class To> static void normed(const float *x, const weight_t *weight, int64_t count, float epsilon, To *to)
{
    vec squares = {};
    for (int64_t i = 0; i < count; i += LANES) squares += sixteen(x + i) * sixteen(x + i);
    float factor = 1 / std::sqrt(added_up(squares) / count + epsilon);
    for (int64_t i = 0; i < count; i += LANES) put(sixteen(x + i) * factor * widened(weight + i), to + i);
}

/* One head's query or key at its position. */
static void rotated(const Token *t, const float *x, const weight_t *norm, float *to)
{
    int64_t half = t->head / 2;
    if (norm) normed(x, norm, t->head, t->epsilon, to);
    else std::memcpy(to, x, t->head * sizeof *to);
    for (int64_t i = 0; i < half; i++) {
        float a = to[i], b = to[i + half];
        to[i] = a * t->cosines[i] - b * t->sines[i];
        to[i + half] = b * t->cosines[i] + a * t->sines[i];
    }
}

/* What all threads work on, and what each has for itself. */
struct Shared {
    float *hidden, *qkv, *gate, *up;
    input_t *attended, *acted;
};
struct Own {
    input_t *inputs;
    float *query, *key, *scores;
};

static inline float dot(const float *a, const weight_t *b, int64_t count)
{
    vec sum = {};
    for (int64_t i = 0; i < count; i += LANES) sum += sixteen(a + i) * widened(b + i);
    return added_up(sum);
}

/* One head attends to the cache and to its own token, which goes into the cache. */
static void attend(const Token *t, const Layer &layer, const Shared &shared, const Own &own, int64_t head)
{
    int64_t size = t->head, group = t->heads / t->kv_heads, kv = head / group, length = t->length;
    const float *key = shared.qkv + (t->heads + kv) * size, *value = key + t->kv_heads * size;
    weight_t *keys = layer.keys + kv * t->capacity * size, *values = layer.values + kv * t->capacity * size;
    rotated(t, shared.qkv + head * size, layer.query_norm, own.query);
    rotated(t, key, layer.key_norm, own.key);
    if (head % group == 0) /* nobody reads it before the next token */
        for (int64_t i = 0; i < size; i += LANES) {
            put(sixteen(own.key + i), keys + length * size + i);
            put(sixteen(value + i), values + length * size + i);
        }
    float *scores = own.scores, best = 0, sum = 0;
    for (int64_t i = 0; i < size; i++) best += own.query[i] * own.key[i];
    scores[length] = best *= t->scale * LOG2_E;
    for (int64_t j = 0; j < length; j++) {
        scores[j] = dot(own.query, keys + j * size, size) * (float)(t->scale * LOG2_E);
        best = scores[j] > best ? scores[j] : best;
    }
    for (int64_t j = 0; j <= length; j += LANES) { /* what is behind the last one is not used */
        put(exp2_(larger(all(-125), sixteen(scores + j) - best), 1), scores + j);
        for (int64_t l = j; l < j + LANES && l <= length; l++) sum += scores[l];
    }
    for (int64_t i = 0; i < size; i += LANES) {
        vec of_all = sixteen(value + i) * scores[length];
        for (int64_t j = 0; j < length; j++) of_all += widened(values + j * size + i) * scores[j];
        put(of_all * (1 / sum), shared.attended + head * size + i);
    }
}

/* A thread's share of something, in whole sixteens. */
struct Share {
    int64_t from, to;
    Share(int64_t count, int64_t number, int64_t threads)
        : from(count / LANES * number / threads * LANES), to(count / LANES * (number + 1) / threads * LANES)
    {
    }
};

/* Of three matrices one after the other, as if they were one, a share. */
static void project(const Layer &layer, const Shared &shared, const Own &own, Share share)
{
    int64_t start = 0;
    const Matrix *matrices[] = {&layer.query, &layer.key, &layer.value};
    for (const Matrix *m : matrices) {
        int64_t from = share.from > start ? share.from - start : 0;
        int64_t to = share.to - start < m->outputs ? share.to - start : m->outputs;
        float *here = shared.qkv + start;
        lines_of(*m, own.inputs, from, to, [=](int64_t o, float y) { here[o] = y; });
        start += m->outputs;
    }
}

static void run(const Token *t, const Shared &shared, const Own &own, int64_t number, int64_t threads, Team &team)
{
    Share hidden(t->hidden, number, threads), inner(t->inner, number, threads);
    Share projected((t->heads + 2 * t->kv_heads) * t->head, number, threads);
    auto add = [&](int64_t o, float y) { shared.hidden[o] += y; };
    if (number == 0)
        for (int64_t i = 0; i < t->hidden; i += LANES) put(widened(t->embedded + i), shared.hidden + i);
    team.wait();
    for (int64_t l = 0; l < t->count; l++) {
        const Layer &layer = t->layers[l];
        normed(shared.hidden, layer.attention_norm, t->hidden, t->epsilon, own.inputs);
        project(layer, shared, own, projected);
        team.wait();
        for (int64_t h = t->heads * number / threads; h < t->heads * (number + 1) / threads; h++)
            attend(t, layer, shared, own, h);
        team.wait();
        lines_of(layer.output, shared.attended, hidden.from, hidden.to, add);
        team.wait();
        normed(shared.hidden, layer.mlp_norm, t->hidden, t->epsilon, own.inputs);
        lines_of(layer.gate, own.inputs, inner.from, inner.to, [&](int64_t o, float y) { shared.gate[o] = y; });
        lines_of(layer.up, own.inputs, inner.from, inner.to, [&](int64_t o, float y) { shared.up[o] = y; });
        for (int64_t i = inner.from; i < inner.to; i += LANES) {
            vec gate = sixteen(shared.gate + i), e = exp2_(smaller(all(125), larger(all(-125), gate * -LOG2_E)), 1);
            put(gate * over(1.0f + e) * sixteen(shared.up + i), shared.acted + i);
        }
        team.wait();
        lines_of(layer.down, shared.acted, hidden.from, hidden.to, add);
        team.wait();
    }
    if (number == 0) normed(shared.hidden, t->norm, t->hidden, t->epsilon, t->out);
}

/* Bytes of so many numbers, in whole lines of the CPU's cache; the next so many of some memory. */
static inline int64_t bytes_for(int64_t count) { return (count * sizeof(float) + 63) / 64 * 64; }
template <class Number> static Number *reserved(char *&from, int64_t count)
{
    Number *here = (Number *)from;
    from += bytes_for(count);
    return here;
}

/* Non-zero where there is no memory. */
extern "C" int decode_token(const Token *t)
{
    int64_t projected = (t->heads + 2 * t->kv_heads) * t->head, threads = t->openmp.parallel ? t->threads : 1;
    int64_t attended = padded(t->heads * t->head), scores = t->length + 1 + LANES;
    int64_t common = bytes_for(t->hidden) + bytes_for(projected) + 2 * bytes_for(t->inner);
    common += bytes_for(attended) + bytes_for(padded(t->inner));
    int64_t each = bytes_for(padded(t->hidden)) + 2 * bytes_for(t->head) + bytes_for(scores);
    int64_t bytes = common + threads * each;
    char *memory = (char *)std::aligned_alloc(64, bytes), *next = memory;
    if (!memory) return 1;
    std::memset(memory, 0, bytes);
    Shared shared;
    shared.hidden = reserved<float>(next, t->hidden), shared.qkv = reserved<float>(next, projected);
    shared.gate = reserved<float>(next, t->inner), shared.up = reserved<float>(next, t->inner);
    shared.attended = reserved<input_t>(next, attended);
    shared.acted = reserved<input_t>(next, padded(t->inner));
    in_team(t->openmp, threads, [&](int64_t number, int64_t count, Team &team) {
        char *mine = memory + common + number * each;
        Own own;
        own.inputs = reserved<input_t>(mine, padded(t->hidden));
        own.query = reserved<float>(mine, t->head), own.key = reserved<float>(mine, t->head);
        own.scores = reserved<float>(mine, scores);
        run(t, shared, own, number, count, team);
    });
    std::free(memory);
    return 0;
}
