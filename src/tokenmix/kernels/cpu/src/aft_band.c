/* AFT-local and AFT-conv in one dimension (AFT, Eqs. 4 and 6): y_t = gate(q_t) * sum_s e^{k_s + w_ts} v_s / sum_s e^{k_s + w_ts}, w_ts = 0 outside of a band of
   L keys around t: entry j of row t is the log-weight of key t + j - lo, and L = lo + 1 + hi.

   The sums are those of the keys older than the band, of the band, and of the keys beyond it: positive terms only. e^{k - top} and e^{k - top} v stand in a
   panel of keys; a register tile of rows starts from the sums outside of the band and multiplies its way through the panel with e^w. Causal rows know
   only keys up to their block, so top is the running maximum, and what is carried from block to block is scaled when it rises. Sums over time run in
   two levels, those of a block joining the total.

   A denominator that comes out small (in units of e^top) may have lost terms to the range of float32: that number alone is computed again, in float64
   under its own maximum, from the sums before the block and the keys since, or from all keys where even those sums are out of range.

   Backward: with L_t the log-denominator, dv_s = sum_t e^{k_s + w_ts - L_t} g_t and dk_s = v_s dv_s - sum_t e^{k_s + w_ts - L_t} g_t y_t are the same
   sums over the transposed band. In mirrored time it is the same band again, and the sweep the same, with g / denominator in the place of e^k v and keys in
   the place of rows. Blocks are those of the forward sweep, and so are their units: what is kept is 1 / denominator in units of e^top, and the sums before
   each block. Rows computed in float64 are done so again: each key gets their share pair by pair, and from those whose band has passed in float64. */
#include "tm.h"

#define BAND_V (TM_REGISTERS >= 32 ? 4 : 2) /* vectors in a row of the register tile: the first half sums e v, the second e */
#define BAND_R 6                            /* rows of the register tile */
#define BAND_G (BAND_V / 2 * TM_VL)         /* features in a group */
#define BAND_X (2 * BAND_G)                 /* floats in a panel row */
#define BAND_W 256                          /* most features in a strip */
#define BAND_T 60                           /* rows in a block, whole tiles */
#define BAND_LEAST 4.25e-18f                /* e^-40: smaller denominators are computed again */
#define BAND_FREE 20.0f                     /* log-weights up to this much need no scale of their own */
#define BAND_FAR 45.0                       /* sums outside of the panel that are e^45 times the denominator hold too little of it */
#define BAND_CAP 300.0f                     /* larger log-weights count as this much */
#define BAND_DEAD (-0x1.fffffep127f)        /* a key that counts as masked */

typedef struct {
    int dtype, gate, causal, heads, per_head, width;
    const void *q, *k, *v, *g;
    const uint8_t *mask;
    const float *w, *pack, *scale; /* log-weights; e^(w - scale) by groups of rows; scale of each group */
    float *r, *whole;              /* 1 / denominator in units of e^(top + scale), negative where that is beyond float32; output before rounding: (B, T, D) */
    float *m, *num, *den;          /* before each block the maximum and the sums outside of its panel: (B, blocks + 1, D) and (B, blocks, D) */
    void *y, *dq, *dk, *dv;
    int *odd; /* set where an output is not finite */
    int64_t B, T, D, lo, hi, L, wb, wh, wt, groups, blocks, qb, qt, kb, kt, vb, vt, gb, gt;
} band_in;

typedef struct {
    const band_in *a;
    int64_t b, head, c0, i0, P;
    int w, ng, te;
    const float *pack, *scale;
    float *x, *outer;              /* panel, and what its rows count outside of their bands */
    float *keys, *suffix, *dw;     /* keys of the block (backward), sums beyond each block, gradient of w by rows */
    double *dtaps, *dkey;          /* gradient of w without rows, of keys per head */
    float top[BAND_W], old[BAND_W], sums[2 * BAND_W], was[2 * BAND_W];
    double *exact;      /* (T, w) log-denominators of rows beyond float32, once there are any */
    double far[BAND_W][3]; /* the sums of such rows whose band has passed, and their unit */
    int64_t last[BAND_W];  /* mirrored time of the latest such row of every feature */
} band_strip;

/* One number of an array of dtype. */
static float band_at(int dtype, const void *a, int64_t at) {
    float buffer;
    return *tm_read(dtype, a, at, &buffer, 1);
}

static void band_put(int dtype, void *a, int64_t at, double x) {
    float buffer;
    *tm_target(dtype, a, at, &buffer) = (float)x;
    buffer = (float)x;
    tm_write(dtype, a, at, &buffer, 1);
}

/* w features of a row, and zeros up to whole groups. */
TM_INLINE const float *band_row(const band_strip *s, const void *p, int64_t at, float *buffer) {
    int whole = s->ng * BAND_G;
    const float *row = tm_read(s->a->dtype, p, at, buffer, s->w);
    if (s->w == whole) return row;
    if (row != buffer) memcpy(buffer, row, sizeof(float) * s->w);
    for (int c = s->w; c < whole; c++) buffer[c] = 0.0f;
    return buffer;
}

TM_INLINE int band_live(const band_strip *s, int64_t t) { return !s->a->mask || s->a->mask[s->b * s->a->T + t]; }

TM_INLINE int64_t band_key_at(const band_strip *s, int64_t t) { return s->b * s->a->kb + t * s->a->kt + (s->a->per_head ? s->head : s->c0); }

TM_INLINE const float *band_key_row(const band_strip *s, int64_t t, float *buffer) {
    if (!s->a->per_head) return band_row(s, s->a->k, band_key_at(s, t), buffer);
    float k = band_at(s->a->dtype, s->a->k, band_key_at(s, t));
    for (int c = 0; c < s->ng * BAND_G; c++) buffer[c] = k;
    return buffer;
}

/* The row of results at time t. */
TM_INLINE int64_t band_out_at(const band_strip *s, int64_t t) { return (s->b * s->a->T + t) * s->a->D + s->c0; }

/* The rows of what is kept of block n: its sums, and its maximum, which is that after block n - 1. */
TM_INLINE int64_t band_sums_at(const band_strip *s, int64_t n) { return (s->b * s->a->blocks + n) * s->a->D + s->c0; }
TM_INLINE int64_t band_top_at(const band_strip *s, int64_t n) { return (s->b * (s->a->blocks + 1) + n) * s->a->D + s->c0; }

/* The time of row i of mirrored time, whose blocks are those of time. */
TM_INLINE int64_t band_mirror(const band_in *a, int64_t i) { return a->blocks * BAND_T - 1 - i; }

