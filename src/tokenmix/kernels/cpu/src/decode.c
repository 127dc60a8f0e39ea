/* A few tokens joined to a state, for decoding: AFT-simple, the ring of AFT-local and AFT-conv, the history of AFT-full, Hydra, linear attention.

   A stream may be any length, so the sums it carries are float64, and what multiplies them is too; what is used once, the terms of a window or a
   history, is float32 in two levels. States are values: each kernel reads one and writes another.

   Every kernel takes one struct of 8-byte fields: what is called for each token must cost the caller little.

   A pair weighs exp(k + w). The rounding of k + w, up to 1e-5 for keys of 100, is found by the two-sum below and added to the exponent. */
#include "tm.h"

#define STEP_W 64       /* features in a strip */
#define STEP_N 16       /* terms in a partial sum */
#define STEP_BLOCK 64   /* keys of a window under one maximum */
#define STEP_SEGMENT 256 /* keys of a history that one block of the work sums */
#ifndef STEP_WORK       /* the sanitizers set less */
#define STEP_WORK 65536 /* elements below which one thread is faster */
#endif
#define STEP_CAP 300.0  /* larger log-weights count as this much */

/* Half precision is converted outside of the loops that are specialised for float32. */
static __attribute__((noinline)) const float *step_convert(int dtype, const void *a, int64_t at, float *buffer, int n) { return tm_read(dtype, a, at, buffer, n); }
static __attribute__((noinline)) void step_round(int dtype, void *a, int64_t at, const float *buffer, int n) { tm_write(dtype, a, at, buffer, n); }

TM_INLINE const float *step_read(int dtype, const void *a, int64_t at, float *buffer, int n) {
    return dtype == TM_F32 ? (const float *)a + at : step_convert(dtype, a, at, buffer, n);
}

TM_INLINE void step_write(int dtype, void *a, int64_t at, const float *buffer, int n) {
    if (dtype != TM_F32) step_round(dtype, a, at, buffer, n);
}

/* exp(x) for x <= 0 (and a little above) to one unit in the last place of float64, 0 below -708. */
TM_INLINE double step_exp(double x) {
    double c = x < -708.0 ? -708.0 : x, t = c * 1.4426950408889634 + 0x1.8p52, n = t - 0x1.8p52;
    double r = c - n * 0x1.62e42fee00000p-1;
    r -= n * 0x1.a39ef35793c76p-33;
    double p = 1.0 / 479001600;
    p = p * r + 1.0 / 39916800, p = p * r + 1.0 / 3628800, p = p * r + 1.0 / 362880, p = p * r + 1.0 / 40320, p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720, p = p * r + 1.0 / 120, p = p * r + 1.0 / 24, p = p * r + 1.0 / 6, p = p * r + 0.5;
    p = p * r * r + (r + 1.0);
    uint64_t bits;
    memcpy(&bits, &t, 8); /* the low bits of t are n */
    bits = (bits << 52) + 0x3ff0000000000000u;
    double scale;
    memcpy(&scale, &bits, 8);
    return x < -708.0 ? 0.0 : p * scale;
}

/* log(x) for x >= 1. */
TM_INLINE double step_log(double x) {
    uint64_t bits, low;
    memcpy(&bits, &x, 8);
    uint64_t shifted = bits + (0x3ff0000000000000u - 0x3fe6a09e667f3bcdu); /* so that the mantissa lies in sqrt(1/2) .. sqrt(2) */
    low = (shifted & 0x000fffffffffffffu) + 0x3fe6a09e667f3bcdu;
    double f, n;
    memcpy(&f, &low, 8);
    uint64_t count = (shifted >> 52) + 0x4330000000000000u; /* 2^52 + exponent + 1023, as a float64 */
    memcpy(&n, &count, 8);
    n -= 0x1p52 + 1023.0;
    double s = (f - 1.0) / (f + 1.0), z = s * s, p = 1.0 / 21;
    p = p * z + 1.0 / 19, p = p * z + 1.0 / 17, p = p * z + 1.0 / 15, p = p * z + 1.0 / 13, p = p * z + 1.0 / 11;
    p = p * z + 1.0 / 9, p = p * z + 1.0 / 7, p = p * z + 1.0 / 5, p = p * z + 1.0 / 3, p = p * z + 1.0;
    return 2.0 * s * p + n * 0.6931471805599453;
}

/* A key k that weighs exp(k + w), w = high + low: its exponent less a maximum that is no smaller than the float32 sum k + high. */
TM_INLINE float step_term(float k, float high, float low, float top) {
    float z = k + high, back = z - k, lost = (k - (z - back)) + (high - back);
    return z < TM_FLOOR ? 0.0f : tm_exp_neg((z - top) + (lost + low)); /* of -inf what is lost would be NaN */
}

TM_INLINE float step_high(double w) { return (float)(w > STEP_CAP ? STEP_CAP : w); }
TM_INLINE float step_low(double w) { return (float)((w > STEP_CAP ? STEP_CAP : w) - (double)step_high(w)); }

/* Sums of w features: maximum, numerator and denominator, float64, at consecutive addresses each. */
TM_INLINE void step_join(const float *restrict k, const float *restrict v, double *restrict m, double *restrict num, double *restrict den, int w) {
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        double d = (double)k[c] - m[c], e = step_exp(-fabs(d)), old = d > 0 ? e : 1.0, new = d > 0 ? d * 0.0 + 1.0 : e; /* a key of +inf gives NaN, as one of NaN does */
        num[c] = num[c] * old + new *(double)v[c];
        den[c] = den[c] * old + new;
        m[c] = d > 0 ? (double)k[c] : m[c];
    }
}

TM_INLINE void step_gate(const float *restrict q, float *restrict y, int w) {
    TM_IVDEP
    for (int c = 0; c < w; c++) y[c] *= tm_sigmoid(q[c]);
}

/* ---- AFT-simple ---- */

