/* AFT-forget: y_t = gate(q_t) * norm(n_t / z_t) with n_t = e^{d_t} n_{t-1} + e^{k_t} v_t, z_t = e^{d_t} z_{t-1} + e^{k_t}, feature by feature: the scan of
   aft_simple.c with a log-decay d per token and feature. norm divides the features of a head by the root of their mean square; it and the gate are optional.

   Sums are kept in units of e^u, and u decays with them: u is the key that set the unit and the decays since, with what rounding takes from that in a second
   float. Then a sum changes only where a key joins it, so that a half-life of a million tokens costs no digits; with one exponential per key, as u is compared
   with the key: where the key is above, it becomes the unit.

   Backward: with r_t and p_t the sums over later tokens as in aft_simple.c, which shrink by the factor o_t by which token t's old sums did,
       dv_t = e^{k_t - u_t} r_t,  dk_t = e^{k_t - u_t} (v_t r_t - p_t),  dd_t = o_t (n_{t-1} r_t - z_{t-1} p_t), n and z in their units;
   dd is not a difference of running sums, which would lose digits as they grow. The sums after the last token are n and z in their unit, so gradients of these
   start r and p (with its sign turned); what is left of both before the first token is the gradient of the sums before it. Before them, with x = n / z, u = x / rms and h = gate(q) g in a head:
       dq = gate'(q) g u,  dx = (h - u mean(h u)) / rms. */
#include "tm.h"

#define FADE_LEAST TM_FLOOR /* a unit is no less, so that it never is an infinity that looks like a key */

/* e: features of a head, whose ratios are normalised together; 0: no norm. q: NULL for no gate. */
typedef struct {
    int dtype, e;
    double eps;
    const void *q, *k, *v, *d, *g;
    const uint8_t *mask;
    int64_t T, D, qb, qt, kb, kt, vb, vt, db, dt, gb, gt;
} fade_in;

/* The unit is u + r, r what rounding took from u. The total is (no, dn), in double (tn, td), of which f remains; (nc, dc) is this chunk's. */
typedef struct {
    float u[SCAN_W], r[SCAN_W], f[SCAN_W], no[SCAN_W], dn[SCAN_W], nc[SCAN_W], dc[SCAN_W];
    double tn[SCAN_W], td[SCAN_W];
} fade_sums;

/* The sums of w features decay by dd, then one key, kk + bias, joins them. A decay of -inf forgets all before it, whatever the key; of +inf it makes rr NaN, as
   one of NaN does. */
#define FADE_JOIN_WITH(kk, vv, dd, above_it, whole)                                                                                                            \
    float more = (dd) + s->r[c], uu = s->u[c] + more, rr = more - (uu - s->u[c]);                                                                              \
    float kept = uu < FADE_LEAST ? 0.0f : 1.0f;                                                                                                                \
    rr = uu < FADE_LEAST ? 0.0f : rr, uu = uu < FADE_LEAST ? FADE_LEAST : uu;                                                                                  \
    float above = above_it;                                                                                                                                    \
    int up = above > 0;                                                                                                                                        \
    float e = tm_exp_neg(-fabsf(above)), old = up ? e : kept, new = up ? (whole)*0.0f + 1.0f : e;                                                              \
    float f = s->f[c] * old, nb = s->nc[c] * old, db = s->dc[c] * old, nc = nb + new * (vv), dc = db + new;

#define FADE_KEEP_WITH(bias)                                                                                                                                   \
    s->f[c] = f, s->nc[c] = nc, s->dc[c] = dc;                                                                                                                 \
    s->u[c] = up ? kk : uu, s->r[c] = up ? bias : rr;

#define FADE_JOIN(kk, vv, dd) FADE_JOIN_WITH(kk, vv, dd, ((kk)-uu) - rr, kk)
#define FADE_KEEP FADE_KEEP_WITH(0.0f)

TM_INLINE void fade_fold(fade_sums *s, int w) {
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        s->tn[c] = s->tn[c] * s->f[c] + s->nc[c], s->td[c] = s->td[c] * s->f[c] + s->dc[c];
        s->no[c] = (float)s->tn[c], s->dn[c] = (float)s->td[c];
        s->nc[c] = s->dc[c] = 0.0f, s->f[c] = 1.0f;
    }
}

/* What becomes of the gate: there is none, the division of the sums applies it, or it waits in ``open`` for the norm. */
enum { FADE_NO_GATE, FADE_GATE, FADE_GATE_LATER };