/* The scale of the log-weights of row t. */
TM_INLINE float band_scale_at(const band_strip *s, int64_t t) { return s->scale[s->a->wt ? t / BAND_R : 0]; }

TM_INLINE const float *band_saved(const band_strip *s, const float *p, int64_t t, float *buffer) {
    int whole = s->ng * BAND_G;
    const float *row = p + band_out_at(s, t);
    if (s->w == whole) return row;
    memcpy(buffer, row, sizeof(float) * s->w);
    for (int c = s->w; c < whole; c++) buffer[c] = 0.0f;
    return buffer;
}

/* out[r] = scale * start[r] + sum_p w[p][r] x[p] for the rows of a tile. */
static void band_product(const float *restrict start, float scale, const float *restrict w, const float *restrict x, int64_t n, float *restrict out) {
    tm_vf a[BAND_R][BAND_V];
#pragma GCC unroll 6
    for (int r = 0; r < BAND_R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < BAND_V; j++) a[r][j] = scale * *(const tm_vf *)(start + r * BAND_X + j * TM_VL);
    for (int64_t p = 0; p < n; p++) {
        tm_vf b[BAND_V];
#pragma GCC unroll 4
        for (int j = 0; j < BAND_V; j++) b[j] = *(const tm_vf *)(x + p * BAND_X + j * TM_VL);
#pragma GCC unroll 6
        for (int r = 0; r < BAND_R; r++)
#pragma GCC unroll 4
            for (int j = 0; j < BAND_V; j++) a[r][j] += w[p * BAND_R + r] * b[j];
    }
#pragma GCC unroll 6
    for (int r = 0; r < BAND_R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < BAND_V; j++) *(tm_vf *)(out + r * BAND_X + j * TM_VL) = a[r][j];
}