TM_INLINE void step_simple_strip(const int dtype, const void *q, const void *k, const void *v, const uint8_t *live, void *y, int64_t b, int64_t c0, int w, int64_t L,
                                 int64_t D, double *restrict m, double *restrict num, double *restrict den) {
    float kbuf[STEP_W], vbuf[STEP_W], qbuf[STEP_W], ybuf[STEP_W];
    for (int64_t t = 0; t < L; t++) {
        int64_t at = (b * L + t) * D + c0;
        if (!live || live[b * L + t]) step_join(step_read(dtype, k, at, kbuf, w), step_read(dtype, v, at, vbuf, w), m, num, den, w);
        float *out = tm_target(dtype, y, at, ybuf);
        if (q) {
            const float *qr = step_read(dtype, q, at, qbuf, w);
            TM_IVDEP
            for (int c = 0; c < w; c++) {
                float e = tm_exp_neg(-fabsf(qr[c])), d = (float)den[c];
                out[c] = d == 0 ? 0.0f : (float)num[c] * (qr[c] >= 0 ? 1.0f : e) / (d * (1.0f + e));
            }
        } else
            for (int c = 0; c < w; c++) out[c] = den[c] == 0 ? 0.0f : (float)(num[c] / den[c]);
        step_write(dtype, y, at, out, w);
    }
}

typedef struct {
    int64_t dtype;
    const void *q, *k, *v;
    const uint8_t *live;
    const double *m0, *num0, *den0;
    void *y;
    double *m1, *num1, *den1;
    int64_t B, L, D;
} step_simple_in;

/* q (or NULL), k, v, y (B, L, D) contiguous; live (B, L) or NULL; sums (B, D) before and after. */
TM_EXPORT(step_simple)(const step_simple_in *a) {
    int64_t strips = tm_ceil(a->D, STEP_W);
#pragma omp parallel for schedule(static) if (a->B * a->L * a->D > STEP_WORK)
    for (int64_t i = 0; i < a->B * strips; i++) {
        int64_t b = i / strips, c0 = i % strips * STEP_W, at = b * a->D + c0;
        int w = (int)tm_min(STEP_W, a->D - c0);
        double m[STEP_W], num[STEP_W], den[STEP_W];
        memcpy(m, a->m0 + at, 8 * w), memcpy(num, a->num0 + at, 8 * w), memcpy(den, a->den0 + at, 8 * w);
        if (a->dtype == TM_F32 && w == STEP_W)
            step_simple_strip(TM_F32, a->q, a->k, a->v, a->live, a->y, b, c0, STEP_W, a->L, a->D, m, num, den);
        else
            step_simple_strip((int)a->dtype, a->q, a->k, a->v, a->live, a->y, b, c0, w, a->L, a->D, m, num, den);
        memcpy(a->m1 + at, m, 8 * w), memcpy(a->num1 + at, num, 8 * w), memcpy(a->den1 + at, den, 8 * w);
    }
}

/* ---- the ring of AFT-local and AFT-conv ---- */

typedef struct {
    int64_t dtype, heads; /* heads: one key for the D / h features of each of h heads, else h = D */
    const void *q, *k, *v;
    const uint8_t *live;
    const void *keys, *values;
    const uint8_t *lives;
    const double *m0, *num0, *den0, *w;
    const uint8_t *near;
    void *y, *keys1, *values1;
    uint8_t *lives1;
    double *m1, *num1, *den1;
    int64_t B, L, R, D, h, wb, wh, nb; /* wb, wh, nb: element strides of w for batch and head, of near for batch; 0 where one serves all */
} step_ring_in;

/* Row j of the ring followed by the new tokens. */
TM_INLINE const float *step_row(const int dtype, const void *old, const void *new, int64_t b, int64_t j, int64_t R, int64_t L, int64_t width, int64_t c0, float *buffer, int n) {
    return j < R ? step_read(dtype, old, (b * R + j) * width + c0, buffer, n) : step_read(dtype, new, (b * L + j - R) * width + c0, buffer, n);
}

TM_INLINE int step_seen(const step_ring_in *a, int64_t b, int64_t t, int64_t j) {
    int live = j < a->R ? a->lives[b * a->R + j] : !a->live || a->live[b * a->L + j - a->R];
    return live && (!a->near || a->near[b * a->nb + t * (a->R + a->L) + j]);
}

/* The keys of a block that one token sees: how many, which, their sums with the weights, their values (``wide`` holds them where they are half precision). */
typedef struct {
    int n;
    int64_t at[STEP_BLOCK];
    const float *v[STEP_BLOCK];
    float z[STEP_BLOCK * STEP_W], wide[STEP_BLOCK * STEP_W];
} step_block;

/* Gathers keys j0 .. j1 and raises ``top`` to them. ``shift``, for one new float32 token: each row goes to its place in the ring after it as well. */
TM_INLINE void step_gather(const int dtype, const int shift, const step_ring_in *a, int64_t b, int64_t t, int64_t j0, int64_t j1, int64_t c0, int w, step_block *x,
                           float *restrict top) {
    const double *weights = a->w + b * a->wb + t * (a->R + a->L);
    float kbuf[STEP_W];
    x->n = 0;
    for (int64_t j = j0; j < j1; j++) {
        int seen = step_seen(a, b, t, j);
        if (!seen && !shift) continue;
        const float *restrict k = step_row(dtype, a->keys, a->k, b, j, a->R, a->L, a->D, c0, kbuf, w);
        const float *restrict v = step_row(dtype, a->values, a->v, b, j, a->R, a->L, a->D, c0, x->wide + x->n * STEP_W, w);
        if (shift && j > 0) {
            int64_t to = (b * a->R + j - 1) * a->D + c0;
            memcpy((float *)a->keys1 + to, k, sizeof(float) * w), memcpy((float *)a->values1 + to, v, sizeof(float) * w);
        }
        if (!seen) continue;
        float high = step_high(weights[j]), *restrict z = x->z + x->n * STEP_W;
        x->at[x->n] = j, x->v[x->n++] = v;
        TM_IVDEP
        for (int c = 0; c < w; c++) {
            float sum = k[c] + high;
            z[c] = sum, top[c] = sum > top[c] ? sum : top[c];
        }
    }
}

/* Adds one term: with its rounding, where that would show. */
TM_INLINE void step_add(const float *restrict z, const float *restrict v, const float *restrict top, float *restrict n, float *restrict d, int w) {
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        float e = tm_exp_neg(z[c] - top[c]);
        n[c] += e * v[c], d[c] += e;
    }
}