TM_INLINE void fade_step(const int gate, const float *restrict k, const float *restrict v, const float *restrict d, const float *restrict q, float *restrict y,
                         float *restrict open, fade_sums *restrict s, int w) {
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        float kk = k[c];
        FADE_JOIN(kk, v[c], d[c])
        FADE_KEEP
        float num = s->no[c] * f + nc, den = s->dn[c] * f + dc;
        if (gate) {
            float e1 = tm_exp_neg(-fabsf(q[c])), part = q[c] >= 0 ? 1.0f : e1;
            if (gate == FADE_GATE)
                num *= part, den *= 1.0f + e1;
            else
                open[c] = part / (1.0f + e1);
        }
        y[c] = den == 0 ? 0.0f : num / den;
    }
}

static void fade_step_row(int gate, const float *k, const float *v, const float *d, const float *q, float *y, float *open, fade_sums *s, int w) {
    if (gate == FADE_GATE_LATER)
        fade_step(FADE_GATE_LATER, k, v, d, q, y, open, s, w);
    else if (gate)
        fade_step(FADE_GATE, k, v, d, q, y, open, s, w);
    else
        fade_step(FADE_NO_GATE, k, v, d, q, y, open, s, w);
}

/* A token that may not be attended: it sees the sums as they are. */
static void fade_look(int gate, const float *restrict q, float *restrict y, float *restrict open, const fade_sums *restrict s, int w) {
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        float num = s->no[c] * s->f[c] + s->nc[c], den = s->dn[c] * s->f[c] + s->dc[c];
        y[c] = den == 0 ? 0.0f : num / den;
    }
    if (!gate) return;
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        float g = tm_sigmoid(q[c]);
        y[c] *= gate == FADE_GATE ? g : 1.0f;
        open[c] = g;
    }
}

/* 1 / rms of the ratios of each head; NaN where one of them is not finite, as that of the others would be 0. */
TM_INLINE void fade_scales(const fade_in *a, const float *y, float *scales, int w) {
    double squares[SCAN_W];
    int heads = w / a->e;
    for (int h = 0; h < heads; h++) squares[h] = tm_dot(y + h * a->e, y + h * a->e, a->e) / (double)a->e;
    TM_IVDEP
    for (int h = 0; h < heads; h++) scales[h] = squares[h] < INFINITY ? (float)(1.0 / sqrt(squares[h] + a->eps)) : NAN;
}

/* The ratios of a row, normalised and gated in place. */
static void fade_normalise(const fade_in *a, const float *restrict open, float *restrict y, int w) {
    float scales[SCAN_W];
    fade_scales(a, y, scales, w);
    for (int h = 0, c0 = 0; c0 < w; h++, c0 += a->e) {
        TM_IVDEP
        for (int c = c0; c < c0 + a->e; c++) y[c] *= scales[h];
    }
    if (!a->q) return;
    TM_IVDEP
    for (int c = 0; c < w; c++) y[c] *= open[c];
}

/* Ask for the rows of token t, where they are pieces of rows. */
TM_INLINE void fade_ahead(const fade_in *a, int64_t b, int64_t t, int64_t c0, int w) {
    if (w == a->D) return;
    tm_ahead(a->dtype, a->k, b * a->kb + t * a->kt + c0, w);
    tm_ahead(a->dtype, a->v, b * a->vb + t * a->vt + c0, w);
    tm_ahead(a->dtype, a->d, b * a->db + t * a->dt + c0, w);
    if (a->q) tm_ahead(a->dtype, a->q, b * a->qb + t * a->qt + c0, w);
    if (a->g) tm_ahead(a->dtype, a->g, b * a->gb + t * a->gt + c0, w);
}

