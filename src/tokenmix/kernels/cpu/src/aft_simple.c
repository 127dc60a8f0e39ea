/* AFT-simple (AFT, Eq. 5): y_t = gate(q_t) * sum_s e^{k_s} v_s / sum_s e^{k_s}, feature by feature, over s <= t or over all s.

   Causal: a triple (m, num, den) per feature, with m the running maximum, so that every factor is at most 1 and any keys are exact; one exponential per
   key, because of the old maximum and the new key one is the maximum. Sums run in two levels: those of the current chunk of 64 tokens, in units of the
   running maximum, join the total at its end, which is kept in double and in units of the maximum before the chunk, so that no sum drifts however long.
   The gate shares the division.

   Backward: with D_t = e^{m_t} d_t the denominator, dv_t = e^{k_t} sum_{u >= t} g_u / D_u and dk_t = e^{k_t} sum_{u >= t} g_u (v_t - y_u) / D_u. The sums run
   from the last token, in units of e^{-m_t}, which only ever shrink them and by exactly 1 while the maximum stands still, so that nothing drifts:
       r_t = r_{t+1} e^{m_t - m_{t+1}} + g_t / d_t,  p likewise with g_t y_t,  dv_t = e^{k_t - m_t} r_t,  dk_t = e^{k_t - m_t} (v_t r_t - p_t),
   from the triple kept at the start of each chunk, again in two levels. Gradients of the sums after the last token start r and p (with its sign turned); what
   is left of both before the first token is the gradient of the sums before it. */
#include "tm.h"

#define SCAN_W 512 /* most features in a strip, one block of work */
#define SCAN_T 64  /* tokens in a chunk */
#define SCAN_AHEAD 8 /* tokens between asking for a row and reading it */

typedef struct {
    int dtype, gate;
    const void *q, *k, *v, *g;
    const uint8_t *mask;
    int64_t T, D, S, qb, qt, kb, kt, vb, vt, gb, gt;
} scan_in;

/* The total is (tn, td) * e^{m0}, no and dn the same in float; f = e^{m0 - m}; the chunk's sums are (nc, dc) * e^m. */
typedef struct {
    float m[SCAN_W], m0[SCAN_W], f[SCAN_W], no[SCAN_W], dn[SCAN_W], nc[SCAN_W], dc[SCAN_W];
    double tn[SCAN_W], td[SCAN_W];
} scan_sums;

/* One key joins the sums of w features. */
#define SCAN_JOIN(kk, vv)                                                                                                                                      \
    float mm = s->m[c];                                                                                                                                        \
    int up = (kk) > mm;                                                                                                                                        \
    float e = tm_exp_neg(-fabsf((kk)-mm)), old = up ? e : 1.0f, new = up ? (kk)*0.0f + 1.0f : e; /* a key of +inf gives NaN, as one of NaN does */              \
    float f = s->f[c] * old, nc = s->nc[c] * old + new * (vv), dc = s->dc[c] * old + new;                                                                      \
    float num = s->no[c] * f + nc, den = s->dn[c] * f + dc;

#define SCAN_KEEP                                                                                                                                              \
    s->f[c] = f, s->nc[c] = nc, s->dc[c] = dc;                                                                                                                 \
    s->m[c] = up ? kk : mm;

TM_INLINE void scan_fold(scan_sums *s, int w) {
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        double f = tm_exp_neg(s->m0[c] - s->m[c]);
        s->tn[c] = s->tn[c] * f + s->nc[c], s->td[c] = s->td[c] * f + s->dc[c];
        s->no[c] = (float)s->tn[c], s->dn[c] = (float)s->td[c];
        s->m0[c] = s->m[c], s->f[c] = 1.0f, s->nc[c] = s->dc[c] = 0.0f;
    }
}

TM_INLINE void scan_step(const int gate, const float *restrict k, const float *restrict v, const float *restrict q, float *restrict y, scan_sums *restrict s, int w) {
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        float kk = k[c];
        SCAN_JOIN(kk, v[c])
        SCAN_KEEP
        if (gate) {
            float e1 = tm_exp_neg(-fabsf(q[c]));
            num *= q[c] >= 0 ? 1.0f : e1;
            den *= 1.0f + e1;
        }
        y[c] = den == 0 ? 0.0f : num / den;
    }
}