TM_INLINE void step_add_exactly(const float *restrict k, double weight, const float *restrict v, const float *restrict top, float *restrict n, float *restrict d, int w) {
    float high = step_high(weight), low = step_low(weight);
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        float e = step_term(k[c], high, low, top[c]);
        n[c] += e * v[c], d[c] += e;
    }
}

/* Adds terms first .. last of a block, with their rounding where it would show: where k + w is small, it is below 1e-6 wherever an exponential counts. */
TM_INLINE void step_sum_block(const int dtype, const step_ring_in *a, int64_t b, const step_block *x, int first, int last, int64_t c0, int w, const double *weights,
                              const float *restrict top, float *restrict pn, float *restrict pd, float *kbuf) {
    int small = 1;
    for (int c = 0; c < w; c++) small &= fabsf(top[c]) < 16.0f;
    for (int i = first; i < last; i++) {
        double weight = weights[x->at[i]];
        if (small && fabs(weight) < 16.0)
            step_add(x->z + i * STEP_W, x->v[i], top, pn, pd, w);
        else
            step_add_exactly(step_row(dtype, a->keys, a->k, b, x->at[i], a->R, a->L, a->D, c0, kbuf, w), weight, x->v[i], top, pn, pd, w);
    }
}

/* A key for each feature: token t over keys t .. R + t of the row and the sums of all older ones. */
TM_INLINE void step_window(const int dtype, const int shift, const step_ring_in *a, int64_t b, int64_t t, int64_t c0, int w, const double *restrict m,
                           const double *restrict num, const double *restrict den, float *restrict out) {
    float kbuf[STEP_W], top[STEP_W], last[STEP_W], n[STEP_W], d[STEP_W], pn[STEP_W], pd[STEP_W];
    const double *weights = a->w + b * a->wb + t * (a->R + a->L);
    step_block x;
    for (int c = 0; c < w; c++) top[c] = (float)m[c], n[c] = d[c] = 0.0f;
    for (int64_t j = t; j <= a->R + t; j += STEP_BLOCK) {
        memcpy(last, top, sizeof last);
        step_gather(dtype, shift, a, b, t, j, tm_min(j + STEP_BLOCK, a->R + t + 1), c0, w, &x, top);
        if (j > t)
            for (int c = 0; c < w; c++) {
                float f = tm_exp_neg(last[c] - top[c]);
                n[c] *= f, d[c] *= f;
            }
        for (int i0 = 0; i0 < x.n; i0 += STEP_N) {
            for (int c = 0; c < w; c++) pn[c] = pd[c] = 0.0f;
            step_sum_block(dtype, a, b, &x, i0, (int)tm_min(i0 + STEP_N, x.n), c0, w, weights, top, pn, pd, kbuf);
            for (int c = 0; c < w; c++) n[c] += pn[c], d[c] += pd[c];
        }
    }
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        float f = tm_exp_neg((float)(m[c] - (double)top[c]));
        float all = d[c] + f * (float)den[c], sum = n[c] + f * (float)num[c];
        out[c] = all == 0 ? 0.0f : sum / all;
    }
}

TM_INLINE void step_ring_strip(const int dtype, const int shift, const step_ring_in *a, int64_t b, int64_t c0, int w, double *m, double *num, double *den) {
    float kbuf[STEP_W], vbuf[STEP_W], qbuf[STEP_W], ybuf[STEP_W];
    for (int64_t t = 0; t < a->L; t++) {
        int64_t at = (b * a->L + t) * a->D + c0;
        float *out = tm_target(dtype, a->y, at, ybuf);
        step_window(dtype, shift, a, b, t, c0, w, m, num, den, out);
        if (a->q) step_gate(step_read(dtype, a->q, at, qbuf, w), out, w);
        step_write(dtype, a->y, at, out, w);
        if (a->near || !(t < a->R ? a->lives[b * a->R + t] : !a->live || a->live[b * a->L + t - a->R])) continue;
        const float *k = step_row(dtype, a->keys, a->k, b, t, a->R, a->L, a->D, c0, kbuf, w), *v = step_row(dtype, a->values, a->v, b, t, a->R, a->L, a->D, c0, vbuf, w);
        step_join(k, v, m, num, den, w);
    }
}

/* One key for the g features of head i. ``e``: R + 1 floats. */
TM_INLINE void step_head_window(const int dtype, const step_ring_in *a, int64_t b, int64_t i, int64_t t, double m, const double *restrict num, double den, float *restrict e) {
    int64_t R = a->R, g = a->D / a->h;
    const double *weights = a->w + b * a->wb + i * a->wh + t * (R + a->L);
    float one, top = (float)m, d = 0.0f;
    for (int64_t j = 0; j <= R; j++) {
        float z = !step_seen(a, b, t, t + j) ? TM_FLOOR : *step_row(dtype, a->keys, a->k, b, t + j, R, a->L, a->h, i, &one, 1) + step_high(weights[t + j]);
        top = z > top ? z : top;
    }
    for (int64_t j0 = 0; j0 <= R; j0 += STEP_N) {
        float part = 0.0f;
        for (int64_t j = j0; j < tm_min(j0 + STEP_N, R + 1); j++) {
            e[j] = -1.0f; /* not seen */
            if (!step_seen(a, b, t, t + j)) continue;
            e[j] = step_term(*step_row(dtype, a->keys, a->k, b, t + j, R, a->L, a->h, i, &one, 1), step_high(weights[t + j]), step_low(weights[t + j]), top);
            part += e[j];
        }
        d += part;
    }
    float f = tm_exp_neg((float)(m - (double)top)), all = d + f * (float)den, inverse = all == 0 ? 0.0f : 1.0f / all;
    for (int64_t c0 = 0; c0 < g; c0 += STEP_W) {
        float vbuf[STEP_W], qbuf[STEP_W], ybuf[STEP_W], n[STEP_W], pn[STEP_W];
        int w = (int)tm_min(STEP_W, g - c0);
        int64_t at = (b * a->L + t) * a->D + i * g + c0;
        for (int c = 0; c < w; c++) n[c] = f * (float)num[c0 + c], pn[c] = 0.0f;
        for (int64_t j = 0; j <= R; j++) {
            if (!(e[j] < 0)) {
                const float *v = step_row(dtype, a->values, a->v, b, t + j, R, a->L, a->D, i * g + c0, vbuf, w);
                TM_IVDEP
                for (int c = 0; c < w; c++) pn[c] += e[j] * v[c];
            }
            if (j % STEP_N == STEP_N - 1 || j == R)
                for (int c = 0; c < w; c++) n[c] += pn[c], pn[c] = 0.0f;
        }
        float *out = tm_target(dtype, a->y, at, ybuf);
        for (int c = 0; c < w; c++) out[c] = n[c] * inverse;
        if (a->q) step_gate(step_read(dtype, a->q, at, qbuf, w), out, w);
        step_write(dtype, a->y, at, out, w);
    }
}

