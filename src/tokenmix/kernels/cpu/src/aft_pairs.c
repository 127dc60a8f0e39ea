/* AFT-pairs: y_t = gate(q_t) * norm(sum_r e^{a_tr} n_tr / sum_r e^{a_tr} z_tr), where n_tr = e^{g_tr} n_{t-1,r} + e^{k_t + b_tr} v_t and z likewise: R scans of
   aft_forget.c, whose decays and biases are those of a head. Sums of different r have units of their own, u_r; the ratio is taken in that of the largest e^{u + a}.

   Backward: with w_r = e^{u_r + a_r - top} and Z = sum_r w_r z_r, sum r gets the gradient g w_r / Z, after which each scan goes back as in aft_forget.c; a_r gets
   w_r / Z sum_c g_c (n_cr - y_c z_cr), b_r and g_r the sums over the features of the head of what their keys and decays get. */
#include "tm.h"

#define PAIRS_W 64 /* features in a strip, unless a head has more */

/* e: features of a head; a, b, g: (B, T, H, R), b and g may be NULL. The rest is that of aft_forget.c, whose norm and gate are used; its e is 0 for no norm. */
typedef struct {
    fade_in in;
    int e, R;
    int64_t H;
    const float *a, *b, *g;
} pairs_in;

/* As fade_sums, each (R, w). */
typedef struct {
    float *u, *r, *f, *no, *dn, *nc, *dc;
    double *tn, *td;
} pairs_sums;

/* Of a row: numerators, denominators, weights (R, w); the unit that is the largest, and the sums in it (w). */
typedef struct {
    float *num, *den, *wt;
    float tu[SCAN_W], tr[SCAN_W], ta[SCAN_W], all[SCAN_W], part[SCAN_W], open[SCAN_W];
    float k[SCAN_W], v[SCAN_W], q[SCAN_W], g[SCAN_W], y[SCAN_W], gr[SCAN_W], dq[SCAN_W], dk[SCAN_W], dv[SCAN_W];
} pairs_room;

/* Whole heads, about PAIRS_W features. */
static int pairs_width(int64_t D, int e) { return (int)tm_min(D, e * tm_max(1, PAIRS_W / e)); }

static pairs_sums pairs_new(int n) {
    float *all = tm_scratch(sizeof(float) * 7 * n + sizeof(double) * 2 * n);
    double *totals = (double *)all; /* doubles first, for their alignment */
    float *f = (float *)(totals + 2 * n);
    pairs_sums s = {f, f + n, f + 2 * n, f + 3 * n, f + 4 * n, f + 5 * n, f + 6 * n, totals, totals + n};
    return s;
}

static void pairs_free(pairs_sums *s) { free(s->tn); }

static void pairs_fold(pairs_sums *s, int n) {
    TM_IVDEP
    for (int c = 0; c < n; c++) {
        s->tn[c] = s->tn[c] * s->f[c] + s->nc[c], s->td[c] = s->td[c] * s->f[c] + s->dc[c];
        s->no[c] = (float)s->tn[c], s->dn[c] = (float)s->td[c];
        s->nc[c] = s->dc[c] = 0.0f, s->f[c] = 1.0f;
    }
}

/* One key joins sum r of the w features from i on, after they decayed. */
TM_INLINE void pairs_step(const float *restrict k, const float *restrict v, float bias, float decay, const pairs_sums *all, int i, float *restrict num,
                          float *restrict den, int w) {
    pairs_sums at = {all->u + i, all->r + i, all->f + i, all->no + i, all->dn + i, all->nc + i, all->dc + i, NULL, NULL}, *s = &at;
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        float kk = k[c];
        FADE_JOIN_WITH(kk, v[c], decay, ((kk - uu) - rr) + bias, kk + bias)
        FADE_KEEP_WITH(bias)
        num[c] = s->no[c] * f + nc, den[c] = s->dn[c] * f + dc;
    }
}

/* A token that may not be attended sees the sums as they are. */
TM_INLINE void pairs_look(const pairs_sums *s, int n, float *restrict num, float *restrict den) {
    TM_IVDEP
    for (int c = 0; c < n; c++) num[c] = s->no[c] * s->f[c] + s->nc[c], den[c] = s->dn[c] * s->f[c] + s->dc[c];
}

