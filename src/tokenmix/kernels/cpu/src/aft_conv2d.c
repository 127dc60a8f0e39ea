/* AFT-conv on grids (AFT, Eq. 6): y_t = gate(q_t) * sum_s e^{k_s + w_{s-t}} v_s / sum_s e^{k_s + w_{s-t}}, one key and one filter per head, w = 0 outside of
   the filter, and for the pairs of which one is a prefix token.

   Every query sees every key, so one maximum per head and row of the batch serves all. Weights that span less than e^60, which the caller sees to, cannot
   bring back what float32 loses 87 below it. With x = e^{k - m} v, or e^{k - m} for the denominator, the mixing is linear in x: channel by channel a
   correlation with e^w, plus what lies outside of the window: rows above and below, and in the rows between the cells to the left and right, each a
   prefix or suffix sum. All terms are positive, none is a difference.

   A strip is TM_VL channels of one row of the batch: a cell is one vector, the whole grid a plane that fits the cache, and a filter a table of vectors, so
   that a strip may cross heads. A row of the grid is computed in register tiles of up to CONV_R cells; at the borders a tile starts or ends inside of its
   code, so that no tap is multiplied with nothing. Denominators are strips of heads.

   Backward: with G_t = g_t gate_t / D_t, [dX | dE] = E^T [G | -sum over the head's channels of G y], the same mixing with the filter turned around:
       dv = e^{k - m} dX,  dk = sum over the channels of v dv + e^{k - m} dE,  dw = e^w sum over the pairs of a tap of (x_s G_t),
   the last over strips, a share of the batch at a time, in float64. y gate is the output: nothing but the denominators is kept for the backward pass. */
#include "tm.h"

#define CONV_R 14      /* most cells in a register tile, most taps in one of the filter's gradient */
#define CONV_TERMS 512 /* products summed before they join the sum of sums; of the filter's gradient a quarter */
#define CONV_RUN 64    /* the same for prefix sums */
#define CONV_AHEAD 8   /* tokens asked for ahead of their use */
#define CONV_ITEMS 96  /* shares of the batch are made until there are this many strips */

typedef struct {
    int dtype, gate, transposed;
    const void *q, *k, *v, *g, *y;
    const uint8_t *mask;
    const float *w, *table;
    int *odd;           /* set where an output is not finite */
    float *e, *inverse; /* e^{k - m} and 1 / denominator, (B, T, stride) */
    int64_t B, T, D, heads, per, P, H, W, s, half, strips, dens, stride;
    int64_t qb, qt, kb, kt, vb, vt, gb, gt;
} conv2d_in;

/* TM_VL channels from c0, n of which there are, of head first and those after it. */
typedef struct {
    int64_t c0, first;
    int n;
    int32_t head[TM_VL];
} conv2d_strip;

static conv2d_strip conv2d_lanes(int64_t i, int64_t all, int64_t per) {
    conv2d_strip s = {.c0 = i * TM_VL, .first = i * TM_VL / per};
    s.n = (int)tm_min(TM_VL, all - s.c0);
    for (int l = 0; l < TM_VL; l++) s.head[l] = (int32_t)((s.c0 + (l < s.n ? l : s.n - 1)) / per - s.first);
    return s;
}

/* n numbers of a row, zeros after them. */
TM_INLINE tm_vf conv2d_get(const int dtype, const void *a, int64_t at, int n) {
    float x[TM_VL] __attribute__((aligned(64)));
    if (n == TM_VL && dtype == TM_F32) return *(const tm_vfu *)((const float *)a + at);
    if (n == TM_VL && dtype == TM_BF16) {
        for (int c = 0; c < TM_VL; c++) x[c] = tm_from_bf16(((const uint16_t *)a)[at + c]);
        return *(tm_vf *)x;
    }
    memset(x, 0, sizeof x);
    if (dtype == TM_F32)
        memcpy(x, (const float *)a + at, sizeof(float) * n);
    else
        tm_widen(dtype, (const uint16_t *)a + at, x, n);
    return *(tm_vf *)x;
}

TM_INLINE void conv2d_put(const int dtype, void *a, int64_t at, int n, tm_vf v) {
    float x[TM_VL] __attribute__((aligned(64)));
    if (n == TM_VL && dtype == TM_F32) {
        *(tm_vfu *)((float *)a + at) = v;
        return;
    }
    *(tm_vf *)x = v;
    if (dtype == TM_F32)
        memcpy((float *)a + at, x, sizeof(float) * n);
    else
        tm_round(dtype, (uint16_t *)a + at, x, n);
}

