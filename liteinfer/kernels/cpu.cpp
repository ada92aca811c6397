// The operators of a step, for CPUs: plain loops over vectors, written once for float and double.
//
// Nothing here knows torch. Python passes addresses and sizes (liteinfer/fast/ops.py), so this file compiles in
// seconds and needs a C++ compiler, no headers of Python or torch. `V<T>` is a SIMD register full of T, a vector
// type of GCC and Clang: a * b + c is one FMA, whatever the processor calls it.
//
// Legend: N tokens, B sequences, S key length, H query heads, K kv heads, D head size, E hidden, I inner, P panel width.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#ifdef __AVX512F__
constexpr int BYTES = 64, MAX_ROWS = 12;   // of 32 registers: 12 x 2 sums, 2 of weights, 1 of an input
#else
constexpr int BYTES = 32, MAX_ROWS = 6;    // of 16 registers: 6 x 2 sums, 2 of weights, 1 of an input
#endif
constexpr long IN_CACHE = 256 * 1024;      // bytes of inputs that a pass over the panels keeps in the L2 cache
constexpr long WORTH_A_THREAD = 1 << 14;   // numbers to touch, below which a second thread costs more than it brings

#define UNROLL _Pragma("GCC unroll 64")    // a sum stays in its register only where the loop over sums is unrolled

template <class T> struct Register;
template <> struct Register<float> {
    typedef float type __attribute__((vector_size(BYTES), aligned(sizeof(float)), may_alias));
};
template <> struct Register<double> {
    typedef double type __attribute__((vector_size(BYTES), aligned(sizeof(double)), may_alias));
};
template <class T> using V = typename Register<T>::type;
template <class T> constexpr int LANES = BYTES / sizeof(T);
template <class T> constexpr int P = 2 * LANES<T>;

template <class T> static inline V<T> load(const T* at) { return *reinterpret_cast<const V<T>*>(at); }
template <class T> static inline void store(T* at, V<T> v) { *reinterpret_cast<V<T>*>(at) = v; }
template <class T, int N = LANES<T> / 2> static inline T sum(V<T> v) {   // fold in halves: 16 lanes, 8, 4, 2, 1
    typedef typename std::conditional<sizeof(T) == 4, int32_t, int64_t>::type Int;
    typedef Int Ints __attribute__((vector_size(BYTES)));
    Ints other;
    for (int i = 0; i < LANES<T>; i++) other[i] = i ^ N;
#ifdef __clang__
    V<T> swapped;
    for (int i = 0; i < LANES<T>; i++) swapped[i] = v[i ^ N];
    v += swapped;
#else
    v += __builtin_shuffle(v, other);
#endif
    if constexpr (N > 1) return sum<T, N / 2>(v);
    return v[0];
}

// ---- linear layers ---------------------------------------------------------------------------------------------
// Weights [out, in] lie in panels of P outputs: panel p holds, for each input k, the weights of outputs p*P .. p*P+P-1
// side by side. One input then meets P outputs in two FMAs, and a panel is read from its first byte to its last:
// nothing a memory controller likes better.

template <class T> static void pack(const T* weight, T* panels, long out, long in, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long p = 0; p < (out + P<T> - 1) / P<T>; p++)
        for (long k = 0; k < in; k++)
            for (long j = 0; j < P<T>; j++) {
                long o = p * P<T> + j;
                panels[(p * in + k) * P<T> + j] = o < out ? weight[o * in + k] : T(0);
            }
}

// ROWS inputs through one panel: their sums stay in registers from the first k to the last. Meanwhile a share of the
// next panel is fetched, so that it has arrived when its turn comes.
template <class T, int ROWS>
static void tile(const T* x, long xs, const T* panel, long in, const T* bias, T* y, long ys, long cols,
                 const T* next, long every) {
    V<T> acc[ROWS][2] = {};
    for (long k = 0, wait = 1; k < in; k++) {
        V<T> left = load(panel + k * P<T>), right = load(panel + k * P<T> + LANES<T>);
        if (next && --wait == 0) {
            for (long j = 0; j < P<T>; j += 64 / long(sizeof(T))) __builtin_prefetch(next + j, 0, 2);
            next += P<T>;
            wait = every;
        }
        UNROLL for (int r = 0; r < ROWS; r++) {
            acc[r][0] += x[r * xs + k] * left;
            acc[r][1] += x[r * xs + k] * right;
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
        T sums[P<T>];
        store(sums, acc[r][0]);
        store(sums + LANES<T>, acc[r][1]);
        for (long j = 0; j < cols; j++) y[r * ys + j] = sums[j] + (bias ? bias[j] : T(0));
    }
}

template <class T, int ROWS = MAX_ROWS, class... A> static inline void tile_of(long rows, A... a) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) tile<T, ROWS>(a...);
        else tile_of<T, ROWS - 1>(rows, a...);
    }
}