/* From the R sums of a row, in units u + r (R, w), to the ratio y; its parts stay in the room. */
static void pairs_ratio(const pairs_in *p, const float *a, const float *u, const float *r, pairs_room *o, float *y, int w) {
    for (int c0 = 0; c0 < w; c0 += p->e, a += p->R) {
        const int end = c0 + p->e;
        for (int c = c0; c < end; c++) o->tu[c] = u[c], o->tr[c] = r[c], o->ta[c] = a[0], o->all[c] = 0.0f, y[c] = 0.0f;
        for (int i = 1; i < p->R; i++) {
            const float *restrict uu = u + i * w, *restrict rr = r + i * w;
            float aa = a[i];
            TM_IVDEP
            for (int c = c0; c < end; c++) {
                int up = (uu[c] - o->tu[c]) + (rr[c] - o->tr[c]) + (aa - o->ta[c]) > 0;
                o->tu[c] = up ? uu[c] : o->tu[c], o->tr[c] = up ? rr[c] : o->tr[c], o->ta[c] = up ? aa : o->ta[c];
            }
        }
        for (int i = 0; i < p->R; i++) {
            const float *restrict uu = u + i * w, *restrict rr = r + i * w, *restrict num = o->num + i * w, *restrict den = o->den + i * w;
            float *restrict wt = o->wt + i * w, aa = a[i];
            TM_IVDEP
            for (int c = c0; c < end; c++) {
                float x = (uu[c] - o->tu[c]) + (rr[c] - o->tr[c]) + (aa - o->ta[c]);
                wt[c] = tm_exp_neg(x > 0 ? 0.0f : x);
                y[c] += wt[c] * num[c], o->all[c] += wt[c] * den[c];
            }
        }
    }
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        o->part[c] = o->all[c] == 0 ? 0.0f : 1.0f / o->all[c];
        y[c] *= o->part[c];
    }
}

static const float *pairs_at(const pairs_in *p, const float *x, int64_t b, int64_t t, int64_t c0) {
    return x ? x + ((b * p->in.T + t) * p->H + c0 / p->e) * p->R : NULL;
}

static void pairs_join_row(const pairs_in *p, const float *k, const float *v, const float *b, const float *g, const pairs_sums *s, float *num, float *den, int w) {
    for (int c0 = 0, h = 0; c0 < w; c0 += p->e, h++)
        for (int i = 0; i < p->R; i++)
            pairs_step(k + c0, v + c0, b ? b[h * p->R + i] : 0.0f, g ? g[h * p->R + i] : 0.0f, s, i * w + c0, num + i * w + c0, den + i * w + c0, p->e);
}

static void pairs_forward_strip(const pairs_in *p, int64_t b, int64_t c0, int w, void *y, float *saved, pairs_sums *s) {
    const fade_in *x = &p->in;
    const int n = p->R * w;
    pairs_room *o = tm_scratch(sizeof(pairs_room) + sizeof(float) * 3 * n);
    o->num = (float *)(o + 1), o->den = o->num + n, o->wt = o->den + n;
    for (int64_t t0 = 0; t0 < x->T; t0 += SCAN_T) {
        if (saved)
            for (int i = 0; i < p->R; i++) {
                float *to = saved + (((b * tm_ceil(x->T, SCAN_T) + t0 / SCAN_T) * p->R + i) * 4) * x->D + c0;
                for (int c = 0, at = i * w; c < w; c++, at++) to[c] = s->u[at], to[x->D + c] = s->r[at], to[2 * x->D + c] = s->no[at], to[3 * x->D + c] = s->dn[at];
            }
        for (int64_t t = t0; t < tm_min(x->T, t0 + SCAN_T); t++) {
            int64_t at = (b * x->T + t) * x->D + c0;
            float *out = tm_target(x->dtype, y, at, o->y);
            if (x->mask && !x->mask[b * x->T + t])
                pairs_look(s, n, o->num, o->den);
            else {
                const float *k = tm_read(x->dtype, x->k, b * x->kb + t * x->kt + c0, o->k, w), *v = tm_read(x->dtype, x->v, b * x->vb + t * x->vt + c0, o->v, w);
                pairs_join_row(p, k, v, pairs_at(p, p->b, b, t, c0), pairs_at(p, p->g, b, t, c0), s, o->num, o->den, w);
            }
            pairs_ratio(p, pairs_at(p, p->a, b, t, c0), s->u, s->r, o, out, w);
            if (x->q) {
                const float *restrict q = tm_read(x->dtype, x->q, b * x->qb + t * x->qt + c0, o->q, w);
                TM_IVDEP
                for (int c = 0; c < w; c++) o->open[c] = tm_sigmoid(q[c]);
            }
            if (x->e) fade_normalise(x, o->open, out, w);
            if (x->q && !x->e)
                for (int c = 0; c < w; c++) out[c] *= o->open[c];
            tm_write(x->dtype, y, at, out, w);
        }
        pairs_fold(s, n);
    }
    free(o);
}