/* What a row of numbers per head is for each lane; the row is padded so that TM_VL can be read from any head. */
TM_INLINE tm_vf conv2d_spread(const conv2d_strip *s, const float *row) {
#if defined(__clang__)
    tm_vf x;
    for (int l = 0; l < TM_VL; l++) x[l] = row[s->first + s->head[l]];
    return x;
#else
    typedef int32_t lanes __attribute__((vector_size(4 * TM_VL), aligned(4), may_alias));
    return __builtin_shuffle((tm_vf) * (const tm_vfu *)(row + s->first), *(const lanes *)s->head);
#endif
}

TM_INLINE tm_vf conv2d_sigmoid(tm_vf x) {
    float a[TM_VL] __attribute__((aligned(64)));
    *(tm_vf *)a = x;
    TM_IVDEP
    for (int c = 0; c < TM_VL; c++) a[c] = tm_sigmoid(a[c]);
    return *(tm_vf *)a;
}

TM_INLINE int conv2d_live(const conv2d_in *a, int64_t b, int64_t t) { return !a->mask || a->mask[b * a->T + t]; }

TM_INLINE void conv2d_ask(const conv2d_in *a, const void *p, int64_t sb, int64_t st, int64_t b, int64_t t, int64_t c0, int n) {
    if (t + CONV_AHEAD < a->T) tm_ahead(a->dtype, p, b * sb + (t + CONV_AHEAD) * st + c0, n);
}

#define CONV_EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)
#define CONV_BACK(X) X(13) X(12) X(11) X(10) X(9) X(8) X(7) X(6) X(5) X(4) X(3) X(2) X(1) X(0)
/* acc[r] += y * x[r], from r = lo, or up to r < hi. */
#define CONV_FROM(r) \
    case r: \
        if (r < R) acc[r] += y * x[r]; /* fall through */
#define CONV_TO(r) \
    case r + 1: \
        if (r < R) acc[r] += y * x[r]; /* fall through */
#define CONV_ALL(r) \
    if (r < R) acc[r] += y * x[r];
/* The same without loops, which would put the tile into memory. */
#define CONV_SET(r) \
    if (r < R) acc[r] = start;
#define CONV_ADD(r) \
    if (r < R) acc[r] += x[r];
#define CONV_OUT(r) \
    if (r < R) sums[r] = acc[r];

/* Cells c0 .. c0 + R of row i: start + sum over the rows from ``from`` to ``to`` of the window of w x, added to ``out`` but for the first of these. */
TM_INLINE void conv2d_tile(const int R, const conv2d_in *a, const tm_vf *restrict w, const tm_vf *restrict plane, const tm_vf *restrict side, tm_vf start,
                           int64_t i, int64_t c0, int64_t from, int64_t to, int first, tm_vf *restrict out) {
    const int64_t turn = a->transposed ? -1 : 1, W = a->W, last = tm_min(a->half, W - 1 - c0), whole = tm_min(last, W - R - c0);
    tm_vf acc[CONV_R];
    CONV_EACH(CONV_SET)
    for (int64_t u = from; u < to; u++) {
        const tm_vf *row = plane + u * W + c0, *taps = w + turn * (u - i) * a->s;
        int64_t d = -tm_min(a->half, c0 + R - 1);
        if (side) {
            const tm_vf *x = side + u * W + c0;
            CONV_EACH(CONV_ADD)
        }
        for (; d < -c0; d++) {
            const tm_vf y = taps[turn * d], *x = row + d;
            switch (-c0 - d) { CONV_EACH(CONV_FROM) }
        }
        for (; d <= whole; d++) {
            const tm_vf y = taps[turn * d], *x = row + d;
            CONV_EACH(CONV_ALL)
        }
        for (; d <= last; d++) {
            const tm_vf y = taps[turn * d], *x = row + d;
            switch (W - c0 - d) { CONV_BACK(CONV_TO) }
        }
    }
    tm_vf *sums = out + i * W + c0;
    if (!first) {
        const tm_vf *x = sums;
        CONV_EACH(CONV_ADD)
    }
    CONV_EACH(CONV_OUT)
}

