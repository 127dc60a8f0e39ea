/* Linear attention: y_t = sum_s w_ts v_s / sum_s w_ts with w_ts = sum_i A_ti B_si, A and B positive features of queries and keys: elu + 1 of what is given,
   or exp of it. Heads of e features each, over s <= t or over all s.

   Features may lie a hundred powers of e apart, so each feature i of the keys has a unit e^{M_i}, M_i about the logarithm of the largest so far, and each
   query a unit that makes the largest of A_ti e^{M_i} about 1; both cancel. All terms are positive, so no precision is lost but by underflow, and none that
   matters where a denominator comes out above LINEAR_SAFE. In the causal form blocks of 64 tokens share the units of their end: products of matrices, within
   the block and with the sums S = sum B v before it. Where one of its queries comes out below LINEAR_SAFE, as before a key far above all earlier ones, the
   block is done again token by token, each with units of its own, in which every denominator is about 1 or more. Sums over blocks run in float64.

   Backward, with G_t = g_t / den_t, d_t = G_t . y_t and R = sum over later queries of A G, r = sum of A d:
       dA_t = sum_s (G_t . v_s - d_t) B_s,  dB_s = sum_t (G_t . v_s - d_t) A_t,  dv_s = sum_t w_ts G_t,
   the first in a sweep forward, the others in one backward. A, B and R in the units of their block stay of ordinary size.

   The causal form may go on from sums of earlier tokens, and returns those after the last one. Their gradient starts R and r (r with its sign turned); what R
   and r are before the first token is the gradient of the sums there. */
#include "tm.h"

#define LINEAR_T 64
#define LINEAR_SAFE 1e-12f
#define LINEAR_NV (TM_REGISTERS == 32 ? 4 : 2) /* vectors in a tile of 4 rows */

enum { LINEAR_FULL, LINEAR_LOWER_IN, LINEAR_UPPER_IN, LINEAR_LOWER_OUT, LINEAR_UPPER_OUT };

typedef struct {
    int dtype, elu, e, E; /* E: e filled up to whole vectors */
    const void *q, *k, *v, *g, *y;
    const uint8_t *mask;
    int64_t T, S, H, qb, qt, kb, kt, vb, vt, gb, gt;
    int *odd; /* set where an output is not finite */
    /* Sums, in float64, or NULL: their units m (B, H, e), as logarithms of features, and acc (B, H, e + 1, e), whose last row is the denominator. */
    const double *past_m, *past; /* before the first token */
    double *end_m, *end;         /* after the last one */
    const double *g_end;         /* gradients of ``end``, and of ``past`` */
    double *g_past;
} linear_in;

/* Working space of one head. Rows of tokens are (64, E), transposed ones (E, 64); padded rows and features are 0. */
typedef struct {
    float *xq, *xk, *q, *qt, *k, *kt, *v, *vt, *g, *gt, *o, *w, *p, *s, *st, *add, *z, *m, *top, *row, *f;
    double *sum, *den;
    float d[LINEAR_T];
    uint8_t live[LINEAR_T];
    void *all;
} linear_work;

static void linear_open(linear_work *w, int E) {
    size_t rows = (size_t)LINEAR_T * E, square = (size_t)E * E, pairs = LINEAR_T * LINEAR_T;
    size_t total = 11 * rows + 2 * pairs + 3 * square + 5 * E + 2 * (square + E);
    float *p = w->all = tm_scratch(sizeof(float) * total);
    memset(p, 0, sizeof(float) * total);
    float **parts[] = {&w->xq, &w->xk, &w->q, &w->qt, &w->k, &w->kt, &w->v, &w->vt, &w->g, &w->gt, &w->o};
    for (int i = 0; i < 11; i++) *parts[i] = p, p += rows;
    w->w = p, p += pairs, w->p = p, p += pairs;
    w->s = p, p += square, w->st = p, p += square, w->add = p, p += square;
    w->z = p, p += E, w->m = p, p += E, w->top = p, p += E, w->row = p, p += E, w->f = p, p += E;
    w->sum = (double *)p, w->den = w->sum + square;
}

/* 4 rows by nv vectors of c (+)= a b, over k0 <= k < k1. */
TM_INLINE void linear_tile(const int nv, const float *restrict a, int lda, const float *restrict b, int ldb, float *restrict c, int ldc, int k0, int k1, int add) {
    tm_vf s[4][4];
    for (int r = 0; r < 4; r++)
        for (int j = 0; j < nv; j++)
            if (add)
                s[r][j] = *(const tm_vfu *)(c + r * ldc + j * TM_VL);
            else
                s[r][j] = (tm_vf){0};
    for (int k = k0; k < k1; k++) {
        tm_vf x[4];
        for (int j = 0; j < nv; j++) x[j] = *(const tm_vfu *)(b + k * ldb + j * TM_VL);
        for (int r = 0; r < 4; r++) {
            float f = a[r * lda + k];
            for (int j = 0; j < nv; j++) s[r][j] += f * x[j];
        }
    }
    for (int r = 0; r < 4; r++)
        for (int j = 0; j < nv; j++) *(tm_vfu *)(c + r * ldc + j * TM_VL) = s[r][j];
}

