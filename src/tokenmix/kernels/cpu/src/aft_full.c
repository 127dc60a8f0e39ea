/* AFT-full (AFT, Eq. 2): y_t = gate(q_t) * sum_s e^{k_s + w_ts} v_s / sum_s e^{k_s + w_ts}, feature by feature.

   The sums are a matrix product, E X with E_ts = e^{w_ts - a_t}, a_t the largest weight of the row, and X_s = [e^{k_s - m} v_s | e^{k_s - m}], m the largest
   key of a feature among those that the rows of a block see. Rows come in blocks of FULL_ROWS; E is formed once for a block, whatever the batch and the
   features, and X again for each block, which costs two or three in a hundred in float32; so nothing larger than a block of rows of E is ever held.

   Exactness. What float32 loses are terms below e^{a_t + m - 87}. They cannot matter to a row that sees some term above e^{a_t + m - 60}:
   - the key with the row's largest weight is such a term while the keys in play span at most 60;
   - the row's largest key is one while the row's weights span at most 60, less what that key lacks to m (causal rows see a part of the block's keys).
   Groups of FULL_GROUP rows where neither holds for a strip of features take the literal form: each row's own maximum, exponents in float64.

   Backward: with the denominators D in the same units and Z_t = [g_t gate_t / D_t | -g_t gate_t y_t / D_t], [A | C] = E^T Z and dE = Z X^T,
       dv = e^{k - m} A,  dk = e^{k - m} (v A + C),  dw = E * dE (elementwise), the last summed over features and over the batch where it shares the weights. */
#include "tm.h"

#define FULL_R 6                             /* rows in a register tile */
#define FULL_NV (TM_REGISTERS >= 32 ? 4 : 2) /* vectors in a register tile */
#define FULL_TW (FULL_NV * TM_VL)            /* floats across it */
#define FULL_C 32                            /* features in a strip: 2 FULL_C columns of X */
#define FULL_X (2 * FULL_C)
#define FULL_KEYS 240  /* keys in a block of X */
#define FULL_RANGE 48  /* keys whose largest and smallest are known */
#define FULL_ROWS 1024 /* most rows in a block: whole panels */
#define FULL_PART 256  /* rows whose sums are added first */
#define FULL_GROUP 48  /* rows that take one path */
#define FULL_GROUPS ((FULL_ROWS + FULL_GROUP - 1) / FULL_GROUP)
#define FULL_TILE 120  /* keys in a block of dw */
#define FULL_SIDE 2    /* strips of X side by side there */
#define FULL_AHEAD 8   /* rows asked for ahead of their use */
#define FULL_SAFE 60.0f
#define FULL_CAP 300.0f       /* larger log-weights count as this much */
#define FULL_DEAD (-0x1.fffffep127f) /* the key of a dead token */
#define FULL_PW (FULL_TW < FULL_C ? FULL_TW : FULL_C)
/* Column col of row i in a matrix of ``rows`` rows cut into panels FULL_TW wide. */
#define FULL_AT(col, i, rows) (((col) / FULL_TW * (int64_t)(rows) + (i)) * FULL_TW + (col) % FULL_TW)

/* acc[r] += sum_p e[p][r] x[p]: the register tile, n steps; e has the strides step and row. */
TM_INLINE void full_tile(const float *restrict e, const int64_t step, const int64_t row, const float *restrict x, int64_t n, float *restrict acc, int64_t ld) {
    tm_vf a[FULL_R][FULL_NV];
    for (int r = 0; r < FULL_R; r++)
        for (int j = 0; j < FULL_NV; j++) a[r][j] = (tm_vf){0};
    for (int64_t p = 0; p < n; p++) {
        tm_vf v[FULL_NV];
#pragma GCC unroll 4
        for (int j = 0; j < FULL_NV; j++) v[j] = *(const tm_vf *)(x + p * FULL_TW + j * TM_VL);
#pragma GCC unroll 6
        for (int r = 0; r < FULL_R; r++) {
            float w = e[p * step + r * row];
#pragma GCC unroll 4
            for (int j = 0; j < FULL_NV; j++) a[r][j] += w * v[j];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < FULL_R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < FULL_NV; j++) *(tm_vf *)(acc + r * ld + j * TM_VL) += a[r][j];
}

/* Where the processor multiplies bfloat16 numbers, tensors in bfloat16 have E, X and Z rounded to it: sums are still in float32. The left factor is then cut
   into squares of HALF rows by HALF steps of the product, a row of a square after the other; in the right one two steps stand side by side for every column,
   FULL_TW columns wide. acc[r] += sum over the steps of e[r] x, HALF rows by FULL_TW columns: e has the strides row, from row to row of a square, and step,
   from square to square. There are two such products: of pairs of steps (AVX512_BF16), and of tiles of 16 rows, 32 steps and 16 columns (AMX). */
#define HALF 32
#define HALF_KEYS 128             /* keys in a block of X, and of dw: fewer than of float32, as the tiles read X again for every square */
#define HALF_SIDE (2 * FULL_SIDE) /* strips that use a block of E while it is in the cache */
#define HALF_PARTS 8              /* parts that there are for threads before strips are put together */
enum { HALF_NONE, HALF_PAIRS, HALF_TILES };
#if TM_VL == 16
#include <immintrin.h>
__attribute__((target("avx512bf16"), noinline)) static void half_pairs(const uint16_t *e, int64_t row, int64_t step, const uint32_t *x, int64_t n, float *acc,
    int64_t ld) {
    enum { R = 4 };
    for (int r0 = 0; r0 < HALF; r0 += R) {
        __m512 a[R][4];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) a[r][j] = _mm512_loadu_ps(acc + (r0 + r) * ld + j * TM_VL);
        for (int64_t p = 0; p < n * (HALF / 2); p++) {
            const uint16_t *at = e + r0 * row + p / (HALF / 2) * step + p % (HALF / 2) * 2;
            __m512bh v[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) v[j] = (__m512bh)_mm512_load_si512(x + p * FULL_TW + j * TM_VL);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                int32_t w;
                memcpy(&w, at + r * row, 4);
                __m512bh both = (__m512bh)_mm512_set1_epi32(w);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) a[r][j] = _mm512_dpbf16_ps(a[r][j], both, v[j]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) _mm512_storeu_ps(acc + (r0 + r) * ld + j * TM_VL, a[r][j]);
    }
}
#else
#define half_pairs(...) ((void)0)
#endif