/* One row. One call per row costs nothing, one copy per use would make the compiler work for minutes. */
static void scan_step_row(int gate, const float *k, const float *v, const float *q, float *y, scan_sums *s, int w) {
    if (gate)
        scan_step(1, k, v, q, y, s, w);
    else
        scan_step(0, k, v, q, y, s, w);
}

/* A token that may not be attended: it sees the sums as they are. */
TM_INLINE void scan_look(const int gate, const float *restrict q, float *restrict y, const scan_sums *restrict s, int w) {
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        float num = s->no[c] * s->f[c] + s->nc[c], den = s->dn[c] * s->f[c] + s->dc[c], sg = gate ? tm_sigmoid(q[c]) : 1.0f;
        y[c] = den == 0 ? 0.0f : sg * num / den;
    }
}

static void scan_look_row(int gate, const float *q, float *y, const scan_sums *s, int w) {
    if (gate)
        scan_look(1, q, y, s, w);
    else
        scan_look(0, q, y, s, w);
}

/* Ask for the rows of token t, where they are pieces of rows: those the processor does not foresee by itself, as it does whole ones. */
TM_INLINE void scan_ahead(const scan_in *a, int64_t b, int64_t t, int64_t c0, int w, const void *y) {
    if (w == a->D) return;
    if (y) tm_ahead(a->dtype, y, (b * a->T + t) * a->D + c0, w);
    tm_ahead(a->dtype, a->k, b * a->kb + t * a->kt + c0, w);
    tm_ahead(a->dtype, a->v, b * a->vb + t * a->vt + c0, w);
    if (a->gate) tm_ahead(a->dtype, a->q, b * a->qb + t * a->qt + c0, w);
    if (a->g) tm_ahead(a->dtype, a->g, b * a->gb + t * a->gt + c0, w);
}

static void scan_forward_strip(const scan_in *a, int64_t b, int64_t c0, int w, void *y, float *saved, scan_sums *s) {
    float kbuf[SCAN_W], vbuf[SCAN_W], qbuf[SCAN_W], ybuf[SCAN_W];
    const uint8_t *mask = a->mask ? a->mask + b * a->T : NULL;
    for (int64_t t0 = 0; t0 < a->T; t0 += SCAN_T) {
        if (saved) {
            float *p = saved + ((b * tm_ceil(a->T, SCAN_T) + t0 / SCAN_T) * 3) * a->D + c0;
            for (int c = 0; c < w; c++) p[c] = s->m[c], p[a->D + c] = s->no[c], p[2 * a->D + c] = s->dn[c];
        }
        for (int64_t t = t0; t < tm_min(a->T, t0 + SCAN_T); t++) {
            scan_ahead(a, b, tm_min(t + SCAN_AHEAD, a->T - 1), c0, w, y);
            const float *q = a->gate ? tm_read(a->dtype, a->q, b * a->qb + t * a->qt + c0, qbuf, w) : NULL;
            int64_t at = (b * a->T + t) * a->D + c0;
            float *out = tm_target(a->dtype, y, at, ybuf);
            if (mask && !mask[t])
                scan_look_row(a->gate, q, out, s, w);
            else {
                const float *k = tm_read(a->dtype, a->k, b * a->kb + t * a->kt + c0, kbuf, w), *v = tm_read(a->dtype, a->v, b * a->vb + t * a->vt + c0, vbuf, w);
                scan_step_row(a->gate, k, v, q, out, s, w);
            }
            tm_write(a->dtype, y, at, out, w);
        }
        scan_fold(s, w);
    }
}

TM_INLINE void scan_start(scan_sums *s, int w, int64_t at, const double *m, const double *num, const double *den) {
    for (int c = 0; c < w; c++) {
        s->m[c] = s->m0[c] = m ? (float)m[at + c] : TM_FLOOR;
        s->tn[c] = num ? num[at + c] : 0.0, s->td[c] = den ? den[at + c] : 0.0;
        s->no[c] = (float)s->tn[c], s->dn[c] = (float)s->td[c];
        s->f[c] = 1.0f, s->nc[c] = s->dc[c] = 0.0f;
    }
}

/* Features in a strip: whole rows, which memory delivers fastest, cut into pieces where the threads would not share the rows evenly. Each feature is summed
   alone, so the result does not depend on it. */