/* Taps d0 .. d0 + R of row ``dy`` of the filter: sum over rows i of the grid and cells c of g[i][c] x[i + dy][c + d]. */
TM_INLINE void conv2d_tap_tile(const int R, const conv2d_in *a, const tm_vf *restrict plane, const tm_vf *restrict grads, int64_t dy, int64_t d0, int64_t from,
                               int64_t to, double *restrict total) {
    const int64_t W = a->W;
    const tm_vf start = {0};
    tm_vf acc[CONV_R], sums[CONV_R];
    CONV_EACH(CONV_SET)
    for (int64_t i = from; i < to; i++) {
        const tm_vf *row = plane + (i + dy) * W + d0, *g = grads + i * W;
        int64_t c = tm_max(0, 1 - d0 - R), end = tm_min(W, W - d0);
        for (; c < -d0 && c < end; c++) {
            const tm_vf y = g[c], *x = row + c;
            switch (-d0 - c) { CONV_EACH(CONV_FROM) }
        }
        for (; c <= W - d0 - R && c < end; c++) {
            const tm_vf y = g[c], *x = row + c;
            CONV_EACH(CONV_ALL)
        }
        for (; c < end; c++) {
            const tm_vf y = g[c], *x = row + c;
            switch (W - d0 - c) { CONV_BACK(CONV_TO) }
        }
    }
    CONV_EACH(CONV_OUT)
    for (int i = 0; i < R * TM_VL; i++) total[i] += (double)((const float *)sums)[i];
}

#define CONV_SIZED(f, n, ...) \
    switch (n) { \
    case 1: f(1, __VA_ARGS__); break; \
    case 2: f(2, __VA_ARGS__); break; \
    case 3: f(3, __VA_ARGS__); break; \
    case 4: f(4, __VA_ARGS__); break; \
    case 5: f(5, __VA_ARGS__); break; \
    case 6: f(6, __VA_ARGS__); break; \
    case 7: f(7, __VA_ARGS__); break; \
    case 8: f(8, __VA_ARGS__); break; \
    case 9: f(9, __VA_ARGS__); break; \
    case 10: f(10, __VA_ARGS__); break; \
    case 11: f(11, __VA_ARGS__); break; \
    case 12: f(12, __VA_ARGS__); break; \
    case 13: f(13, __VA_ARGS__); break; \
    default: f(14, __VA_ARGS__); break; \
    }

/* Not inlined: beside other vectors in use a tile would not fit the registers. */
__attribute__((noinline)) static void conv2d_cells(int64_t n, const conv2d_in *a, const tm_vf *w, const tm_vf *plane, const tm_vf *side, tm_vf start,
                                                   int64_t i, int64_t c0, int64_t from, int64_t to, int first, tm_vf *out) {
    CONV_SIZED(conv2d_tile, n, a, w, plane, side, start, i, c0, from, to, first, out)
}

__attribute__((noinline)) static void conv2d_taps(int64_t n, const conv2d_in *a, const tm_vf *plane, const tm_vf *grads, int64_t dy, int64_t d0, int64_t from,
                                                  int64_t to, double *total) {
    CONV_SIZED(conv2d_tap_tile, n, a, plane, grads, dy, d0, from, to, total)
}

/* sums[i] = x[0] + .. + x[i - 1] for i up to n, from the end where step is -1; in two levels. */
TM_INLINE void conv2d_prefix(const tm_vf *x, int64_t step, int64_t n, tm_vf *sums) {
    tm_vf total = {0}, run = {0};
    for (int64_t i = 0; i < n; i++) {
        sums[i] = total + run;
        run += x[i * step];
        if (i % CONV_RUN == CONV_RUN - 1) total += run, run = (tm_vf){0};
    }
    sums[n] = total + run;
}

/* For each cell the sum of the cells of its row outside of the window, and the sums of rows. */
static void conv2d_sides(const conv2d_in *a, const tm_vf *plane, tm_vf *side, tm_vf *line, tm_vf *rows) {
    int64_t W = a->W, n = W - a->half - 1; /* the cells that have some */
    for (int64_t i = 0; i < a->H; i++) {
        const tm_vf *x = plane + i * W;
        tm_vf *to = side + i * W;
        conv2d_prefix(x, 1, W, line);
        rows[i] = line[W];
        if (n <= 0) continue;
        for (int64_t c = 0; c < W; c++) to[c] = c > a->half ? line[c - a->half] : (tm_vf){0};
        conv2d_prefix(x + W - 1, -1, n, line);
        for (int64_t c = 0; c < n; c++) to[c] += line[n - c];
    }
}