#if TM_VL == 16 && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HALF_ASM(text, ...) __asm__ volatile(text ::__VA_ARGS__ : "memory")
#define HALF_LOAD(tile, a, bytes) HALF_ASM("tileloadd (%0,%1,1), %%tmm" #tile, "r"(a), "r"((int64_t)(bytes)))
#define HALF_STORE(tile, a, bytes) HALF_ASM("tilestored %%tmm" #tile ", (%0,%1,1)", "r"(a), "r"((int64_t)(bytes)))
#define HALF_MULTIPLY(tile, left, right) HALF_ASM("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #tile, "i"(0))
typedef struct {
    uint8_t palette, start, rest[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} half_shape;

/* Eight tiles of 16 rows of 64 bytes in this thread until half_end, which is given what the thread had before. */
TM_INLINE void half_begin(int half, half_shape *before) {
    half_shape shape = {.palette = 1};
    if (half != HALF_TILES) return;
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
    __asm__ volatile("sttilecfg %0\n\tldtilecfg %1" : "=m"(*before) : "m"(shape));
}

TM_INLINE void half_end(int half, const half_shape *before) {
    if (half == HALF_TILES) __asm__ volatile("ldtilecfg %0" ::"m"(*before) : "memory");
}

/* Two by two tiles: each that is read serves two products. */
static __attribute__((noinline)) void half_tiles(const uint16_t *e, int64_t row, int64_t step, const uint32_t *x, int64_t n, float *acc, int64_t ld) {
    for (int j = 0; j < FULL_TW; j += 32) {
        const uint16_t *left = e;
        const uint32_t *right = x + j;
        float *upper = acc + j, *lower = upper + 16 * ld;
        HALF_LOAD(0, upper, 4 * ld);
        HALF_LOAD(1, upper + 16, 4 * ld);
        HALF_LOAD(2, lower, 4 * ld);
        HALF_LOAD(3, lower + 16, 4 * ld);
        for (int64_t i = 0; i < n; i++, left += step, right += HALF / 2 * FULL_TW) {
            HALF_LOAD(4, left, 2 * row);
            HALF_LOAD(6, right, 4 * FULL_TW);
            HALF_MULTIPLY(0, 4, 6);
            HALF_LOAD(7, right + 16, 4 * FULL_TW);
            HALF_MULTIPLY(1, 4, 7);
            HALF_LOAD(5, left + 16 * row, 2 * row);
            HALF_MULTIPLY(2, 5, 6);
            HALF_MULTIPLY(3, 5, 7);
        }
        HALF_STORE(0, upper, 4 * ld);
        HALF_STORE(1, upper + 16, 4 * ld);
        HALF_STORE(2, lower, 4 * ld);
        HALF_STORE(3, lower + 16, 4 * ld);
    }
}

/* Whether the processor has the product and the system lends this process the memory of its tiles. */
static int half_permitted(void) {
    unsigned a, b, c, d = 0, bits = 1u << 22 | 1u << 24; /* AMX-BF16, AMX-TILE */
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & bits) == bits && !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tiles */);
}
#else
typedef int half_shape;
#define half_begin(half, before) ((void)(half), (void)(before))
#define half_end(half, before) ((void)(half), (void)(before))
#define half_tiles half_pairs
#define half_permitted() 0
#endif

/* The fastest product of bfloat16 numbers that this processor has. */
TM_EXPORT(full_half)(int *best) {
    *best = HALF_NONE;
#if TM_VL == 16
    if (__builtin_cpu_supports("avx512bf16")) *best = half_permitted() ? HALF_TILES : HALF_PAIRS;
#endif
}

TM_INLINE void half_product(int half, const uint16_t *e, int64_t row, int64_t step, const uint32_t *x, int64_t n, float *acc, int64_t ld) {
    if (half == HALF_TILES)
        half_tiles(e, row, step, x, n, acc, ld);
    else
        half_pairs(e, row, step, x, n, acc, ld);
}

TM_INLINE uint32_t full_pair(float first, float second) { return tm_to_bf16(first) | (uint32_t)tm_to_bf16(second) << 16; }

TM_INLINE void full_round(const float *restrict x, int64_t n, uint16_t *restrict out) {
    TM_IVDEP
    for (int64_t i = 0; i < n; i++) out[i] = tm_to_bf16(x[i]);
}

TM_INLINE int64_t half_squares(int64_t n) { return tm_ceil(n, HALF); }

typedef struct {
    int dtype, wdtype, gate, causal, half;
    const void *q, *k, *v, *g;
    const uint8_t *mask;                           /* (B, S) */
    const void *w;                                 /* log-weights of the block of rows (rows, ldw) */
    const float *top, *span, *slack, *kmax, *kmin; /* what full_pack made of them, and full_ranges of the keys */
    const void *e;
    int64_t B, T, S, D, t0, rows, hi, ldw;                 /* rows t0 .. t0 + rows of T see keys below hi */
    int64_t qb, qt, kb, kt, vb, vt, gb, gt;
    int *odd; /* set where an output is not finite */
} full_in;

/* How many features are worked on together. */
TM_INLINE int64_t full_wide(const full_in *a) {
    return FULL_C * (a->half ? tm_max(1, tm_min(HALF_SIDE, a->B * tm_ceil(a->D, FULL_C) / HALF_PARTS)) : 1);
}

/* Rows of a block, and room for the last square of them. */
TM_INLINE int64_t full_room(const full_in *a) { return a->rows + HALF; }

TM_INLINE int full_live(const full_in *a, int64_t b, int64_t s) { return !a->mask || a->mask[b * a->S + s]; }

/* Per block of keys the largest and the smallest key of each feature, (B, blocks, D); masked and dead keys do not count. */
TM_INLINE void full_range_block(const int dtype, const void *k, const uint8_t *mask, int64_t at, int64_t kt, int64_t n, int64_t D, float *top, float *low) {
    float buf[FULL_X];
    for (int64_t c = 0; c < D; c++) top[c] = TM_FLOOR, low[c] = -TM_FLOOR;
    for (int64_t i = 0; i < n; i++) {
        if (mask && !mask[i]) continue;
        for (int64_t c0 = 0; c0 < D; c0 += FULL_X) {
            int w = (int)tm_min(FULL_X, D - c0);
            const float *x = tm_read(dtype, k, at + i * kt + c0, buf, w);
            TM_IVDEP
            for (int c = 0; c < w; c++) {
                float u = x[c], l = u <= FULL_DEAD ? -TM_FLOOR : u;
                top[c0 + c] = u > top[c0 + c] ? u : top[c0 + c];
                low[c0 + c] = l < low[c0 + c] ? l : low[c0 + c];
            }
        }
    }
}

TM_EXPORT(full_ranges)(int dtype, const void *k, const uint8_t *mask, float *kmax, float *kmin, int64_t B, int64_t S, int64_t D, int64_t kb, int64_t kt,
    int threads) {
    int64_t blocks = tm_ceil(S, FULL_RANGE);
#pragma omp parallel for schedule(static) num_threads(threads) if (B * blocks > 1 && threads > 1)
    for (int64_t i = 0; i < B * blocks; i++) {
        int64_t b = i / blocks, s0 = i % blocks * FULL_RANGE, n = tm_min(FULL_RANGE, S - s0);
        full_range_block(dtype, k, mask ? mask + b * S + s0 : NULL, b * kb + s0 * kt, kt, n, D, kmax + i * D, kmin + i * D);
    }
}

/* The largest of n numbers, and the least. */
TM_INLINE void full_extremes(const float *restrict w, const uint8_t *restrict mask, int64_t n, float *top, float *low) {
    enum { LANES = 4 * TM_VL };
    float up[LANES], down[LANES];
    for (int i = 0; i < LANES; i++) up[i] = -1e30f, down[i] = 1e30f;
    for (int64_t s0 = 0; s0 < n; s0 += LANES) {
        int m = (int)tm_min(LANES, n - s0);
        if (m == LANES && !mask) {
            TM_IVDEP
            for (int i = 0; i < LANES; i++) {
                float x = w[s0 + i];
                up[i] = x > up[i] ? x : up[i], down[i] = x < down[i] ? x : down[i];
            }
        } else
            for (int i = 0; i < m; i++) {
                if (mask && !mask[s0 + i]) continue;
                float x = w[s0 + i];
                up[i] = x > up[i] ? x : up[i], down[i] = x < down[i] ? x : down[i];
            }
    }
    for (int i = 1; i < LANES; i++) up[0] = up[i] > up[0] ? up[i] : up[0], down[0] = down[i] < down[0] ? down[i] : down[0];
    *top = up[0], *low = down[0];
}