static int scan_width(int64_t B, int64_t D, int threads) {
    int64_t pieces = tm_max(tm_ceil(D, SCAN_W), 1);
    while (pieces < tm_ceil(D, 16) && B * pieces < 4 * threads && B * pieces % threads) pieces++;
    return (int)tm_ceil(tm_ceil(D, pieces), 16) * 16;
}

/* saved (B, chunks, 3, D) or NULL; the state before and after, m, num, den (B, D) each, or NULL. */
TM_EXPORT(scan_forward)(int dtype, int gate, const void *q, const void *k, const void *v, const uint8_t *mask, void *y, float *saved, const double *m0,
                        const double *num0, const double *den0, double *m1, double *num1, double *den1, int64_t B, int64_t T, int64_t D, int64_t qb, int64_t qt,
                        int64_t kb, int64_t kt, int64_t vb, int64_t vt, int threads) {
    scan_in a = {dtype, gate, q, k, v, NULL, mask, T, D, T, qb, qt, kb, kt, vb, vt, 0, 0};
    int w = scan_width(B, D, threads);
    int64_t strips = tm_ceil(D, w);
#pragma omp parallel for schedule(static) num_threads(threads) if (B * strips > 1 && threads > 1)
    for (int64_t i = 0; i < B * strips; i++) {
        int64_t b = i / strips, c0 = i % strips * w, at = b * D + c0;
        int n = (int)tm_min(w, D - c0);
        scan_sums s __attribute__((aligned(64)));
        scan_start(&s, n, at, m0, num0, den0);
        scan_forward_strip(&a, b, c0, n, y, saved, &s);
        if (m1)
            for (int c = 0; c < n; c++) m1[at + c] = s.m[c], num1[at + c] = s.tn[c], den1[at + c] = s.td[c];
    }
}

typedef struct {
    float e[SCAN_T * SCAN_W], n[SCAN_T * SCAN_W], d[SCAN_T * SCAN_W];
} scan_chunk;

/* Of one token: e^{-|k - m|}, with its sign bit set where the maximum rose; numerator and denominator. */
static void scan_replay(const float *restrict k, const float *restrict v, scan_sums *restrict s, float *restrict e_, float *restrict n_, float *restrict d_, int w) {
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        float kk = k[c];
        SCAN_JOIN(kk, v[c])
        SCAN_KEEP
        e_[c] = up ? -fabsf(e) : fabsf(e);
        n_[c] = num;
        d_[c] = den;
    }
}

/* The sums over later tokens: (tr, tp) and in float (ro, po), of which f remains; (rc, pc) of this chunk; shrink: e^{m_t - m_{t+1}} for the token to come. */
typedef struct {
    double tr[SCAN_W], tp[SCAN_W];
    float ro[SCAN_W], po[SCAN_W], f[SCAN_W], rc[SCAN_W], pc[SCAN_W], shrink[SCAN_W];
} scan_rest;

TM_INLINE void scan_rest_fold(scan_rest *r, int w) {
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        r->tr[c] = r->tr[c] * r->f[c] + r->rc[c], r->tp[c] = r->tp[c] * r->f[c] + r->pc[c];
        r->ro[c] = (float)r->tr[c], r->po[c] = (float)r->tp[c];
        r->f[c] = 1.0f, r->rc[c] = r->pc[c] = 0.0f;
    }
}

/* live: this token is a key. One division serves 1 / den and the gate, sigmoid(q) = 1 / (1 + e1) or e1 / (1 + e1). */
TM_INLINE void scan_back(const int gate, const int live, const float *restrict v, const float *restrict g, const float *restrict q, const float *restrict e_,
                         const float *restrict n_, const float *restrict d_, float *restrict dk, float *restrict dv, float *restrict dq, scan_rest *restrict r, int w) {
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        float gg = g[c], den = d_[c], shrink = r->shrink[c], e = fabsf(e_[c]);
        int up = signbit(e_[c]) != 0;
        float e1 = gate ? tm_exp_neg(-fabsf(q[c])) : 0.0f, both = den == 0 ? 0.0f : 1.0f / (den * (1.0f + e1)), yy = n_[c] * (both * (1.0f + e1));
        int none = gg == 0; /* a row that nothing is asked of gives nothing, not even NaN */
        if (gate) {
            float sg = both * den;
            dq[c] = none ? 0.0f : gg * yy * sg * (e1 * sg);
            both *= q[c] >= 0 ? 1.0f : e1;
        }
        gg = none ? 0.0f : gg * both, yy = none ? 0.0f : yy;
        float f = r->f[c] * shrink, rc = r->rc[c] * shrink + gg, pc = r->pc[c] * shrink + gg * yy;
        r->f[c] = f, r->rc[c] = rc, r->pc[c] = pc;
        if (live) {
            float sum = r->ro[c] * f + rc, a = up ? 1.0f : e;
            r->shrink[c] = up ? e : 1.0f;
            dv[c] = a * sum;
            dk[c] = a * (v[c] * sum - (r->po[c] * f + pc));
        } else {
            r->shrink[c] = 1.0f;
            dv[c] = dk[c] = 0.0f;
        }
    }
}