/* c (m, n) (+)= a (m, k) b (k, n), rows contiguous; m a multiple of 4, n of TM_VL. LOWER_IN, UPPER_IN: a is a triangle; LOWER_OUT, UPPER_OUT: only that of c. */
static void linear_matmul(int m, int n, int k, const float *a, const float *b, float *c, int add, int shape) {
    for (int r = 0; r < m; r += 4) {
        int k0 = shape == LINEAR_UPPER_IN ? r : 0, k1 = shape == LINEAR_LOWER_IN ? r + 4 : k;
        int n1 = shape == LINEAR_LOWER_OUT ? r + 4 : n, j = shape == LINEAR_UPPER_OUT ? r / TM_VL * TM_VL : 0;
        const float *row = a + r * k;
        float *out = c + r * n;
        for (; j + (LINEAR_NV - 1) * TM_VL < n1 && j + LINEAR_NV * TM_VL <= n; j += LINEAR_NV * TM_VL) linear_tile(LINEAR_NV, row, k, b + j, n, out + j, n, k0, k1, add);
        for (; j < n1; j += TM_VL) linear_tile(1, row, k, b + j, n, out + j, n, k0, k1, add);
    }
}

static void linear_transpose(const float *restrict a, int rows, int cols, float *restrict out) {
    for (int r0 = 0; r0 < rows; r0 += 4)
        for (int c = 0; c < cols; c++)
            for (int r = 0; r < 4; r++) out[c * rows + r0 + r] = a[(r0 + r) * cols + c];
}

/* Sums of products and of numbers; n a multiple of TM_VL. */
TM_INLINE float linear_dot(const float *x, const float *y, int n) {
    tm_vf s = {0};
    for (int i = 0; i < n; i += TM_VL) s += *(const tm_vfu *)(x + i) * *(const tm_vfu *)(y + i);
    float sum = 0.0f;
    for (int i = 0; i < TM_VL; i++) sum += s[i];
    return sum;
}

TM_INLINE float linear_total(const float *x, int n) {
    tm_vf s = {0};
    for (int i = 0; i < n; i += TM_VL) s += *(const tm_vfu *)(x + i);
    float sum = 0.0f;
    for (int i = 0; i < TM_VL; i++) sum += s[i];
    return sum;
}

/* The largest of n numbers, at least TM_FLOOR. */
TM_INLINE float linear_largest(const float *x, int n) {
    typedef int32_t bits __attribute__((vector_size(4 * TM_VL), may_alias));
    tm_vf best = (tm_vf){0} + TM_FLOOR;
    for (int i = 0; i < n; i += TM_VL) {
        tm_vf next = *(const tm_vfu *)(x + i);
        bits above = (bits)(next > best);
        best = (tm_vf)((above & (bits)next) | (~above & (bits)best));
    }
    float largest = TM_FLOOR;
    for (int i = 0; i < TM_VL; i++) largest = best[i] > largest ? best[i] : largest;
    return largest;
}

/* About log(1 + x) for x > 0: the logarithm of the power of two below. */
TM_INLINE float linear_log(float x) {
    float y = 1.0f + x;
    int32_t bits;
    memcpy(&bits, &y, 4);
    return (float)((bits >> 23) - 127) * 0.693147180559945f;
}

TM_INLINE float linear_level(int elu, float x) { return elu && x > 0 ? linear_log(x) : x; }

/* The feature of x over e^unit, unit at least about its logarithm. */
TM_INLINE float linear_feature(int elu, float x, float unit) {
    int linear = elu && x > 0;
    float arg = (linear ? 0.0f : x) - unit;
    return tm_exp_neg(arg > 1.0f ? 1.0f : arg) * (linear ? 1.0f + x : 1.0f);
}

TM_INLINE void linear_levels(const linear_in *a, const float *restrict top, float *restrict m) {
    for (int i = 0; i < a->e; i++) m[i] = linear_level(a->elu, top[i]);
    for (int i = a->e; i < a->E; i++) m[i] = TM_FLOOR;
}

/* A query's features with the units of the keys, over its own unit; the sum of three is rounded once. */
TM_INLINE void linear_query_of(const int elu, int e, int E, const float *restrict x, const float *restrict m, float *restrict out) {
    TM_IVDEP
    for (int i = 0; i < E; i++) out[i] = linear_level(elu, x[i]) + m[i];
    float unit = linear_largest(out, E);
    TM_IVDEP
    for (int i = 0; i < e; i++) {
        int linear = elu && x[i] > 0;
        float arg = (float)((double)(linear ? 0.0f : x[i]) + m[i] - unit);
        out[i] = tm_exp_neg(arg > 1.0f ? 1.0f : arg) * (linear ? 1.0f + x[i] : 1.0f);
    }
    for (int i = e; i < E; i++) out[i] = 0.0f;
}

TM_INLINE void linear_query(const linear_in *a, const float *x, const float *m, float *out) {
    if (a->elu)
        linear_query_of(1, a->e, a->E, x, m, out);
    else
        linear_query_of(0, a->e, a->E, x, m, out);
}

TM_INLINE void linear_key(const linear_in *a, const float *restrict x, const float *restrict m, float *restrict out) {
    if (a->elu) {
        TM_IVDEP
        for (int i = 0; i < a->e; i++) out[i] = linear_feature(1, x[i], m[i]);
    } else {
        TM_IVDEP
        for (int i = 0; i < a->e; i++) out[i] = linear_feature(0, x[i], m[i]);
    }
}