/* Log-weights of a row from key s on, or one. */
TM_INLINE const float *full_weights(const full_in *a, int64_t row, int64_t s, float *buffer, int64_t n) {
    return tm_read(a->wdtype, a->w, row * a->ldw + s, buffer, (int)n);
}

TM_INLINE float full_weight(const full_in *a, int64_t row, int64_t s) {
    float x;
    return *full_weights(a, row, s, &x, 1);
}

/* How many keys a row of the block sees; none beyond the last row. */
TM_INLINE int64_t full_seen(const full_in *a, int64_t row) { return row >= a->rows ? 0 : a->causal ? tm_min(a->hi, a->t0 + row + 1) : a->hi; }

/* One row of log-weights: the largest and smallest of those it may use, and by how much the largest a batch row can see falls short of it. */
TM_INLINE void full_row(const full_in *a, int64_t r, float *line, float *top, float *low, float *slack) {
    int64_t n = full_seen(a, r);
    const float *w = full_weights(a, r, 0, line, n);
    float up, down, seen, least;
    full_extremes(w, NULL, n, &up, &down);
    *top = up = up > FULL_CAP ? FULL_CAP : up;
    *low = down < up ? down : up;
    for (int64_t b = 0; a->mask && b < a->B; b++) {
        full_extremes(w, a->mask + b * a->S, n, &seen, &least);
        float lack = seen > -1e29f && seen < up ? up - seen : 0.0f;
        slack[b] = lack > slack[b] ? lack : slack[b];
    }
}

/* e^{w - a_t} of some keys of a row. */
TM_INLINE void full_exp(const float *restrict w, float top, int64_t n, float *restrict out) {
    TM_IVDEP
    for (int64_t s = 0; s < n; s++) {
        float x = w[s] > FULL_CAP ? FULL_CAP : w[s];
        out[s] = tm_exp_neg(x - top);
    }
}

/* E by groups of FULL_R rows, (group, key, row); zeros after the last key that a causal row sees, up to the last of its group. */
TM_INLINE void full_pack_rows(const full_in *a, int64_t group, const float *top, float *e) {
    float line[FULL_KEYS], buffer[FULL_KEYS], *out = e + group * a->hi * FULL_R;
    for (int r = 0; r < FULL_R; r++) {
        int64_t row = group * FULL_R + r, last = group * FULL_R + FULL_R;
        int64_t end = a->causal ? tm_min(a->hi, a->t0 + last) : a->hi, n = full_seen(a, row);
        for (int64_t s0 = 0; s0 < n; s0 += FULL_KEYS) {
            int64_t m = tm_min(FULL_KEYS, n - s0);
            full_exp(full_weights(a, row, s0, buffer, m), top[row], m, line);
            for (int64_t s = 0; s < m; s++) out[(s0 + s) * FULL_R + r] = line[s];
        }
        for (int64_t s = n; s < end; s++) out[s * FULL_R + r] = 0.0f;
    }
}

/* HALF numbers of a row of E from key s on, in halves; zeros from key n on. */
TM_INLINE void half_line(const full_in *a, int64_t row, int64_t s, int64_t n, const float *top, uint16_t *out) {
    float line[HALF], buffer[HALF];
    int64_t m = tm_max(0, tm_min(HALF, n - s));
    if (m) full_exp(full_weights(a, row, s, buffer, m), top[row], m, line);
    for (int64_t i = m; i < HALF; i++) line[i] = 0.0f;
    full_round(line, HALF, out);
}

/* In halves: a square of rows and keys after the other. */
TM_INLINE void half_pack_rows(const full_in *a, int64_t group, const float *top, uint16_t *e) {
    int64_t squares = half_squares(full_seen(a, tm_min(group * HALF + HALF, a->rows) - 1));
    for (int64_t r = 0; r < HALF; r++) {
        int64_t row = group * HALF + r, n = full_seen(a, row);
        for (int64_t i = 0; i < squares; i++) half_line(a, row, i * HALF, n, top, e + ((group * half_squares(a->hi) + i) * HALF + r) * HALF);
    }
}

/* E by groups of FULL_R keys, (group, row, key): what the gradients of the keys read; FULL_GROUP rows of it. */
TM_INLINE void full_pack_keys(const full_in *a, int64_t group, const float *top, float *e) {
    float line[FULL_KEYS + FULL_R], buffer[FULL_KEYS];
    for (int64_t row = group * FULL_GROUP; row < tm_min(a->rows, (group + 1) * FULL_GROUP); row++) {
        int64_t n = full_seen(a, row);
        for (int64_t s0 = 0; s0 < n; s0 += FULL_KEYS) {
            int64_t m = tm_min(FULL_KEYS, n - s0);
            full_exp(full_weights(a, row, s0, buffer, m), top[row], m, line);
            memset(line + m, 0, sizeof(float) * FULL_R);
            for (int64_t s = 0; s < m; s += FULL_R) memcpy(e + (s0 + s) * a->rows + row * FULL_R, line + s, sizeof(float) * FULL_R);
        }
    }
}

/* In halves: squares of keys and rows. */
TM_INLINE void half_pack_keys(const full_in *a, int64_t group, const float *top, uint16_t *e) {
    uint16_t halves[HALF];
    int64_t squares = half_squares(full_seen(a, tm_min(group * HALF + HALF, a->rows) - 1));
    for (int64_t r = 0; r < HALF; r++) {
        int64_t row = group * HALF + r, n = full_seen(a, row);
        for (int64_t i = 0; i < squares; i++) {
            half_line(a, row, i * HALF, n, top, halves);
            for (int64_t s = 0; s < HALF; s++) e[((i * half_squares(a->rows) + group) * HALF + s) * HALF + r] = halves[s];
        }
    }
}

/* What a block of rows of log-weights w (rows, ldw) becomes: the row maxima, per group of rows the widest span of weights and per batch row the largest
   shortfall (B, groups), and E, by rows for the forward pass (keys = 0) or by keys for the backward. */