static void scan_back_row(int gate, int live, const float *v, const float *g, const float *q, const float *e_, const float *n_, const float *d_, float *dk, float *dv,
                          float *dq, scan_rest *r, int w) {
    if (!live && gate)
        scan_back(1, 0, v, g, q, e_, n_, d_, dk, dv, dq, r, w);
    else if (!live)
        scan_back(0, 0, v, g, q, e_, n_, d_, dk, dv, dq, r, w);
    else if (gate)
        scan_back(1, 1, v, g, q, e_, n_, d_, dk, dv, dq, r, w);
    else
        scan_back(0, 1, v, g, q, e_, n_, d_, dk, dv, dq, r, w);
}

/* The same for the gradients of token t. */
TM_INLINE void scan_ahead_grads(const scan_in *a, int64_t b, int64_t t, int64_t c0, int w, const void *dq, const void *dk, const void *dv) {
    int64_t at = (b * a->T + t) * a->D + c0;
    if (w == a->D) return;
    tm_ahead(a->dtype, dk, at, w), tm_ahead(a->dtype, dv, at, w);
    if (a->gate) tm_ahead(a->dtype, dq, at, w);
}

/* Start the sums over later tokens from the gradients of num and den (B, D) after the last one, or from nothing. */
TM_INLINE void scan_rest_start(scan_rest *r, int w, int64_t at, const double *gn, const double *gz) {
    memset(r, 0, sizeof *r);
    for (int c = 0; c < w; c++) {
        r->f[c] = r->shrink[c] = 1.0f;
        r->tr[c] = gn ? gn[at + c] : 0.0, r->tp[c] = gz ? -gz[at + c] : 0.0;
        r->ro[c] = (float)r->tr[c], r->po[c] = (float)r->tp[c];
    }
}

/* The gradients of num and den (B, D) before the first token; NULL: they are not asked for. */
TM_INLINE void scan_rest_end(const scan_rest *r, int w, int64_t at, double *dn, double *dz) {
    if (!dn) return;
    for (int c = 0; c < w; c++) dn[at + c] = r->tr[c] * r->shrink[c], dz[at + c] = -r->tp[c] * r->shrink[c];
}