/* d / dx from x and d / d log(feature). */
TM_INLINE void linear_chain(const linear_in *a, const float *restrict x, float *restrict d) {
    if (!a->elu) return;
    TM_IVDEP
    for (int i = 0; i < a->e; i++) d[i] = x[i] > 0 ? d[i] / (1.0f + x[i]) : d[i];
}

TM_INLINE void linear_load(const linear_in *a, const void *x, int64_t at, float *out) {
    const float *row = tm_read(a->dtype, x, at, out, a->e);
    if (row != out) memcpy(out, row, sizeof(float) * a->e);
}

TM_INLINE void linear_store(const linear_in *a, void *x, int64_t at, const float *row) {
    if (a->dtype == TM_F32)
        memcpy((float *)x + at, row, sizeof(float) * a->e);
    else
        tm_write(a->dtype, x, at, row, a->e);
}

/* Keys and values of a block, those that may not be attended as zeros. */
static void linear_load_keys(const linear_in *a, int64_t b, int64_t h, int64_t t0, int n, linear_work *w) {
    for (int t = 0; t < LINEAR_T; t++) {
        w->live[t] = t < n && (!a->mask || a->mask[b * a->S + t0 + t]);
        if (w->live[t]) {
            linear_load(a, a->k, b * a->kb + (t0 + t) * a->kt + h * a->e, w->xk + t * a->E);
            linear_load(a, a->v, b * a->vb + (t0 + t) * a->vt + h * a->e, w->v + t * a->E);
        } else {
            memset(w->xk + t * a->E, 0, sizeof(float) * a->E);
            memset(w->v + t * a->E, 0, sizeof(float) * a->E);
        }
    }
}

static void linear_load_queries(const linear_in *a, int64_t b, int64_t h, int64_t t0, int n, linear_work *w) {
    for (int t = 0; t < LINEAR_T; t++)
        if (t < n)
            linear_load(a, a->q, b * a->qb + (t0 + t) * a->qt + h * a->e, w->xq + t * a->E);
        else
            memset(w->xq + t * a->E, 0, sizeof(float) * a->E);
}

/* G = g / den and d = G . y of a block; den 0 marks what sees nothing. */
static void linear_load_grads(const linear_in *a, int64_t b, int64_t h, int64_t t0, int n, const float *den, linear_work *w) {
    for (int t = 0; t < LINEAR_T; t++) {
        float *g = w->g + t * a->E, inv = t < n && den[t] > 0 ? 1.0f / den[t] : 0.0f;
        w->d[t] = 0.0f;
        if (!(inv > 0)) {
            memset(g, 0, sizeof(float) * a->E);
            continue;
        }
        linear_load(a, a->g, b * a->gb + (t0 + t) * a->gt + h * a->e, g);
        linear_load(a, a->y, ((b * a->T + t0 + t) * a->H + h) * a->e, w->row);
        for (int j = 0; j < a->e; j++) g[j] *= inv;
        w->d[t] = linear_dot(g, w->row, a->E);
    }
}

TM_INLINE void linear_rise(const linear_in *a, const linear_work *w, float *restrict top, int t) {
    if (!w->live[t]) return;
    const float *x = w->xk + t * a->E;
    TM_IVDEP
    for (int i = 0; i < a->e; i++) top[i] = x[i] > top[i] ? x[i] : top[i];
}

/* Features of a block's keys in the units m; zeros where a key may not be attended. */
static void linear_keys(const linear_in *a, const float *m, linear_work *w) {
    for (int t = 0; t < LINEAR_T; t++)
        if (w->live[t])
            linear_key(a, w->xk + t * a->E, m, w->k + t * a->E);
        else
            memset(w->k + t * a->E, 0, sizeof(float) * a->E);
}

static void linear_queries(const linear_in *a, const float *m, int n, linear_work *w) {
    for (int t = 0; t < LINEAR_T; t++)
        if (t < n)
            linear_query(a, w->xq + t * a->E, m, w->q + t * a->E);
        else
            memset(w->q + t * a->E, 0, sizeof(float) * a->E);
}

/* Sums of the units m: (E, E) and (E) in float64, times f in each feature, rounded to s and z. */
static void linear_round(const linear_in *a, linear_work *w, const float *f) {
    int E = a->E;
    for (int i = 0; i < a->e; i++) {
        double scale = f ? f[i] : 1.0;
        TM_IVDEP
        for (int j = 0; j < E; j++) w->s[i * E + j] = (float)(w->sum[i * E + j] * scale);
        w->z[i] = (float)(w->den[i] * scale);
    }
}

/* sum = sum f + x^T y and den = den f + x^T u (u 1 where there is none), over a block; xt is x transposed. */
static void linear_absorb(const linear_in *a, const float *x, const float *xt, const float *y, const float *u, const float *f, linear_work *w) {
    int E = a->E;
    memset(w->row, 0, sizeof(float) * E);
    for (int t = 0; t < LINEAR_T; t++) {
        float by = u ? u[t] : 1.0f;
        TM_IVDEP
        for (int i = 0; i < E; i++) w->row[i] += x[t * E + i] * by;
    }
    linear_matmul(E, E, LINEAR_T, xt, y, w->add, 0, LINEAR_FULL);
    for (int i = 0; i < a->e; i++) {
        double scale = f ? f[i] : 1.0;
        TM_IVDEP
        for (int j = 0; j < E; j++) w->sum[i * E + j] = w->sum[i * E + j] * scale + w->add[i * E + j];
        w->den[i] = w->den[i] * scale + w->row[i];
    }
    memset(w->row, 0, sizeof(float) * E);
}