/* out[j][r] = <x[r], z[j]> over all groups, for the keys of a tile and BAND_V queries. */
__attribute__((noinline)) static void band_dots(const float *restrict x, int64_t xs, const float *restrict z, int64_t zs, int ng, float *restrict out) {
    tm_vf a[BAND_R][BAND_V];
    float lanes[BAND_R * BAND_V][TM_VL] __attribute__((aligned(64)));
#pragma GCC unroll 6
    for (int r = 0; r < BAND_R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < BAND_V; j++) a[r][j] = (tm_vf){0};
    for (int g = 0; g < ng; g++)
        for (int u = 0; u < BAND_X; u += TM_VL) {
            tm_vf b[BAND_V];
#pragma GCC unroll 4
            for (int j = 0; j < BAND_V; j++) b[j] = *(const tm_vf *)(z + g * zs + j * BAND_X + u);
#pragma GCC unroll 6
            for (int r = 0; r < BAND_R; r++) {
                tm_vf e = *(const tm_vf *)(x + g * xs + r * BAND_X + u);
#pragma GCC unroll 4
                for (int j = 0; j < BAND_V; j++) a[r][j] += e * b[j];
            }
        }
#pragma GCC unroll 6
    for (int r = 0; r < BAND_R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < BAND_V; j++) {
            *(tm_vf *)lanes[j * BAND_R + r] = a[r][j];
        }
    for (int i = 0; i < BAND_R * BAND_V; i++) {
        float sum[4];
        for (int l = 0; l < 4; l++) {
            sum[l] = lanes[i][l];
            for (int m = 4; m < TM_VL; m += 4) sum[l] += lanes[i][l + m];
        }
        out[i] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
}

TM_INLINE void band_no_row(const band_strip *s, float *to, int64_t stride) {
    for (int g = 0; g < s->ng; g++) memset(to + g * stride, 0, sizeof(float) * BAND_X);
}

/* A group of features of one key: e^{k - top} v and e^{k - top}. */
TM_INLINE void band_key_terms(const float *restrict k, const float *restrict v, const float *restrict top, float *restrict x) {
    TM_IVDEP
    for (int c = 0; c < BAND_G; c++) {
        float e = tm_exp_neg(k[c] - top[c]);
        x[c] = e * v[c], x[BAND_G + c] = e;
    }
}

/* The same of one query of the backward sweep: g gate(q) / denominator, g / denominator times -y, and the gradient of q. Returns whether any denominator is
   beyond float32; those count as infinite. */
TM_INLINE int band_query_terms(const int gate, const float *restrict g, const float *restrict q, const float *restrict y, const float *restrict r,
                               float *restrict x, float *restrict dq) {
    int beyond = 0;
    TM_IVDEP
    for (int c = 0; c < BAND_G; c++) {
        float gy = g[c] * y[c], inverse = r[c] < 0 ? 0.0f : r[c];
        beyond |= r[c] < 0;
        if (gate) {
            float e = tm_exp_neg(-fabsf(q[c])), near = 1.0f / (1.0f + e), far = e * near;
            dq[c] = gy * (q[c] >= 0 ? far : near);
            x[c] = g[c] * (q[c] >= 0 ? near : far) * inverse;
        } else
            x[c] = g[c] * inverse;
        x[BAND_G + c] = -gy * inverse;
    }
    return beyond;
}

TM_INLINE void band_key_results(const float *restrict x, const float *restrict o, int n, float *restrict dk, float *restrict dv) {
    TM_IVDEP
    for (int c = 0; c < n; c++) {
        dv[c] = x[BAND_G + c] * o[c];
        dk[c] = x[c] * o[c] + x[BAND_G + c] * o[BAND_G + c];
    }
}

/* Asks for the inputs and outputs of row i of the next block: a strip of features is a short piece of every row, which the hardware does not follow. */
TM_INLINE void band_ask(const int back, const band_strip *s, int64_t i) {
    const band_in *a = s->a;
    int64_t t = back ? band_mirror(a, i) : i;
    if (t < 0 || t >= a->T) return;
    int64_t at = band_out_at(s, t);
    if (a->gate) tm_ahead(a->dtype, a->q, s->b * a->qb + t * a->qt + s->c0, s->w);
    tm_ahead(a->dtype, a->v, s->b * a->vb + t * a->vt + s->c0, s->w);
    if (!a->per_head) tm_ahead(a->dtype, a->k, band_key_at(s, t), s->w);
    if (!back) {
        tm_ahead(a->dtype, a->y, at, s->w);
        return;
    }
    tm_ahead(a->dtype, a->g, s->b * a->gb + t * a->gt + s->c0, s->w);
    tm_ahead(TM_F32, a->whole, at, s->w);
    tm_ahead(TM_F32, a->r, at, s->w);
}

/* Key i into a panel whose groups are ``stride`` apart. */
static void band_load_key(const band_strip *s, int64_t i, float *to, int64_t stride) {
    float kbuf[BAND_W], vbuf[BAND_W];
    if (!band_live(s, i)) {
        band_no_row(s, to, stride);
        return;
    }
    const float *v = band_row(s, s->a->v, s->b * s->a->vb + i * s->a->vt + s->c0, vbuf);
    if (s->a->per_head) {
        float e = tm_exp_neg(band_at(s->a->dtype, s->a->k, band_key_at(s, i)) - s->top[0]);
        for (int g = 0; g < s->ng; g++) {
            float *x = to + g * stride;
            TM_IVDEP
            for (int c = 0; c < BAND_G; c++) x[c] = e * v[g * BAND_G + c], x[BAND_G + c] = e;
        }
        return;
    }
    const float *k = band_key_row(s, i, kbuf);
    for (int g = 0; g < s->ng; g++) {
        int c = g * BAND_G;
        band_key_terms(k + c, v + c, s->top + c, to + g * stride);
    }
}

static void band_mark(band_strip *s, int64_t i);

/* Query i of mirrored time into the panel, and its gradient of q out. */
static void band_load_query(band_strip *s, int64_t i, float *to) {
    float gbuf[BAND_W], qbuf[BAND_W], ybuf[BAND_W], rbuf[BAND_W], out[BAND_W];
    const band_in *a = s->a;
    int64_t t = band_mirror(a, i), at = band_out_at(s, t);
    const float *gr = band_row(s, a->g, s->b * a->gb + t * a->gt + s->c0, gbuf);
    const float *q = a->gate ? band_row(s, a->q, s->b * a->qb + t * a->qt + s->c0, qbuf) : NULL;
    const float *y = band_saved(s, a->whole, t, ybuf), *r = band_saved(s, a->r, t, rbuf);
    float *dq = a->gate && a->dtype == TM_F32 && s->w == s->ng * BAND_G ? (float *)a->dq + at : out;
    int beyond = 0;
    for (int g = 0; g < s->ng; g++) {
        int c = g * BAND_G;
        float *x = to + g * s->P * BAND_X;
        if (a->gate)
            beyond |= band_query_terms(1, gr + c, q + c, y + c, r + c, x, dq + c);
        else
            beyond |= band_query_terms(0, gr + c, NULL, y + c, r + c, x, NULL);
    }
    if (a->gate && dq == out) {
        if (a->dtype == TM_F32) memcpy((float *)a->dq + at, out, sizeof(float) * s->w);
        tm_write(a->dtype, a->dq, at, out, s->w);
    }
    if (beyond) band_mark(s, i);
}

/* The maximum of a block: found, row by row, or known from the forward sweep. */
TM_INLINE void band_raise(band_strip *s, int64_t i) {
    float buffer[BAND_W];
    if (!band_live(s, i)) return;
    const float *k = band_key_row(s, i, buffer);
    TM_IVDEP
    for (int c = 0; c < s->ng * BAND_G; c++) s->top[c] = k[c] > s->top[c] ? k[c] : s->top[c];
}

static void band_recall(band_strip *s, int64_t n) {
    memset(s->top, 0, sizeof s->top);
    memcpy(s->top, s->a->m + band_top_at(s, s->a->blocks - n), sizeof(float) * s->w);
    for (int c = s->w; c < BAND_W && s->a->per_head; c++) s->top[c] = s->top[0]; /* as in the forward sweep, where they hold the key of the head too */
}

/* Row i into the panel, zeros where there is none. */
TM_INLINE void band_load(const int back, band_strip *s, int64_t i, float *to) {
    int64_t t = back ? band_mirror(s->a, i) : i;
    if (t < 0 || t >= s->a->T)
        band_no_row(s, to, s->P * BAND_X);
    else if (back)
        band_load_query(s, i, to);
    else
        band_load_key(s, i, to, s->P * BAND_X);
}

/* What row i counts outside of its band: the panel of queries has the scale of their log-weights. */
static float band_outer(const int back, const band_strip *s, int64_t i) {
    if (!back) return 1.0f;
    int64_t t = band_mirror(s->a, i);
    float scale = t < 0 || t >= s->a->T ? 0.0f : band_scale_at(s, t);
    return scale == 0.0f ? 1.0f : tm_exp(-scale);
}

/* What is carried follows the maximum, which rises, or falls in mirrored time: the sums, and the first n rows of the panel. */
TM_INLINE void band_rescale(const int back, band_strip *s, int64_t n) {
    float f[BAND_W];
    int rose = 0;
    for (int c = 0; c < s->ng * BAND_G; c++) {
        f[c] = tm_exp_neg(back ? s->top[c] - s->old[c] : s->old[c] - s->top[c]);
        rose |= s->old[c] != s->top[c];
    }
    if (!rose) return;
    for (int g = 0; g < s->ng; g++) {
        const float *fg = f + g * BAND_G;
        float *sums = s->sums + g * BAND_X, *x = s->x + g * s->P * BAND_X;
        for (int c = 0; c < BAND_G; c++) sums[c] *= fg[c], sums[BAND_G + c] *= fg[c];
        for (int64_t p = 0; p < n; p++, x += BAND_X) {
            TM_IVDEP
            for (int c = 0; c < BAND_G; c++) x[c] *= fg[c], x[BAND_G + c] *= fg[c];
        }
    }
}

/* Not causal: one maximum over everything, and for each block the sums of what lies beyond its panel. */
TM_INLINE void band_look_ahead(const int back, band_strip *s) {
    const band_in *a = s->a;
    int64_t blocks = a->blocks, size = 2 * BAND_W, end = blocks * BAND_T;
    if (back)
        band_recall(s, 0);
    else
        for (int64_t i = 0; i < a->T; i++) band_raise(s, i);
    memset(s->suffix, 0, sizeof(float) * size * blocks);
    float *row = s->x; /* the panel is still empty */
    for (int64_t n = blocks - 2; n >= 0; n--) {
        float *sum = s->suffix + n * size, *later = sum + size;
        for (int64_t i = tm_min(end, (n + 1) * BAND_T + a->hi); i < tm_min(end, (n + 2) * BAND_T + a->hi); i++) {
            band_load(back, s, i, row);
            float f = band_outer(back, s, i);
            for (int g = 0; g < s->ng; g++)
                for (int c = 0; c < BAND_X; c++) sum[g * BAND_X + c] += f * row[g * s->P * BAND_X + c];
        }
        for (int c = 0; c < s->ng * BAND_X; c++) sum[c] += later[c];
    }
    band_no_row(s, row, s->P * BAND_X);
}

/* For every row of the block the sums over the keys outside of its band; those which leave the panel join the carried sums. */
__attribute__((noinline)) static void band_outside(band_strip *s, int64_t n, int g, float *restrict ps) {
    const float *x = s->x + g * s->P * BAND_X;
    float *sums = s->sums + g * BAND_X, part[BAND_X] __attribute__((aligned(64)));
    memset(part, 0, sizeof part);
    for (int r = 0; r < s->te; r++) {
        const float *xr = x + r * BAND_X;
        float *to = ps + r * BAND_X, f = s->outer[r];
        TM_IVDEP
        for (int c = 0; c < BAND_X; c++) to[c] = sums[c] + part[c], part[c] += f * xr[c];
    }
    for (int c = 0; c < BAND_X; c++) sums[c] += part[c];
    if (s->a->causal) return;
    const float *beyond = s->suffix + n * 2 * BAND_W + g * BAND_X;
    memset(part, 0, sizeof part);
    for (int r = s->te - 1; r >= 0; r--) {
        const float *xr = x + (r + s->a->L - 1) * BAND_X;
        float *to = ps + r * BAND_X, f = s->outer[r + s->a->L - 1];
        TM_IVDEP
        for (int c = 0; c < BAND_X; c++) to[c] += beyond[c] + part[c], part[c] += f * xr[c];
    }
}

/* Log-weight of key u for row t; 0 outside of the band. */
static double band_weight(const band_strip *s, int64_t t, int64_t u) {
    const band_in *a = s->a;
    int64_t j = u - t + a->lo;
    if (j < 0 || j >= a->L) return 0.0;
    float w = a->w[s->b * a->wb + s->head * a->wh + t * a->wt + j];
    return w > BAND_CAP ? BAND_CAP : w;
}

/* Keys from..to of row t and feature c, together with sums (num, den) * e^m: in float64 under their own maximum. */
static void band_exact_sums(const band_strip *s, int c, int64_t t, int64_t from, int64_t to, double *m, double *num, double *den) {
    const band_in *a = s->a;
    double top = *den > 0 ? *m : TM_FLOOR;
    for (int second = 0; second < 2; second++) {
        for (int64_t u = from; u <= to; u++) {
            if (!band_live(s, u)) continue;
            float k = band_at(a->dtype, a->k, band_key_at(s, u) + (a->per_head ? 0 : c));
            if (k <= BAND_DEAD) continue;
            double z = k + band_weight(s, t, u);
            if (!second) {
                if (z > top) top = z;
                continue;
            }
            double e = exp(z - top);
            *num += e * band_at(a->dtype, a->v, s->b * a->vb + u * a->vt + s->c0 + c), *den += e;
        }
        if (!second && *den > 0) {
            double f = exp(*m - top);
            *num *= f, *den *= f;
        }
    }
    *m = top;
}

/* The sums of row t of feature c once more, exactly: from (m, num, den), those outside of the panel of its block, and the keys of the panel. */
static void band_exact_row(const band_strip *s, int c, int64_t t, double *m, double *num, double *den) {
    const band_in *a = s->a;
    int64_t first = t / BAND_T * BAND_T, last = a->causal ? t : tm_min(a->T - 1, tm_min(first + BAND_T, a->T) - 1 + a->hi);
    int before = *m > TM_FLOOR;
    double base = *m;
    band_exact_sums(s, c, t, tm_max(0, first - a->lo), last, m, num, den);
    if (!before || (*den > 0 && *m + log(*den) - base > -BAND_FAR)) return;
    *m = *num = *den = 0.0;
    band_exact_sums(s, c, t, 0, a->causal ? t : a->T - 1, m, num, den);
}

/* Row t of feature c of the forward sweep. */
static void band_exact_output(const band_strip *s, int64_t n, int c, int64_t t) {
    const band_in *a = s->a;
    int at = c / BAND_G * BAND_X + c % BAND_G;
    const float *beyond = a->causal ? NULL : s->suffix + n * 2 * BAND_W + at;
    double m = a->causal ? s->old[c] : s->top[c], num = s->was[at] + (beyond ? beyond[0] : 0.0f), den = s->was[at + BAND_G] + (beyond ? beyond[BAND_G] : 0.0f);
    band_exact_row(s, c, t, &m, &num, &den);
    int64_t out = band_out_at(s, t) + c;
    double y = den == 0 ? 0.0 : num / den;
    if (a->gate) y /= 1.0 + exp(-(double)band_at(a->dtype, a->q, s->b * a->qb + t * a->qt + s->c0 + c));
    band_put(a->dtype, a->y, out, y);
    tm_tell(tm_odd((float)y), a->odd);
    if (!a->r) return;
    double units = den > 0 ? exp(s->top[c] + band_scale_at(s, t) - m) / den : 0.0;
    a->r[out] = units <= 1.0 / BAND_LEAST ? (float)units : -1.0f;
    a->whole[out] = (float)y;
}

/* One row of a tile: n features of group g. Returns whether any denominator is too small. */
TM_INLINE int band_finish(const int save, const band_strip *s, int g, int n, int64_t t, const float *restrict o) {
    const band_in *a = s->a;
    float qbuf[BAND_G], ybuf[BAND_G];
    int64_t at = band_out_at(s, t) + g * BAND_G;
    const float *q = a->gate ? tm_read(a->dtype, a->q, s->b * a->qb + t * a->qt + s->c0 + g * BAND_G, qbuf, n) : NULL;
    float *y = tm_target(a->dtype, a->y, at, ybuf), *inverse = save ? a->r + at : NULL;
    int small = 0, some = 0;
    if (a->gate) {
        TM_IVDEP
        for (int c = 0; c < n; c++) {
            float e = tm_exp_neg(-fabsf(q[c])), den = o[BAND_G + c];
            small |= den < BAND_LEAST;
            den = den < BAND_LEAST ? BAND_LEAST : den;
            if (save) inverse[c] = 1.0f / den;
            y[c] = o[c] * (q[c] >= 0 ? 1.0f : e) / (den * (1.0f + e));
            some |= tm_odd(y[c]);
        }
    } else {
        TM_IVDEP
        for (int c = 0; c < n; c++) {
            float den = o[BAND_G + c];
            small |= den < BAND_LEAST;
            den = den < BAND_LEAST ? BAND_LEAST : den;
            if (save) inverse[c] = 1.0f / den;
            y[c] = o[c] / den;
            some |= tm_odd(y[c]);
        }
    }
    tm_tell(some, a->odd);
    if (save && a->dtype != TM_F32) memcpy(a->whole + at, y, sizeof(float) * n);
    tm_write(a->dtype, a->y, at, y, n);
    return small;
}

TM_INLINE int band_finish_row(const band_strip *s, int g, int n, int64_t t, const float *o) {
    if (n < BAND_G) return s->a->r ? band_finish(1, s, g, n, t, o) : band_finish(0, s, g, n, t, o);
    return s->a->r ? band_finish(1, s, g, BAND_G, t, o) : band_finish(0, s, g, BAND_G, t, o);
}

__attribute__((noinline)) static void band_forward_tile(const band_strip *s, int64_t block, int g, int r0, const float *o) {
    int n = (int)tm_min(BAND_G, s->w - g * BAND_G);
    for (int r = 0; r < BAND_R && r0 + r < s->te; r++, o += BAND_X) {
        int64_t t = s->i0 + r0 + r;
        if (!band_finish_row(s, g, n, t, o)) continue;
        for (int c = 0; c < n; c++)
            if (o[BAND_G + c] < BAND_LEAST) band_exact_output(s, block, g * BAND_G + c, t);
    }
}

/* The keys of a block of the backward sweep. */
static void band_load_keys(const band_strip *s) {
    for (int r = 0; r < BAND_T; r++) {
        int64_t t = band_mirror(s->a, s->i0 + r);
        float *to = s->keys + r * BAND_X;
        if (t < s->a->T)
            band_load_key(s, t, to, BAND_T * BAND_X);
        else
            band_no_row(s, to, BAND_T * BAND_X);
    }
}

TM_INLINE void band_finish_back(const band_strip *s, int g, int n, int r, const float *restrict o) {
    const band_in *a = s->a;
    int64_t i = s->i0 + r, at = band_out_at(s, band_mirror(a, i)) + g * BAND_G;
    const float *x = s->keys + (g * BAND_T + r) * BAND_X;
    float kbuf[BAND_G], vbuf[BAND_G], *dv = tm_target(a->dtype, a->dv, at, vbuf), *dk = a->per_head ? kbuf : tm_target(a->dtype, a->dk, at, kbuf);
    band_key_results(x, o, n, dk, dv);
    tm_write(a->dtype, a->dv, at, dv, n);
    if (!a->per_head) {
        tm_write(a->dtype, a->dk, at, dk, n);
        return;
    }
    float sum = 0.0f;
    for (int c = 0; c < n; c++) sum += dk[c];
    s->dkey[i] += sum;
}

__attribute__((noinline)) static void band_backward_tile(const band_strip *s, int g, int r0, const float *o) {
    int n = (int)tm_min(BAND_G, s->w - g * BAND_G);
    for (int r = r0; r < r0 + BAND_R; r++, o += BAND_X) {
        if (band_mirror(s->a, s->i0 + r) >= s->a->T) continue;
        if (n == BAND_G)
            band_finish_back(s, g, BAND_G, r, o);
        else
            band_finish_back(s, g, n, r, o);
    }
}

/* The gradient of the log-weights of the keys of a tile: e^w <keys, queries>, features summed. */
__attribute__((noinline)) static void band_weights_back(const band_strip *s, int r0, const float *pack) {
    const band_in *a = s->a;
    float o[BAND_V * BAND_R] __attribute__((aligned(64)));
    for (int64_t p0 = 0; p0 < a->L + BAND_R - 1; p0 += BAND_V) {
        band_dots(s->keys + r0 * BAND_X, BAND_T * BAND_X, s->x + (r0 + p0) * BAND_X, s->P * BAND_X, s->ng, o);
        for (int64_t p = p0; p < tm_min(p0 + BAND_V, a->L + BAND_R - 1); p++) {
            const float *w = pack + p * BAND_R, *d = o + (p - p0) * BAND_R;
            int64_t t = band_mirror(a, s->i0 + r0 - a->lo + p);
            if (t < 0 || t >= a->T) continue;
            for (int r = 0; r < BAND_R; r++) {
                if (w[r] == 0.0f) continue;
                if (s->dtaps)
                    s->dtaps[p - r] += w[r] * d[r];
                else
                    s->dw[t * a->L + p - r] += w[r] * d[r];
            }
        }
    }
}

TM_INLINE int band_marked(const band_strip *s, int c, int64_t t) { return s->a->r[band_out_at(s, t) + c] < 0; }

/* g gate(q) and g y of query t. */
static void band_exact_query(const band_strip *s, int c, int64_t t, double *g, double *gy) {
    const band_in *a = s->a;
    *g = band_at(a->dtype, a->g, s->b * a->gb + t * a->gt + s->c0 + c);
    *gy = *g * a->whole[band_out_at(s, t) + c];
    if (a->gate) *g /= 1.0 + exp(-(double)band_at(a->dtype, a->q, s->b * a->qb + t * a->qt + s->c0 + c));
}

/* The features of query i whose denominators are beyond float32: these denominators once more. */
static void band_mark(band_strip *s, int64_t i) {
    const band_in *a = s->a;
    int64_t t = band_mirror(a, i), at = band_sums_at(s, t / BAND_T), top = band_top_at(s, t / BAND_T);
    if (!s->exact) s->exact = tm_scratch(sizeof(double) * a->T * s->w);
    for (int c = 0; c < s->w; c++) {
        if (!band_marked(s, c, t)) continue;
        double m = a->m[top + c], num = a->num[at + c], den = a->den[at + c];
        band_exact_row(s, c, t, &m, &num, &den);
        s->exact[t * s->w + c] = m + log(den);
        s->last[c] = tm_max(s->last[c], i);
    }
}

/* What query t adds to the sums of a key of its own, and to the gradient of w. */
static void band_exact_pair(const band_strip *s, int c, int64_t t, int64_t u, double k, double v, double sums[2]) {
    const band_in *a = s->a;
    int64_t j = u - t + a->lo;
    double g, gy, e = exp(k + band_weight(s, t, u) - s->exact[t * s->w + c]);
    band_exact_query(s, c, t, &g, &gy);
    sums[0] += e * g, sums[1] -= e * gy;
    if (j < 0 || j >= a->L) return;
    if (s->dtaps)
        s->dtaps[j] += e * (g * v - gy);
    else
        s->dw[t * a->L + j] += (float)(e * (g * v - gy));
}

/* What the keys of the block get, in feature c, from queries whose denominators are beyond float32: those of the panel one by one, older ones together. */
static void band_exact_keys(const band_strip *s, int c) {
    const band_in *a = s->a;
    const double *far = s->far[c];
    for (int r = 0; r < BAND_T; r++) {
        int64_t i = s->i0 + r, u = band_mirror(a, i), out = band_out_at(s, u) + c;
        if (u >= a->T || !band_live(s, u)) continue;
        double sums[2] = {0.0, 0.0}, k = band_at(a->dtype, a->k, band_key_at(s, u) + (a->per_head ? 0 : c));
        double v = band_at(a->dtype, a->v, s->b * a->vb + u * a->vt + s->c0 + c), f = a->causal ? exp(k + far[2]) : 0.0;
        if (k <= BAND_DEAD) continue;
        if (f > 0) sums[0] = f * far[0], sums[1] = f * far[1];
        int64_t first = a->causal ? u : 0, last = a->causal ? tm_min(a->T - 1, band_mirror(a, s->i0 - a->lo)) : a->T - 1;
        for (int64_t t = first; t <= last && (!a->causal || s->last[c] >= s->i0 - a->lo); t++)
            if (band_marked(s, c, t)) band_exact_pair(s, c, t, u, k, v, sums);
        band_put(a->dtype, a->dv, out, band_at(a->dtype, a->dv, out) + sums[0]);
        if (a->per_head)
            s->dkey[i] += v * sums[0] + sums[1];
        else
            band_put(a->dtype, a->dk, out, band_at(a->dtype, a->dk, out) + (v * sums[0] + sums[1]));
    }
}

/* The queries that leave the panel join the older ones. */
static void band_exact_leave(band_strip *s, int c) {
    double *far = s->far[c];
    for (int64_t i = tm_max(0, s->i0 - s->a->lo); i < s->i0 - s->a->lo + BAND_T; i++) {
        int64_t t = band_mirror(s->a, i);
        if (t < 0 || t >= s->a->T || !band_marked(s, c, t)) continue;
        double g, gy, unit = -s->exact[t * s->w + c];
        band_exact_query(s, c, t, &g, &gy);
        if (unit > far[2]) far[0] *= exp(far[2] - unit), far[1] *= exp(far[2] - unit), far[2] = unit;
        far[0] += exp(unit - far[2]) * g, far[1] -= exp(unit - far[2]) * gy;
    }
}

/* Everything from the panel on. Between the tiles, the rows of the next block are asked for. */
TM_INLINE void band_block(const int back, band_strip *s, int64_t n, float *ps, float *o) {
    const band_in *a = s->a;
    int64_t rows = a->L + BAND_R - 1, ahead = s->i0 + BAND_T + a->hi;
    if (back) band_load_keys(s);
    for (int g = 0; g < s->ng; g++) {
        band_outside(s, n, g, ps);
        for (int r = 0; r < s->te; r += BAND_R) {
            int64_t group = a->wt ? (s->i0 + r) / BAND_R : 0;
            float scale = back ? 0.0f : s->scale[group];
            for (int j = (g * BAND_T + r) / s->ng; j < (g * BAND_T + r + BAND_R) / s->ng; j++) band_ask(back, s, ahead + j);
            band_product(ps + r * BAND_X, scale == 0.0f ? 1.0f : tm_exp(-scale), s->pack + group * rows * BAND_R, s->x + (g * s->P + r) * BAND_X, rows, o);
            if (back)
                band_backward_tile(s, g, r, o);
            else
                band_forward_tile(s, n, g, r, o);
        }
    }
    if (!back) return;
    for (int r = 0; r < s->te; r += BAND_R) band_weights_back(s, r, s->pack + (a->wt ? (s->i0 + r) / BAND_R : 0) * rows * BAND_R);
    for (int c = 0; c < s->w && s->exact; c++) {
        if (s->last[c] < 0) continue;
        band_exact_keys(s, c);
        if (a->causal) band_exact_leave(s, c);
    }
}

/* Keeps what computing rows of block n once more needs. */
static void band_keep(const band_strip *s, int64_t n) {
    const band_in *a = s->a;
    int64_t sums = band_sums_at(s, n), top = band_top_at(s, n);
    for (int c = 0; c < s->w; c++) {
        int at = c / BAND_G * BAND_X + c % BAND_G;
        const float *beyond = a->causal ? NULL : s->suffix + n * 2 * BAND_W + at;
        a->m[top + c] = a->causal ? s->old[c] : s->top[c], a->m[top + a->D + c] = s->top[c];
        a->num[sums + c] = s->was[at] + (beyond ? beyond[0] : 0.0f);
        a->den[sums + c] = s->was[at + BAND_G] + (beyond ? beyond[BAND_G] : 0.0f);
    }
}

/* A strip of features over all of time. Panel row p of the block at i0 is key i0 - lo + p. */
TM_INLINE void band_sweep(const int back, band_strip *s) {
    const band_in *a = s->a;
    float *ps = tm_scratch(sizeof(float) * BAND_T * BAND_X), *o = tm_scratch(sizeof(float) * BAND_R * BAND_X);
    memset(s->x, 0, sizeof(float) * s->ng * s->P * BAND_X);
    memset(s->outer, 0, sizeof(float) * s->P);
    memset(ps, 0, sizeof(float) * BAND_T * BAND_X);
    memset(s->sums, 0, sizeof s->sums);
    for (int c = 0; c < BAND_W; c++) s->top[c] = TM_FLOOR, s->last[c] = -1, s->far[c][0] = s->far[c][1] = 0.0, s->far[c][2] = TM_FLOOR;
    if (!a->causal) band_look_ahead(back, s);
    for (int64_t n = 0; n < a->blocks; n++) {
        s->i0 = n * BAND_T, s->te = back ? BAND_T : (int)tm_min(BAND_T, a->T - s->i0);
        memcpy(s->old, s->top, sizeof s->top), memcpy(s->was, s->sums, sizeof s->sums);
        for (int g = 0; g < s->ng && n; g++) {
            float *x = s->x + g * s->P * BAND_X;
            memmove(x, x + BAND_T * BAND_X, sizeof(float) * BAND_X * (a->L - 1));
        }
        memmove(s->outer, s->outer + BAND_T, sizeof(float) * (a->L - 1));
        if (a->causal) {
            if (back) band_recall(s, n);
            for (int r = 0; r < s->te && !back; r++) band_raise(s, s->i0 + r);
            if (n) band_rescale(back, s, a->L - 1);
        }
        for (int64_t i = n ? s->i0 + a->hi : 0; i < s->i0 + s->te + a->hi; i++) {
            int64_t p = i - s->i0 + a->lo;
            s->outer[p] = band_outer(back, s, i);
            band_load(back, s, i, s->x + p * BAND_X);
        }
        if (!back && a->r) band_keep(s, n);
        band_block(back, s, n, ps, o);
    }
    free(ps), free(o);
}

/* The scale of rows whose largest log-weight is ``most``. A whole number, so that adding it to a large key rounds nothing away. */
TM_INLINE float band_scale(float most) { return most > BAND_FREE ? (float)ceil(fmin(most, BAND_CAP)) : 0.0f; }

/* The scale of a group of rows of time. */
static float band_group_scale(const band_in *a, const float *w, int64_t i0) {
    float most = BAND_FREE;
    for (int64_t i = i0; i < i0 + (a->wt ? tm_min(BAND_R, a->T - i0) : 1); i++)
        for (int64_t j = 0; j < a->L; j++) {
            float x = w[i * a->wt + j];
            if (a->wt && (i - a->lo + j < 0 || i - a->lo + j >= a->T)) continue;
            most = x > most ? x : most;
        }
    return band_scale(most);
}

/* e^(w - scale) of a group of rows by [panel row][row]: zero outside of the band and of the sequence. In mirrored time the rows are keys, and key i has entry
   j of query i - lo + j. */
static void band_pack_group(const band_in *a, const float *w, const float *scale, int mirrored, int64_t i0, float *out) {
    memset(out, 0, sizeof(float) * (a->L + BAND_R - 1) * BAND_R);
    for (int r = 0; r < BAND_R; r++)
        for (int64_t j = 0; j < a->L; j++) {
            int64_t i = mirrored ? band_mirror(a, i0 + r) : i0 + r, u = mirrored ? i + a->lo - j : i - a->lo + j, t = mirrored ? u : i;
            if (a->wt && (i < 0 || i >= a->T || u < 0 || u >= a->T)) continue;
            float x = w[t * a->wt + j];
            x = x > BAND_CAP ? BAND_CAP : x;
            out[(j + r) * BAND_R + r] = tm_exp(x - scale[a->wt ? t / BAND_R : 0]);
        }
}

/* Packs for every slot, (batch entry, head) of w, and the scales of their rows. */
static void band_pack(band_in *a, int back, float *pack, float *scale, int threads) {
    int64_t slots = (a->wb ? a->B : 1) * (a->wh ? a->heads : 1), size = (a->L + BAND_R - 1) * BAND_R, hw = a->wh ? a->heads : 1;
    for (int second = 0; second < 2; second++) {
#pragma omp parallel for schedule(static) num_threads(threads) if (slots * a->groups > 64 && threads > 1)
        for (int64_t i = 0; i < slots * a->groups; i++) {
            int64_t slot = i / a->groups, i0 = i % a->groups * BAND_R;
            const float *w = a->w + slot / hw * a->wb + slot % hw * a->wh;
            if (second)
                band_pack_group(a, w, scale + slot * a->groups, back, i0, pack + i * size);
            else
                scale[i] = a->wt && i0 >= a->T ? 0.0f : band_group_scale(a, w, i0);
        }
    }
    a->pack = pack, a->scale = scale;
}

/* Features in a strip: narrower where there would be few strips. Sums over features depend on it, so it depends on shapes only. */
static int band_width(int64_t B, int64_t heads, int64_t per) {
    int w = BAND_W;
    while (w > 32 && B * heads * tm_ceil(per, w) < 8) w /= 2;
    return w;
}

/* The work on features c0.. of one batch entry and head. */
static void band_strip_run(const band_in *a, int back, int64_t b, int64_t head, int64_t c0, int w, float *dw, double *dtaps, double *dkey) {
    band_strip *s = tm_scratch(sizeof(band_strip));
    s->a = a, s->b = b, s->head = head, s->c0 = c0, s->w = w;
    s->ng = (int)tm_ceil(w, BAND_G);
    s->P = BAND_T + a->L - 1 + BAND_V + BAND_R; /* the last tiles of band_weights_back read beyond the panel */
    s->dw = dw, s->dtaps = dtaps, s->dkey = dkey, s->exact = NULL;
    int64_t slot = (a->wb ? b : 0) * (a->wh ? a->heads : 1) + (a->wh ? head : 0);
    s->pack = a->pack + slot * a->groups * (a->L + BAND_R - 1) * BAND_R, s->scale = a->scale + slot * a->groups;
    s->x = tm_scratch(sizeof(float) * s->ng * s->P * BAND_X);
    s->outer = tm_scratch(sizeof(float) * s->P);
    s->keys = back ? tm_scratch(sizeof(float) * s->ng * BAND_T * BAND_X) : NULL;
    s->suffix = a->causal ? NULL : tm_scratch(sizeof(float) * 2 * BAND_W * a->blocks);
    if (back)
        band_sweep(1, s);
    else
        band_sweep(0, s);
    free(s->x), free(s->outer), free(s->keys), free(s->suffix), free(s->exact), free(s);
}

static band_in band_of(int dtype, int gate, int causal, int per_head, const int64_t *n) {
    band_in a = {.dtype = dtype, .gate = gate, .causal = causal, .per_head = per_head};
    a.B = n[0], a.T = n[1], a.D = n[2], a.heads = (int)n[3], a.L = n[4];
    a.wb = n[5], a.wh = n[6], a.wt = n[7], a.qb = n[8], a.qt = n[9], a.kb = n[10], a.kt = n[11], a.vb = n[12], a.vt = n[13], a.gb = n[14], a.gt = n[15];
    a.lo = causal ? a.L - 1 : a.L / 2, a.hi = a.L - 1 - a.lo;
    a.blocks = tm_ceil(a.T, BAND_T), a.groups = a.wt ? a.blocks * (BAND_T / BAND_R) : 1;
    a.width = band_width(a.B, a.heads, a.D / a.heads);
    return a;
}

static size_t band_pack_size(const band_in *a) { return sizeof(float) * (a->wb ? a->B : 1) * (a->wh ? a->heads : 1) * a->groups; }

/* Where things stand in what is kept for the backward pass, in this order: 1 / denominators, sums before blocks and, in half precision, the output. */
static void band_kept(band_in *a, float *saved, void *y) {
    int64_t size = a->B * a->T * a->D, small = a->B * a->blocks * a->D;
    a->r = saved, a->num = saved + size, a->den = a->num + small, a->m = a->den + small;
    a->whole = a->dtype == TM_F32 ? y : a->m + small + a->B * a->D;
}

/* y (B, T, D); saved as band_kept has it, or NULL. n: B, T, D, heads, L; element strides of w along batch, head and time, 0 where it does not vary; of q, k, v and g
   along batch and time. Every head is swept alone; without heads of keys or weights there is one. What is not finite shows in the rows of its tile: where ``odd``
   is set, the caller takes it out and calls again. */
TM_EXPORT(band_forward)(int dtype, int gate, int causal, int per_head, const void *q, const void *k, const void *v, const float *w, const uint8_t *mask,
                        void *y, float *saved, const int64_t *n, int threads, int *odd) {
    band_in a = band_of(dtype, gate, causal, per_head, n);
    int64_t per = a.D / a.heads, strips = tm_ceil(per, a.width);
    a.q = q, a.k = k, a.v = v, a.w = w, a.mask = mask, a.y = y, a.odd = odd;
    if (saved) band_kept(&a, saved, y);
    float *pack = tm_scratch(band_pack_size(&a) * (a.L + BAND_R - 1) * BAND_R), *scale = tm_scratch(band_pack_size(&a));
    band_pack(&a, 0, pack, scale, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (a.B * a.heads * strips > 1 && threads > 1)
    for (int64_t i = 0; i < a.B * a.heads * strips; i++) {
        int64_t head = i / strips % a.heads, from = i % strips * a.width;
        band_strip_run(&a, 0, i / strips / a.heads, head, head * per + from, (int)tm_min(a.width, per - from), NULL, NULL, NULL);
    }
    free(pack), free(scale);
}

/* Strips whose gradients of w are added up one after the other: a share of the items of a slot, (batch entry or all, head or all). */
typedef struct {
    int64_t items, parts, slots;
} band_shares;

static band_shares band_share(const band_in *a, int64_t strips) {
    int64_t slots = a->wb ? a->B : 1, items = (a->wb ? 1 : a->B) * strips, room = tm_max(1, a->B * a->D / (8 * slots * a->L));
    return (band_shares){items, tm_min(items, tm_max(tm_max(1, 8 / slots), tm_min(64 / tm_min(64, slots), room))), slots};
}

/* Gradients with one row of log-weights per token: every share of the strips has its own copy, added up in order. */
static void band_backward_rows(const band_in *a, int64_t strips, float *dw, int threads) {
    band_shares sh = band_share(a, strips);
    int64_t size = a->T * a->L;
    float *parts = tm_scratch(sizeof(float) * sh.slots * sh.parts * size);
#pragma omp parallel for schedule(static) num_threads(threads) if (sh.slots * sh.parts > 1 && threads > 1)
    for (int64_t i = 0; i < sh.slots * sh.parts; i++) {
        float *mine = parts + i * size;
        int64_t slot = i / sh.parts, part = i % sh.parts;
        memset(mine, 0, sizeof(float) * size);
        for (int64_t j = sh.items * part / sh.parts; j < sh.items * (part + 1) / sh.parts; j++) {
            int64_t from = j % strips * a->width;
            band_strip_run(a, 1, a->wb ? slot : j / strips, 0, from, (int)tm_min(a->width, a->D - from), mine, NULL, NULL);
        }
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < sh.slots * a->T; t++) {
        const float *p = parts + (t / a->T * sh.parts * a->T + t % a->T) * a->L;
        for (int64_t j = 0; j < a->L; j++) {
            double sum = 0.0;
            for (int64_t i = 0; i < sh.parts; i++) sum += p[i * size + j];
            dw[t * a->L + j] = a->w[t / a->T * a->wb + t % a->T * a->wt + j] > BAND_CAP ? 0.0f : (float)sum;
        }
    }
    free(parts);
}

/* Gradients with one filter per head: (batch entry, head) by itself, its strips in order. */
static void band_backward_taps(const band_in *a, int64_t strips, float *dw, int threads) {
    int64_t per = a->D / a->heads, items = a->B * a->heads;
    double *taps = tm_scratch(sizeof(double) * items * a->L);
    memset(taps, 0, sizeof(double) * items * a->L);
#pragma omp parallel for schedule(static) num_threads(threads) if (items > 1 && threads > 1)
    for (int64_t i = 0; i < items; i++) {
        int64_t b = i / a->heads, head = i % a->heads;
        double *dkey = a->per_head ? tm_scratch(sizeof(double) * a->blocks * BAND_T) : NULL;
        if (dkey) memset(dkey, 0, sizeof(double) * a->blocks * BAND_T);
        for (int64_t j = 0; j < strips; j++)
            band_strip_run(a, 1, b, head, head * per + j * a->width, (int)tm_min(a->width, per - j * a->width), NULL, taps + i * a->L, dkey);
        for (int64_t t = 0; t < a->T && dkey; t++) band_put(a->dtype, a->dk, (b * a->T + t) * a->heads + head, dkey[band_mirror(a, t)]);
        free(dkey);
    }
    int64_t bw = a->wb ? a->B : 1, hw = a->wh ? a->heads : 1;
    for (int64_t slot = 0; slot < bw * hw; slot++)
        for (int64_t j = 0; j < a->L; j++) {
            double sum = 0.0;
            for (int64_t i = 0; i < items; i++)
                if ((!a->wb || i / a->heads == slot / hw) && (!a->wh || i % a->heads == slot % hw)) sum += taps[i * a->L + j];
            dw[slot * a->L + j] = a->w[slot / hw * a->wb + slot % hw * a->wh + j] > BAND_CAP ? 0.0f : (float)sum;
        }
    free(taps);
}

/* dq, dv (B, T, D), dk as k, contiguous; dw contiguous as w without its broadcast dimensions. With rows of w there is one head. */
TM_EXPORT(band_backward)(int dtype, int gate, int causal, int per_head, const void *q, const void *k, const void *v, const float *w, const uint8_t *mask,
                         const void *y, const void *g, const float *saved, void *dq, void *dk, void *dv, float *dw, const int64_t *n, int threads) {
    band_in a = band_of(dtype, gate, causal, per_head, n);
    int64_t strips = tm_ceil(a.D / a.heads, a.width);
    a.q = q, a.k = k, a.v = v, a.w = w, a.mask = mask, a.g = g, a.dq = dq, a.dk = dk, a.dv = dv;
    band_kept(&a, (float *)saved, (void *)y);
    float *pack = tm_scratch(band_pack_size(&a) * (a.L + BAND_R - 1) * BAND_R), *scale = tm_scratch(band_pack_size(&a));
    band_pack(&a, 1, pack, scale, threads);
    if (a.wt)
        band_backward_rows(&a, strips, dw, threads);
    else
        band_backward_taps(&a, strips, dw, threads);
    free(pack), free(scale);
}