/* gn, gz: the gradients of the sums after the last token, or NULL; dn, dz: of those before the first, or NULL. */
static void scan_backward_strip(const scan_in *a, int64_t b, int64_t c0, int w, const float *saved, const double *gn, const double *gz, void *dq, void *dk,
                                void *dv, double *dn, double *dz) {
    float kbuf[SCAN_W], vbuf[SCAN_W], qbuf[SCAN_W], gbuf[SCAN_W], o1[SCAN_W], o2[SCAN_W], o3[SCAN_W];
    scan_chunk *x = tm_scratch(sizeof(scan_chunk));
    scan_sums s __attribute__((aligned(64)));
    scan_rest r __attribute__((aligned(64)));
    scan_rest_start(&r, w, b * a->D + c0, gn, gz);
    const uint8_t *mask = a->mask ? a->mask + b * a->T : NULL;
    int64_t chunks = tm_ceil(a->T, SCAN_T);
    for (int64_t i = chunks - 1; i >= 0; i--) {
        const float *p = saved + ((b * chunks + i) * 3) * a->D + c0;
        for (int c = 0; c < w; c++) s.m[c] = p[c], s.no[c] = p[a->D + c], s.dn[c] = p[2 * a->D + c], s.f[c] = 1.0f, s.nc[c] = s.dc[c] = 0.0f;
        int64_t t0 = i * SCAN_T, t1 = tm_min(a->T, t0 + SCAN_T);
        for (int64_t t = t0; t < t1; t++) {
            scan_ahead(a, b, tm_min(t + SCAN_AHEAD, t1 - 1), c0, w, NULL);
            float *e_ = x->e + (t - t0) * SCAN_W, *n_ = x->n + (t - t0) * SCAN_W, *d_ = x->d + (t - t0) * SCAN_W;
            if (mask && !mask[t]) {
                for (int c = 0; c < w; c++) n_[c] = s.no[c] * s.f[c] + s.nc[c], d_[c] = s.dn[c] * s.f[c] + s.dc[c];
                continue;
            }
            const float *k = tm_read(a->dtype, a->k, b * a->kb + t * a->kt + c0, kbuf, w), *v = tm_read(a->dtype, a->v, b * a->vb + t * a->vt + c0, vbuf, w);
            scan_replay(k, v, &s, e_, n_, d_, w);
        }
        for (int64_t t = t1 - 1; t >= t0; t--) {
            int64_t at = (b * a->T + t) * a->D + c0, off = (t - t0) * SCAN_W;
            int live = !mask || mask[t];
            scan_ahead_grads(a, b, tm_max(t - SCAN_AHEAD, t0), c0, w, dq, dk, dv);
            const float *v = live ? tm_read(a->dtype, a->v, b * a->vb + t * a->vt + c0, vbuf, w) : NULL;
            const float *g = tm_read(a->dtype, a->g, b * a->gb + t * a->gt + c0, gbuf, w);
            const float *q = a->gate ? tm_read(a->dtype, a->q, b * a->qb + t * a->qt + c0, qbuf, w) : NULL;
            float *pk = tm_target(a->dtype, dk, at, o1), *pv = tm_target(a->dtype, dv, at, o2), *pq = a->gate ? tm_target(a->dtype, dq, at, o3) : NULL;
            scan_back_row(a->gate, live, v, g, q, x->e + off, x->n + off, x->d + off, pk, pv, pq, &r, w);
            tm_write(a->dtype, dk, at, pk, w);
            tm_write(a->dtype, dv, at, pv, w);
            if (a->gate) tm_write(a->dtype, dq, at, pq, w);
        }
        scan_rest_fold(&r, w);
    }
    scan_rest_end(&r, w, b * a->D + c0, dn, dz);
    free(x);
}

/* dq, dk, dv contiguous (B, T, D). gn, gz, dn, dz (B, D), or NULL: see scan_backward_strip. */
TM_EXPORT(scan_backward)(int dtype, int gate, const void *q, const void *k, const void *v, const uint8_t *mask, const void *g, const float *saved,
                         const double *gn, const double *gz, void *dq, void *dk, void *dv, double *dn, double *dz, int64_t B, int64_t T, int64_t D, int64_t qb,
                         int64_t qt, int64_t kb, int64_t kt, int64_t vb, int64_t vt, int64_t gb, int64_t gt, int threads) {
    scan_in a = {dtype, gate, q, k, v, g, mask, T, D, T, qb, qt, kb, kt, vb, vt, gb, gt};
    int w = scan_width(B, D, threads);
    int64_t strips = tm_ceil(D, w);
#pragma omp parallel for schedule(static) num_threads(threads) if (B * strips > 1 && threads > 1)
    for (int64_t i = 0; i < B * strips; i++) {
        int64_t b = i / strips, c0 = i % strips * w;
        int n = (int)tm_min(w, D - c0);
        scan_backward_strip(&a, b, c0, n, saved, gn, gz, dq, dk, dv, dn, dz);
    }
}

TM_INLINE void scan_ahead_keys(const scan_in *a, int64_t b, int64_t s, int64_t c0, int w) {
    if (w == a->D) return;
    tm_ahead(a->dtype, a->k, b * a->kb + s * a->kt + c0, w), tm_ahead(a->dtype, a->v, b * a->vb + s * a->vt + c0, w);
}

