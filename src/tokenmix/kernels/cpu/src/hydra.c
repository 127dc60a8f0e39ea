/* Hydra attention: y_t = q^_t * sum_s k^_s * v_s, all products feature by feature, over s <= t or over all s; q^ and k^ are the rows themselves or
   x / sqrt(|x|^2 + eps), the norm over all features. ``scale`` (B, T) multiplies each output, which is how a mean over the keys is made of the sum.

   A norm needs a whole row and a sum a whole column, so work is cut into blocks of 64 tokens: each block's sum is made in float32, by 16 tokens at a time as
   the terms have signs and may cancel; blocks are joined in float64 in their order. Causal: the sum over the blocks before, then token by token. Where there are as many batches as threads a batch is done in one
   sweep, else blocks are summed, joined and read in three: the same numbers in the same order.

   Backward, with h_t = scale_t g_t:  dq^_t = h_t * S_t,  dv_s = k^_s * R_s,  dk^_s = v_s * R_s,  R_s = sum of h_t * q^_t over the queries that see s, and
   dx = r (dx^ - x^ (x^ . dx^)) with r = 1 / sqrt(|x|^2 + eps).

   The causal form may go on from the sum over earlier tokens, and returns that after the last one. Its gradient starts R; what R is before the first token is
   the gradient of the sum there. */
#include "tm.h"

#define HYDRA_T 64 /* tokens in a block */
#define HYDRA_U 16 /* tokens summed directly */

typedef struct {
    int dtype, of_q, of_k; /* of_q, of_k: whether rows are divided by their norm */
    const void *q, *k, *v, *g;
    const uint8_t *mask;
    const float *scale;
    double eps;
    int64_t T, S, D, qb, qt, kb, kt, vb, vt, gb, gt;
} hydra_in;

/* x^ = (x * unit) * r: two factors, as the norm of a long token may be too large for a float32, and its inverse too small. */
typedef struct {
    float unit, r;
} hydra_norm;

TM_INLINE float hydra_sum(tm_vf a) {
    float sum = 0.0f;
    for (int i = 0; i < TM_VL; i++) sum += a[i];
    return sum;
}

TM_INLINE float hydra_dot(const float *x, const float *y, int n) {
    tm_vf s[4] = {{0}, {0}, {0}, {0}};
    int c = 0;
    for (; c + 4 * TM_VL <= n; c += 4 * TM_VL)
        for (int j = 0; j < 4; j++) s[j] += *(const tm_vfu *)(x + c + j * TM_VL) * *(const tm_vfu *)(y + c + j * TM_VL);
    float rest = 0.0f;
    for (; c < n; c++) rest += x[c] * y[c];
    return hydra_sum((s[0] + s[1]) + (s[2] + s[3])) + rest;
}

/* A token too short to be squared counts as zero where eps is 0 too. */
static hydra_norm hydra_far(const float *x, int n, double eps) {
    double square = eps;
    for (int c = 0; c < n; c++) square += (double)x[c] * x[c];
    if (square < 1.5e-45) return (hydra_norm){1.0f, 1.0f};
    if (square > 1e36) return (hydra_norm){0x1p-64f, (float)(0x1p64 / sqrt(square))};
    return (hydra_norm){1.0f, (float)(1.0 / sqrt(square))};
}

TM_INLINE hydra_norm hydra_of(int on, const float *x, int n, double eps) {
    if (!on) return (hydra_norm){1.0f, 1.0f};
    float square = hydra_dot(x, x, n);
    if (!(square > 1e-20f && square < 1e36f)) return hydra_far(x, n, eps);
    return (hydra_norm){1.0f, (float)(1.0 / sqrt(square + eps))};
}

/* run + n += x^ * y: the sum of the last few tokens, which joins that of the block, run. */
TM_INLINE void hydra_join(const float *restrict x, hydra_norm f, const float *restrict y, float *restrict run, int n) {
    float *restrict few = run + n;
    TM_IVDEP
    for (int c = 0; c < n; c++) few[c] += x[c] * f.unit * f.r * y[c];
}