static void fade_forward_strip(const fade_in *a, int64_t b, int64_t c0, int w, void *y, float *saved, fade_sums *s) {
    float kbuf[SCAN_W], vbuf[SCAN_W], dbuf[SCAN_W], qbuf[SCAN_W], ybuf[SCAN_W], open[SCAN_W];
    const uint8_t *mask = a->mask ? a->mask + b * a->T : NULL;
    int gate = a->q == NULL ? FADE_NO_GATE : a->e ? FADE_GATE_LATER : FADE_GATE;
    for (int64_t t0 = 0; t0 < a->T; t0 += SCAN_T) {
        if (saved) {
            float *p = saved + ((b * tm_ceil(a->T, SCAN_T) + t0 / SCAN_T) * 4) * a->D + c0;
            for (int c = 0; c < w; c++) p[c] = s->u[c], p[a->D + c] = s->r[c], p[2 * a->D + c] = s->no[c], p[3 * a->D + c] = s->dn[c];
        }
        for (int64_t t = t0; t < tm_min(a->T, t0 + SCAN_T); t++) {
            fade_ahead(a, b, tm_min(t + SCAN_AHEAD, a->T - 1), c0, w);
            int64_t at = (b * a->T + t) * a->D + c0;
            const float *q = a->q ? tm_read(a->dtype, a->q, b * a->qb + t * a->qt + c0, qbuf, w) : NULL;
            float *out = tm_target(a->dtype, y, at, ybuf);
            if (mask && !mask[t])
                fade_look(gate, q, out, open, s, w);
            else {
                const float *k = tm_read(a->dtype, a->k, b * a->kb + t * a->kt + c0, kbuf, w), *v = tm_read(a->dtype, a->v, b * a->vb + t * a->vt + c0, vbuf, w);
                fade_step_row(gate, k, v, tm_read(a->dtype, a->d, b * a->db + t * a->dt + c0, dbuf, w), q, out, open, s, w);
            }
            if (a->e) fade_normalise(a, open, out, w);
            tm_write(a->dtype, y, at, out, w);
        }
        fade_fold(s, w);
    }
}

TM_INLINE void fade_start(fade_sums *s, int w, int64_t at, const double *m, const double *num, const double *den) {
    for (int c = 0; c < w; c++) {
        double unit = m ? m[at + c] : TM_FLOOR;
        s->u[c] = (float)unit, s->r[c] = (float)(unit - (double)s->u[c]);
        s->tn[c] = num ? num[at + c] : 0.0, s->td[c] = den ? den[at + c] : 0.0;
        s->no[c] = (float)s->tn[c], s->dn[c] = (float)s->td[c];
        s->f[c] = 1.0f, s->nc[c] = s->dc[c] = 0.0f;
    }
}

/* Features in a strip: as in aft_simple.c, but whole heads. A feature is at the same place of a vector however many threads there are, or else the width does
   not depend on them, so that the results do not. */
static int fade_width(int64_t B, int64_t D, int e, int threads) {
    int w = scan_width(B, D, threads), unit = e;
    while (unit && unit % 16) unit += e;
    if (e == 0) return w;
    return (int)(unit > SCAN_W ? tm_min(D, SCAN_W - SCAN_W % e) : tm_max(unit, w - w % unit));
}

/* saved (B, chunks, 4, D) or NULL; the state before and after, m, num, den (B, D) each, or NULL. heads: 0 for no norm; a head has at most SCAN_W features. */
TM_EXPORT(fade_forward)(int dtype, int heads, double eps, const void *q, const void *k, const void *v, const void *d, const uint8_t *mask, void *y, float *saved,
                        const double *m0, const double *num0, const double *den0, double *m1, double *num1, double *den1, int64_t B, int64_t T, int64_t D,
                        int64_t qb, int64_t qt, int64_t kb, int64_t kt, int64_t vb, int64_t vt, int64_t db, int64_t dt, int threads) {
    int e = heads ? (int)(D / heads) : 0, w = fade_width(B, D, e, threads);
    fade_in a = {dtype, e, eps, q, k, v, d, NULL, mask, T, D, qb, qt, kb, kt, vb, vt, db, dt, 0, 0};
    int64_t strips = tm_ceil(D, w);
#pragma omp parallel for schedule(static) num_threads(threads) if (B * strips > 1 && threads > 1)
    for (int64_t i = 0; i < B * strips; i++) {
        int64_t b = i / strips, c0 = i % strips * w, at = b * D + c0;
        int n = (int)tm_min(w, D - c0);
        fade_sums s __attribute__((aligned(64)));
        fade_start(&s, n, at, m0, num0, den0);
        fade_forward_strip(&a, b, c0, n, y, saved, &s);
        if (m1)
            for (int c = 0; c < n; c++) m1[at + c] = (double)s.u[c] + s.r[c], num1[at + c] = s.tn[c], den1[at + c] = s.td[c];
    }
}

