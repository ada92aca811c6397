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
#include <vector>

#ifdef __AVX512F__
constexpr int BYTES = 64, MAX_ROWS = 12;   // of 32 registers: 12 x 2 sums, 2 of weights, 1 of an input
#else
constexpr int BYTES = 32, MAX_ROWS = 6;    // of 16 registers: 6 x 2 sums, 2 of weights, 1 of an input
#endif
constexpr long IN_CACHE = 256 * 1024;      // bytes of inputs that a pass over the panels keeps in the L2 cache
constexpr long WORTH_A_THREAD = 1 << 14;   // numbers to touch, below which a second thread costs more than it brings

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
template <class T> static inline T sum(V<T> v) {
    T half[LANES<T>];
    store(half, v);
    for (int n = LANES<T> / 2; n; n /= 2)
        for (int i = 0; i < n; i++) half[i] += half[i + n];
    return half[0];
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
        for (int r = 0; r < ROWS; r++) {
            acc[r][0] += x[r * xs + k] * left;
            acc[r][1] += x[r * xs + k] * right;
        }
    }
    for (int r = 0; r < ROWS; r++) {
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
// A task is a sequence and a kv head. Its rows are (query, query head) pairs, all heads that share the kv head side by
// side, as in the Triton kernel; AT_ONCE of them share every key and value that is loaded. They walk the block table
// twice, for the scores of all keys and for the values, and copy nothing. Pages are [blocks, block_size, K, D]; tables
// [B, table_stride]; q and out [N, H, D], queries lie qs apart.

#ifdef __AVX512F__
constexpr int AT_ONCE = 6;
#else
constexpr int AT_ONCE = 3;
#endif
constexpr int KEYS = 4, REGISTERS = 4;                      // 6 x 4 sums in 32 registers, or 3 x 4 in 16

template <class T> struct Pages {                           // one layer's keys, or values, of one kv head
    const T* first;
    const int32_t* table;                                   // of the sequence
    long block_size, stride;                                // numbers from one slot to the next
    const T* block(long b) const { return first + table[b] * block_size * stride; }
};

// scores[r][s] = row r . key s, for KEYS keys from k on.
template <class T, int ROWS, int COUNT>
static inline void score(const T* const* q, const T* k, long stride, long d, T scale, T* scores, long apart) {
    V<T> acc[ROWS][COUNT] = {};
    for (long j = 0; j < d; j += LANES<T>)
        for (int i = 0; i < COUNT; i++) {
            V<T> key = load(k + i * stride + j);
            for (int r = 0; r < ROWS; r++) acc[r][i] += load(q[r] + j) * key;
        }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < COUNT; i++) scores[r * apart + i] = sum<T>(acc[r][i]) * scale;
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

// out[r] = sum of weights[r][s] * value s over all keys, COUNT registers' worth of the head.
template <class T, int ROWS, int COUNT>
static void mix(const T* weights, long apart, Pages<T> values, long length, const T* shrink, T* const* out) {
    V<T> acc[ROWS][COUNT] = {};
    for (long s0 = 0, b = 0; s0 < length; s0 += values.block_size, b++) {
        const T* v = values.block(b);
        long held = std::min(values.block_size, length - s0);
        for (long s = 0; s < held; s++)
            for (int i = 0; i < COUNT; i++) {
                V<T> value = load(v + s * values.stride + i * LANES<T>);
                for (int r = 0; r < ROWS; r++) acc[r][i] += weights[r * apart + s0 + s] * value;
            }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < COUNT; i++) store(out[r] + i * LANES<T>, acc[r][i] * shrink[r]);
}

// ROWS rows over the keys up to their own: row r sees sees[r] keys, none more than `length`.
template <class T, int ROWS>
static void attend_rows(const T* const* q, T** out, const long* sees, Pages<T> keys, Pages<T> values, long length,
                        long d, T scale, std::vector<T>& scores) {
    long padded = (length + LANES<T> - 1) / LANES<T> * LANES<T>;
    scores.resize(ROWS * padded);
    for (long s0 = 0, b = 0; s0 < length; s0 += keys.block_size, b++) {
        const T* k = keys.block(b);
        long held = std::min(keys.block_size, length - s0), s = 0;
        for (; s + KEYS <= held; s += KEYS)
            score<T, ROWS, KEYS>(q, k + s * keys.stride, keys.stride, d, scale, &scores[s0 + s], padded);
        for (; s < held; s++) score<T, ROWS, 1>(q, k + s * keys.stride, keys.stride, d, scale, &scores[s0 + s], padded);
    }
    T shrink[ROWS];
    for (int r = 0; r < ROWS; r++) shrink[r] = soften(&scores[r * padded], sees[r], padded);
    for (long j = 0; j < d;) {
        bool wide = j + REGISTERS * LANES<T> <= d;
        if (wide) mix<T, ROWS, REGISTERS>(scores.data(), padded, values, length, shrink, out);
        else mix<T, ROWS, 1>(scores.data(), padded, values, length, shrink, out);
        long step = (wide ? REGISTERS : 1) * LANES<T>;
        for (int r = 0; r < ROWS; r++) out[r] += step;
        values.first += step;
        j += step;
    }
}

template <class T, int ROWS = AT_ONCE, class... A> static inline void attend_rows_of(int rows, A&&... a) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) attend_rows<T, ROWS>(a...);
        else attend_rows_of<T, ROWS - 1>(rows, a...);
    }
}

template <class T>
static void attend(const T* q, long qs, const T* keys, const T* values, const int32_t* tables, long table_stride,
                   const int32_t* query_start_loc, const int32_t* seq_lens, long batch, T* out, long h, long kv, long d,
                   long block_size, double scale, int threads) {
    const long group = h / kv, tile = std::max(1L, AT_ONCE / group) * group;   // whole queries, or a part of one
    std::vector<long> first{0};                             // tasks before each sequence's: tiles of its rows
    for (long b = 0; b < batch; b++) {
        long rows = (query_start_loc[b + 1] - query_start_loc[b]) * group;
        first.push_back(first.back() + (rows + tile - 1) / tile * kv);
    }
#pragma omp parallel num_threads(threads) if (first.back() > kv || seq_lens[0] * kv * d >= WORTH_A_THREAD)
    {
        static thread_local std::vector<T> scores;
#pragma omp for schedule(dynamic, 1)
        for (long task = first.back() - 1; task >= 0; task--) {                // the longest last rows first
            long b = std::upper_bound(first.begin(), first.end(), task) - first.begin() - 1;
            long start = query_start_loc[b], queries = query_start_loc[b + 1] - start;
            long head = (task - first[b]) % kv, row0 = (task - first[b]) / kv * tile;
            long rows = std::min(tile, queries * group - row0);
            Pages<T> k{keys + head * d, tables + b * table_stride, block_size, kv * d}, v = k;
            v.first = values + head * d;
            for (long r0 = row0; r0 < row0 + rows; r0 += AT_ONCE) {
                int count = int(std::min<long>(AT_ONCE, row0 + rows - r0));
                const T* from[AT_ONCE];
                T* to[AT_ONCE];
                long sees[AT_ONCE];
                for (int r = 0; r < count; r++) {
                    long query = (r0 + r) / group, at = head * group + (r0 + r) % group;
                    from[r] = q + (start + query) * qs + at * d;
                    to[r] = out + ((start + query) * h + at) * d;
                    sees[r] = seq_lens[b] - queries + query + 1;
                }
                attend_rows_of<T>(count, from, to, sees, k, v, sees[count - 1], d, T(scale), scores);
            }
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