TM_EXPORT(full_pack)(int wdtype, int keys, int half, int causal, const void *w, const uint8_t *mask, float *top, float *span, float *slack, void *e,
    int64_t B, int64_t S, int64_t t0, int64_t rows, int64_t hi, int64_t ldw, int threads) {
    full_in a = {.wdtype = wdtype, .causal = causal, .half = half, .mask = mask, .w = w, .B = B, .S = S, .t0 = t0, .rows = rows, .hi = hi, .ldw = ldw};
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < tm_ceil(rows, FULL_GROUP); i++) {
        float *lacks = tm_scratch(sizeof(float) * (size_t)B), *line = tm_scratch(sizeof(float) * (size_t)hi), low;
        memset(lacks, 0, sizeof(float) * (size_t)B);
        span[i] = 0.0f;
        for (int64_t r = i * FULL_GROUP; r < tm_min(rows, (i + 1) * FULL_GROUP); r++) {
            full_row(&a, r, line, top + r, &low, lacks);
            span[i] = top[r] - low > span[i] ? top[r] - low : span[i];
        }
        for (int64_t b = 0; b < B; b++) slack[b * FULL_GROUPS + i] = lacks[b];
        free(lacks), free(line);
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < tm_ceil(rows, half ? HALF : keys ? FULL_GROUP : FULL_R); i++) {
        if (half)
            keys ? half_pack_keys(&a, i, top, e) : half_pack_rows(&a, i, top, e);
        else
            keys ? full_pack_keys(&a, i, top, e) : full_pack_rows(&a, i, top, e);
    }
}

/* What all rows of a block share in a strip of features. */
typedef struct {
    float m[FULL_C];               /* the unit of the keys */
    uint8_t literal[FULL_GROUPS];  /* groups of rows that take the literal form */
} full_strip;

/* The largest key each feature has among those up to the first row of every group; m where all rows see all keys. */
TM_INLINE float full_drop(const int dtype, const full_in *a, int64_t b, int64_t c0, int w, const float *m, int64_t *next, float *seen, int64_t row) {
    float buf[FULL_C], drop = 0.0f;
    for (; *next <= a->t0 + row; (*next)++) {
        if (!full_live(a, b, *next)) continue;
        const float *k = tm_read(dtype, a->k, b * a->kb + *next * a->kt + c0, buf, w);
        for (int c = 0; c < w; c++) seen[c] = k[c] > seen[c] ? k[c] : seen[c];
    }
    for (int c = 0; c < w; c++) drop = m[c] - seen[c] > drop ? m[c] - seen[c] : drop;
    return drop;
}

/* The unit of a strip's keys, and which groups of rows float32 cannot do exactly. */
TM_INLINE void full_plan(const int dtype, const full_in *a, int64_t b, int64_t c0, int w, full_strip *s) {
    float low[FULL_C], seen[FULL_C], range = 0.0f;
    int64_t blocks = tm_ceil(a->hi, FULL_RANGE), all = tm_ceil(a->S, FULL_RANGE), next = a->t0 / FULL_RANGE * FULL_RANGE;
    for (int c = 0; c < FULL_C; c++) s->m[c] = seen[c] = TM_FLOOR, low[c] = -TM_FLOOR;
    for (int64_t i = 0; i < blocks; i++) {
        const float *top = a->kmax + (b * all + i) * a->D + c0, *bottom = a->kmin + (b * all + i) * a->D + c0;
        for (int c = 0; c < w; c++) {
            s->m[c] = top[c] > s->m[c] ? top[c] : s->m[c];
            low[c] = bottom[c] < low[c] ? bottom[c] : low[c];
            if ((i + 1) * FULL_RANGE <= next) seen[c] = s->m[c];
        }
    }
    for (int c = 0; c < w; c++) range = s->m[c] - low[c] > range ? s->m[c] - low[c] : range;
    for (int i = 0; i * FULL_GROUP < a->rows; i++) {
        s->literal[i] = 0;
        if (range + a->slack[b * FULL_GROUPS + i] <= FULL_SAFE) continue;
        float drop = a->causal ? full_drop(dtype, a, b, c0, w, s->m, &next, seen, i * FULL_GROUP) : 0.0f;
        s->literal[i] = !(a->span[i] + drop <= FULL_SAFE);
    }
}

/* Rows of X, or of Z, in halves: two side by side, up to whole tiles. */
TM_INLINE void half_interleave(const float *restrict x, int64_t n, uint32_t *restrict out) {
    for (int64_t i = 0; i < half_squares(n) * HALF; i += 2, x += 2 * FULL_X, out += FULL_X) {
        if (i + 1 < n) {
            TM_IVDEP
            for (int c = 0; c < FULL_X; c++) out[c] = full_pair(x[c], x[FULL_X + c]);
        } else
            for (int c = 0; c < FULL_X; c++) out[c] = i < n ? full_pair(x[c], 0.0f) : 0;
    }
}

/* X of n keys from s0, in panels. */
TM_INLINE void full_products(const int dtype, const full_in *a, int64_t b, int64_t c0, int w, const float *m, int64_t s0, int64_t n, float *x) {
    float kbuf[FULL_C], vbuf[FULL_C];
    for (int64_t i = 0; i < n; i++) {
        tm_ahead(dtype, a->k, b * a->kb + (s0 + i + FULL_AHEAD) * a->kt + c0, w), tm_ahead(dtype, a->v, b * a->vb + (s0 + i + FULL_AHEAD) * a->vt + c0, w);
        int live = full_live(a, b, s0 + i);
        const float *k = live ? tm_read(dtype, a->k, b * a->kb + (s0 + i) * a->kt + c0, kbuf, w) : NULL;
        const float *v = live ? tm_read(dtype, a->v, b * a->vb + (s0 + i) * a->vt + c0, vbuf, w) : NULL;
        for (int j = 0; j < FULL_C; j += FULL_PW) {
            float *num = x + FULL_AT(j, i, FULL_KEYS), *den = x + FULL_AT(FULL_C + j, i, FULL_KEYS);
            if (live && w == FULL_C) {
                TM_IVDEP
                for (int c = 0; c < FULL_PW; c++) {
                    float e = tm_exp_neg(k[j + c] - m[j + c]);
                    num[c] = e * v[j + c], den[c] = e;
                }
            } else
                for (int c = 0; c < FULL_PW; c++) {
                    float e = live && j + c < w ? tm_exp_neg(k[j + c] - m[j + c]) : 0.0f;
                    num[c] = live && j + c < w ? e * v[j + c] : 0.0f, den[c] = e;
                }
        }
    }
}

/* The largest exponent of a row in each feature. */
TM_INLINE void full_literal_top(const int dtype, const full_in *a, int64_t b, int64_t c0, int w, int64_t row, float *top) {
    float buf[FULL_C];
    double m[FULL_C];
    int64_t n = full_seen(a, row);
    for (int c = 0; c < FULL_C; c++) m[c] = TM_FLOOR;
    for (int64_t s = 0; s < n; s++) {
        if (!full_live(a, b, s)) continue;
        float x = full_weight(a, row, s);
        double ww = x > FULL_CAP ? FULL_CAP : x;
        const float *k = tm_read(dtype, a->k, b * a->kb + s * a->kt + c0, buf, w);
        TM_IVDEP
        for (int c = 0; c < w; c++) {
            double z = k[c] <= FULL_DEAD ? TM_FLOOR : k[c] + ww;
            m[c] = z > m[c] ? z : m[c];
        }
    }
    for (int c = 0; c < FULL_C; c++) top[c] = (float)m[c];
}

/* e^{k + w - top} of one key; 0 for a dead one. */
TM_INLINE float full_term(float k, double w, float top) { return k <= FULL_DEAD ? 0.0f : tm_exp_neg((float)((double)k + w - (double)top)); }