/* Of one token: e, with its sign bit set where its key became the unit; the sums before its key, decayed, and NaN where a key of +inf joins them. */
static void fade_replay(const float *restrict k, const float *restrict v, const float *restrict d, fade_sums *restrict s, float *restrict e_, float *restrict n_,
                        float *restrict d_, int w) {
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        float kk = k[c];
        FADE_JOIN(kk, v[c], d[c])
        FADE_KEEP
        e_[c] = up ? -fabsf(e) : fabsf(e);
        n_[c] = s->no[c] * f + nb + (new - new);
        d_[c] = s->dn[c] * f + db + (new - new);
    }
}

/* Of one feature of a row, from its gradient g: 1 / denominator, the ratio, and, with a gate, gr = gate(q) g and dq = gate'(q) g; without one gr = g. A row that
   nothing is asked of gives nothing, not even NaN. live: its token is a key. */
typedef struct {
    float part, yy, gr, dq;
} fade_ratio;

TM_INLINE fade_ratio fade_ratio_of(const int gate, const int live, float v, float q, float g, float e, float n, float d) {
    float new = live ? (signbit(e) ? 1.0f : e) : 0.0f, den = d + new, num = live ? n + new * v : n;
    fade_ratio o;
    if (gate) {
        int none = g == 0;
        float some = den == 0 ? 1.0f : den, e1 = tm_exp_neg(none ? 0.0f : -fabsf(q)), both = 1.0f / (some * (1.0f + e1)), open = some * both;
        o.part = den == 0 ? 0.0f : both * (1.0f + e1);
        o.gr = none ? 0.0f : g * (q >= 0 ? open : e1 * open);
        o.dq = none ? 0.0f : g * open * (e1 * open);
    } else
        o.part = den == 0 ? 0.0f : 1.0f / den, o.gr = g, o.dq = 0.0f;
    o.yy = num * o.part;
    return o;
}

/* Finish the gradients of a row, gr of its ratios and dq, where they are normalised. A head that nothing is asked of gives nothing. */
static void fade_back_norm(const fade_in *a, const float *restrict g, const float *restrict yy, float *restrict gr, float *restrict dq, int w) {
    float scales[SCAN_W];
    fade_scales(a, yy, scales, w);
    for (int h = 0, c0 = 0; c0 < w; h++, c0 += a->e) {
        int asked = 0;
        for (int c = c0; c < c0 + a->e && !asked; c++) asked = g[c] != 0;
        float scale = scales[h];
        float along = asked ? (float)(tm_dot(gr + c0, yy + c0, a->e) / (double)a->e * (double)scale * (double)scale) : 0.0f;
        TM_IVDEP
        for (int c = c0; c < c0 + a->e; c++) {
            gr[c] = asked ? (gr[c] - yy[c] * along) * scale : 0.0f;
            if (dq) dq[c] = asked ? dq[c] * (yy[c] * scale) : 0.0f;
        }
    }
}

/* Of feature c, from the gradient gr of its ratio to those of key, value and decay. */
TM_INLINE void fade_back(const int live, int c, float v, float gr, float e0, float n, float d, float part, float yy, float *restrict dk, float *restrict dv,
                         float *restrict dd, scan_rest *restrict r) {
    float shrink = r->shrink[c], e = fabsf(e0);
    int up = signbit(e0) != 0, none = gr == 0; /* a row that nothing is asked of gives nothing, not even NaN */
    float new = up ? 1.0f : e, gg = none ? 0.0f : gr * part, past_y = none ? 0.0f : gg * yy;
    float f = r->f[c] * shrink, rc = r->rc[c] * shrink + gg, pc = r->pc[c] * shrink + past_y;
    r->f[c] = f, r->rc[c] = rc, r->pc[c] = pc;
    if (live) {
        float rest = r->ro[c] * f + rc, past = r->po[c] * f + pc;
        int idle = rest == 0 && past == 0; /* no row asks for this key or for one before it */
        r->shrink[c] = up ? e : d == 0 ? 0.0f : 1.0f; /* 0: no sums before, or forgotten */
        dv[c] = idle ? 0.0f : new * rest;
        dk[c] = idle ? 0.0f : new * (v * rest - past);
        dd[c] = idle ? 0.0f : n * rest - d * past;
    } else {
        r->shrink[c] = 1.0f;
        dv[c] = dk[c] = dd[c] = 0.0f;
    }
}