/* out = E x, or E^T x: vectors of the prefix tokens, then of the grid. */
static void conv2d_mix(const conv2d_in *a, const float *table, const tm_vf *x, tm_vf *out, tm_vf *side, tm_vf *line) {
    int64_t H = a->H, W = a->W, P = a->P, half = a->half, tiles = tm_ceil(W, CONV_R), group = tm_max(1, CONV_TERMS / a->s);
    const tm_vf *w = (const tm_vf *)table + half * a->s + half, *plane = x + P;
    tm_vf *rows = line + tm_max(W, tm_max(H, P)) + 1, *above = rows + H, *below = above + H + 1;
    conv2d_sides(a, plane, side, line, rows);
    conv2d_prefix(rows, 1, H, above), conv2d_prefix(rows + H - 1, -1, H, below);
    conv2d_prefix(x, 1, P, line);
    tm_vf early = line[P];
    for (int64_t i = 0; i < P; i++) out[i] = early + above[H];
    for (int64_t i = 0; i < H; i++) {
        int64_t from = tm_max(0, i - half), to = tm_min(H, i + half + 1);
        tm_vf start = early + above[from] + below[H - to];
        for (int64_t u = from; u < to; u += group)
            for (int64_t j = 0; j < tiles; j++) {
                int64_t c0 = W * j / tiles, n = W * (j + 1) / tiles - c0;
                conv2d_cells(n, a, w, plane, W > half + 1 ? side : NULL, u == from ? start : (tm_vf){0}, i, c0, u, tm_min(to, u + group), u == from, out + P);
            }
    }
}

/* Taps first .. end of a row of the filter, in pieces; of a piece with taps on both sides no cell may lack cells on both. */
static void conv2d_tap_row(const conv2d_in *a, const tm_vf *x, const tm_vf *g, int64_t dy, int64_t first, int64_t end, double *total) {
    int64_t top = tm_max(0, -dy), bottom = tm_min(a->H, a->H - dy), rows = tm_max(1, CONV_TERMS / 4 / a->W), pieces = tm_ceil(end - first, CONV_R);
    for (int64_t j = 0; j < pieces; j++) {
        int64_t d0 = first + (end - first) * j / pieces, d1 = first + (end - first) * (j + 1) / pieces;
        double *to = total + ((dy + a->half) * a->s + d0 + a->half) * TM_VL;
        for (int64_t i = top; i < bottom; i += rows) conv2d_taps(d1 - d0, a, x + a->P, g + a->P, dy, d0, i, tm_min(bottom, i + rows), to);
    }
}

/* The sums over the pairs of every tap, added to ``total`` (taps, TM_VL). */
static void conv2d_weigh(const conv2d_in *a, const tm_vf *x, const tm_vf *g, double *total) {
    int64_t down = tm_min(a->half, a->H - 1), across = tm_min(a->half, a->W - 1);
    for (int64_t dy = -down; dy <= down; dy++) {
        if (a->s <= CONV_R && a->W >= a->s)
            conv2d_tap_row(a, x, g, dy, -across, across + 1, total);
        else
            conv2d_tap_row(a, x, g, dy, -across, 1, total), conv2d_tap_row(a, x, g, dy, 1, across + 1, total);
    }
}

/* e^w as vectors, a table for each strip of channels and then for each of heads. */
static void conv2d_tables(const conv2d_in *a, float *table, int threads) {
    int64_t taps = a->s * a->s;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < a->strips + a->dens; i++) {
        conv2d_strip s = i < a->strips ? conv2d_lanes(i, a->D, a->per) : conv2d_lanes(i - a->strips, a->heads, 1);
        for (int64_t j = 0; j < taps; j++)
            for (int l = 0; l < TM_VL; l++) table[(i * taps + j) * TM_VL + l] = tm_exp(a->w[(s.first + s.head[l]) * taps + j]);
    }
}

/* Memory for one strip: planes, and the lines of conv2d_mix. */
typedef struct {
    tm_vf *x, *g, *out, *side, *line;
} conv2d_room;