/* saved (B, chunks, R, 4, D) or NULL; the state before and after, m, num, den (B, R, D) each, or NULL. */
TM_EXPORT(pairs_forward)(int dtype, int heads, int R, int norm, double eps, const void *q, const void *k, const void *v, const float *a, const float *b,
                         const float *g, const uint8_t *mask, void *y, float *saved, const double *m0, const double *num0, const double *den0, double *m1,
                         double *num1, double *den1, int64_t B, int64_t T, int64_t D, int64_t qb, int64_t qt, int64_t kb, int64_t kt, int64_t vb, int64_t vt,
                         int threads) {
    int e = (int)(D / heads), w = pairs_width(D, e);
    fade_in in = {dtype, norm ? e : 0, eps, q, k, v, NULL, NULL, mask, T, D, qb, qt, kb, kt, vb, vt, 0, 0, 0, 0};
    pairs_in p = {in, e, R, heads, a, b, g};
    int64_t strips = tm_ceil(D, w);
#pragma omp parallel for schedule(static) num_threads(threads) if (B * strips > 1 && threads > 1)
    for (int64_t j = 0; j < B * strips; j++) {
        int64_t row = j / strips, c0 = j % strips * w;
        int n = (int)tm_min(w, D - c0);
        pairs_sums s = pairs_new(R * n);
        for (int i = 0; i < R; i++)
            for (int c = 0; c < n; c++) {
                int64_t from = (row * R + i) * D + c0 + c;
                double unit = m0 ? m0[from] : TM_FLOOR;
                int at = i * n + c;
                s.u[at] = (float)unit, s.r[at] = (float)(unit - (double)s.u[at]);
                s.tn[at] = num0 ? num0[from] : 0.0, s.td[at] = den0 ? den0[from] : 0.0;
                s.no[at] = (float)s.tn[at], s.dn[at] = (float)s.td[at];
                s.f[at] = 1.0f, s.nc[at] = s.dc[at] = 0.0f;
            }
        pairs_forward_strip(&p, row, c0, n, y, saved, &s);
        for (int i = 0; m1 && i < R; i++)
            for (int c = 0; c < n; c++) {
                int64_t to = (row * R + i) * D + c0 + c;
                int at = i * n + c;
                m1[to] = (double)s.u[at] + s.r[at], num1[to] = s.tn[at], den1[to] = s.td[at];
            }
        pairs_free(&s);
    }
}

/* What the replay of a chunk keeps of each token: as scan_chunk, (SCAN_T, R, w) each, and the units. */
typedef struct {
    float *e, *n, *d, *u, *r;
} pairs_chunk;

/* Of one token and sum: e^{-|k - u|}, with its sign bit set where the key became the unit; the sums before the key, decayed, and NaN where a key of +inf
   joins them; the unit after it. */
TM_INLINE void pairs_replay(const float *restrict k, const float *restrict v, float bias, float decay, const pairs_sums *all, int i, const pairs_chunk *x, int64_t to,
                            int w) {
    pairs_sums at = {all->u + i, all->r + i, all->f + i, all->no + i, all->dn + i, all->nc + i, all->dc + i, NULL, NULL}, *s = &at;
    float *restrict e_ = x->e + to, *restrict n_ = x->n + to, *restrict d_ = x->d + to, *restrict u_ = x->u + to, *restrict r_ = x->r + to;
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        float kk = k[c];
        FADE_JOIN_WITH(kk, v[c], decay, ((kk - uu) - rr) + bias, kk + bias)
        FADE_KEEP_WITH(bias)
        e_[c] = up ? -fabsf(e) : fabsf(e);
        n_[c] = s->no[c] * f + nb + (new - new), d_[c] = s->dn[c] * f + db + (new - new);
        u_[c] = s->u[c], r_[c] = s->r[c];
    }
}