TM_INLINE void step_head_fold(const int dtype, const step_ring_in *a, int64_t b, int64_t i, int64_t t, double *m, double *restrict num, double *den) {
    int64_t g = a->D / a->h;
    float one, vbuf[STEP_W];
    double k = *step_row(dtype, a->keys, a->k, b, t, a->R, a->L, a->h, i, &one, 1), d = k - *m, e = step_exp(-fabs(d)), old = d > 0 ? e : 1.0, new = d > 0 ? d * 0.0 + 1.0 : e;
    for (int64_t c0 = 0; c0 < g; c0 += STEP_W) {
        int w = (int)tm_min(STEP_W, g - c0);
        const float *v = step_row(dtype, a->values, a->v, b, t, a->R, a->L, a->D, i * g + c0, vbuf, w);
        for (int c = 0; c < w; c++) num[c0 + c] = num[c0 + c] * old + new *(double)v[c];
    }
    *den = *den * old + new;
    *m = d > 0 ? k : *m;
}

TM_INLINE void step_ring_head(const int dtype, const step_ring_in *a, int64_t b, int64_t i, double *m, double *num, double *den) {
    float few[128], *e = a->R < 128 ? few : tm_scratch(sizeof(float) * (a->R + 1));
    for (int64_t t = 0; t < a->L; t++) {
        step_head_window(dtype, a, b, i, t, *m, num, *den, e);
        if (!a->near && (t < a->R ? a->lives[b * a->R + t] : !a->live || a->live[b * a->L + t - a->R])) step_head_fold(dtype, a, b, i, t, m, num, den);
    }
    if (e != few) free(e);
}

/* The last R of R + L rows of ``size`` bytes. */
static void step_shift(const void *old, const void *new, void *out, int64_t b, int64_t R, int64_t L, int64_t size) {
    int64_t stay = tm_max(R - L, 0), come = R - stay;
    memcpy((char *)out + b * R * size, (const char *)old + (b * R + R - stay) * size, stay * size);
    memcpy((char *)out + (b * R + stay) * size, (const char *)new + (b * L + L - come) * size, come * size);
}

/* New tokens q (or NULL), v, y (B, L, D), k (B, L, h), live (B, L) over a ring of keys (B, R, h), values (B, R, D), lives (B, R) and the sums m, den (B, h),
   num (B, D) of all older keys. w (.., L, R + L): token t reads t .. R + t of its row. near (.., L, R + L) or NULL: the only pairs that count, then the
   older keys take no part and their sums are not written. */
TM_EXPORT(step_ring)(const step_ring_in *a) {
    int64_t B = a->B, R = a->R, D = a->D, h = a->h, size = a->dtype == TM_F32 ? 4 : 2, blocks = a->heads ? h : tm_ceil(D, STEP_W), g = D / h;
    int near = a->near != NULL, together = a->L == 1 && !a->heads && a->dtype == TM_F32; /* then rows move while they are read */
    if (!near) memcpy(a->m1, a->m0, 8 * B * h), memcpy(a->num1, a->num0, 8 * B * D), memcpy(a->den1, a->den0, 8 * B * h);
    for (int64_t b = 0; b < B && R > 0; b++) {
        if (!together) step_shift(a->keys, a->k, a->keys1, b, R, a->L, h * size), step_shift(a->values, a->v, a->values1, b, R, a->L, D * size);
        step_shift(a->lives, a->live, a->lives1, b, R, a->L, 1);
    }
    double lowest[STEP_W], zero[STEP_W], *zeros = near && g > STEP_W ? calloc(g, 8) : zero; /* the sums over nothing */
    for (int c = 0; c < STEP_W; c++) lowest[c] = TM_FLOOR, zero[c] = 0.0;
#pragma omp parallel for schedule(static) if (B * a->L * (R + 1) * (a->heads ? h + D / 4 : D) > STEP_WORK)
    for (int64_t i = 0; i < B * blocks; i++) {
        int64_t b = i / blocks, c0 = a->heads ? i % blocks * g : i % blocks * STEP_W, at = a->heads ? i : b * D + c0;
        double *m = near ? lowest : a->m1 + at, *num = near ? zeros : a->num1 + b * D + c0, *den = near ? zero : a->den1 + at;
        int w = (int)tm_min(STEP_W, D - c0);
        if (a->heads && a->dtype == TM_F32)
            step_ring_head(TM_F32, a, b, i % blocks, m, num, den);
        else if (a->heads)
            step_ring_head((int)a->dtype, a, b, i % blocks, m, num, den);
        else if (together && w == STEP_W)
            step_ring_strip(TM_F32, 1, a, b, c0, STEP_W, m, num, den);
        else
            step_ring_strip((int)a->dtype, together, a, b, c0, w, m, num, den);
    }
    if (zeros != zero) free(zeros);
}

/* ---- the log-weights of pairs ---- */

typedef struct {
    int64_t dtype;
    const void *u, *v; /* factors (rows, rank) and (cols, rank), or a table (rows, cols) and NULL */
    const int64_t *at, *places;
    double *w;
    uint8_t *near;
    int64_t *places1, *fault;
    int64_t B, L, R, rows, cols, rank, window, keep;
} step_pairs_in;