/* Over all keys: sums of 64 keys under their own maximum join the total, so each key costs one exponential. */
static void scan_all_sums(const scan_in *a, int64_t b, int64_t c0, int w, scan_sums *s) {
    float kbuf[SCAN_W], vbuf[SCAN_W];
    float *restrict m = s->m, *restrict nc = s->nc, *restrict dc = s->dc;
    const uint8_t *mask = a->mask ? a->mask + b * a->S : NULL;
    for (int64_t t0 = 0; t0 < a->S; t0 += SCAN_T) {
        int64_t t1 = tm_min(a->S, t0 + SCAN_T);
        for (int64_t t = t0; t < t1; t++) {
            if (mask && !mask[t]) continue;
            scan_ahead_keys(a, b, tm_min(t + SCAN_AHEAD, a->S - 1), c0, w);
            const float *restrict k = tm_read(a->dtype, a->k, b * a->kb + t * a->kt + c0, kbuf, w);
            TM_IVDEP
            for (int c = 0; c < w; c++) m[c] = k[c] > m[c] ? k[c] : m[c];
        }
        for (int64_t t = t0; t < t1; t++) {
            if (mask && !mask[t]) continue;
            const float *restrict k = tm_read(a->dtype, a->k, b * a->kb + t * a->kt + c0, kbuf, w);
            const float *restrict v = tm_read(a->dtype, a->v, b * a->vb + t * a->vt + c0, vbuf, w);
            TM_IVDEP
            for (int c = 0; c < w; c++) {
                float e = tm_exp_neg(k[c] - m[c]);
                nc[c] += e * v[c], dc[c] += e;
            }
        }
        scan_fold(s, w);
    }
}

static void scan_all_strip(const scan_in *a, int64_t b, int64_t c0, int w, void *y, float *saved) {
    float qbuf[SCAN_W], ybuf[SCAN_W], mean[SCAN_W];
    scan_sums s __attribute__((aligned(64)));
    scan_start(&s, w, 0, NULL, NULL, NULL);
    scan_all_sums(a, b, c0, w, &s);
    for (int c = 0; c < w; c++) mean[c] = s.dn[c] == 0 ? 0.0f : s.no[c] / s.dn[c];
    if (saved)
        for (int c = 0; c < w; c++) {
            float *p = saved + b * 3 * a->D + c0 + c;
            p[0] = s.m[c], p[a->D] = mean[c], p[2 * a->D] = s.dn[c] == 0 ? 0.0f : 1.0f / s.dn[c];
        }
    for (int64_t t = 0; t < a->T; t++) {
        int64_t at = (b * a->T + t) * a->D + c0;
        float *out = tm_target(a->dtype, y, at, ybuf);
        if (a->gate) {
            if (w < a->D) tm_ahead(a->dtype, a->q, b * a->qb + tm_min(t + SCAN_AHEAD, a->T - 1) * a->qt + c0, w);
            const float *q = tm_read(a->dtype, a->q, b * a->qb + t * a->qt + c0, qbuf, w);
            TM_IVDEP
            for (int c = 0; c < w; c++) out[c] = tm_sigmoid(q[c]) * mean[c];
        } else
            for (int c = 0; c < w; c++) out[c] = mean[c];
        tm_write(a->dtype, y, at, out, w);
    }
}

/* q, y (B, T, D); k, v (B, S, D); saved (B, 3, D): maximum, mean value, 1 / denominator. */
TM_EXPORT(scan_all_forward)(int dtype, int gate, const void *q, const void *k, const void *v, const uint8_t *mask, void *y, float *saved, int64_t B, int64_t T,
                            int64_t S, int64_t D, int64_t qb, int64_t qt, int64_t kb, int64_t kt, int64_t vb, int64_t vt, int threads) {
    scan_in a = {dtype, gate, q, k, v, NULL, mask, T, D, S, qb, qt, kb, kt, vb, vt, 0, 0};
    int w = scan_width(B, D, threads);
    int64_t strips = tm_ceil(D, w);
#pragma omp parallel for schedule(static) num_threads(threads) if (B * strips > 1 && threads > 1)
    for (int64_t i = 0; i < B * strips; i++) {
        int64_t b = i / strips, c0 = i % strips * w;
        int n = (int)tm_min(w, D - c0);
        scan_all_strip(&a, b, c0, n, y, saved);
    }
}