/* The same for one token: x y and x u. */
static void linear_absorb_one(const linear_in *a, const float *x, const float *y, float u, linear_work *w) {
    int E = a->E;
    for (int i = 0; i < a->e; i++) {
        double xi = x[i];
        TM_IVDEP
        for (int j = 0; j < E; j++) w->sum[i * E + j] += xi * y[j];
        w->den[i] += xi * u;
    }
}

/* From the units w->m to those of top; f gets the factors. */
static void linear_factors(const linear_in *a, const float *top, linear_work *w, float *m, float *f) {
    linear_levels(a, top, m);
    for (int i = 0; i < a->e; i++) f[i] = tm_exp_neg(-fabsf(w->m[i] - m[i]));
}

static void linear_rescale(const linear_in *a, const float *top, linear_work *w) {
    int E = a->E;
    for (int i = 0; i < a->e; i++) {
        float m = linear_level(a->elu, top[i]);
        if (m == w->m[i]) continue;
        double f = exp(-fabs((double)w->m[i] - m));
        TM_IVDEP
        for (int j = 0; j < E; j++) w->sum[i * E + j] *= f;
        w->den[i] *= f;
        w->m[i] = m;
    }
}

/* Zeros beyond the triangle as far as products and sums of whole vectors look. */
static void linear_cut(float *w, int upper) {
    const int step = TM_VL;
    for (int t = 0; t < LINEAR_T; t++) {
        int first = t / step * step;
        for (int s = upper ? first : t + 1; s < (upper ? t : first + step); s++) w[t * LINEAR_T + s] = 0.0f;
    }
}

static void linear_start(const linear_in *a, linear_work *w) {
    memset(w->sum, 0, sizeof(double) * (a->E * a->E + a->E));
    for (int i = 0; i < a->E; i++) w->m[i] = w->top[i] = TM_FLOOR;
}

/* The key, as it is given, whose feature is e^m. */
static float linear_key_of(int elu, double m) {
    double x = elu && m > 0 ? expm1(m) : m;
    return x > -TM_FLOOR ? -TM_FLOOR : x < TM_FLOOR ? TM_FLOOR : (float)x;
}

/* Head j of the past, its units those of the keys from which they would come; f gets the factors. */
static void linear_units(const linear_in *a, int64_t j, float *top, float *m, double *f) {
    const double *past = a->past_m + j * a->e;
    for (int i = 0; i < a->e; i++) top[i] = linear_key_of(a->elu, past[i]), m[i] = linear_level(a->elu, top[i]), f[i] = exp(past[i] - m[i]);
}

/* Head j of acc (B, H, e + 1, e) as sum and den, times f in each feature (NULL: 1), and den times sign. */
static void linear_take(const linear_in *a, const double *acc, int64_t j, const double *f, double sign, linear_work *w) {
    acc += j * (a->e + 1) * a->e;
    for (int i = 0; i < a->e; i++) {
        double by = f ? f[i] : 1.0;
        for (int r = 0; r < a->e; r++) w->sum[i * a->E + r] = acc[r * a->e + i] * by;
        w->den[i] = acc[a->e * a->e + i] * by * sign;
    }
}

/* The way back. */
static void linear_give(const linear_in *a, double *acc, int64_t j, const double *f, double sign, const linear_work *w) {
    acc += j * (a->e + 1) * a->e;
    for (int i = 0; i < a->e; i++) {
        double by = f ? f[i] : 1.0;
        for (int r = 0; r < a->e; r++) acc[r * a->e + i] = w->sum[i * a->E + r] * by;
        acc[a->e * a->e + i] = w->den[i] * by * sign;
    }
}

static void linear_resume(const linear_in *a, int64_t j, linear_work *w) {
    linear_start(a, w);
    if (!a->past) return;
    double f[a->E];
    linear_units(a, j, w->top, w->m, f);
    linear_take(a, a->past, j, f, 1.0, w);
}

static void linear_leave(const linear_in *a, int64_t j, const linear_work *w) {
    if (!a->end) return;
    for (int i = 0; i < a->e; i++) a->end_m[j * a->e + i] = w->m[i];
    linear_give(a, a->end, j, NULL, 1.0, w);
}

/* A token joins the sums, in units that it raises. */
static void linear_join(const linear_in *a, int t, linear_work *w) {
    if (!w->live[t]) return;
    linear_rise(a, w, w->top, t);
    linear_rescale(a, w->top, w);
    linear_key(a, w->xk + t * a->E, w->m, w->k + t * a->E);
    linear_absorb_one(a, w->k + t * a->E, w->v + t * a->E, 1.0f, w);
}