/* Where key j of row b stands: R kept ones at ``places`` (B, R), then L new ones at ``at`` (B, L). */
TM_INLINE int64_t step_place(const int64_t *places, const int64_t *at, int64_t b, int64_t j, int64_t R, int64_t L) {
    return j < R ? places[b * R + j] : at[b * L + j - R];
}

/* The last n of all places, (B, n). */
TM_INLINE void step_last_places(const int64_t *places, const int64_t *at, int64_t *last, int64_t B, int64_t R, int64_t L, int64_t n) {
    for (int64_t b = 0; b < B; b++)
        for (int64_t j = 0; j < n; j++) last[b * n + j] = step_place(places, at, b, R + L - n + j, R, L);
}

/* u v^T or the table at one pair of places. */
TM_INLINE double step_pair(const int dtype, const step_pairs_in *a, int64_t row, int64_t col) {
    float ubuf[STEP_W], vbuf[STEP_W];
    if (!a->v) return (double)*step_read(dtype, a->u, row * a->cols + col, ubuf, 1);
    double lanes[TM_VL] = {0}, sum = 0.0;
    for (int64_t c0 = 0; c0 < a->rank; c0 += STEP_W) {
        int w = (int)tm_min(STEP_W, a->rank - c0), c = 0;
        const float *u = step_read(dtype, a->u, row * a->rank + c0, ubuf, w), *v = step_read(dtype, a->v, col * a->rank + c0, vbuf, w);
        for (; c + TM_VL <= w; c += TM_VL)
            for (int l = 0; l < TM_VL; l++) lanes[l] += (double)u[c + l] * (double)v[c + l];
        for (; c < w; c++) sum += (double)u[c] * (double)v[c];
    }
    for (int l = 0; l < TM_VL; l++) sum += lanes[l];
    return sum;
}

/* Weights w (B, L, R + L) of new tokens at places ``at`` (B, L) for R kept ones at ``places`` (B, R) and each other; with a window >= 0 those of pairs less
   than that apart, which ``near`` (or NULL) marks, and 0 elsewhere. places1: the last ``keep`` of all places. fault: whether a place lies outside of the bias. */
TM_EXPORT(step_pairs)(const step_pairs_in *a) {
    int64_t S = a->R + a->L, blocks = tm_ceil(S, STEP_SEGMENT), faults = 0;
    step_last_places(a->places, a->at, a->places1, a->B, a->R, a->L, a->keep);
#pragma omp parallel for schedule(static) reduction(+ : faults) if (a->B * a->L * S * (a->rank + 1) > STEP_WORK)
    for (int64_t i = 0; i < a->B * a->L * blocks; i++) {
        int64_t b = i / blocks / a->L, row = i / blocks, j0 = i % blocks * STEP_SEGMENT, from = a->at[row];
        for (int64_t j = j0; j < tm_min(j0 + STEP_SEGMENT, S); j++) {
            int64_t place = step_place(a->places, a->at, b, j, a->R, a->L);
            int near = a->window < 0 || (place < from ? from - place : place - from) < a->window;
            int inside = from >= 0 && from < a->rows && place >= 0 && place < a->cols;
            a->w[row * S + j] = !near || !inside ? 0.0 : a->dtype == TM_F32 ? step_pair(TM_F32, a, from, place) : step_pair((int)a->dtype, a, from, place);
            if (a->near) a->near[row * S + j] = (uint8_t)near;
            faults += !inside;
        }
    }
    *a->fault = faults;
}

typedef struct {
    int64_t dtype;
    const void *kernel; /* (heads, taps) */
    const int64_t *at, *places;
    double *w;
    uint8_t *near;
    int64_t *places1;
    int64_t B, L, R, heads, taps;
} step_taps_in;

/* Weights w (B, heads, L, R + L) of new tokens at places ``at`` (B, L) for R kept ones at ``places`` (B, R) and each other, by how far back these stand: the
   last tap is that of the token itself. 0 elsewhere; near (B, L, R + L) marks the pairs that have a tap. places1: the last R of all places. */
TM_EXPORT(step_taps)(const step_taps_in *a) {
    int64_t S = a->R + a->L;
    step_last_places(a->places, a->at, a->places1, a->B, a->R, a->L, a->R);
#pragma omp parallel for schedule(static) if (a->B * a->L * S * a->heads > STEP_WORK)
    for (int64_t row = 0; row < a->B * a->L; row++) {
        int64_t b = row / a->L, t = row % a->L;
        for (int64_t j = 0; j < S; j++) {
            int64_t place = step_place(a->places, a->at, b, j, a->R, a->L);
            uint64_t back = (uint64_t)a->at[row] - (uint64_t)place; /* huge where the place lies after the token */
            int near = back < (uint64_t)a->taps;
            a->near[row * S + j] = (uint8_t)near;
            for (int64_t h = 0; h < a->heads; h++) {
                float buf[1];
                double *w = a->w + ((b * a->heads + h) * a->L + t) * S + j;
                *w = near ? (double)*step_read((int)a->dtype, a->kernel, h * a->taps + a->taps - 1 - (int64_t)back, buf, 1) : 0.0;
            }
        }
    }
}

/* ---- a short convolution, feature by feature ---- */

typedef struct {
    int64_t dtype;
    const void *weight, *x, *values; /* (D, taps); new tokens (B, L, D); the R before them */
    const uint8_t *live, *lives;
    const int64_t *at, *places;
    void *y, *values1;
    uint8_t *lives1;
    int64_t *places1;
    int64_t B, L, R, D, taps;
} step_conv_in;

/* One strip of one row: each token at most taps - 1 positions back, times its tap. What is not finite makes its feature NaN, whatever its tap is. */
TM_INLINE void step_conv_strip(const int dtype, const step_conv_in *a, int64_t b, int64_t t, int64_t c0, int w) {
    float xbuf[STEP_W], tbuf[1], sum[STEP_W];
    for (int c = 0; c < w; c++) sum[c] = 0.0f;
    for (int64_t j = 0; j <= a->R + t; j++) {
        uint64_t back = (uint64_t)a->at[b * a->L + t] - (uint64_t)step_place(a->places, a->at, b, j, a->R, a->L);
        if (back >= (uint64_t)a->taps || !(j < a->R ? a->lives[b * a->R + j] : a->live[b * a->L + j - a->R])) continue;
        const float *x = step_row(dtype, a->values, a->x, b, j, a->R, a->L, a->D, c0, xbuf, w);
        int64_t tap = c0 * a->taps + a->taps - 1 - (int64_t)back;
        for (int c = 0; c < w; c++) sum[c] += *step_read(dtype, a->weight, tap + c * a->taps, tbuf, 1) * x[c] + (x[c] - x[c]);
    }
    float *y = tm_target(dtype, a->y, (b * a->L + t) * a->D + c0, xbuf);
    for (int c = 0; c < w; c++) y[c] = sum[c];
    step_write(dtype, a->y, (b * a->L + t) * a->D + c0, y, w);
}