/* dv_s = a_s G and dk_s = a_s (v_s - mean) G with G = sum_t g_t gate(q_t) and a_s = e^{k_s} / den: every query sees the same mean. */
static void scan_all_back_strip(const scan_in *a, int64_t b, int64_t c0, int w, const float *saved, void *dq, void *dk, void *dv) {
    float kbuf[SCAN_W], vbuf[SCAN_W], qbuf[SCAN_W], gbuf[SCAN_W], o1[SCAN_W], o2[SCAN_W], total[SCAN_W], part[SCAN_W], mean[SCAN_W];
    const float *m = saved + b * 3 * a->D + c0, *inv = m + 2 * a->D;
    const uint8_t *mask = a->mask ? a->mask + b * a->S : NULL;
    memset(total, 0, sizeof total);
    memcpy(mean, m + a->D, sizeof(float) * w);
    for (int64_t t0 = 0; t0 < a->T; t0 += SCAN_T) {
        memset(part, 0, sizeof part);
        for (int64_t t = t0; t < tm_min(a->T, t0 + SCAN_T); t++) {
            int64_t at = (b * a->T + t) * a->D + c0;
            const float *g = tm_read(a->dtype, a->g, b * a->gb + t * a->gt + c0, gbuf, w);
            if (a->gate) {
                const float *q = tm_read(a->dtype, a->q, b * a->qb + t * a->qt + c0, qbuf, w);
                float *out = tm_target(a->dtype, dq, at, o1);
                TM_IVDEP
                for (int c = 0; c < w; c++) {
                    float sg = tm_sigmoid(q[c]), gs = g[c] == 0 ? 0.0f : g[c] * sg;
                    out[c] = gs == 0 ? 0.0f : gs * (1.0f - sg) * mean[c];
                    part[c] += gs;
                }
                tm_write(a->dtype, dq, at, out, w);
            } else
                for (int c = 0; c < w; c++) part[c] += g[c];
        }
        for (int c = 0; c < w; c++) total[c] += part[c];
    }
    for (int c = 0; c < w; c++) { /* where nothing is asked, nothing is given, not even NaN */
        mean[c] = total[c] == 0 ? 0.0f : mean[c];
        total[c] = total[c] == 0 ? 0.0f : inv[c] * total[c];
    }
    for (int64_t t = 0; t < a->S; t++) {
        int64_t at = (b * a->S + t) * a->D + c0;
        scan_ahead_keys(a, b, tm_min(t + SCAN_AHEAD, a->S - 1), c0, w);
        float *pk = tm_target(a->dtype, dk, at, o1), *pv = tm_target(a->dtype, dv, at, o2);
        if (mask && !mask[t])
            for (int c = 0; c < w; c++) pk[c] = pv[c] = 0.0f;
        else {
            const float *k = tm_read(a->dtype, a->k, b * a->kb + t * a->kt + c0, kbuf, w), *v = tm_read(a->dtype, a->v, b * a->vb + t * a->vt + c0, vbuf, w);
            TM_IVDEP
            for (int c = 0; c < w; c++) {
                float e = tm_exp_neg(k[c] - m[c]) * total[c];
                pv[c] = e;
                pk[c] = e * (v[c] - mean[c]);
            }
        }
        tm_write(a->dtype, dk, at, pk, w);
        tm_write(a->dtype, dv, at, pv, w);
    }
}

TM_EXPORT(scan_all_backward)(int dtype, int gate, const void *q, const void *k, const void *v, const uint8_t *mask, const void *g, const float *saved, void *dq,
                             void *dk, void *dv, int64_t B, int64_t T, int64_t S, int64_t D, int64_t qb, int64_t qt, int64_t kb, int64_t kt, int64_t vb, int64_t vt,
                             int64_t gb, int64_t gt, int threads) {
    scan_in a = {dtype, gate, q, k, v, g, mask, T, D, S, qb, qt, kb, kt, vb, vt, gb, gt};
    int w = scan_width(B, D, threads);
    int64_t strips = tm_ceil(D, w);
#pragma omp parallel for schedule(static) num_threads(threads) if (B * strips > 1 && threads > 1)
    for (int64_t i = 0; i < B * strips; i++) {
        int64_t b = i / strips, c0 = i % strips * w;
        int n = (int)tm_min(w, D - c0);
        scan_all_back_strip(&a, b, c0, n, saved, dq, dk, dv);
    }
}