/* A block token by token. */
static void linear_forward_slow(const linear_in *a, int64_t b, int64_t h, int64_t t0, int n, void *y, float *den, linear_work *w) {
    int E = a->E;
    double *out = tm_scratch(sizeof(double) * E);
    for (int t = 0; t < n; t++) {
        linear_join(a, t, w);
        float *q = w->q + t * E;
        linear_query(a, w->xq + t * E, w->m, q);
        double sum = 0.0;
        memset(out, 0, sizeof(double) * E);
        for (int i = 0; i < a->e; i++) {
            double x = q[i];
            sum += x * w->den[i];
            for (int j = 0; j < E; j++) out[j] += x * w->sum[i * E + j];
        }
        den[t] = (float)sum;
        int some = 0;
        for (int j = 0; j < a->e; j++) w->row[j] = sum == 0 ? 0.0f : (float)(out[j] / sum), some |= tm_odd(w->row[j]);
        tm_tell(some, a->odd);
        linear_store(a, y, ((b * a->T + t0 + t) * a->H + h) * a->e, w->row);
    }
    free(out);
}

/* den of each query from the weights within the block and the sums before it; whether all are safe. */
static int linear_denominators(const linear_in *a, int n, float *den, const linear_work *w, int within) {
    int safe = 1;
    for (int t = 0; t < n; t++) {
        float near = within ? linear_total(w->w + t * LINEAR_T, (t / TM_VL + 1) * TM_VL) : 0.0f;
        den[t] = near + linear_dot(w->q + t * a->E, w->z, a->E);
        safe &= den[t] >= LINEAR_SAFE;
        tm_tell(tm_odd(den[t]), a->odd);
    }
    return safe;
}

static void linear_write(const linear_in *a, int64_t b, int64_t h, int64_t t0, int n, const float *den, void *y, linear_work *w) {
    for (int t = 0; t < n; t++) {
        float *row = w->o + t * a->E, inv = 1.0f / den[t];
        int some = 0;
        for (int j = 0; j < a->e; j++) row[j] = den[t] == 0 ? 0.0f : row[j] * inv, some |= tm_odd(row[j]);
        tm_tell(some, a->odd);
        linear_store(a, y, ((b * a->T + t0 + t) * a->H + h) * a->e, row);
    }
}

/* Features of a block in the units of its end, and the sums before it in the same; f gets their factors. */
static void linear_prepare(const linear_in *a, int n, float *top, float *f, linear_work *w) {
    float m[a->E];
    memcpy(top, w->top, sizeof(float) * a->E);
    for (int t = 0; t < n; t++) linear_rise(a, w, top, t);
    linear_factors(a, top, w, m, f);
    linear_keys(a, m, w);
    linear_queries(a, m, n, w);
    linear_round(a, w, f);
    linear_transpose(w->k, LINEAR_T, a->E, w->kt);
}

static void linear_advance(const linear_in *a, const float *top, const float *f, linear_work *w) {
    linear_absorb(a, w->k, w->kt, w->v, NULL, f, w);
    memcpy(w->top, top, sizeof(float) * a->E);
    linear_levels(a, w->top, w->m);
}

/* One head; den (T) and slow (blocks) are kept for the backward pass. */
static void linear_forward_head(const linear_in *a, int64_t b, int64_t h, void *y, float *den, float *slow, linear_work *w) {
    int E = a->E;
    float top[E], f[E];
    memset(f, 0, sizeof f);
    linear_resume(a, b * a->H + h, w);
    for (int64_t t0 = 0; t0 < a->T; t0 += LINEAR_T) {
        int n = (int)tm_min(LINEAR_T, a->T - t0);
        linear_load_keys(a, b, h, t0, n, w);
        linear_load_queries(a, b, h, t0, n, w);
        linear_prepare(a, n, top, f, w);
        linear_matmul(LINEAR_T, LINEAR_T, E, w->q, w->kt, w->w, 0, LINEAR_LOWER_OUT);
        linear_cut(w->w, 0);
        int safe = linear_denominators(a, n, den + t0, w, 1);
        if (a->odd && *a->odd) return; /* all is done again */
        slow[t0 / LINEAR_T] = safe ? 0.0f : 1.0f;
        if (!safe) {
            linear_forward_slow(a, b, h, t0, n, y, den + t0, w);
            continue;
        }
        linear_matmul(LINEAR_T, E, LINEAR_T, w->w, w->v, w->o, 0, LINEAR_LOWER_IN);
        linear_matmul(LINEAR_T, E, E, w->q, w->s, w->o, 1, LINEAR_FULL);
        linear_write(a, b, h, t0, n, den + t0, y, w);
        linear_advance(a, top, f, w);
    }
    linear_leave(a, b * a->H + h, w);
}

#define LINEAR_HEADS(body)                                                                                                                                     \
    _Pragma("omp parallel num_threads(threads) if (threads > 1 && B * H > 1)") {                                                                               \
        linear_work work, *w = &work;                                                                                                                          \
        linear_open(w, a->E);                                                                                                                                  \
        _Pragma("omp for schedule(static)") for (int64_t j = 0; j < B * H; j++) {                                                                              \
            const int64_t b = j / H, h = j % H;                                                                                                                \
            body;                                                                                                                                              \
        }                                                                                                                                                      \
        free(w->all);                                                                                                                                          \
    }

/* q, k, v, y (B, T, H e); saved (B, H, T + blocks): the denominators, and which blocks were done token by token. What is not finite shows in the rows of its
   block: where ``odd`` is set, not all is done; the caller takes it out and calls again. */