/* y: the convolution at the new tokens; values1, lives1, places1: the last R of all tokens. */
TM_EXPORT(step_conv)(const step_conv_in *a) {
    int64_t width = a->D * (a->dtype == TM_F32 ? 4 : 2), strips = tm_ceil(a->D, STEP_W);
    step_last_places(a->places, a->at, a->places1, a->B, a->R, a->L, a->R);
    for (int64_t i = 0; i < a->B * a->R; i++) {
        int64_t b = i / a->R, j = i % a->R + a->L; /* of the R + L tokens of the row */
        int old = j < a->R;
        int64_t from = old ? b * a->R + j : b * a->L + j - a->R;
        a->lives1[i] = old ? a->lives[from] : a->live[from];
        memcpy((char *)a->values1 + i * width, (const char *)(old ? a->values : a->x) + from * width, (size_t)width);
    }
#pragma omp parallel for schedule(static) if (a->B * a->L * a->D * a->taps > STEP_WORK)
    for (int64_t i = 0; i < a->B * a->L * strips; i++) {
        int64_t row = i / strips, c0 = i % strips * STEP_W;
        int w = (int)tm_min(STEP_W, a->D - c0);
        if (a->dtype == TM_F32) step_conv_strip(TM_F32, a, row / a->L, row % a->L, c0, w);
        else step_conv_strip((int)a->dtype, a, row / a->L, row % a->L, c0, w);
    }
}

/* ---- the history of AFT-full ---- */

/* The keys of a block that one token sees: how many, which, and their log-weights. */
typedef struct {
    int n, light; /* light: no weight is large, so that the rounding of k + w does not show where k is not large either */
    int64_t at[STEP_N];
    float high[STEP_N];
} step_keys;

TM_INLINE step_keys step_look(const step_ring_in *a, int64_t b, int64_t t, int64_t j0, int64_t j1, const double *weights) {
    step_keys x = {.n = 0, .light = 1};
    for (int64_t j = j0; j < j1; j++) {
        if (!step_seen(a, b, t, j)) continue;
        x.at[x.n] = j, x.high[x.n++] = step_high(weights[j]), x.light &= fabs(weights[j]) < 16.0;
    }
    return x;
}

/* Starts to read w features of a row of a history and of its values: rows lie too far apart for the hardware to foresee them. */
TM_INLINE void step_fetch(const int dtype, const step_ring_in *a, int64_t b, int64_t j, int64_t c0, int w) {
    int64_t size = dtype == TM_F32 ? 4 : 2, place = ((b * a->R + j) * a->D + c0) * size;
    for (int64_t at = 0; at < w * size; at += 64) __builtin_prefetch((const char *)a->keys + place + at), __builtin_prefetch((const char *)a->values + place + at);
}

/* A strip of w features of a query joins the keys of one block; m, n and d: its sums so far. What the next block will read is asked for in between. */
TM_INLINE void step_block_strip(const int dtype, const step_ring_in *a, int64_t b, const step_keys *x, const double *weights, int64_t next, int64_t end, int64_t c0, const int w,
                                float *restrict m, float *restrict n, float *restrict d, float *wide) {
    const float *k[STEP_N], *v[STEP_N];
    float top[STEP_W], pn[STEP_W], pd[STEP_W];
    int small = x->light;
    for (int c = 0; c < w; c++) top[c] = m[c], pn[c] = pd[c] = 0.0f;
    for (int i = 0; i < x->n; i++) {
        k[i] = step_row(dtype, a->keys, a->k, b, x->at[i], a->R, a->L, a->D, c0, wide + 2 * i * STEP_W, w);
        v[i] = step_row(dtype, a->values, a->v, b, x->at[i], a->R, a->L, a->D, c0, wide + (2 * i + 1) * STEP_W, w);
        TM_IVDEP
        for (int c = 0; c < w; c++) {
            float z = k[i][c] + x->high[i];
            top[c] = z > top[c] ? z : top[c];
        }
    }
    for (int c = 0; c < w; c++) small &= fabsf(top[c]) < 16.0f;
    for (int i = 0; i < x->n; i++) {
        if (next + i < end) step_fetch(dtype, a, b, next + i, c0, w);
        if (small)
            TM_IVDEP
            for (int c = 0; c < w; c++) {
                float e = tm_exp_neg((k[i][c] + x->high[i]) - top[c]);
                pn[c] += e * v[i][c], pd[c] += e;
            }
        else
            step_add_exactly(k[i], weights[x->at[i]], v[i], top, pn, pd, w);
    }
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        float f = tm_exp_neg(m[c] - top[c]);
        n[c] = n[c] * f + pn[c], d[c] = d[c] * f + pd[c], m[c] = top[c];
    }
}

/* One query over keys j0 .. j1 of row b: maximum, numerator, denominator (3, D). */
TM_INLINE void step_segment(const int dtype, const step_ring_in *a, int64_t b, int64_t t, int64_t j0, int64_t j1, float *restrict sums) {
    const double *weights = a->w + b * a->wb + t * (a->R + a->L);
    float wide[2 * STEP_N * STEP_W];
    for (int64_t c = 0; c < a->D; c++) sums[c] = TM_FLOOR, sums[a->D + c] = sums[2 * a->D + c] = 0.0f;
    for (int64_t j = j0; j < j1; j += STEP_N) {
        step_keys x = step_look(a, b, t, j, tm_min(j + STEP_N, j1), weights);
        int64_t next = j + STEP_N, end = tm_min(j1, a->R);
        for (int64_t c0 = 0; c0 < a->D; c0 += STEP_W) {
            float *m = sums + c0, *n = m + a->D, *d = n + a->D;
            if (a->D - c0 >= STEP_W) step_block_strip(dtype, a, b, &x, weights, next, end, c0, STEP_W, m, n, d, wide);
            else step_block_strip(dtype, a, b, &x, weights, next, end, c0, (int)(a->D - c0), m, n, d, wide);
        }
    }
}