TM_INLINE void full_literal_row(const int dtype, const full_in *a, int64_t b, int64_t c0, int w, int64_t row, float *restrict acc) {
    float top[FULL_C], kbuf[FULL_C], vbuf[FULL_C], part[FULL_X];
    full_literal_top(dtype, a, b, c0, w, row, top);
    int64_t n = full_seen(a, row);
    memset(acc, 0, sizeof part);
    for (int64_t s0 = 0; s0 < n; s0 += FULL_KEYS) {
        memset(part, 0, sizeof part);
        for (int64_t s = s0; s < tm_min(n, s0 + FULL_KEYS); s++) {
            if (!full_live(a, b, s)) continue;
            float x = full_weight(a, row, s);
            double ww = x > FULL_CAP ? FULL_CAP : x;
            const float *k = tm_read(dtype, a->k, b * a->kb + s * a->kt + c0, kbuf, w), *v = tm_read(dtype, a->v, b * a->vb + s * a->vt + c0, vbuf, w);
            TM_IVDEP
            for (int c = 0; c < w; c++) {
                float e = full_term(k[c], ww, top[c]);
                part[c] += e * v[c], part[FULL_C + c] += e;
            }
        }
        for (int c = 0; c < FULL_X; c++) acc[c] += part[c];
    }
}

/* Outputs of one row from its sums; y0 and den, before the gate, are what the backward pass needs. */
TM_INLINE void full_finish(const int dtype, const int gate, const full_in *a, int64_t b, int64_t c0, int w, int64_t row, const float *restrict acc, void *y,
    float *y0, float *den) {
    float qbuf[FULL_C], ybuf[FULL_C], ratio[FULL_C];
    int64_t t = a->t0 + row, at = (b * a->T + t) * a->D + c0;
    if (gate) tm_ahead(dtype, a->q, b * a->qb + (t + FULL_AHEAD) * a->qt + c0, w);
    TM_IVDEP
    for (int c = 0; c < w; c++) ratio[c] = acc[FULL_C + c] == 0 ? 0.0f : acc[c] / acc[FULL_C + c];
    if (y0) memcpy(y0 + at, ratio, sizeof(float) * w), memcpy(den + at, acc + FULL_C, sizeof(float) * w);
    float *out = tm_target(dtype, y, at, ybuf);
    const float *q = gate ? tm_read(dtype, a->q, b * a->qb + t * a->qt + c0, qbuf, w) : NULL;
    int some = 0;
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        out[c] = gate ? ratio[c] * tm_sigmoid(q[c]) : ratio[c];
        some |= tm_odd(out[c]);
    }
    tm_tell(some, a->odd);
    tm_write(dtype, y, at, out, w);
}

/* The sums of a block of rows in one strip over n keys from s0, whose X is x. */
TM_INLINE void full_forward_block(const full_in *a, const full_strip *s, int64_t s0, int64_t n, const float *x, const uint32_t *pairs, float *acc) {
    int64_t step = a->half ? HALF : FULL_R;
    for (int64_t r = a->causal ? tm_max(0, s0 - a->t0) / step * step : 0; r < a->rows; r += step) {
        int64_t last = tm_min(r + step, a->rows) - 1, seen = tm_min(n, full_seen(a, last) - s0);
        if (s->literal[r / FULL_GROUP] && s->literal[last / FULL_GROUP]) continue;
        if (a->half)
            half_product(a->half, (const uint16_t *)a->e + (r * half_squares(a->hi) + s0) * HALF, HALF, HALF * HALF, pairs, half_squares(seen),
                acc + r * FULL_X, FULL_X);
        else
            for (int j = 0; j < FULL_X; j += FULL_TW)
                full_tile((const float *)a->e + (r * a->hi) + s0 * FULL_R, FULL_R, 1, x + FULL_AT(j, 0, FULL_KEYS), seen, acc + r * FULL_X + j, FULL_X);
    }
}

/* All rows of a block in w features from c0, up to HALF_SIDE strips. */
TM_INLINE void full_forward_strips(const int dtype, const int gate, const full_in *a, int64_t b, int64_t c0, int64_t w, float *x, uint32_t *pairs, float *acc,
    void *y, float *y0, float *den) {
    full_strip s[HALF_SIDE];
    int64_t keys = a->half ? HALF_KEYS : FULL_KEYS, strips = tm_ceil(w, FULL_C), sums = full_room(a) * FULL_X;
    memset(acc, 0, sizeof(float) * strips * sums);
    for (int64_t i = 0; i < strips; i++) full_plan(dtype, a, b, c0 + i * FULL_C, (int)tm_min(FULL_C, w - i * FULL_C), s + i);
    for (int64_t s0 = 0; s0 < a->hi; s0 += keys) {
        int64_t n = tm_min(keys, a->hi - s0);
        for (int64_t i = 0; i < strips; i++) {
            full_products(dtype, a, b, c0 + i * FULL_C, (int)tm_min(FULL_C, w - i * FULL_C), s[i].m, s0, n, x);
            if (a->half) half_interleave(x, n, pairs);
            full_forward_block(a, s + i, s0, n, x, pairs, acc + i * sums);
        }
    }
    for (int64_t i = 0; i < strips; i++)
        for (int64_t r = 0; r < a->rows; r++) {
            int64_t c = c0 + i * FULL_C;
            int width = (int)tm_min(FULL_C, w - i * FULL_C);
            float *sum = acc + i * sums + r * FULL_X;
            if (s[i].literal[r / FULL_GROUP]) full_literal_row(dtype, a, b, c, width, r, sum);
            full_finish(dtype, gate, a, b, c, width, r, sum, y, y0, den);
        }
}

#define FULL_DISPATCH(call)                                                                                                                                    \
    switch (a.dtype) {                                                                                                                                         \
    case 0: call(0); break;                                                                                                                                    \
    case 1: call(1); break;                                                                                                                                    \
    default: call(2); break;                                                                                                                                   \
    }

/* Rows t0 .. t0 + rows of y (B, T, D); y0 and den (B, T, D) or NULL. Keys, values and log-weights that are not finite show in the rows of their tile: where
   ``odd`` is set, the caller takes them out and calls again. e, top, span and slack are full_pack's, kmax and kmin full_ranges'. */
TM_EXPORT(full_forward)(int dtype, int wdtype, int gate, int causal, int half, const void *q, const void *k, const void *v, const uint8_t *mask, const void *w,
    const float *top,
                        const float *span, const float *slack, const float *kmax, const float *kmin, const void *e, void *y, float *y0, float *den, int64_t B,
                        int64_t T, int64_t S, int64_t D, int64_t t0, int64_t rows, int64_t hi, int64_t ldw, int64_t qb, int64_t qt, int64_t kb, int64_t kt,
                        int64_t vb, int64_t vt, int threads, int *odd) {
    full_in a = {dtype, wdtype, gate, causal, half, q, k, v, NULL, mask, w, top, span, slack, kmax, kmin, e, B, T, S, D, t0, rows, hi, ldw, qb, qt, kb, kt, vb,
        vt, 0, 0, odd};
    int64_t wide = full_wide(&a), parts = tm_ceil(D, wide);
#pragma omp parallel num_threads(threads) if (B * parts > 1 && threads > 1)
    {
        float *x = tm_scratch(sizeof(float) * FULL_KEYS * FULL_X * 2), *acc = tm_scratch(sizeof(float) * wide / FULL_C * full_room(&a) * FULL_X);
        half_shape before;
        half_begin(half, &before);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < B * parts; i++) {
            int64_t b = i / parts, c0 = i % parts * wide;
#define FULL_CALL(type) full_forward_strips(type, gate, &a, b, c0, tm_min(wide, D - c0), x, (uint32_t *)(x + FULL_KEYS * FULL_X), acc, y, y0, den)
            FULL_DISPATCH(FULL_CALL)
#undef FULL_CALL
        }
        half_end(half, &before);
        free(x), free(acc);
    }
}