TM_EXPORT(linear_forward)(int dtype, int elu, const void *q, const void *k, const void *v, const uint8_t *mask, void *y, float *saved, const double *past_m,
                          const double *past, double *end_m, double *end, int64_t B, int64_t T, int64_t H, int64_t e, int64_t qb, int64_t qt, int64_t kb, int64_t kt,
                          int64_t vb, int64_t vt, int threads, int *odd) {
    linear_in in = {dtype, elu, (int)e, (int)(tm_ceil(e, TM_VL) * TM_VL), q, k, v, NULL, NULL, mask, T, T, H, qb, qt, kb, kt, vb, vt, 0, 0, odd,
                    past_m, past, end_m, end}, *a = &in;
    int64_t each = T + tm_ceil(T, LINEAR_T);
    LINEAR_HEADS(linear_forward_head(a, b, h, y, saved + j * each, saved + j * each + T, w))
}

/* dq of a block token by token, the sums moving on. */
static void linear_back_queries_slow(const linear_in *a, int n, linear_work *w) {
    int E = a->E;
    for (int t = 0; t < n; t++) {
        linear_join(a, t, w);
        float *q = w->q + t * E;
        linear_query(a, w->xq + t * E, w->m, q);
        for (int i = 0; i < a->e; i++) {
            double d = -w->d[t] * w->den[i];
            for (int j = 0; j < a->e; j++) d += w->sum[i * E + j] * w->g[t * E + j];
            w->o[t * E + i] = (float)(q[i] * d);
        }
    }
}

/* o = q (p k + g s^T - d z), the gradients by the logarithms of the queries' features; p the pairs within the block, if any. */
static void linear_back_queries(const linear_in *a, linear_work *w, int within) {
    int E = a->E;
    linear_transpose(w->s, E, E, w->st);
    linear_matmul(LINEAR_T, E, E, w->g, w->st, w->o, 0, LINEAR_FULL);
    if (within) {
        linear_transpose(w->v, LINEAR_T, E, w->vt);
        linear_matmul(LINEAR_T, LINEAR_T, E, w->g, w->vt, w->p, 0, LINEAR_LOWER_OUT);
        for (int t = 0; t < LINEAR_T; t++)
            for (int s = 0; s <= t; s++) w->p[t * LINEAR_T + s] -= w->d[t];
        linear_cut(w->p, 0);
        linear_matmul(LINEAR_T, E, LINEAR_T, w->p, w->k, w->o, 1, LINEAR_LOWER_IN);
    }
    for (int t = 0; t < LINEAR_T; t++)
        for (int i = 0; i < E; i++) w->o[t * E + i] = w->q[t * E + i] * (w->o[t * E + i] - w->d[t] * w->z[i]);
}

static void linear_write_back(const linear_in *a, int64_t b, int64_t h, int64_t t0, int n, int64_t T, const float *x, void *out, linear_work *w) {
    for (int t = 0; t < n; t++) {
        linear_chain(a, x + t * a->E, w->o + t * a->E);
        linear_store(a, out, ((b * T + t0 + t) * a->H + h) * a->e, w->o + t * a->E);
    }
}

/* o = w g + k r to dv, then o = k (p q + v r^T - r') with w and p the pairs of each key with later queries of the block, if any, and r, r' in s, z. */
static void linear_back_keys(const linear_in *a, int64_t b, int64_t h, int64_t t0, int n, void *dk, void *dv, linear_work *w, int within) {
    int E = a->E;
    linear_matmul(LINEAR_T, E, E, w->k, w->s, w->o, 0, LINEAR_FULL);
    if (within) {
        linear_matmul(LINEAR_T, LINEAR_T, E, w->k, w->qt, w->w, 0, LINEAR_UPPER_OUT);
        linear_cut(w->w, 1);
        linear_matmul(LINEAR_T, E, LINEAR_T, w->w, w->g, w->o, 1, LINEAR_UPPER_IN);
    }
    for (int t = 0; t < n; t++) linear_store(a, dv, ((b * a->S + t0 + t) * a->H + h) * a->e, w->o + t * E);
    linear_transpose(w->s, E, E, w->st);
    linear_matmul(LINEAR_T, E, E, w->v, w->st, w->o, 0, LINEAR_FULL);
    if (within) {
        linear_transpose(w->g, LINEAR_T, E, w->gt);
        linear_matmul(LINEAR_T, LINEAR_T, E, w->v, w->gt, w->p, 0, LINEAR_UPPER_OUT);
        for (int s = 0; s < LINEAR_T; s++)
            for (int t = s; t < LINEAR_T; t++) w->p[s * LINEAR_T + t] -= w->d[t];
        linear_cut(w->p, 1);
        linear_matmul(LINEAR_T, E, LINEAR_T, w->p, w->q, w->o, 1, LINEAR_UPPER_IN);
    }
    for (int t = 0; t < LINEAR_T; t++)
        for (int i = 0; i < E; i++) w->o[t * E + i] = w->live[t] ? w->k[t * E + i] * (w->o[t * E + i] - w->z[i]) : 0.0f;
    linear_write_back(a, b, h, t0, n, a->S, w->xk, dk, w);
}