/* Working room of a row in the backward pass. */
typedef struct {
    float v[SCAN_W], g[SCAN_W], q[SCAN_W], part[SCAN_W], yy[SCAN_W], gr[SCAN_W], o1[SCAN_W], o2[SCAN_W], o3[SCAN_W], o4[SCAN_W];
} fade_room;

/* A row without a norm: one pass. */
TM_INLINE void fade_back_plain(const int gate, const int live, const float *restrict v, const float *restrict g, const float *restrict q,
                               const float *restrict e_, const float *restrict n_, const float *restrict d_, float *restrict dq, float *restrict dk,
                               float *restrict dv, float *restrict dd, scan_rest *restrict r, int w) {
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        float vv = live ? v[c] : 0.0f, n = n_[c], d = d_[c], e = e_[c];
        fade_ratio o = fade_ratio_of(gate, live, vv, gate ? q[c] : 0.0f, g[c], e, n, d);
        if (gate) dq[c] = g[c] == 0 ? 0.0f : o.dq * o.yy;
        fade_back(live, c, vv, o.gr, e, n, d, o.part, o.yy, dk, dv, dd, r);
    }
}

/* A row whose ratios are normalised: the norm needs all of a head before the gradient of any. */
TM_INLINE void fade_back_normed(const int gate, const int live, const fade_in *a, const float *restrict v, const float *restrict g, const float *restrict q,
                                const float *restrict e_, const float *restrict n_, const float *restrict d_, float *restrict dq, float *restrict dk,
                                float *restrict dv, float *restrict dd, scan_rest *restrict r, fade_room *restrict room, int w) {
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        fade_ratio o = fade_ratio_of(gate, live, live ? v[c] : 0.0f, gate ? q[c] : 0.0f, g[c], e_[c], n_[c], d_[c]);
        room->part[c] = o.part, room->yy[c] = o.yy, room->gr[c] = o.gr;
        if (gate) dq[c] = o.dq;
    }
    fade_back_norm(a, g, room->yy, room->gr, gate ? dq : NULL, w);
    TM_IVDEP
    for (int c = 0; c < w; c++)
        fade_back(live, c, live ? v[c] : 0.0f, room->gr[c], e_[c], n_[c], d_[c], room->part[c], room->yy[c], dk, dv, dd, r);
}

#define FADE_BACK(gate, live)                                                                                                                                  \
    do {                                                                                                                                                       \
        if (a->e)                                                                                                                                              \
            fade_back_normed(gate, live, a, v, g, q, e_, n_, d_, dq, dk, dv, dd, r, room, w);                                                                  \
        else                                                                                                                                                   \
            fade_back_plain(gate, live, v, g, q, e_, n_, d_, dq, dk, dv, dd, r, w);                                                                            \
    } while (0)

static void fade_back_row(int live, const fade_in *a, const float *v, const float *g, const float *q, const float *e_, const float *n_, const float *d_,
                          float *dq, float *dk, float *dv, float *dd, scan_rest *r, fade_room *room, int w) {
    if (live && q)
        FADE_BACK(1, 1);
    else if (live)
        FADE_BACK(0, 1);
    else if (q)
        FADE_BACK(1, 0);
    else
        FADE_BACK(0, 0);
}

static void fade_replay_chunk(const fade_in *a, int64_t b, int64_t t0, int64_t t1, int64_t c0, int w, fade_sums *s, scan_chunk *x) {
    float kbuf[SCAN_W], vbuf[SCAN_W], dbuf[SCAN_W];
    for (int64_t t = t0; t < t1; t++) {
        fade_ahead(a, b, tm_min(t + SCAN_AHEAD, t1 - 1), c0, w);
        float *e_ = x->e + (t - t0) * SCAN_W, *n_ = x->n + (t - t0) * SCAN_W, *d_ = x->d + (t - t0) * SCAN_W;
        if (a->mask && !a->mask[b * a->T + t]) {
            for (int c = 0; c < w; c++) e_[c] = 0.0f, n_[c] = s->no[c] * s->f[c] + s->nc[c], d_[c] = s->dn[c] * s->f[c] + s->dc[c];
            continue;
        }
        const float *k = tm_read(a->dtype, a->k, b * a->kb + t * a->kt + c0, kbuf, w), *v = tm_read(a->dtype, a->v, b * a->vb + t * a->vt + c0, vbuf, w);
        fade_replay(k, v, tm_read(a->dtype, a->d, b * a->db + t * a->dt + c0, dbuf, w), s, e_, n_, d_, w);
    }
}