/* What the gradients of the keys leave for those of the weights. */
typedef struct {
    void *z;          /* Z transposed, by panels of FULL_TW rows: (B, panel, column, row), columns as those of X, strip after strip; in halves
                         (B, panel, pair of columns, row, 2) */
    float *rate, *to; /* (B, rows, D), of rows in the literal form: g gate / den, and the exponent that den is in units of */
    uint8_t *literal; /* (B, strips, FULL_GROUPS) */
} full_rest;

/* Z of one row into its panels and its group, and dq. A row in the literal form has Z = 0 here. */
TM_INLINE void full_back_row(const int dtype, const int gate, const full_in *a, int64_t b, int64_t c0, int w, int64_t row, int literal, const float *y0,
                             const float *den, float *z, const full_rest *rest, void *dq) {
    float gbuf[FULL_C], qbuf[FULL_C], dbuf[FULL_C], pair[FULL_X];
    int64_t t = a->t0 + row, at = (b * a->T + t) * a->D + c0, strips = tm_ceil(a->D, FULL_C), panels = tm_ceil(a->rows, FULL_TW);
    tm_ahead(dtype, a->g, b * a->gb + (t + FULL_AHEAD) * a->gt + c0, w);
    tm_ahead(TM_F32, y0, at + FULL_AHEAD * a->D, w), tm_ahead(TM_F32, den, at + FULL_AHEAD * a->D, w);
    if (gate) tm_ahead(dtype, a->q, b * a->qb + (t + FULL_AHEAD) * a->qt + c0, w);
    const float *g = tm_read(dtype, a->g, b * a->gb + t * a->gt + c0, gbuf, w);
    float *rate = rest->rate + (b * a->rows + row) * a->D + c0;
    for (int c = 0; c < w; c++) rate[c] = g[c];
    if (gate) {
        const float *q = tm_read(dtype, a->q, b * a->qb + t * a->qt + c0, qbuf, w);
        float *out = tm_target(dtype, dq, at, dbuf);
        TM_IVDEP
        for (int c = 0; c < w; c++) {
            float sg = tm_sigmoid(q[c]);
            out[c] = g[c] * y0[at + c] * sg * (1.0f - sg);
            rate[c] *= sg;
        }
        tm_write(dtype, dq, at, out, w);
    }
    memset(pair, 0, sizeof pair);
    TM_IVDEP
    for (int c = 0; c < w; c++) rate[c] = den[at + c] > 0 ? rate[c] / den[at + c] : 0.0f;
    for (int c = 0; c < (literal ? 0 : w); c++) pair[c] = rate[c], pair[FULL_C + c] = -rate[c] * y0[at + c];
    int64_t place = ((b * panels + row / FULL_TW) * strips + c0 / FULL_C) * FULL_X * FULL_TW;
    if (a->half) {
        uint32_t *out = (uint32_t *)((uint16_t *)rest->z + place) + row % FULL_TW;
        for (int c = 0; c < FULL_X; c += 2) out[c / 2 * FULL_TW] = full_pair(pair[c], pair[c + 1]);
    } else {
        float *out = (float *)rest->z + place + row % FULL_TW;
        for (int c = 0; c < FULL_X; c++) out[c * FULL_TW] = pair[c];
    }
    for (int c = 0; c < FULL_X; c += FULL_PW) memcpy(z + FULL_AT(c, row, FULL_ROWS), pair + c, sizeof(float) * FULL_PW);
}

/* Gradients of n keys from s0 of what the rows in float32 gave them: [A | C] in acc. */
TM_INLINE void full_back_keys(const int dtype, const full_in *a, int64_t b, int64_t c0, int w, const float *m, int64_t s0, int64_t n, const float *acc,
    float *dk, float *dv) {
    float kbuf[FULL_C], vbuf[FULL_C];
    for (int64_t i = 0; i < n; i++) {
        int64_t s = s0 + i, at = (b * a->S + s) * a->D + c0;
        if (!full_live(a, b, s)) continue;
        const float *k = tm_read(dtype, a->k, b * a->kb + s * a->kt + c0, kbuf, w), *v = tm_read(dtype, a->v, b * a->vb + s * a->vt + c0, vbuf, w);
        const float *p = acc + i * FULL_X;
        float *pk = dk + at, *pv = dv + at;
        TM_IVDEP
        for (int c = 0; c < w; c++) {
            float e = tm_exp_neg(k[c] - m[c]);
            pv[c] += e * p[c];
            pk[c] += e * (v[c] * p[c] + p[FULL_C + c]);
        }
    }
}

/* The same of a row in the literal form; its maximum is left for the gradients of the weights. */
TM_INLINE void full_back_literal(const int dtype, const full_in *a, int64_t b, int64_t c0, int w, int64_t row, const float *y0, const full_rest *rest,
    float *dk, float *dv) {
    float kbuf[FULL_C], vbuf[FULL_C], top[FULL_C];
    int64_t n = full_seen(a, row), here = (b * a->rows + row) * a->D + c0;
    const float *rate = rest->rate + here, *y = y0 + (b * a->T + a->t0 + row) * a->D + c0;
    full_literal_top(dtype, a, b, c0, w, row, top);
    memcpy(rest->to + here, top, sizeof(float) * w);
    for (int64_t s = 0; s < n; s++) {
        if (!full_live(a, b, s)) continue;
        float x = full_weight(a, row, s);
        double ww = x > FULL_CAP ? FULL_CAP : x;
        const float *k = tm_read(dtype, a->k, b * a->kb + s * a->kt + c0, kbuf, w), *v = tm_read(dtype, a->v, b * a->vb + s * a->vt + c0, vbuf, w);
        float *pk = dk + (b * a->S + s) * a->D + c0, *pv = dv + (b * a->S + s) * a->D + c0;
        TM_IVDEP
        for (int c = 0; c < w; c++) {
            float p = full_term(k[c], ww, top[c]) * rate[c];
            pv[c] += p;
            pk[c] += p * (v[c] - y[c]);
        }
    }
}