/* dk and dv of a block token by token; top holds the largest keys before the block. */
static void linear_back_keys_slow(const linear_in *a, int64_t b, int64_t h, int64_t t0, int n, const float *top, void *dk, void *dv, linear_work *w) {
    int E = a->E;
    float *tops = tm_scratch(sizeof(float) * LINEAR_T * E);
    double *out = tm_scratch(sizeof(double) * E);
    for (int t = 0; t < n; t++) {
        memcpy(tops + t * E, t ? tops + (t - 1) * E : top, sizeof(float) * E);
        linear_rise(a, w, tops + t * E, t);
    }
    for (int t = n - 1; t >= 0; t--) {
        float *q = w->q + t * E, *k = w->k + t * E;
        int64_t at = ((b * a->S + t0 + t) * a->H + h) * a->e;
        linear_rescale(a, tops + t * E, w);
        linear_query(a, w->xq + t * E, w->m, q);
        linear_absorb_one(a, q, w->g + t * E, w->d[t], w);
        memset(out, 0, sizeof(double) * E);
        memset(w->o + t * E, 0, sizeof(float) * E);
        if (w->live[t]) {
            linear_key(a, w->xk + t * E, w->m, k);
            for (int i = 0; i < a->e; i++) {
                double d = -w->den[i];
                for (int j = 0; j < a->e; j++) d += w->sum[i * E + j] * w->v[t * E + j], out[j] += k[i] * w->sum[i * E + j];
                w->o[t * E + i] = (float)(k[i] * d);
            }
        }
        for (int j = 0; j < a->e; j++) w->row[j] = (float)out[j];
        linear_store(a, dv, at, w->row);
    }
    linear_write_back(a, b, h, t0, n, a->S, w->xk, dk, w);
    free(tops), free(out);
}

static void linear_load_block(const linear_in *a, int64_t b, int64_t h, int64_t t0, int n, const float *den, linear_work *w) {
    linear_load_keys(a, b, h, t0, n, w);
    linear_load_queries(a, b, h, t0, n, w);
    linear_load_grads(a, b, h, t0, n, den, w);
}

/* dq, forward in time; tops (blocks + 1, E) gets the largest keys before each block. */
static void linear_sweep_queries(const linear_in *a, int64_t b, int64_t h, const float *den, const float *slow, float *tops, void *dq, linear_work *w) {
    int E = a->E;
    float top[E], f[E];
    memset(f, 0, sizeof f);
    linear_resume(a, b * a->H + h, w);
    for (int64_t i = 0; i * LINEAR_T < a->T; i++) {
        int64_t t0 = i * LINEAR_T;
        int n = (int)tm_min(LINEAR_T, a->T - t0);
        memcpy(tops + i * E, w->top, sizeof(float) * E);
        linear_load_block(a, b, h, t0, n, den + t0, w);
        if (slow[i] > 0)
            linear_back_queries_slow(a, n, w);
        else {
            linear_prepare(a, n, top, f, w);
            linear_back_queries(a, w, 1);
            linear_advance(a, top, f, w);
        }
        linear_write_back(a, b, h, t0, n, a->T, w->xq, dq, w);
        memcpy(tops + (i + 1) * E, w->top, sizeof(float) * E);
    }
}

/* dk and dv, backward in time: sum and den are those of the queries, in units that fall. */
static void linear_sweep_keys(const linear_in *a, int64_t b, int64_t h, const float *den, const float *slow, const float *tops, void *dk, void *dv, linear_work *w) {
    int E = a->E;
    float m[E], f[E];
    memset(f, 0, sizeof f);
    int64_t blocks = tm_ceil(a->T, LINEAR_T), j = b * a->H + h;
    linear_start(a, w);
    linear_levels(a, tops + blocks * E, w->m);
    if (a->g_end) linear_take(a, a->g_end, j, NULL, -1.0, w);
    for (int64_t i = blocks - 1; i >= 0; i--) {
        int64_t t0 = i * LINEAR_T;
        int n = (int)tm_min(LINEAR_T, a->T - t0);
        linear_load_block(a, b, h, t0, n, den + t0, w);
        if (slow[i] > 0) {
            linear_back_keys_slow(a, b, h, t0, n, tops + i * E, dk, dv, w);
            continue;
        }
        linear_factors(a, tops + (i + 1) * E, w, m, f);
        linear_keys(a, m, w);
        linear_queries(a, m, n, w);
        linear_round(a, w, f);
        linear_transpose(w->q, LINEAR_T, E, w->qt);
        linear_back_keys(a, b, h, t0, n, dk, dv, w, 1);
        linear_absorb(a, w->q, w->qt, w->g, w->d, f, w);
        memcpy(w->m, m, sizeof(float) * a->e);
    }
    if (!a->g_past) return;
    double scale[E];
    float top[E];
    linear_units(a, j, top, m, scale);
    for (int c = 0; c < a->e; c++) scale[c] *= exp(-fabs((double)w->m[c] - m[c]));
    linear_give(a, a->g_past, j, scale, -1.0, w);
}

static void linear_backward_head(const linear_in *a, int64_t b, int64_t h, const float *den, const float *slow, void *dq, void *dk, void *dv, linear_work *w) {
    float *tops = tm_scratch(sizeof(float) * (tm_ceil(a->T, LINEAR_T) + 1) * a->E);
    linear_sweep_queries(a, b, h, den, slow, tops, dq, w);
    linear_sweep_keys(a, b, h, den, slow, tops, dk, dv, w);
    free(tops);
}