/* The sums over later tokens, as scan_rest, each (R, w). */
typedef struct {
    double *tr, *tp;
    float *ro, *po, *f, *rc, *pc, *shrink;
} pairs_rest;

/* One sum of one head of one token, from the gradient gr of the ratios yy: adds to dk and dv, returns those of a, b and the decay. */
TM_INLINE void pairs_back(const int live, const float *restrict v, const float *restrict gr, const float *restrict yy, const float *restrict part,
                          const float *restrict wt, const float *restrict num, const float *restrict den, const float *restrict e_, const float *restrict n_,
                          const float *restrict d_, float *restrict dk, float *restrict dv, float *restrict sa, float *restrict sb, float *restrict sg,
                          const pairs_rest *all, int i, int w) {
    float *restrict rf = all->f + i, *restrict rrc = all->rc + i, *restrict rpc = all->pc + i, *restrict rs = all->shrink + i;
    const float *restrict ro = all->ro + i, *restrict po = all->po + i;
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        float shrink = rs[c], e = fabsf(e_[c]);
        int up = signbit(e_[c]) != 0, none = gr[c] == 0; /* a row that nothing is asked of gives nothing, not even NaN */
        float new = up ? 1.0f : e, gg = none ? 0.0f : gr[c] * part[c] * wt[c];
        sa[c] = none ? 0.0f : gg * (num[c] - yy[c] * den[c]);
        float f = rf[c] * shrink, rc = rrc[c] * shrink + gg, pc = rpc[c] * shrink + (none ? 0.0f : gg * yy[c]);
        rf[c] = f, rrc[c] = rc, rpc[c] = pc;
        if (live) {
            float rest = ro[c] * f + rc, past = po[c] * f + pc;
            int idle = rest == 0 && past == 0; /* no row asks for this key or for one before it */
            rs[c] = up ? e : d_[c] == 0 ? 0.0f : 1.0f;
            float own = idle ? 0.0f : new * (v[c] * rest - past);
            dv[c] += idle ? 0.0f : new * rest;
            dk[c] += own, sb[c] = own;
            sg[c] = idle ? 0.0f : n_[c] * rest - d_[c] * past;
        } else {
            rs[c] = 1.0f;
            sb[c] = sg[c] = 0.0f;
        }
    }
}