/* What the rows of a block give to the gradients of the keys from s0 on, one step of them, in one strip. */
TM_INLINE void full_back_step(const int dtype, const full_in *a, int64_t b, int64_t c0, int w, const float *m, int64_t s0, int64_t step, const float *z,
    const uint32_t *pairs, float *dk, float *dv) {
    float acc[HALF * FULL_X] __attribute__((aligned(64)));
    int64_t first = a->causal ? tm_max(0, s0 - a->t0) : 0, part = a->half ? FULL_ROWS : FULL_PART;
    if (a->half) first -= first % HALF;
    memset(acc, 0, sizeof(float) * step * FULL_X);
    for (int64_t s = s0; s < tm_min(s0 + step, a->hi); s++) {
        int64_t at = (b * a->S + s) * a->D + c0;
        tm_ahead(dtype, a->k, b * a->kb + s * a->kt + c0, w), tm_ahead(dtype, a->v, b * a->vb + s * a->vt + c0, w);
        tm_ahead(TM_F32, dk, at, w), tm_ahead(TM_F32, dv, at, w);
    }
    for (int64_t r = first; r < a->rows; r += part) { /* partial sums */
        int64_t n = tm_min(part, a->rows - r);
        if (a->half)
            half_product(a->half, (const uint16_t *)a->e + (s0 * half_squares(a->rows) + r) * HALF, HALF, HALF * HALF, pairs + r / 2 * FULL_X,
                half_squares(n), acc, FULL_X);
        else
            for (int j = 0; j < FULL_X; j += FULL_TW)
                full_tile((const float *)a->e + (s0 * a->rows) + r * FULL_R, FULL_R, 1, z + FULL_AT(j, r, FULL_ROWS), n, acc + j, FULL_X);
    }
    full_back_keys(dtype, a, b, c0, w, m, s0, tm_min(step, a->hi - s0), acc, dk, dv);
}

/* All rows of a block in w features from c0, up to HALF_SIDE strips. */
TM_INLINE void full_backward_strips(const int dtype, const int gate, const full_in *a, int64_t b, int64_t c0, int64_t w, const float *y0, const float *den,
    void *dq, float *dk, float *dv, float *z, uint32_t *pairs, const full_rest *rest) {
    full_strip s[HALF_SIDE];
    int64_t step = a->half ? HALF : FULL_R, strips = tm_ceil(w, FULL_C), size = full_room(a) * FULL_X / 2;
    memset(s, 0, sizeof s); /* groups beyond the last row are copied too */
    for (int64_t i = 0; i < strips; i++) {
        int64_t c = c0 + i * FULL_C;
        int width = (int)tm_min(FULL_C, w - i * FULL_C);
        full_plan(dtype, a, b, c, width, s + i);
        memcpy(rest->literal + (b * tm_ceil(a->D, FULL_C) + c / FULL_C) * FULL_GROUPS, s[i].literal, FULL_GROUPS);
        for (int64_t r = 0; r < a->rows; r++) full_back_row(dtype, gate, a, b, c, width, r, s[i].literal[r / FULL_GROUP], y0, den, z, rest, dq);
        if (a->half) half_interleave(z, a->rows, pairs + i * size);
    }
    for (int64_t s0 = 0; s0 < a->hi; s0 += step)
        for (int64_t i = 0; i < strips; i++)
            full_back_step(dtype, a, b, c0 + i * FULL_C, (int)tm_min(FULL_C, w - i * FULL_C), s[i].m, s0, step, z, pairs + i * size, dk, dv);
    for (int64_t i = 0; i < strips; i++)
        for (int64_t r = 0; r < a->rows; r++)
            if (s[i].literal[r / FULL_GROUP])
                full_back_literal(dtype, a, b, c0 + i * FULL_C, (int)tm_min(FULL_C, w - i * FULL_C), r, y0, rest, dk, dv);
}

/* dq of rows t0 .. t0 + rows, and what these rows add to dk and dv (B, S, D), float32; z, rate, to and literal are for full_backward_weights. */
TM_EXPORT(full_backward_keys)(int dtype, int wdtype, int gate, int causal, int half, const void *q, const void *k, const void *v, const void *g,
    const uint8_t *mask, const void *w,
                              const float *top, const float *span, const float *slack, const float *kmax, const float *kmin, const void *e, const float *y0,
                              const float *den, void *dq, float *dk, float *dv, void *z, float *rate, float *to, uint8_t *literal, int64_t B, int64_t T,
                              int64_t S, int64_t D, int64_t t0, int64_t rows, int64_t hi, int64_t ldw, int64_t qb, int64_t qt, int64_t kb, int64_t kt,
                              int64_t vb, int64_t vt, int64_t gb, int64_t gt, int threads) {
    full_in a = {dtype, wdtype, gate, causal, half, q, k, v, g, mask, w, top, span, slack, kmax, kmin, e, B, T, S, D, t0, rows, hi, ldw, qb, qt, kb, kt, vb, vt,
        gb, gt, NULL};
    full_rest rest = {z, rate, to, literal};
    int64_t wide = full_wide(&a), parts = tm_ceil(D, wide);
#pragma omp parallel num_threads(threads) if (B * parts > 1 && threads > 1)
    {
        float *z0 = tm_scratch(sizeof(float) * FULL_ROWS * FULL_X);
        uint32_t *pairs = tm_scratch(half ? sizeof(uint32_t) * wide / FULL_C * full_room(&a) * FULL_X / 2 : 1);
        half_shape before;
        half_begin(half, &before);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < B * parts; i++) {
            int64_t b = i / parts, c0 = i % parts * wide;
#define FULL_CALL(type) full_backward_strips(type, gate, &a, b, c0, tm_min(wide, D - c0), y0, den, dq, dk, dv, z0, pairs, &rest)
            FULL_DISPATCH(FULL_CALL)
#undef FULL_CALL
        }
        half_end(half, &before);
        free(z0), free(pairs);
    }
}

/* How far apart two keys are in the sums for dw, (keys, rows): not a power of two, so that they share no lines of a cache. */
TM_INLINE int64_t full_apart(const full_in *a) { return tm_ceil(a->rows, FULL_TW) * FULL_TW + 16; }

/* What a row in the literal form adds to dw, (keys, rows): sum over features of p (v - y). */
TM_INLINE void full_weights_literal(const int dtype, const full_in *a, int64_t b, int64_t c0, int w, int64_t s0, int64_t n, int64_t row, const float *y0,
                                    const full_rest *rest, float *dw) {
    float kbuf[FULL_C], vbuf[FULL_C], part[FULL_C];
    int64_t here = (b * a->rows + row) * a->D + c0, seen = a->causal ? tm_min(n, a->t0 + row + 1 - s0) : n;
    const float *y = y0 + (b * a->T + a->t0 + row) * a->D + c0, *top = rest->to + here, *rate = rest->rate + here;
    for (int64_t s = 0; s < seen; s++) {
        if (!full_live(a, b, s0 + s)) continue;
        const float *k = tm_read(dtype, a->k, b * a->kb + (s0 + s) * a->kt + c0, kbuf, w), *v = tm_read(dtype, a->v, b * a->vb + (s0 + s) * a->vt + c0, vbuf,
            w);
        double x = full_weight(a, row, s0 + s);
        x = x > FULL_CAP ? FULL_CAP : x;
        float sum = 0.0f;
        TM_IVDEP
        for (int c = 0; c < w; c++) part[c] = full_term(k[c], x, top[c]) * rate[c] * (v[c] - y[c]);
        for (int c = 0; c < w; c++) sum += part[c];
        dw[s * full_apart(a)] += sum;
    }
}