// y [N, out] = x [N, in] @ weight.T + bias; rows of x lie xs apart, those of y ys.
template <class T>
static void linear(const T* x, long xs, const T* panels, const T* bias, T* y, long ys, long n, long in, long out,
                   int threads) {
    long count = (out + P<T> - 1) / P<T>;
    long block = std::max<long>(MAX_ROWS, IN_CACHE / (in * long(sizeof(T))) / MAX_ROWS * MAX_ROWS);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; t++) {
        long first = count * t / threads, last = count * (t + 1) / threads;
        for (long n0 = 0; n0 < n; n0 += block) {
            long rows = std::min(block, n - n0), tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
            for (long p = first; p < last; p++) {
                const T* panel = panels + p * in * P<T>;
                for (long i = 0; i < tiles; i++) {
                    long r0 = rows * i / tiles, r1 = rows * (i + 1) / tiles;   // as even as can be
                    const T* next = tiles > 1 && p + 1 < last ? panel + in * P<T> + in * i / tiles * P<T> : nullptr;
                    tile_of<T>(r1 - r0, x + (n0 + r0) * xs, xs, panel, in, bias ? bias + p * P<T> : nullptr,
                               y + (n0 + r0) * ys + p * P<T>, ys, std::min<long>(P<T>, out - p * P<T>), next, tiles);
                }
            }
        }
    }
}

// ---- the small operators ---------------------------------------------------------------------------------------

// x [N, E] += add [N, E] if there is one; y [N, E] = x / rms(x) * weight.
template <class T>
static void add_rms_norm(T* x, const T* add, const T* weight, T* y, long n, long e, double eps, int threads) {
#pragma omp parallel for num_threads(threads) if (n * e >= WORTH_A_THREAD)
    for (long i = 0; i < n; i++) {
        T* row = x + i * e;
        V<T> squares = {};
        T rest = 0;
        long k = 0;
        for (; k + LANES<T> <= e; k += LANES<T>) {
            V<T> v = load(row + k);
            if (add) store(row + k, v += load(add + i * e + k));
            squares += v * v;
        }
        for (; k < e; k++) {
            if (add) row[k] += add[i * e + k];
            rest += row[k] * row[k];
        }
        T scale = T(1) / std::sqrt((sum<T>(squares) + rest) / T(e) + T(eps));
        for (k = 0; k < e; k++) y[i * e + k] = row[k] * scale * weight[k];
    }
}

// Turn queries [N, H, D] in place and keys [N, K, D] on their way into the pages; values [N, K, D] go there as they
// are. Token i lies in slot slots[i] of pages [blocks * block_size, K, D]; cos and sin are [N, D].
template <class T>
static void rotate_and_store(T* q, long qs, const T* k, long ks, const T* v, long vs, const T* cos, const T* sin,
                             const int64_t* slots, T* keys, T* values, long n, long h, long kv, long d, int threads) {
#pragma omp parallel for num_threads(threads) if (n * (h + 2 * kv) * d >= WORTH_A_THREAD)
    for (long i = 0; i < n; i++) {
        const T *c = cos + i * d, *s = sin + i * d;
        auto turn = [&](const T* from, T* to) {
            for (long j = 0; j < d / 2; j++) {
                T a = from[j], b = from[j + d / 2];
                to[j] = a * c[j] - b * s[j];
                to[j + d / 2] = b * c[j + d / 2] + a * s[j + d / 2];
            }
        };
        for (long head = 0; head < h; head++) turn(q + i * qs + head * d, q + i * qs + head * d);
        for (long head = 0; head < kv; head++) turn(k + i * ks + head * d, keys + (slots[i] * kv + head) * d);
        std::memcpy(values + slots[i] * kv * d, v + i * vs, kv * d * sizeof(T));
    }
}