/* The same of a query and its h: a row that nothing is asked of gives nothing, not even NaN. */
TM_INLINE void hydra_join_asked(const float *restrict x, hydra_norm f, const float *restrict h, float *restrict run, int n) {
    float *restrict few = run + n;
    TM_IVDEP
    for (int c = 0; c < n; c++) few[c] += h[c] == 0 ? 0.0f : x[c] * f.unit * f.r * h[c];
}

TM_INLINE void hydra_fold(float *restrict run, int64_t n) {
    float *restrict few = run + n;
    TM_IVDEP
    for (int64_t c = 0; c < n; c++) run[c] += few[c], few[c] = 0.0f;
}

/* y = x^ * (before + run + few) * scale */
TM_INLINE void hydra_read(const float *restrict x, hydra_norm f, float scale, const float *restrict before, const float *restrict run, float *restrict y, int n) {
    const float *restrict few = run + n;
    float r = f.r * scale;
    TM_IVDEP
    for (int c = 0; c < n; c++) y[c] = x[c] * f.unit * r * (before[c] + (run[c] + few[c]));
}

/* The gradient of x from that of x^; d may be out. */
TM_INLINE void hydra_back(int on, const float *x, hydra_norm f, const float *d, float *out, int n) {
    float along = 0.0f, r = f.r;
    if (on) along = f.unit == 1.0f ? hydra_dot(x, d, n) * r : 0.0f;
    if (f.unit != 1.0f)
        for (int c = 0; c < n; c++) along += x[c] * f.unit * r * d[c];
    TM_IVDEP
    for (int c = 0; c < n; c++) out[c] = (d[c] - x[c] * f.unit * r * along) * f.unit * r;
}

TM_INLINE int hydra_live(const hydra_in *a, int64_t b, int64_t s) { return !a->mask || a->mask[b * a->S + s]; }
TM_INLINE float hydra_scale(const hydra_in *a, int64_t b, int64_t t) { return a->scale ? a->scale[b * a->T + t] : 1.0f; }

/* Rows of one thread: six of D numbers. */
typedef struct {
    float *q, *k, *v, *g, *o, *d;
} hydra_rows;

static hydra_rows hydra_buffers(int64_t D) {
    float *p = tm_scratch(sizeof(float) * 6 * D);
    return (hydra_rows){p, p + D, p + 2 * D, p + 3 * D, p + 4 * D, p + 5 * D};
}

#define HYDRA_ROW(x, at) tm_read(a->dtype, a->x, b * a->x##b + (at)*a->x##t, w->x, (int)a->D)

/* The sum of k^ * v over the tokens of block i. */
static void hydra_keys(const hydra_in *a, int64_t b, int64_t i, float *run, const hydra_rows *w) {
    memset(run, 0, sizeof(float) * 2 * a->D);
    for (int64_t s = i * HYDRA_T; s < tm_min(a->S, (i + 1) * HYDRA_T); s++) {
        if (hydra_live(a, b, s)) {
            const float *k = HYDRA_ROW(k, s), *v = HYDRA_ROW(v, s);
            hydra_join(k, hydra_of(a->of_k, k, (int)a->D, a->eps), v, run, (int)a->D);
        }
        if (s % HYDRA_U == HYDRA_U - 1) hydra_fold(run, a->D);
    }
    hydra_fold(run, a->D);
}

/* h_t: g_t itself where nothing scales it. */
TM_INLINE const float *hydra_scaled(const hydra_in *a, int64_t b, int64_t t, const hydra_rows *w) {
    const float *g = HYDRA_ROW(g, t);
    if (!a->scale) return g;
    float scale = hydra_scale(a, b, t);
    for (int64_t c = 0; c < a->D; c++) w->g[c] = g[c] * scale;
    return w->g;
}

/* The sum of h * q^ over the tokens of block i, the last first. */
static void hydra_queries(const hydra_in *a, int64_t b, int64_t i, float *run, const hydra_rows *w) {
    memset(run, 0, sizeof(float) * 2 * a->D);
    for (int64_t t = tm_min(a->T, (i + 1) * HYDRA_T) - 1; t >= i * HYDRA_T; t--) {
        const float *q = HYDRA_ROW(q, t), *h = hydra_scaled(a, b, t, w);
        hydra_join_asked(q, hydra_of(a->of_q, q, (int)a->D, a->eps), h, run, (int)a->D);
        if (t % HYDRA_U == 0) hydra_fold(run, a->D);
    }
}