TM_INLINE float pairs_sum(const float *restrict x, int n) {
    double part[TM_VL], sum = 0.0;
    int c = 0;
    for (int i = 0; i < TM_VL; i++) part[i] = 0.0;
    for (; c + TM_VL <= n; c += TM_VL) {
        TM_IVDEP
        for (int i = 0; i < TM_VL; i++) part[i] += (double)x[c + i];
    }
    for (; c < n; c++) sum += (double)x[c];
    for (int half = TM_VL / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return (float)(sum + part[0]);
}

static void pairs_store(int dtype, void *to, int64_t at, const float *from, int w) {
    if (dtype == TM_F32)
        memcpy((float *)to + at, from, sizeof(float) * w);
    else
        tm_write(dtype, to, at, from, w);
}

/* The gradient of a row's outputs becomes that of its ratios, o->gr, and of q. */
static void pairs_unfinish(const fade_in *x, const float *restrict q, const float *restrict g, pairs_room *o, float *restrict dq, int w) {
    TM_IVDEP
    for (int c = 0; c < w; c++) {
        int none = g[c] == 0;
        float open = q ? tm_sigmoid(none ? 0.0f : q[c]) : 1.0f;
        o->gr[c] = none ? 0.0f : g[c] * open;
        if (q) dq[c] = none ? 0.0f : g[c] * open * (1.0f - open);
    }
    if (x->e)
        fade_back_norm(x, g, o->y, o->gr, q ? dq : NULL, w);
    else if (q)
        for (int c = 0; c < w; c++) dq[c] = g[c] == 0 ? 0.0f : dq[c] * o->y[c];
}

static void pairs_back_row(const pairs_in *p, int live, const float *v, const pairs_chunk *x, int64_t from, pairs_rest *r, pairs_room *o, float *da, float *db,
                           float *dg, int w) {
    float sa[SCAN_W], sb[SCAN_W], sg[SCAN_W];
    for (int c = 0; c < w; c++) o->dk[c] = o->dv[c] = 0.0f;
    for (int c0 = 0, h = 0; c0 < w; c0 += p->e, h++)
        for (int i = 0; i < p->R; i++) {
            int at = i * w + c0;
            int64_t to = from + at;
            if (live)
                pairs_back(1, v + c0, o->gr + c0, o->y + c0, o->part + c0, o->wt + at, o->num + at, o->den + at, x->e + to, x->n + to, x->d + to, o->dk + c0,
                           o->dv + c0, sa, sb, sg, r, at, p->e);
            else
                pairs_back(0, NULL, o->gr + c0, o->y + c0, o->part + c0, o->wt + at, o->num + at, o->den + at, x->e + to, x->n + to, x->d + to, o->dk + c0,
                           o->dv + c0, sa, sb, sg, r, at, p->e);
            da[h * p->R + i] = pairs_sum(sa, p->e);
            if (db) db[h * p->R + i] = pairs_sum(sb, p->e);
            if (dg) dg[h * p->R + i] = pairs_sum(sg, p->e);
        }
}

/* Replay a chunk from its saved sums. */
static void pairs_replay_chunk(const pairs_in *p, int64_t b, int64_t t0, int64_t t1, int64_t c0, int w, const float *saved, pairs_sums *s, pairs_chunk *x,
                               pairs_room *o) {
    const fade_in *in = &p->in;
    const int n = p->R * w;
    for (int i = 0; i < p->R; i++) {
        const float *from = saved + (((b * tm_ceil(in->T, SCAN_T) + t0 / SCAN_T) * p->R + i) * 4) * in->D + c0;
        for (int c = 0, at = i * w; c < w; c++, at++) {
            s->u[at] = from[c], s->r[at] = from[in->D + c], s->no[at] = from[2 * in->D + c], s->dn[at] = from[3 * in->D + c];
            s->f[at] = 1.0f, s->nc[at] = s->dc[at] = 0.0f;
        }
    }
    for (int64_t t = t0; t < t1; t++) {
        int64_t to = (t - t0) * n;
        if (in->mask && !in->mask[b * in->T + t]) {
            pairs_look(s, n, x->n + to, x->d + to);
            for (int c = 0; c < n; c++) x->e[to + c] = 0.0f, x->u[to + c] = s->u[c], x->r[to + c] = s->r[c];
            continue;
        }
        const float *k = tm_read(in->dtype, in->k, b * in->kb + t * in->kt + c0, o->k, w), *v = tm_read(in->dtype, in->v, b * in->vb + t * in->vt + c0, o->v, w);
        const float *bias = pairs_at(p, p->b, b, t, c0), *decay = pairs_at(p, p->g, b, t, c0);
        for (int at = 0, h = 0; at < w; at += p->e, h++)
            for (int i = 0; i < p->R; i++)
                pairs_replay(k + at, v + at, bias ? bias[h * p->R + i] : 0.0f, decay ? decay[h * p->R + i] : 0.0f, s, i * w + at, x, to + i * w + at, p->e);
    }
}

static void pairs_backward_strip(const pairs_in *p, int64_t b, int64_t c0, int w, const float *saved, void *dq, void *dk, void *dv, float *da, float *db, float *dg) {
    const fade_in *in = &p->in;
    const int n = p->R * w;
    pairs_room *o = tm_scratch(sizeof(pairs_room) + sizeof(float) * 3 * n);
    o->num = (float *)(o + 1), o->den = o->num + n, o->wt = o->den + n;
    float *kept = tm_scratch(sizeof(float) * 5 * SCAN_T * n);
    pairs_chunk x = {kept, kept + SCAN_T * n, kept + 2 * SCAN_T * n, kept + 3 * SCAN_T * n, kept + 4 * SCAN_T * n};
    pairs_sums s = pairs_new(n);
    double *later = tm_scratch(sizeof(double) * 2 * n + sizeof(float) * 6 * n);
    float *f = (float *)(later + 2 * n);
    pairs_rest r = {later, later + n, f, f + n, f + 2 * n, f + 3 * n, f + 4 * n, f + 5 * n};
    memset(later, 0, sizeof(double) * 2 * n + sizeof(float) * 6 * n);
    for (int c = 0; c < n; c++) r.f[c] = r.shrink[c] = 1.0f;
    for (int64_t t0 = (tm_ceil(in->T, SCAN_T) - 1) * SCAN_T; t0 >= 0; t0 -= SCAN_T) {
        int64_t t1 = tm_min(in->T, t0 + SCAN_T);
        pairs_replay_chunk(p, b, t0, t1, c0, w, saved, &s, &x, o);
        for (int64_t t = t1 - 1; t >= t0; t--) {
            int64_t at = (b * in->T + t) * in->D + c0, from = (t - t0) * n, logits = ((b * in->T + t) * p->H + c0 / p->e) * p->R;
            int live = !in->mask || in->mask[b * in->T + t];
            const float *v = live ? tm_read(in->dtype, in->v, b * in->vb + t * in->vt + c0, o->v, w) : NULL;
            const float *g = tm_read(in->dtype, in->g, b * in->gb + t * in->gt + c0, o->g, w);
            const float *q = in->q ? tm_read(in->dtype, in->q, b * in->qb + t * in->qt + c0, o->q, w) : NULL;
            for (int i = 0; i < p->R; i++) {
                const float *restrict e_ = x.e + from + i * w, *restrict n_ = x.n + from + i * w, *restrict d_ = x.d + from + i * w;
                float *restrict num = o->num + i * w, *restrict den = o->den + i * w;
                TM_IVDEP
                for (int c = 0; c < w; c++) {
                    float new = live ? (signbit(e_[c]) ? 1.0f : e_[c]) : 0.0f;
                    num[c] = live ? n_[c] + new * v[c] : n_[c], den[c] = d_[c] + new;
                }
            }
            pairs_ratio(p, p->a + logits, x.u + from, x.r + from, o, o->y, w);
            pairs_unfinish(in, q, g, o, o->dq, w);
            pairs_back_row(p, live, v, &x, from, &r, o, da + logits, db ? db + logits : NULL, dg ? dg + logits : NULL, w);
            if (q) pairs_store(in->dtype, dq, at, o->dq, w);
            pairs_store(in->dtype, dk, at, o->dk, w);
            pairs_store(in->dtype, dv, at, o->dv, w);
        }
        TM_IVDEP
        for (int c = 0; c < n; c++) {
            r.tr[c] = r.tr[c] * r.f[c] + r.rc[c], r.tp[c] = r.tp[c] * r.f[c] + r.pc[c];
            r.ro[c] = (float)r.tr[c], r.po[c] = (float)r.tp[c];
            r.f[c] = 1.0f, r.rc[c] = r.pc[c] = 0.0f;
        }
    }
    free(later), pairs_free(&s), free(kept), free(o);
}

/* dq, dk, dv contiguous (B, T, D); da, db, dg (B, T, H, R), the last two not written without b and g. */
TM_EXPORT(pairs_backward)(int dtype, int heads, int R, int norm, double eps, const void *q, const void *k, const void *v, const float *a, const float *b,
                          const float *g, const uint8_t *mask, const void *grad, const float *saved, void *dq, void *dk, void *dv, float *da, float *db, float *dg,
                          int64_t B, int64_t T, int64_t D, int64_t qb, int64_t qt, int64_t kb, int64_t kt, int64_t vb, int64_t vt, int64_t gb, int64_t gt,
                          int threads) {
    int e = (int)(D / heads), w = pairs_width(D, e);
    fade_in in = {dtype, norm ? e : 0, eps, q, k, v, NULL, grad, mask, T, D, qb, qt, kb, kt, vb, vt, 0, 0, gb, gt};
    pairs_in p = {in, e, R, heads, a, b, g};
    int64_t strips = tm_ceil(D, w);
#pragma omp parallel for schedule(static) num_threads(threads) if (B * strips > 1 && threads > 1)
    for (int64_t j = 0; j < B * strips; j++) {
        int64_t row = j / strips, c0 = j % strips * w;
        pairs_backward_strip(&p, row, c0, (int)tm_min(w, D - c0), saved, dq, dk, dv, da, b ? db : NULL, g ? dg : NULL);
    }
}