/* The segments of one query joined in their order, in float64. */
static void step_segments_joined(const step_ring_in *a, int64_t b, int64_t t, const float *sums, int64_t segments) {
    for (int64_t c0 = 0; c0 < a->D; c0 += STEP_W) {
        double m[STEP_W], num[STEP_W], den[STEP_W];
        float qbuf[STEP_W], ybuf[STEP_W];
        int w = (int)tm_min(STEP_W, a->D - c0);
        for (int c = 0; c < w; c++) m[c] = TM_FLOOR, num[c] = den[c] = 0.0;
        for (int64_t i = 0; i < segments; i++) {
            const float *s = sums + i * 3 * a->D + c0;
            TM_IVDEP
            for (int c = 0; c < w; c++) {
                double d = (double)s[c] - m[c], e = step_exp(-fabs(d)), old = d > 0 ? e : 1.0, new = d > 0 ? 1.0 : e;
                num[c] = num[c] * old + new *(double)s[a->D + c], den[c] = den[c] * old + new *(double)s[2 * a->D + c];
                m[c] = d > 0 ? (double)s[c] : m[c];
            }
        }
        int64_t at = (b * a->L + t) * a->D + c0;
        float *out = tm_target((int)a->dtype, a->y, at, ybuf);
        for (int c = 0; c < w; c++) out[c] = den[c] == 0 ? 0.0f : (float)(num[c] / den[c]);
        if (a->q) step_gate(step_read((int)a->dtype, a->q, at, qbuf, w), out, w);
        step_write((int)a->dtype, a->y, at, out, w);
    }
}

/* New tokens over R kept keys and each other, causally: fields as in step_ring, of which those of the ring after, the sums and near are not read. */
TM_EXPORT(step_full)(const step_ring_in *a) {
    int64_t segments = tm_ceil(a->R + a->L, STEP_SEGMENT), items = a->B * a->L * segments;
    float *sums = tm_scratch(sizeof(float) * items * 3 * a->D);
#pragma omp parallel for schedule(static) if (a->B * a->L * (a->R + a->L) * a->D > STEP_WORK)
    for (int64_t i = 0; i < items; i++) {
        int64_t b = i / segments / a->L, t = i / segments % a->L, j0 = i % segments * STEP_SEGMENT, j1 = tm_min(j0 + STEP_SEGMENT, a->R + t + 1);
        if (a->dtype == TM_F32)
            step_segment(TM_F32, a, b, t, j0, j1, sums + i * 3 * a->D);
        else
            step_segment((int)a->dtype, a, b, t, j0, j1, sums + i * 3 * a->D);
    }
    for (int64_t i = 0; i < a->B * a->L; i++) step_segments_joined(a, i / a->L, i % a->L, sums + i * segments * 3 * a->D, segments);
    free(sums);
}

/* ---- Hydra ---- */

/* 1 / sqrt(|x|^2 + eps), a long token in units in which its square is finite; one too short to be squared counts as having norm 1. */
TM_INLINE double step_norm(const int dtype, const void *x, int64_t at, int64_t D, double eps) {
    float buffer[STEP_W], largest = 1.0f;
    double sum = 0.0;
    for (int64_t c0 = 0; c0 < D; c0 += STEP_W) {
        int w = (int)tm_min(STEP_W, D - c0);
        const float *p = step_read(dtype, x, at + c0, buffer, w);
        for (int c = 0; c < w; c++) largest = fabsf(p[c]) > largest ? fabsf(p[c]) : largest;
    }
    float unit = 1.0f / largest;
    for (int64_t c0 = 0; c0 < D; c0 += STEP_W) {
        int w = (int)tm_min(STEP_W, D - c0);
        const float *p = step_read(dtype, x, at + c0, buffer, w);
        double lanes[TM_VL] = {0};
        int c = 0;
        for (; c + TM_VL <= w; c += TM_VL)
            for (int l = 0; l < TM_VL; l++) lanes[l] += (double)((p[c + l] * unit) * (p[c + l] * unit));
        for (; c < w; c++) lanes[0] += (double)((p[c] * unit) * (p[c] * unit));
        for (int l = 0; l < TM_VL; l++) sum += lanes[l];
    }
    double square = sum + eps * (double)unit * (double)unit;
    return (square == 0 ? 1.0 : 1.0 / sqrt(square)) * (double)unit;
}

TM_INLINE void step_hydra_row(const int dtype, int cosine, int mean, double eps, const void *q, const void *k, const void *v, const uint8_t *live, void *y, int64_t b, int64_t L,
                              int64_t D, double *restrict total, int64_t *number) {
    float kbuf[STEP_W], vbuf[STEP_W], qbuf[STEP_W], ybuf[STEP_W];
    for (int64_t t = 0; t < L; t++) {
        int64_t at = (b * L + t) * D;
        int seen = !live || live[b * L + t];
        double kn = cosine && seen ? step_norm(dtype, k, at, D, eps) : 1.0, qn = cosine ? step_norm(dtype, q, at, D, eps) : 1.0;
        *number += seen;
        if (mean) qn /= (double)tm_max(*number, 1);
        for (int64_t c0 = 0; c0 < D; c0 += STEP_W) {
            int w = (int)tm_min(STEP_W, D - c0);
            if (seen) {
                const float *kr = step_read(dtype, k, at + c0, kbuf, w), *vr = step_read(dtype, v, at + c0, vbuf, w);
                TM_IVDEP
                for (int c = 0; c < w; c++) total[c0 + c] += kn * (double)kr[c] * (double)vr[c];
            }
            const float *qr = step_read(dtype, q, at + c0, qbuf, w);
            float *out = tm_target(dtype, y, at + c0, ybuf);
            TM_IVDEP
            for (int c = 0; c < w; c++) out[c] = (float)(qn * (double)qr[c] * total[c0 + c]);
            step_write(dtype, y, at + c0, out, w);
        }
    }
}