/* Block sums (n, D) of one batch replaced by the sums over the blocks before each, or after each, and ``start`` (D) where it is not NULL; total (D), in
   float32, and end (D) get the sum over all unless they are NULL. */
static void hydra_prefix(float *part, float *total, const double *start, double *end, int64_t n, int64_t D, int reverse, int64_t c0, int64_t c1) {
    double sum[64] = {0};
    if (start) memcpy(sum, start + c0, sizeof(double) * (c1 - c0));
    for (int64_t j = 0; j < n; j++) {
        float *p = part + (reverse ? n - 1 - j : j) * D;
        TM_IVDEP
        for (int64_t c = c0; c < c1; c++) {
            float x = p[c];
            p[c] = (float)sum[c - c0];
            sum[c - c0] += x;
        }
    }
    if (total)
        for (int64_t c = c0; c < c1; c++) total[c] = (float)sum[c - c0];
    if (end) memcpy(end + c0, sum, sizeof(double) * (c1 - c0));
}

/* The same for all batches, in strips of 64 features. */
static void hydra_join_blocks(float *part, float *total, const double *start, double *end, int64_t B, int64_t n, int64_t D, int reverse, int threads) {
    int64_t strips = tm_ceil(D, 64);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && B * strips > 1)
    for (int64_t j = 0; j < B * strips; j++) {
        int64_t b = j / strips, c0 = j % strips * 64;
        const double *from = start ? start + b * D : NULL;
        hydra_prefix(part + b * n * D, total ? total + b * D : NULL, from, end ? end + b * D : NULL, n, D, reverse, c0, tm_min(D, c0 + 64));
    }
}

/* The causal outputs of block i over ``before``, the sum before it; run becomes the block's own. */
static void hydra_causal(const hydra_in *a, int64_t b, int64_t i, const float *before, void *y, float *run, const hydra_rows *w) {
    int n = (int)a->D;
    memset(run, 0, sizeof(float) * 2 * n);
    for (int64_t t = i * HYDRA_T; t < tm_min(a->T, (i + 1) * HYDRA_T); t++) {
        if (hydra_live(a, b, t)) {
            const float *k = HYDRA_ROW(k, t), *v = HYDRA_ROW(v, t);
            hydra_join(k, hydra_of(a->of_k, k, n, a->eps), v, run, n);
        }
        const float *q = HYDRA_ROW(q, t);
        int64_t at = (b * a->T + t) * n;
        float *out = tm_target(a->dtype, y, at, w->o);
        hydra_read(q, hydra_of(a->of_q, q, n, a->eps), hydra_scale(a, b, t), before, run, out, n);
        tm_write(a->dtype, y, at, out, n);
        if (t % HYDRA_U == HYDRA_U - 1) hydra_fold(run, n);
    }
    hydra_fold(run, n);
}

/* One row of dk and dv from R = after + run. */
TM_INLINE void hydra_key_row(const hydra_in *a, int64_t b, int64_t s, const float *after, const float *run, void *dk, void *dv, const hydra_rows *w) {
    int n = (int)a->D;
    int64_t at = (b * a->S + s) * n;
    float *pk = tm_target(a->dtype, dk, at, w->o), *pv = tm_target(a->dtype, dv, at, w->d);
    if (hydra_live(a, b, s)) {
        const float *k = HYDRA_ROW(k, s), *v = HYDRA_ROW(v, s);
        hydra_norm f = hydra_of(a->of_k, k, n, a->eps);
        TM_IVDEP
        for (int c = 0; c < n; c++) {
            float sum = after[c] + (run[c] + run[n + c]);
            pv[c] = k[c] * f.unit * f.r * sum;
            pk[c] = v[c] * sum;
        }
        hydra_back(a->of_k, k, f, pk, pk, n);
    } else {
        memset(pk, 0, sizeof(float) * n), memset(pv, 0, sizeof(float) * n);
    }
    tm_write(a->dtype, dk, at, pk, n);
    tm_write(a->dtype, dv, at, pv, n);
}