// e to the power of each lane. float: 2^n times a polynomial in what is left, exact to the last bit or two; below
// -87 it is 0. double has no such haste.
static inline V<double> exp_of(V<double> x) {
    for (int i = 0; i < LANES<double>; i++) x[i] = std::exp(x[i]);
    return x;
}
static inline V<float> exp_of(V<float> x) {
    typedef int32_t Ints [[gnu::vector_size(BYTES)]];
    V<float> low = x < -87.0f ? V<float>{} - 87.0f : x;
    low = low > 88.0f ? V<float>{} + 88.0f : low;
    const float magic = 12582912.0f;                       // 1.5 * 2^23: adding it rounds to a whole number
    V<float> n = (low * 1.44269504f + magic) - magic;
    V<float> r = (low - n * 0.693359375f) + n * 2.12194440e-4f;   // ln 2 in two parts
    V<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
    V<float> scaled = p * reinterpret_cast<V<float>&>(bits);
    scaled = x < -87.0f ? V<float>{} : scaled;
    return x != x ? x : scaled;                            // what is not a number stays so
}

// y [N, I] = silu(gate) * up; rows of gate and up lie gs and us apart.
template <class T>
static void silu_mul(const T* gate, long gs, const T* up, long us, T* y, long n, long inner, int threads) {
#pragma omp parallel for num_threads(threads) if (n * inner >= WORTH_A_THREAD)
    for (long i = 0; i < n; i++) {
        const T *g = gate + i * gs, *u = up + i * us;
        long k = 0;
        for (; k + LANES<T> <= inner; k += LANES<T>) {
            V<T> v = load(g + k);
            store(y + i * inner + k, v / (exp_of(-v) + T(1)) * load(u + k));
        }
        for (; k < inner; k++) y[i * inner + k] = g[k] / (std::exp(-g[k]) + T(1)) * u[k];
    }
}

// ---- attention over pages, in place ----------------------------------------------------------------------------
// A task is a sequence and some of its queries. It walks the block table twice, for the scores of all keys and for the
// values, and copies nothing. In a block it serves one kv head after the other, so that it reads a block from its first
// byte to its last: taking one head through all blocks would read a third of each line of memory's rows, three times,
// and was four times slower. The queries that share a kv head are the rows of a chunk, and a key or value that is
// loaded meets them all. Pages are [blocks, block_size, K, D]; tables [B, table_stride]; q and out [N, H, D], queries
// lie qs apart.

#ifdef __AVX512F__
constexpr int AT_ONCE = 6;
#else
constexpr int AT_ONCE = 3;
#endif
constexpr int KEYS = 4, REGISTERS = 4;                      // 6 x 4 sums in 32 registers, or 3 x 4 in 16

template <class T> struct Chunk {                           // up to AT_ONCE (query, query head) pairs of a kv head
    long head;
    int rows = 0;
    const T* q[AT_ONCE];
    T* out[AT_ONCE];
    long sees[AT_ONCE];                                     // keys that each may look at
    T shrink[AT_ONCE];                                      // one over the sum of its weights
    T* scores;                                              // [rows, padded]
};

// scores[r][s] = row r . key s, for COUNT keys from k on.
template <class T, int ROWS, int COUNT>
static inline void score(const Chunk<T>& rows, const T* k, long ahead, long stride, long d, T scale, T* scores,
                         long padded) {
    V<T> acc[ROWS][COUNT] = {};
    for (long j = 0; j < d; j += LANES<T>)
        UNROLL for (int i = 0; i < COUNT; i++) {
            V<T> key = load(k + i * stride + j);
            __builtin_prefetch(k + ahead + i * stride + j);
            UNROLL for (int r = 0; r < ROWS; r++) acc[r][i] += load(rows.q[r] + j) * key;
        }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int i = 0; i < COUNT; i++) scores[r * padded + i] = sum<T>(acc[r][i]) * scale;
}

template <class T, int ROWS>
static void score_block(const Chunk<T>& rows, const T* k, long ahead, long held, long stride, long d, T scale, long s0,
                        long padded) {
    long s = 0;
    for (; s + KEYS <= held; s += KEYS)
        score<T, ROWS, KEYS>(rows, k + s * stride, ahead, stride, d, scale, rows.scores + s0 + s, padded);
    for (; s < held; s++) score<T, ROWS, 1>(rows, k + s * stride, ahead, stride, d, scale, rows.scores + s0 + s, padded);
}