/* gn, gz: the gradients of the sums after the last token, or NULL; dn, dz: of those before the first, or NULL. */
static void fade_backward_strip(const fade_in *a, int64_t b, int64_t c0, int w, const float *saved, const double *gn, const double *gz, void *dq, void *dk,
                                void *dv, void *dd, double *dn, double *dz) {
    fade_room o __attribute__((aligned(64)));
    scan_chunk *x = tm_scratch(sizeof(scan_chunk));
    fade_sums s __attribute__((aligned(64)));
    scan_rest r __attribute__((aligned(64)));
    scan_rest_start(&r, w, b * a->D + c0, gn, gz);
    int64_t chunks = tm_ceil(a->T, SCAN_T);
    for (int64_t i = chunks - 1; i >= 0; i--) {
        const float *p = saved + ((b * chunks + i) * 4) * a->D + c0;
        for (int c = 0; c < w; c++) {
            s.u[c] = p[c], s.r[c] = p[a->D + c], s.no[c] = p[2 * a->D + c], s.dn[c] = p[3 * a->D + c];
            s.f[c] = 1.0f, s.nc[c] = s.dc[c] = 0.0f;
        }
        int64_t t0 = i * SCAN_T, t1 = tm_min(a->T, t0 + SCAN_T);
        fade_replay_chunk(a, b, t0, t1, c0, w, &s, x);
        for (int64_t t = t1 - 1; t >= t0; t--) {
            int64_t at = (b * a->T + t) * a->D + c0, off = (t - t0) * SCAN_W;
            int live = !a->mask || a->mask[b * a->T + t];
            const float *v = live ? tm_read(a->dtype, a->v, b * a->vb + t * a->vt + c0, o.v, w) : NULL;
            const float *g = tm_read(a->dtype, a->g, b * a->gb + t * a->gt + c0, o.g, w);
            const float *q = a->q ? tm_read(a->dtype, a->q, b * a->qb + t * a->qt + c0, o.q, w) : NULL;
            float *pk = tm_target(a->dtype, dk, at, o.o1), *pv = tm_target(a->dtype, dv, at, o.o2), *pd = tm_target(a->dtype, dd, at, o.o3);
            float *pq = a->q ? tm_target(a->dtype, dq, at, o.o4) : NULL;
            fade_back_row(live, a, v, g, q, x->e + off, x->n + off, x->d + off, pq, pk, pv, pd, &r, &o, w);
            if (a->q) tm_write(a->dtype, dq, at, pq, w);
            tm_write(a->dtype, dk, at, pk, w);
            tm_write(a->dtype, dv, at, pv, w);
            tm_write(a->dtype, dd, at, pd, w);
        }
        scan_rest_fold(&r, w);
    }
    scan_rest_end(&r, w, b * a->D + c0, dn, dz);
    free(x);
}

/* dq, dk, dv, dd contiguous (B, T, D); dq is not written without q. gn, gz, dn, dz (B, D), or NULL: see fade_backward_strip. */
TM_EXPORT(fade_backward)(int dtype, int heads, double eps, const void *q, const void *k, const void *v, const void *d, const uint8_t *mask, const void *g,
                         const float *saved, const double *gn, const double *gz, void *dq, void *dk, void *dv, void *dd, double *dn, double *dz, int64_t B,
                         int64_t T, int64_t D, int64_t qb, int64_t qt, int64_t kb, int64_t kt, int64_t vb, int64_t vt, int64_t db, int64_t dt, int64_t gb,
                         int64_t gt, int threads) {
    int e = heads ? (int)(D / heads) : 0, w = fade_width(B, D, e, threads);
    fade_in a = {dtype, e, eps, q, k, v, d, g, mask, T, D, qb, qt, kb, kt, vb, vt, db, dt, gb, gt};
    int64_t strips = tm_ceil(D, w);
#pragma omp parallel for schedule(static) num_threads(threads) if (B * strips > 1 && threads > 1)
    for (int64_t i = 0; i < B * strips; i++) {
        int64_t b = i / strips, c0 = i % strips * w;
        int n = (int)tm_min(w, D - c0);
        fade_backward_strip(&a, b, c0, n, saved, gn, gz, dq, dk, dv, dd, dn, dz);
    }
}