/* One row of dq from S = before + run; with ``sum`` the row's h * q^ joins it. */
TM_INLINE void hydra_query_row(const hydra_in *a, int64_t b, int64_t t, const float *before, const float *run, float *sum, void *dq, const hydra_rows *w) {
    int n = (int)a->D;
    int64_t at = (b * a->T + t) * n;
    const float *q = HYDRA_ROW(q, t), *h = hydra_scaled(a, b, t, w);
    hydra_norm f = hydra_of(a->of_q, q, n, a->eps);
    float *out = tm_target(a->dtype, dq, at, w->o);
    TM_IVDEP
    for (int c = 0; c < n; c++) out[c] = h[c] == 0 ? 0.0f : h[c] * (before[c] + (run[c] + run[n + c]));
    hydra_back(a->of_q, q, f, out, out, n);
    if (sum) hydra_join_asked(q, f, h, sum, n);
    tm_write(a->dtype, dq, at, out, n);
}

/* Gradients of block i over the sums before it and the sum of h * q^ after it; run becomes the block's own sum of h * q^. */
static void hydra_causal_back(const hydra_in *a, int64_t b, int64_t i, const float *before, const float *after, float *run, void *dq, void *dk, void *dv,
                              const hydra_rows *w) {
    int n = (int)a->D;
    int64_t t0 = i * HYDRA_T, t1 = tm_min(a->T, t0 + HYDRA_T);
    memset(run, 0, sizeof(float) * 2 * n);
    for (int64_t t = t0; t < t1; t++) {
        if (hydra_live(a, b, t)) {
            const float *k = HYDRA_ROW(k, t), *v = HYDRA_ROW(v, t);
            hydra_join(k, hydra_of(a->of_k, k, n, a->eps), v, run, n);
        }
        hydra_query_row(a, b, t, before, run, NULL, dq, w);
        if (t % HYDRA_U == HYDRA_U - 1) hydra_fold(run, n);
    }
    memset(run, 0, sizeof(float) * 2 * n);
    for (int64_t t = t1 - 1; t >= t0; t--) {
        const float *q = HYDRA_ROW(q, t), *h = hydra_scaled(a, b, t, w);
        hydra_join_asked(q, hydra_of(a->of_q, q, n, a->eps), h, run, n);
        hydra_key_row(a, b, t, after, run, dk, dv, w);
        if (t % HYDRA_U == 0) hydra_fold(run, n);
    }
}

/* Whether a batch is one thread's work. */
static int hydra_whole(int64_t B, int threads) { return threads == 1 || B % threads == 0 || B >= 4 * threads; }

/* body for every block i of every batch b, j = b count + i, with rows w and run of the thread. */
#define HYDRA_BLOCKS(count, body)                                                                                                                              \
    {                                                                                                                                                          \
        const int64_t each = (count), jobs = B * each;                                                                                                         \
        _Pragma("omp parallel num_threads(threads) if (threads > 1 && jobs > 1)") {                                                                            \
            hydra_rows rows = hydra_buffers(D), *w = &rows;                                                                                                    \
            float *run = tm_scratch(sizeof(float) * 4 * D), *zero = run + 2 * D;                                                                               \
            memset(zero, 0, sizeof(float) * 2 * D);                                                                                                            \
            _Pragma("omp for schedule(static)") for (int64_t j = 0; j < jobs; j++) {                                                                           \
                const int64_t b = j / each, i = j % each;                                                                                                      \
                (void)i; /* not all bodies look at it */                                                                                                       \
                body;                                                                                                                                          \
            }                                                                                                                                                  \
            free(run), free(rows.q);                                                                                                                           \
        }                                                                                                                                                      \
    }

/* A running sum (D) of batch b, from its row of ``start`` (B, D) or from nothing. */
static double *hydra_begin(const hydra_in *a, int64_t b, const double *start) {
    double *sum = tm_scratch(sizeof(double) * a->D);
    if (start)
        memcpy(sum, start + b * a->D, sizeof(double) * a->D);
    else
        memset(sum, 0, sizeof(double) * a->D);
    return sum;
}

static void hydra_end(const hydra_in *a, int64_t b, double *sum, double *end) {
    if (end) memcpy(end + b * a->D, sum, sizeof(double) * a->D);
    free(sum);
}