static conv2d_room conv2d_open(const conv2d_in *a) {
    int64_t cells = a->H * a->W, lines = tm_max(a->W, tm_max(a->H, a->P)) + 3 * a->H + 4;
    tm_vf *p = tm_scratch(sizeof(tm_vf) * (size_t)(3 * a->T + cells + lines));
    return (conv2d_room){p, p + a->T, p + 2 * a->T, p + 3 * a->T, p + 3 * a->T + cells};
}

/* e^{k - m} of a strip of heads, into the plane and the rows that strips of channels read. */
static void conv2d_keys(const conv2d_in *a, int64_t b, const conv2d_strip *s, tm_vf *x) {
    float top[TM_VL], k[TM_VL] __attribute__((aligned(64)));
    for (int l = 0; l < TM_VL; l++) top[l] = TM_FLOOR;
    for (int64_t t = 0; t < a->T; t++) {
        if (!conv2d_live(a, b, t)) continue;
        *(tm_vf *)k = conv2d_get(a->dtype, a->k, b * a->kb + t * a->kt + s->c0, s->n);
        for (int l = 0; l < TM_VL; l++) top[l] = k[l] > top[l] ? k[l] : top[l];
    }
    for (int64_t t = 0; t < a->T; t++) {
        x[t] = (tm_vf){0};
        if (conv2d_live(a, b, t)) {
            *(tm_vf *)k = conv2d_get(a->dtype, a->k, b * a->kb + t * a->kt + s->c0, s->n);
            TM_IVDEP
            for (int l = 0; l < TM_VL; l++) k[l] = tm_exp_neg(k[l] - top[l]);
            x[t] = *(tm_vf *)k;
        }
        *(tm_vfu *)(a->e + (b * a->T + t) * a->stride + s->c0) = x[t];
    }
}

/* e^{k - m} v of a strip of channels. */
static void conv2d_values(const conv2d_in *a, int64_t b, const conv2d_strip *s, tm_vf *x) {
    for (int64_t t = 0; t < a->T; t++) {
        conv2d_ask(a, a->v, a->vb, a->vt, b, t, s->c0, s->n);
        if (conv2d_live(a, b, t))
            x[t] = conv2d_spread(s, a->e + (b * a->T + t) * a->stride) * conv2d_get(a->dtype, a->v, b * a->vb + t * a->vt + s->c0, s->n);
        else
            x[t] = (tm_vf){0};
    }
}

static void conv2d_denominators(const conv2d_in *a, int64_t b, int64_t i, float *saved) {
    conv2d_strip s = conv2d_lanes(i, a->heads, 1);
    conv2d_room m = conv2d_open(a);
    conv2d_keys(a, b, &s, m.x);
    conv2d_mix(a, a->table + (a->strips + i) * a->s * a->s * TM_VL, m.x, m.out, m.side, m.line);
    for (int64_t t = 0; t < a->T; t++) {
        tm_vf den = m.out[t];
        for (int l = 0; l < TM_VL; l++) den[l] = 1.0f / (den[l] == 0 ? 1.0f : den[l]);
        *(tm_vfu *)(a->inverse + (b * a->T + t) * a->stride + s.c0) = den;
        if (saved) conv2d_put(TM_F32, saved, (b * a->T + t) * a->heads + s.c0, s.n, den);
    }
    free(m.x);
}

TM_INLINE void conv2d_outputs(const int dtype, const int gate, const conv2d_in *a, int64_t b, const conv2d_strip *s, const tm_vf *sums, void *y) {
    tm_vf none = {0}; /* NaN where an output is not finite */
    for (int64_t t = 0; t < a->T; t++) {
        tm_vf value = sums[t] * conv2d_spread(s, a->inverse + (b * a->T + t) * a->stride);
        if (gate) {
            conv2d_ask(a, a->q, a->qb, a->qt, b, t, s->c0, s->n);
            value *= conv2d_sigmoid(conv2d_get(dtype, a->q, b * a->qb + t * a->qt + s->c0, s->n));
        }
        none += value * 0.0f;
        conv2d_put(dtype, y, (b * a->T + t) * a->D + s->c0, s->n, value);
    }
    for (int l = 0; l < s->n; l++) tm_tell(tm_odd(none[l]), a->odd);
}