// The scores that count become e^(score - the largest), the rest up to `padded` 0; returns one over their sum.
template <class T> static T soften(T* scores, long counted, long padded) {
    for (long s = counted; s < padded; s++) scores[s] = -std::numeric_limits<T>::infinity();
    V<T> high = load(scores);
    for (long s = LANES<T>; s < padded; s += LANES<T>) {
        V<T> v = load(scores + s);
        high = v > high ? v : high;                         // what is not a number shows in the sum
    }
    T most = high[0];
    for (int i = 1; i < LANES<T>; i++) most = high[i] > most ? high[i] : most;
    V<T> total = {};
    for (long s = 0; s < padded; s += LANES<T>) {
        V<T> weight = exp_of(load(scores + s) - most);
        store(scores + s, weight);
        total += weight;
    }
    return T(1) / sum<T>(total);
}

// out[r] += weights[r][s] * value s for the values of a block, COUNT registers' worth of the head from j on.
template <class T, int ROWS, int COUNT>
static void mix(const Chunk<T>& rows, const T* v, long ahead, long held, long stride, long j, long s0, long padded) {
    V<T> acc[ROWS][COUNT];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int i = 0; i < COUNT; i++) acc[r][i] = s0 ? load(rows.out[r] + j + i * LANES<T>) : V<T>{};
    for (long s = 0; s < held; s++)
        UNROLL for (int i = 0; i < COUNT; i++) {
            V<T> value = load(v + s * stride + j + i * LANES<T>);
            __builtin_prefetch(v + ahead + s * stride + j + i * LANES<T>);
            UNROLL for (int r = 0; r < ROWS; r++) acc[r][i] += rows.scores[r * padded + s0 + s] * value;
        }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int i = 0; i < COUNT; i++) store(rows.out[r] + j + i * LANES<T>, acc[r][i]);
}

template <class T, int ROWS>
static void mix_block(const Chunk<T>& rows, const T* v, long ahead, long held, long stride, long d, long s0, long padded) {
    long j = 0;
    for (; j + REGISTERS * LANES<T> <= d; j += REGISTERS * LANES<T>)
        mix<T, ROWS, REGISTERS>(rows, v, ahead, held, stride, j, s0, padded);
    for (; j < d; j += LANES<T>) mix<T, ROWS, 1>(rows, v, ahead, held, stride, j, s0, padded);
}

template <class T, int ROWS = AT_ONCE> static void score_chunk(const Chunk<T>& rows, const T* k, long ahead, long held, long stride,
                                                               long d, T scale, long s0, long padded) {
    if constexpr (ROWS > 0) {
        if (rows.rows == ROWS) score_block<T, ROWS>(rows, k, ahead, held, stride, d, scale, s0, padded);
        else score_chunk<T, ROWS - 1>(rows, k, ahead, held, stride, d, scale, s0, padded);
    }
}

template <class T, int ROWS = AT_ONCE> static void mix_chunk(const Chunk<T>& rows, const T* v, long ahead, long held, long stride,
                                                             long d, long s0, long padded) {
    if constexpr (ROWS > 0) {
        if (rows.rows == ROWS) mix_block<T, ROWS>(rows, v, ahead, held, stride, d, s0, padded);
        else mix_chunk<T, ROWS - 1>(rows, v, ahead, held, stride, d, s0, padded);
    }
}

// These chunks, all of one sequence, over its keys up to `length`. A slot is `stride` numbers, of every kv head.
template <class T>
static void attend_task(std::vector<Chunk<T>>& chunks, const T* keys, const T* values, const int32_t* table,
                        long length, long stride, long block_size, long d, T scale, std::vector<T>& scores) {
    long padded = (length + LANES<T> - 1) / LANES<T> * LANES<T>, rows = 0;
    for (auto& chunk : chunks) rows += chunk.rows;
    scores.resize(rows * padded);
    rows = 0;
    for (auto& chunk : chunks) {
        chunk.scores = scores.data() + rows * padded;
        rows += chunk.rows;
    }
    auto at = [&](long s0) { return table[std::min(s0, length - 1) / block_size] * block_size * stride; };
    for (long s0 = 0; s0 < length; s0 += block_size) {
        const T* k = keys + at(s0);
        long held = std::min(block_size, length - s0), ahead = at(s0 + block_size) - at(s0);
        for (auto& chunk : chunks) score_chunk<T>(chunk, k + chunk.head * d, ahead, held, stride, d, scale, s0, padded);
    }
    for (auto& chunk : chunks)
        for (int r = 0; r < chunk.rows; r++)
            chunk.shrink[r] = soften(chunk.scores + r * padded, chunk.sees[r], padded);
    for (long s0 = 0; s0 < length; s0 += block_size) {
        const T* v = values + at(s0);
        long held = std::min(block_size, length - s0), ahead = at(s0 + block_size) - at(s0);
        for (auto& chunk : chunks) mix_chunk<T>(chunk, v + chunk.head * d, ahead, held, stride, d, s0, padded);
    }
    for (auto& chunk : chunks)
        for (int r = 0; r < chunk.rows; r++)
            for (long j = 0; j < d; j++) chunk.out[r][j] *= chunk.shrink[r];
}