/* One batch in one sweep; part (n, D) gets the sums before each block. */
static void hydra_causal_batch(const hydra_in *a, int64_t b, int64_t n, const double *past, double *end, float *part, void *y, float *run, const hydra_rows *w) {
    double *sum = hydra_begin(a, b, past);
    for (int64_t i = 0; i < n; i++) {
        float *p = part + i * a->D;
        for (int64_t c = 0; c < a->D; c++) p[c] = (float)sum[c];
        hydra_causal(a, b, i, p, y, run, w);
        for (int64_t c = 0; c < a->D; c++) sum[c] += run[c];
    }
    hydra_end(a, b, sum, end);
}

static void hydra_causal_back_batch(const hydra_in *a, int64_t b, int64_t n, const double *g_end, double *g_past, const float *part, void *dq, void *dk, void *dv,
                                    float *run, const hydra_rows *w) {
    double *sum = hydra_begin(a, b, g_end);
    float *after = tm_scratch(sizeof(float) * a->D);
    for (int64_t i = n - 1; i >= 0; i--) {
        for (int64_t c = 0; c < a->D; c++) after[c] = (float)sum[c];
        hydra_causal_back(a, b, i, part + i * a->D, after, run, dq, dk, dv, w);
        for (int64_t c = 0; c < a->D; c++) sum[c] += run[c];
    }
    hydra_end(a, b, sum, g_past);
    free(after);
}

/* q, k, v and y (B, T, D); part (B, blocks, D) gets the sums before each block. past and end (B, D), or NULL: the sums before and after all. */
TM_EXPORT(hydra_forward)(int dtype, int of_q, int of_k, double eps, const void *q, const void *k, const void *v, const uint8_t *mask, const float *scale, void *y,
                         float *part, const double *past, double *end, int64_t B, int64_t T, int64_t D, int64_t qb, int64_t qt, int64_t kb, int64_t kt, int64_t vb,
                         int64_t vt, int threads) {
    hydra_in in = {dtype, of_q, of_k, q, k, v, NULL, mask, scale, eps, T, T, D, qb, qt, kb, kt, vb, vt, 0, 0}, *a = &in;
    int64_t n = tm_ceil(T, HYDRA_T);
    if (hydra_whole(B, threads)) {
        HYDRA_BLOCKS(1, hydra_causal_batch(a, b, n, past, end, part + b * n * D, y, run, w))
        return;
    }
    HYDRA_BLOCKS(n, hydra_keys(a, b, i, run, w); memcpy(part + j * D, run, sizeof(float) * D))
    hydra_join_blocks(part, NULL, past, end, B, n, D, 0, threads);
    HYDRA_BLOCKS(n, hydra_causal(a, b, i, part + j * D, y, run, w))
}

/* part as the forward pass left it; rest (B, blocks, D) is working space. dq, dk, dv contiguous. g_end and g_past (B, D), or NULL: the gradients of the sums
   after and before all. */
TM_EXPORT(hydra_backward)(int dtype, int of_q, int of_k, double eps, const void *q, const void *k, const void *v, const uint8_t *mask, const float *scale,
                          const void *g, const float *part, void *dq, void *dk, void *dv, const double *g_end, double *g_past, int64_t B, int64_t T, int64_t D,
                          int64_t qb, int64_t qt, int64_t kb, int64_t kt, int64_t vb, int64_t vt, int64_t gb, int64_t gt, int threads) {
    hydra_in in = {dtype, of_q, of_k, q, k, v, g, mask, scale, eps, T, T, D, qb, qt, kb, kt, vb, vt, gb, gt}, *a = &in;
    int64_t n = tm_ceil(T, HYDRA_T);
    if (hydra_whole(B, threads)) {
        HYDRA_BLOCKS(1, hydra_causal_back_batch(a, b, n, g_end, g_past, part + b * n * D, dq, dk, dv, run, w))
        return;
    }
    float *rest = tm_scratch(sizeof(float) * B * n * D);
    HYDRA_BLOCKS(n, hydra_queries(a, b, i, run, w); memcpy(rest + j * D, run, sizeof(float) * D))
    hydra_join_blocks(rest, NULL, g_end, g_past, B, n, D, 1, threads);
    HYDRA_BLOCKS(n, hydra_causal_back(a, b, i, part + j * D, rest + j * D, run, dq, dk, dv, w))
    free(rest);
}