TM_EXPORT(linear_backward)(int dtype, int elu, const void *q, const void *k, const void *v, const uint8_t *mask, const void *y, const float *saved, const void *g, void *dq,
                           void *dk, void *dv, const double *past_m, const double *past, const double *g_end, double *g_past, int64_t B, int64_t T, int64_t H,
                           int64_t e, int64_t qb, int64_t qt, int64_t kb, int64_t kt, int64_t vb, int64_t vt, int64_t gb, int64_t gt, int threads) {
    linear_in in = {dtype, elu, (int)e, (int)(tm_ceil(e, TM_VL) * TM_VL), q, k, v, g, y, mask, T, T, H, qb, qt, kb, kt, vb, vt, gb, gt, NULL,
                    past_m, past, NULL, NULL, g_end, g_past}, *a = &in;
    int64_t each = T + tm_ceil(T, LINEAR_T);
    LINEAR_HEADS(linear_backward_head(a, b, h, saved + j * each, saved + j * each + T, dq, dk, dv, w))
}

/* Over all keys: their units, and the sums S and z in them. */
static void linear_all_sums(const linear_in *a, int64_t b, int64_t h, linear_work *w) {
    linear_start(a, w);
    for (int64_t t0 = 0; t0 < a->S; t0 += LINEAR_T) {
        int n = (int)tm_min(LINEAR_T, a->S - t0);
        linear_load_keys(a, b, h, t0, n, w);
        for (int t = 0; t < n; t++) linear_rise(a, w, w->top, t);
    }
    linear_levels(a, w->top, w->m);
    for (int64_t t0 = 0; t0 < a->S; t0 += LINEAR_T) {
        linear_load_keys(a, b, h, t0, (int)tm_min(LINEAR_T, a->S - t0), w);
        linear_keys(a, w->m, w);
        linear_transpose(w->k, LINEAR_T, a->E, w->kt);
        linear_absorb(a, w->k, w->kt, w->v, NULL, NULL, w);
    }
    linear_round(a, w, NULL);
}

static void linear_all_forward_head(const linear_in *a, int64_t b, int64_t h, void *y, float *den, linear_work *w) {
    linear_all_sums(a, b, h, w);
    for (int64_t t0 = 0; t0 < a->T; t0 += LINEAR_T) {
        int n = (int)tm_min(LINEAR_T, a->T - t0);
        linear_load_queries(a, b, h, t0, n, w);
        linear_queries(a, w->m, n, w);
        linear_denominators(a, n, den + t0, w, 0);
        linear_matmul(LINEAR_T, a->E, a->E, w->q, w->s, w->o, 0, LINEAR_FULL);
        linear_write(a, b, h, t0, n, den + t0, y, w);
    }
}

/* q, y (B, T, H e); k, v (B, S, H e); den (B, H, T) is kept for the backward pass. */
TM_EXPORT(linear_all_forward)(int dtype, int elu, const void *q, const void *k, const void *v, const uint8_t *mask, void *y, float *den, int64_t B, int64_t T, int64_t S,
                              int64_t H, int64_t e, int64_t qb, int64_t qt, int64_t kb, int64_t kt, int64_t vb, int64_t vt, int threads, int *odd) {
    linear_in in = {dtype, elu, (int)e, (int)(tm_ceil(e, TM_VL) * TM_VL), q, k, v, NULL, NULL, mask, T, S, H, qb, qt, kb, kt, vb, vt, 0, 0, odd}, *a = &in;
    LINEAR_HEADS(linear_all_forward_head(a, b, h, y, den + j * T, w))
}

static void linear_all_backward_head(const linear_in *a, int64_t b, int64_t h, const float *den, void *dq, void *dk, void *dv, linear_work *w) {
    linear_all_sums(a, b, h, w);
    memset(w->sum, 0, sizeof(double) * (a->E * a->E + a->E)); /* from here on the sums of the queries */
    for (int64_t t0 = 0; t0 < a->T; t0 += LINEAR_T) {
        int n = (int)tm_min(LINEAR_T, a->T - t0);
        linear_load_queries(a, b, h, t0, n, w);
        linear_load_grads(a, b, h, t0, n, den + t0, w);
        linear_queries(a, w->m, n, w);
        linear_back_queries(a, w, 0);
        linear_write_back(a, b, h, t0, n, a->T, w->xq, dq, w);
        linear_transpose(w->q, LINEAR_T, a->E, w->qt);
        linear_absorb(a, w->q, w->qt, w->g, w->d, NULL, w);
    }
    linear_round(a, w, NULL);
    for (int64_t t0 = 0; t0 < a->S; t0 += LINEAR_T) {
        int n = (int)tm_min(LINEAR_T, a->S - t0);
        linear_load_keys(a, b, h, t0, n, w);
        linear_keys(a, w->m, w);
        linear_back_keys(a, b, h, t0, n, dk, dv, w, 0);
    }
}

TM_EXPORT(linear_all_backward)(int dtype, int elu, const void *q, const void *k, const void *v, const uint8_t *mask, const void *y, const float *den, const void *g,
                               void *dq, void *dk, void *dv, int64_t B, int64_t T, int64_t S, int64_t H, int64_t e, int64_t qb, int64_t qt, int64_t kb, int64_t kt,
                               int64_t vb, int64_t vt, int64_t gb, int64_t gt, int threads) {
    linear_in in = {dtype, elu, (int)e, (int)(tm_ceil(e, TM_VL) * TM_VL), q, k, v, g, y, mask, T, S, H, qb, qt, kb, kt, vb, vt, gb, gt, NULL}, *a = &in;
    LINEAR_HEADS(linear_all_backward_head(a, b, h, den + j * T, dq, dk, dv, w))
}