static void conv2d_channels(const conv2d_in *a, int64_t b, int64_t i, void *y) {
    conv2d_strip s = conv2d_lanes(i, a->D, a->per);
    conv2d_room m = conv2d_open(a);
    conv2d_values(a, b, &s, m.x);
    conv2d_mix(a, a->table + i * a->s * a->s * TM_VL, m.x, m.out, m.side, m.line);
    if (a->gate)
        conv2d_outputs(a->dtype, 1, a, b, &s, m.out, y);
    else
        conv2d_outputs(a->dtype, 0, a, b, &s, m.out, y);
    free(m.x);
}

static conv2d_in conv2d_of(int dtype, int gate, const int64_t *n) {
    conv2d_in a = {.dtype = dtype, .gate = gate};
    a.B = n[0], a.D = n[1], a.heads = n[2], a.P = n[3], a.H = n[4], a.W = n[5], a.s = n[6];
    a.qb = n[7], a.qt = n[8], a.kb = n[9], a.kt = n[10], a.vb = n[11], a.vt = n[12], a.gb = n[13], a.gt = n[14];
    a.T = a.P + a.H * a.W, a.per = a.D / a.heads, a.half = a.s / 2;
    a.strips = tm_ceil(a.D, TM_VL), a.dens = tm_ceil(a.heads, TM_VL), a.stride = (a.dens + 1) * TM_VL;
    return a;
}

/* The scratch that all strips share: rows of numbers per head, ``each`` of them, and tables of weights after these. */
static float *conv2d_shared(conv2d_in *a, int each, int threads) {
    int64_t rows = a->B * a->T * a->stride;
    float *p = tm_scratch(sizeof(float) * (size_t)(each * rows + (a->strips + a->dens) * a->s * a->s * TM_VL));
    memset(p, 0, sizeof(float) * (size_t)(each * rows)); /* what pads the rows is read, though never used */
    conv2d_tables(a, p + each * rows, threads);
    a->e = p, a->inverse = p + rows, a->table = p + each * rows;
    return p;
}

/* y (B, T, D); saved (B, T, heads), 1 / denominator, or NULL. n: B, D, heads, prefix, grid, filter size; element strides of q, k, v and g along batch and
   time. */