static void hydra_read_block(const hydra_in *a, int64_t b, int64_t i, const float *total, const float *zero, void *y, const hydra_rows *w) {
    int n = (int)a->D;
    for (int64_t t = i * HYDRA_T; t < tm_min(a->T, (i + 1) * HYDRA_T); t++) {
        int64_t at = (b * a->T + t) * n;
        const float *q = HYDRA_ROW(q, t);
        float *out = tm_target(a->dtype, y, at, w->o);
        hydra_read(q, hydra_of(a->of_q, q, n, a->eps), hydra_scale(a, b, t), total, zero, out, n);
        tm_write(a->dtype, y, at, out, n);
    }
}

/* Over all keys: q, y (B, T, D); k, v (B, S, D); part (B, blocks of S, D) is working space, total (B, D) the sum over all keys. */
TM_EXPORT(hydra_all_forward)(int dtype, int of_q, int of_k, double eps, const void *q, const void *k, const void *v, const uint8_t *mask, const float *scale,
                             void *y, float *part, float *total, int64_t B, int64_t T, int64_t S, int64_t D, int64_t qb, int64_t qt, int64_t kb, int64_t kt,
                             int64_t vb, int64_t vt, int threads) {
    hydra_in in = {dtype, of_q, of_k, q, k, v, NULL, mask, scale, eps, T, S, D, qb, qt, kb, kt, vb, vt, 0, 0}, *a = &in;
    int64_t n = tm_ceil(S, HYDRA_T), m = tm_ceil(T, HYDRA_T);
    HYDRA_BLOCKS(n, hydra_keys(a, b, i, run, w); memcpy(part + j * D, run, sizeof(float) * D))
    hydra_join_blocks(part, total, NULL, NULL, B, n, D, 0, threads);
    HYDRA_BLOCKS(m, hydra_read_block(a, b, i, total + b * D, zero, y, w))
}

static void hydra_query_block(const hydra_in *a, int64_t b, int64_t i, const float *total, const float *zero, float *sum, void *dq, const hydra_rows *w) {
    memset(sum, 0, sizeof(float) * 2 * a->D);
    for (int64_t t = i * HYDRA_T; t < tm_min(a->T, (i + 1) * HYDRA_T); t++) {
        hydra_query_row(a, b, t, total, zero, sum, dq, w);
        if (t % HYDRA_U == HYDRA_U - 1) hydra_fold(sum, a->D);
    }
    hydra_fold(sum, a->D);
}

static void hydra_key_block(const hydra_in *a, int64_t b, int64_t i, const float *total, const float *zero, void *dk, void *dv, const hydra_rows *w) {
    for (int64_t s = i * HYDRA_T; s < tm_min(a->S, (i + 1) * HYDRA_T); s++) hydra_key_row(a, b, s, total, zero, dk, dv, w);
}

/* total as the forward pass left it; rest (B, blocks of T + 1, D) is working space. */
TM_EXPORT(hydra_all_backward)(int dtype, int of_q, int of_k, double eps, const void *q, const void *k, const void *v, const uint8_t *mask, const float *scale,
                              const void *g, const float *total, void *dq, void *dk, void *dv, int64_t B, int64_t T, int64_t S, int64_t D, int64_t qb,
                              int64_t qt, int64_t kb, int64_t kt, int64_t vb, int64_t vt, int64_t gb, int64_t gt, int threads) {
    hydra_in in = {dtype, of_q, of_k, q, k, v, g, mask, scale, eps, T, S, D, qb, qt, kb, kt, vb, vt, gb, gt}, *a = &in;
    int64_t n = tm_ceil(S, HYDRA_T), m = tm_ceil(T, HYDRA_T);
    float *rest = tm_scratch(sizeof(float) * B * (m + 1) * D), *all = rest + B * m * D;
    HYDRA_BLOCKS(m, hydra_query_block(a, b, i, total + b * D, zero, run, dq, w); memcpy(rest + j * D, run, sizeof(float) * D))
    hydra_join_blocks(rest, all, NULL, NULL, B, m, D, 0, threads);
    HYDRA_BLOCKS(n, hydra_key_block(a, b, i, all + b * D, zero, dk, dv, w))
    free(rest);
}