template <class T>
static void attend(const T* q, long qs, const T* keys, const T* values, const int32_t* tables, long table_stride,
                   const int32_t* query_start_loc, const int32_t* seq_lens, long batch, T* out, long h, long kv, long d,
                   long block_size, double scale, int threads) {
    const long group = h / kv, together = std::max(1L, AT_ONCE / group);       // queries of a task
    std::vector<long> first{0};                             // tasks before each sequence's
    long work = 0;
    for (long b = 0; b < batch; b++) {
        long queries = query_start_loc[b + 1] - query_start_loc[b];
        first.push_back(first.back() + (queries + together - 1) / together);
        work += queries * seq_lens[b] * kv * d;
    }
#pragma omp parallel num_threads(threads) if (work >= WORTH_A_THREAD)
    {
        static thread_local std::vector<T> scores;
        static thread_local std::vector<Chunk<T>> chunks;
#pragma omp for schedule(dynamic, 1)
        for (long task = first.back() - 1; task >= 0; task--) {                // a prompt's last queries see the most
            long b = std::upper_bound(first.begin(), first.end(), task) - first.begin() - 1;
            long start = query_start_loc[b], queries = query_start_loc[b + 1] - start;
            long from = (task - first[b]) * together, to = std::min(queries, from + together);
            chunks.clear();
            for (long head = 0; head < kv; head++)
                for (long row = from * group; row < to * group; row++) {
                    if (row == from * group || chunks.back().rows == AT_ONCE) {
                        chunks.emplace_back();
                        chunks.back().head = head;
                    }
                    auto& chunk = chunks.back();
                    long query = row / group, at = head * group + row % group;
                    chunk.q[chunk.rows] = q + (start + query) * qs + at * d;
                    chunk.out[chunk.rows] = out + ((start + query) * h + at) * d;
                    chunk.sees[chunk.rows++] = seq_lens[b] - queries + query + 1;
                }
            attend_task(chunks, keys, values, tables + b * table_stride, seq_lens[b] - queries + to, kv * d,
                        block_size, d, T(scale), scores);
        }
    }
}

// ---- what Python calls: each of them for float (f) and double (d) ------------------------------------------------

#define FOR(T, t)                                                                                                     \
    extern "C" void pack_##t(const T* a, T* b, long c, long d, int e) { pack(a, b, c, d, e); }                        \
    extern "C" void linear_##t(const T* a, long b, const T* c, const T* d, T* e, long f, long g, long h, long i,      \
                               int j) { linear(a, b, c, d, e, f, g, h, i, j); }                                       \
    extern "C" void add_rms_norm_##t(T* a, const T* b, const T* c, T* d, long e, long f, double g, int h) {           \
        add_rms_norm(a, b, c, d, e, f, g, h); }                                                                       \
    extern "C" void rotate_and_store_##t(T* a, long b, const T* c, long d, const T* e, long f, const T* g,            \
                                         const T* h, const int64_t* i, T* j, T* k, long l, long m, long n, long o,    \
                                         int p) { rotate_and_store(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p); } \
    extern "C" void silu_mul_##t(const T* a, long b, const T* c, long d, T* e, long f, long g, int h) {               \
        silu_mul(a, b, c, d, e, f, g, h); }                                                                           \
    extern "C" void attend_##t(const T* a, long b, const T* c, const T* d, const int32_t* e, long f,                  \
                               const int32_t* g, const int32_t* h, long i, T* j, long k, long l, long m, long n,      \
                               double o, int p) { attend(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p); }

FOR(float, f)
FOR(double, d)
extern "C" long panel_f() { return P<float>; }
extern "C" long panel_d() { return P<double>; }