typedef struct {
    int64_t dtype, cosine, mean; /* cosine: x / sqrt(|x|^2 + eps), else x itself; mean: divide by the number of keys */
    double eps;
    const void *q, *k, *v;
    const uint8_t *live;
    const double *total0;
    const int64_t *number0;
    void *y;
    double *total1;
    int64_t *number1, B, L, D;
} step_hydra_in;

/* q, k, v, y (B, L, D) contiguous; the sums (B, D) and the number of their keys (B) before and after. */
TM_EXPORT(step_hydra)(const step_hydra_in *a) {
    int cosine = (int)a->cosine, mean = (int)a->mean;
#pragma omp parallel for schedule(static) if (a->B > 1 && a->B * a->L * a->D > STEP_WORK)
    for (int64_t b = 0; b < a->B; b++) {
        double *total = a->total1 + b * a->D;
        memcpy(total, a->total0 + b * a->D, 8 * a->D);
        a->number1[b] = a->number0[b];
        if (a->dtype == TM_F32)
            step_hydra_row(TM_F32, cosine, mean, a->eps, a->q, a->k, a->v, a->live, a->y, b, a->L, a->D, total, a->number1 + b);
        else
            step_hydra_row((int)a->dtype, cosine, mean, a->eps, a->q, a->k, a->v, a->live, a->y, b, a->L, a->D, total, a->number1 + b);
    }
}

/* ---- linear attention ---- */

/* log(elu(x) + 1) */
TM_INLINE void step_log_elu(const float *restrict x, double *restrict out, int64_t n) {
    TM_IVDEP
    for (int64_t c = 0; c < n; c++) {
        double d = x[c], log = step_log(d > 0 ? d + 1.0 : 1.0);
        out[c] = d > 0 ? log + d * 0.0 : d; /* of +inf there is no logarithm */
    }
}

/* One row of a head's sums takes in its new term and is read: acc_i <- acc_i keep_i + value add_i, and sum_i ask_i acc_i. */
TM_INLINE double step_linear_row(const double *from, double *to, const double *restrict keep, const double *restrict add, const double *restrict ask, double value, int64_t e) {
    double lanes[TM_VL] = {0}, sum = 0.0;
    int64_t i = 0;
    for (; i + TM_VL <= e; i += TM_VL)
        for (int l = 0; l < TM_VL; l++) {
            double x = from[i + l] * keep[i + l] + value * add[i + l];
            to[i + l] = x, lanes[l] += ask[i + l] * x;
        }
    for (; i < e; i++) {
        double x = from[i] * keep[i] + value * add[i];
        to[i] = x, lanes[0] += ask[i] * x;
    }
    for (int l = 0; l < TM_VL; l++) sum += lanes[l];
    return sum;
}

/* keep, add and ask of one token, and the new maxima. */
TM_INLINE void step_linear_factors(const float *q, const float *k, int seen, double *restrict m, double *restrict keep, double *restrict add, double *restrict ask, int64_t e) {
    double unit = TM_FLOOR;
    step_log_elu(q, ask, e);
    if (seen) step_log_elu(k, add, e);
    TM_IVDEP
    for (int64_t i = 0; i < e; i++) {
        double top = seen && add[i] > m[i] ? add[i] : m[i];
        keep[i] = step_exp(m[i] - top), add[i] = seen ? step_exp(add[i] - top) : 0.0, m[i] = top, ask[i] += top;
    }
    for (int64_t i = 0; i < e; i++) unit = ask[i] > unit ? ask[i] : unit;
    TM_IVDEP
    for (int64_t i = 0; i < e; i++) ask[i] = step_exp(ask[i] - unit);
}

typedef struct {
    int64_t dtype;
    const void *q, *k, *v;
    const uint8_t *live;
    const double *m0, *acc0;
    void *y;
    double *m1, *acc1;
    int64_t B, L, H, e;
} step_linear_in;

static void step_linear_head(const step_linear_in *a, int64_t b, int64_t i) {
    int dtype = (int)a->dtype;
    int64_t e = a->e, head = b * a->H + i;
    double *keep = tm_scratch(sizeof(double) * 3 * e + sizeof(float) * 3 * e), *add = keep + e, *ask = add + e, *m = a->m1 + head * e, *acc = a->acc1 + head * (e + 1) * e;
    float *rows = (float *)(ask + e);
    const double *from = a->acc0 + head * (e + 1) * e;
    for (int64_t t = 0; t < a->L; t++, from = acc) {
        int64_t at = ((b * a->L + t) * a->H + i) * e;
        int seen = !a->live || a->live[b * a->L + t];
        const float *k = seen ? step_read(dtype, a->k, at, rows, (int)e) : NULL, *v = seen ? step_read(dtype, a->v, at, rows + e, (int)e) : NULL;
        step_linear_factors(step_read(dtype, a->q, at, rows + 2 * e, (int)e), k, seen, m, keep, add, ask, e);
        double den = step_linear_row(from + e * e, acc + e * e, keep, add, ask, seen ? 1.0 : 0.0, e), inverse = den == 0 ? 0.0 : 1.0 / den;
        float *out = tm_target(dtype, a->y, at, rows + 2 * e);
        for (int64_t r = 0; r < e; r++) out[r] = (float)(step_linear_row(from + r * e, acc + r * e, keep, add, ask, seen ? (double)v[r] : 0.0, e) * inverse);
        step_write(dtype, a->y, at, out, (int)e);
    }
    free(keep);
}

/* q, k, v, y (B, L, H e) contiguous; m (B, H, e) and acc (B, H, e + 1, e) before and after; the feature map is elu + 1. */
TM_EXPORT(step_linear)(const step_linear_in *a) {
    memcpy(a->m1, a->m0, 8 * a->B * a->H * a->e);
#pragma omp parallel for schedule(static) if (a->B * a->L * a->H * a->e * a->e > STEP_WORK)
    for (int64_t i = 0; i < a->B * a->H; i++) step_linear_head(a, i / a->H, i % a->H);
}