/* X of n keys in strips side by side, ld numbers from key to key. */
TM_INLINE void full_products_wide(const int dtype, const full_in *a, int64_t b, int64_t c0, int w, const float *m, int64_t s0, int64_t n, int64_t column,
    int64_t ld, float *out) {
    float kbuf[FULL_C], vbuf[FULL_C], line[FULL_X];
    for (int64_t i = 0; i < n; i++) {
        int64_t at = i * ld + column;
        float *x = a->half ? line : out + at;
        memset(x, 0, sizeof(float) * FULL_X);
        if (a->half) memset((uint16_t *)out + at, 0, sizeof(uint16_t) * FULL_X);
        tm_ahead(dtype, a->k, b * a->kb + (s0 + i + FULL_AHEAD) * a->kt + c0, w), tm_ahead(dtype, a->v, b * a->vb + (s0 + i + FULL_AHEAD) * a->vt + c0, w);
        if (!full_live(a, b, s0 + i)) continue;
        const float *k = tm_read(dtype, a->k, b * a->kb + (s0 + i) * a->kt + c0, kbuf, w), *v = tm_read(dtype, a->v, b * a->vb + (s0 + i) * a->vt + c0, vbuf,
            w);
        TM_IVDEP
        for (int c = 0; c < w; c++) {
            float e = tm_exp_neg(k[c] - m[c]);
            x[c] = e > 0 ? e * v[c] : 0.0f, x[FULL_C + c] = e;
        }
        if (a->half) full_round(line, FULL_X, (uint16_t *)out + at);
    }
}

/* One block of keys of dw leaves for the output: w's own exponential times the sums, (keys, rows), and what is in the literal form. */
TM_INLINE void full_weights_write(const full_in *a, int64_t s0, int64_t n, const float *acc, const float *more, float *dw, int64_t lddw) {
    float e[HALF_KEYS], buffer[HALF_KEYS];
    int64_t ld = full_apart(a);
    for (int64_t r = 0; r < a->rows; r++) {
        int64_t seen = a->causal ? tm_max(0, tm_min(n, a->t0 + r + 1 - s0)) : n;
        const float *w = full_weights(a, r, s0, buffer, seen);
        float *out = dw + r * lddw + s0;
        full_exp(w, a->top[r], seen, e);
        for (int64_t s = 0; s < seen; s++) out[s] = w[s] > FULL_CAP ? 0.0f : e[s] * acc[s * ld + r] + (more ? more[s * ld + r] : 0.0f);
        for (int64_t s = seen; s < n; s++) out[s] = 0.0f;
    }
}

TM_INLINE int64_t full_tile_keys(const full_in *a) { return a->half ? HALF_KEYS : FULL_TILE; }

/* dw of all rows of the block for a block of keys from s0, summed over the batch. */
TM_INLINE void full_weights_tile(const int dtype, const full_in *a, int64_t s0, const float *m, const float *y0, const full_rest *rest, float *x, float *acc,
                                 float *more, float *dw, int64_t lddw) {
    int64_t n = tm_min(full_tile_keys(a), a->hi - s0), strips = tm_ceil(a->D, FULL_C), panels = tm_ceil(a->rows, FULL_TW);
    int64_t first = a->causal ? tm_max(0, s0 - a->t0) : 0, apart = full_apart(a), size = sizeof(float) * apart * full_tile_keys(a);
    int64_t side = a->half ? HALF_SIDE : FULL_SIDE, ld = side * FULL_X, step = a->half ? HALF : FULL_R;
    int some = 0;
    memset(acc, 0, size);
    for (int64_t i = 0; i < a->B * strips;) {
        int64_t b = i / strips, strip = i % strips, both = tm_min(side, strips - strip);
        for (int64_t j = 0; j < both; j++) {
            int64_t c0 = (strip + j) * FULL_C;
            int w = (int)tm_min(FULL_C, a->D - c0);
            full_products_wide(dtype, a, b, c0, w, m + b * a->D + c0, s0, n, j * FULL_X, ld, x);
            for (int64_t r = first; r < a->rows; r++) {
                if (!rest->literal[(i + j) * FULL_GROUPS + r / FULL_GROUP]) continue;
                if (!some++) memset(more, 0, size);
                full_weights_literal(dtype, a, b, c0, w, s0, n, r, y0, rest, more + r);
            }
        }
        for (int64_t r = first / FULL_TW; r < panels; r++) {
            int64_t end = a->causal ? tm_min(n, a->t0 + (r + 1) * FULL_TW - s0) : n;
            int64_t place = ((b * panels + r) * strips + strip) * FULL_X * FULL_TW;
            for (int64_t s = 0; s < end; s += step)
                if (a->half)
                    half_product(a->half, (uint16_t *)x + s * ld, ld, HALF, (const uint32_t *)((uint16_t *)rest->z + place), both * FULL_X / HALF,
                        acc + s * apart + r * FULL_TW, apart);
                else
                    full_tile(x + s * ld, 1, ld, (const float *)rest->z + place, both * FULL_X, acc + s * apart + r * FULL_TW, apart);
        }
        i += both;
    }
    full_weights_write(a, s0, n, acc, some ? more : NULL, dw, lddw);
}

/* The unit of the keys of every batch row and feature. */
TM_INLINE void full_units(const float *kmax, float *m, int64_t B, int64_t S, int64_t D, int64_t hi) {
    for (int64_t i = 0; i < B * D; i++) m[i] = TM_FLOOR;
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < tm_ceil(hi, FULL_RANGE); i++) {
            const float *x = kmax + (b * tm_ceil(S, FULL_RANGE) + i) * D;
            for (int64_t c = 0; c < D; c++) m[b * D + c] = x[c] > m[b * D + c] ? x[c] : m[b * D + c];
        }
}

/* dw (rows, lddw) of a block of rows, summed over the B batch rows given. */
TM_EXPORT(full_backward_weights)(int dtype, int wdtype, int causal, int half, const void *k, const void *v, const uint8_t *mask, const void *w,
                                 const float *top, const float *kmax, const float *y0, void *z, float *rate, float *to, uint8_t *literal, float *dw,
                                 int64_t B, int64_t T, int64_t S, int64_t D, int64_t t0, int64_t rows, int64_t hi, int64_t ldw, int64_t kb,
                                 int64_t kt, int64_t vb, int64_t vt, int64_t lddw, int threads) {
    full_in a = {.dtype = dtype, .wdtype = wdtype, .causal = causal, .half = half, .k = k, .v = v, .mask = mask, .w = w, .top = top, .B = B, .T = T, .S = S,
        .D = D, .t0 = t0, .rows = rows, .hi = hi, .ldw = ldw, .kb = kb, .kt = kt, .vb = vb, .vt = vt};
    full_rest rest = {z, rate, to, literal};
    float *m = tm_scratch(sizeof(float) * (size_t)(B * D));
    full_units(kmax, m, B, S, D, hi);
    int64_t keys = full_tile_keys(&a);
#pragma omp parallel num_threads(threads) if (hi > keys && threads > 1)
    {
        float *x = tm_scratch(sizeof(float) * HALF_KEYS * FULL_SIDE * FULL_X), *acc = tm_scratch(sizeof(float) * keys * full_apart(&a));
        float *more = tm_scratch(sizeof(float) * keys * full_apart(&a));
        half_shape before;
        half_begin(half, &before);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < tm_ceil(hi, keys); i++) {
#define FULL_CALL(type) full_weights_tile(type, &a, i * keys, m, y0, &rest, x, acc, more, dw, lddw)
            FULL_DISPATCH(FULL_CALL)
#undef FULL_CALL
        }
        half_end(half, &before);
        free(x), free(acc), free(more);
    }
    free(m);
}