TM_EXPORT(conv2d_forward)(int dtype, int gate, const void *q, const void *k, const void *v, const float *w, const uint8_t *mask, void *y, float *saved,
                          const int64_t *n, int threads, int *odd) {
    conv2d_in a = conv2d_of(dtype, gate, n);
    a.q = q, a.k = k, a.v = v, a.w = w, a.mask = mask, a.odd = odd;
    float *shared = conv2d_shared(&a, 2, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (a.B * a.dens > 1 && threads > 1)
    for (int64_t i = 0; i < a.B * a.dens; i++) conv2d_denominators(&a, i / a.dens, i % a.dens, saved);
#pragma omp parallel for schedule(static) num_threads(threads) if (a.B * a.strips > 1 && threads > 1)
    for (int64_t i = 0; i < a.B * a.strips; i++) conv2d_channels(&a, i / a.strips, i % a.strips, y);
    free(shared);
}

/* out[l] = sum over the channels of head l of x z, for n heads. */
TM_INLINE void conv2d_dots(const int tx, const void *x, int64_t xt, const int tz, const void *z, int64_t zt, int64_t per, int n, float *out) {
    float product[TM_VL * TM_VL] __attribute__((aligned(64)));
    if (per >= TM_VL) {
        for (int l = 0; l < n; l++, xt += per, zt += per) {
            tm_vf sum = {0};
            for (int64_t c = 0; c < per; c += TM_VL) {
                int w = (int)tm_min(TM_VL, per - c);
                sum += conv2d_get(tx, x, xt + c, w) * conv2d_get(tz, z, zt + c, w);
            }
            out[l] = 0.0f;
            for (int i = 0; i < TM_VL; i++) out[l] += sum[i];
        }
        return;
    }
    for (int64_t c = 0; c < n * per; c += TM_VL) {
        int w = (int)tm_min(TM_VL, n * per - c);
        *(tm_vf *)(product + c) = conv2d_get(tx, x, xt + c, w) * conv2d_get(tz, z, zt + c, w);
    }
    for (int l = 0; l < n; l++) {
        out[l] = 0.0f;
        for (int64_t j = 0; j < per; j++) out[l] += product[l * per + j];
    }
}

/* A strip of heads, backward: what denominators give to keys, to ``dkey`` (B, T, stride), and to weights. */
static void conv2d_heads_back(const conv2d_in *a, int64_t b, int64_t i, const conv2d_room *m, const float *saved, float *dkey, double *taps) {
    conv2d_strip s = conv2d_lanes(i, a->heads, 1);
    conv2d_keys(a, b, &s, m->x);
    for (int64_t t = 0; t < a->T; t++) {
        float dots[TM_VL] __attribute__((aligned(64))) = {0};
        int64_t row = b * a->T + t, c = s.c0 * a->per;
        tm_vf inverse = conv2d_get(TM_F32, saved, row * a->heads + s.c0, s.n);
        *(tm_vfu *)(a->inverse + row * a->stride + s.c0) = inverse;
        conv2d_dots(a->dtype, a->g, b * a->gb + t * a->gt + c, a->dtype, a->y, row * a->D + c, a->per, s.n, dots);
        m->g[t] = *(tm_vf *)dots * -inverse;
    }
    conv2d_mix(a, a->table + (a->strips + i) * a->s * a->s * TM_VL, m->g, m->out, m->side, m->line);
    for (int64_t t = 0; t < a->T; t++) *(tm_vfu *)(dkey + (b * a->T + t) * a->stride + s.c0) = m->x[t] * m->out[t];
    conv2d_weigh(a, m->x, m->g, taps);
}

/* g gate / denominator of a strip of channels, and dq. */
TM_INLINE void conv2d_gradients(const int dtype, const int gate, const conv2d_in *a, int64_t b, const conv2d_strip *s, tm_vf *to, void *dq) {
    for (int64_t t = 0; t < a->T; t++) {
        int64_t at = (b * a->T + t) * a->D + s->c0;
        conv2d_ask(a, a->g, a->gb, a->gt, b, t, s->c0, s->n);
        tm_vf g = conv2d_get(dtype, a->g, b * a->gb + t * a->gt + s->c0, s->n);
        if (gate) {
            conv2d_ask(a, a->q, a->qb, a->qt, b, t, s->c0, s->n), conv2d_ask(a, a->y, a->T * a->D, a->D, b, t, s->c0, s->n);
            tm_vf open = conv2d_sigmoid(conv2d_get(dtype, a->q, b * a->qb + t * a->qt + s->c0, s->n));
            conv2d_put(dtype, dq, at, s->n, g * conv2d_get(dtype, a->y, at, s->n) * (1.0f - open));
            g *= open;
        }
        to[t] = g * conv2d_spread(s, a->inverse + (b * a->T + t) * a->stride);
    }
}

/* A strip of channels, backward: dq, dv in float32 and the gradient of weights. */
static void conv2d_channels_back(const conv2d_in *a, int64_t b, int64_t i, const conv2d_room *m, void *dq, float *dv, double *taps) {
    conv2d_strip s = conv2d_lanes(i, a->D, a->per);
    if (a->gate)
        conv2d_gradients(a->dtype, 1, a, b, &s, m->g, dq);
    else
        conv2d_gradients(a->dtype, 0, a, b, &s, m->g, dq);
    conv2d_values(a, b, &s, m->x);
    conv2d_mix(a, a->table + i * a->s * a->s * TM_VL, m->g, m->out, m->side, m->line);
    for (int64_t t = 0; t < a->T; t++)
        conv2d_put(TM_F32, dv, (b * a->T + t) * a->D + s.c0, s.n, conv2d_spread(&s, a->e + (b * a->T + t) * a->stride) * m->out[t]);
    conv2d_weigh(a, m->x, m->g, taps);
}

/* Shares of the batch whose gradients of weights are summed apart: by shapes only. */
static int64_t conv2d_parts(const conv2d_in *a) {
    int64_t size = a->s * a->s * TM_VL * (a->strips + a->dens), room = tm_max(1, (int64_t)(1 << 23) / size);
    return tm_min(a->B, tm_min(room, tm_ceil(CONV_ITEMS, a->strips)));
}

/* dk of a token from the sums over channels and what the denominators gave; dv out of float32. */
static void conv2d_key_gradients(const conv2d_in *a, int64_t b, int64_t t, const float *dkey, const float *dv32, void *dk, void *dv) {
    int64_t row = b * a->T + t;
    int live = conv2d_live(a, b, t);
    for (int64_t h0 = 0; h0 < a->heads; h0 += TM_VL) {
        float sums[TM_VL] __attribute__((aligned(64))) = {0};
        int n = (int)tm_min(TM_VL, a->heads - h0);
        int64_t c = h0 * a->per;
        if (live) {
            conv2d_dots(a->dtype, a->v, b * a->vb + t * a->vt + c, TM_F32, dv32, row * a->D + c, a->per, n, sums);
            *(tm_vf *)sums += *(const tm_vfu *)(dkey + row * a->stride + h0);
        }
        conv2d_put(a->dtype, dk, row * a->heads + h0, n, *(tm_vf *)sums);
    }
    if (a->dtype != TM_F32) tm_round(a->dtype, (uint16_t *)dv + row * a->D, dv32 + row * a->D, (int)a->D);
}

/* dw = e^w times the sums of all shares, strips and lanes of a head, in order. */
static void conv2d_collect(const conv2d_in *a, int64_t head, int64_t parts, const double *taps, float *dw) {
    int64_t size = a->s * a->s, all = a->strips + a->dens;
    for (int64_t j = 0; j < size; j++) {
        double sum = 0.0;
        for (int64_t p = 0; p < parts; p++) {
            for (int64_t c = head * a->per; c < (head + 1) * a->per; c++) sum += taps[((p * all + c / TM_VL) * size + j) * TM_VL + c % TM_VL];
            sum += taps[((p * all + a->strips + head / TM_VL) * size + j) * TM_VL + head % TM_VL];
        }
        dw[head * size + j] = (float)(exp((double)a->w[head * size + j]) * sum);
    }
}

/* dq, dv (B, T, D), dk (B, T, heads), dw (heads, s, s), contiguous; y is the forward pass's output, contiguous. */
TM_EXPORT(conv2d_backward)(int dtype, int gate, const void *q, const void *k, const void *v, const float *w, const uint8_t *mask, const void *g, const void *y,
                           const float *saved, void *dq, void *dk, void *dv, float *dw, const int64_t *n, int threads) {
    conv2d_in a = conv2d_of(dtype, gate, n);
    a.q = q, a.k = k, a.v = v, a.w = w, a.mask = mask, a.g = g, a.y = y, a.transposed = 1;
    int64_t all = a.strips + a.dens, parts = conv2d_parts(&a), size = a.s * a.s * TM_VL;
    float *shared = conv2d_shared(&a, 3, threads), *dkey = shared + 2 * a.B * a.T * a.stride;
    float *dv32 = dtype == TM_F32 ? dv : tm_scratch(sizeof(float) * (size_t)(a.B * a.T * a.D));
    double *taps = tm_scratch(sizeof(double) * (size_t)(parts * all * size));
    memset(taps, 0, sizeof(double) * (size_t)(parts * all * size));
#pragma omp parallel for schedule(static) num_threads(threads) if (parts * a.dens > 1 && threads > 1)
    for (int64_t i = 0; i < parts * a.dens; i++) {
        conv2d_room m = conv2d_open(&a);
        int64_t p = i / a.dens, j = i % a.dens;
        for (int64_t b = a.B * p / parts; b < a.B * (p + 1) / parts; b++) conv2d_heads_back(&a, b, j, &m, saved, dkey, taps + (p * all + a.strips + j) * size);
        free(m.x);
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (parts * a.strips > 1 && threads > 1)
    for (int64_t i = 0; i < parts * a.strips; i++) {
        conv2d_room m = conv2d_open(&a);
        int64_t p = i / a.strips, j = i % a.strips;
        for (int64_t b = a.B * p / parts; b < a.B * (p + 1) / parts; b++) conv2d_channels_back(&a, b, j, &m, dq, dv32, taps + (p * all + j) * size);
        free(m.x);
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < a.B * a.T; i++) conv2d_key_gradients(&a, i / a.T, i % a.T, dkey, dv32, dk, dv);
#pragma omp parallel for schedule(static) num_threads(threads) if (a.heads > 1 && threads > 1)
    for (int64_t i = 0; i < a.heads; i++) conv2d_collect(&a, i, parts, taps, dw);
    if (dv32 != dv) free(dv32);
    free(shared), free(taps);
}
