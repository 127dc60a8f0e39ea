/* Gated linear recurrences: S_t = e^{g_t} S_{t-1} + k_t d_t^T, o_t = scale S_t^T q_t, with d_t = v_t, or under a delta rule d_t = b_t u_t with
   u_t = v_t - (e^{g_t} S_{t-1})^T k_t. A state S has K x V numbers, a row for each feature of the key.

   Live tokens go in chunks of 16; masked ones are left out, and a token that starts a document has e^g = 0. With P_i the product of e^g up to token i of the
   chunk, R_i that of the tokens after it, S the state before:
       u = (I + A)^-1 (v - (P k) S),  A_ij = b_j (k_i . k_j) e^{g_{j+1} + .. + g_i} for j < i;
       o = (P q) S + M d,  M_ij = (q_i . k_j) e^{g_{j+1} + .. + g_i} for j <= i;  S' = P_16 S + (R k)^T d.
   All factors are products of numbers that are at most 1: nothing overflows, whatever is forgotten, and what falls below 2^-126 counts
   as 0. So a chunk reads the state once where a loop over tokens reads it 16 times, and its products run in registers. The state stands in blocks of REC_W columns, of which one and the panels of a group of four chunks are in
   the cache while all four use them.

   Backward: u of every token and the states before each group are kept, the states of its chunks computed again, transposed, as most products of the sweep sum
   over columns. With E the gradient of d, and x = (I + b k k^T ..)^-T E, dv = b x and db = u . x, whatever b is. The gradient of a decay is that of each factor
   it is in, summed inside the chunk and never over the sequence, whose running sums would lose digits. */
#include "tm.h"

#define REC_C 16           /* tokens of a chunk */
#define REC_GROUP 4        /* chunks between two kept states */
#define REC_D 256          /* the most features of a key, and of a value */
#define REC_LD (REC_D + 16) /* of a row of a panel */
#define REC_V 2
#define REC_W (REC_V * TM_VL)
#define REC_PART 8          /* rows of a product between two requests for memory */
#define REC_LINES 14        /* of 64 bytes, that are asked for at a time */
#define REC_ROWS (TM_REGISTERS / 4) /* rows of a register tile of REC_V vectors */

/* kind: 0 no decay, 1 per head, 2 per feature. mask: bit 0, the token is live; bit 1, it starts a document. ends: of the R documents of one row, R + 1 numbers, or
   NULL for R rows of T tokens. past, state, dstate, dpast (R, H, K, V); u (B, T, H, V), starts (slots, H, K, V); all but q, k, v contiguous. NULL: past, mask,
   b (1), u, starts and state of a forward pass, dg, db, dpast may be missing. */
typedef struct {
    int64_t delta, kind, R, T, H, HK, K, V, threads;
    double scale;
    const float *q, *k, *v, *g, *b, *past;
    const uint8_t *mask;
    const int64_t *ends;
    int64_t qb, qt, qh, kb, kt, kh, vb, vt, vh;
    float *y, *state, *u, *starts;
    const float *dy, *dstate;
    float *dq, *dk, *dv, *dg, *db, *dpast;
} rec_in;

/* A chunk of n tokens: panels of rows, and matrices of pairs. t: where its tokens stand in their row. */
typedef struct {
    float qd[REC_C * REC_LD], kd[REC_C * REC_LD], kr[REC_C * REC_LD], q[REC_C * REC_LD], k[REC_C * REC_LD], e[REC_C * REC_LD];
    float seen[REC_C * REC_C], keys[REC_C * REC_C], inverse[REC_C * REC_C], between[REC_C * REC_C];
    float through[REC_LD], b[REC_C], one[REC_C], before[REC_C], after[REC_C];
    const int64_t *t;
    int n;
} rec_chunk;

/* Sizes of a call, padded: Kp and Vp are whole blocks. */
typedef struct {
    int K, V, Kp, Vp;
} rec_size;

#if defined(__clang__)
#define REC_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int rec_vi __attribute__((vector_size(4 * TM_VL)));
#define REC_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (rec_vi){__VA_ARGS__})
#endif
#if TM_VL == 16
#define REC_LOW(a, b) REC_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define REC_HIGH(a, b) REC_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif TM_VL == 8
#define REC_LOW(a, b) REC_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define REC_HIGH(a, b) REC_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define REC_LOW(a, b) REC_SHUFFLE(a, b, 0, 4, 1, 5)
#define REC_HIGH(a, b) REC_SHUFFLE(a, b, 2, 6, 3, 7)
#endif

TM_INLINE tm_vf rec_get(const float *p) { return *(const tm_vfu *)p; }
TM_INLINE void rec_put(float *p, tm_vf x) { *(tm_vfu *)p = x; }
TM_INLINE tm_vf rec_all(float x) { return x - (tm_vf){0}; }

/* dst (TM_VL x TM_VL) = src, transposed. */
TM_INLINE void rec_turn(const float *src, int64_t ls, float *dst, int64_t ld) {
    tm_vf a[TM_VL], b[TM_VL];
#pragma GCC unroll 16
    for (int i = 0; i < TM_VL; i++) a[i] = rec_get(src + i * ls);
#pragma GCC unroll 4
    for (int stage = 1; stage < TM_VL; stage *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < TM_VL / 2; i++) b[2 * i] = REC_LOW(a[i], a[i + TM_VL / 2]), b[2 * i + 1] = REC_HIGH(a[i], a[i + TM_VL / 2]);
#pragma GCC unroll 16
        for (int i = 0; i < TM_VL; i++) a[i] = b[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < TM_VL; i++) rec_put(dst + i * ld, a[i]);
}

/* The sums of TM_VL vectors. */
TM_INLINE tm_vf rec_sums(const float *rows) {
    tm_vf a[TM_VL];
#pragma GCC unroll 16
    for (int i = 0; i < TM_VL; i++) a[i] = rec_get(rows + i * TM_VL);
#pragma GCC unroll 4
    for (int half = TM_VL / 2; half > 0; half /= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < half; i++) a[i] = REC_LOW(a[i], a[i + half]) + REC_HIGH(a[i], a[i + half]);
    }
    return a[0];
}

static float rec_dot(const float *a, const float *b, int n) {
    tm_vf s = {0};
    float sum = 0.0f;
    for (int x = 0; x < n; x += TM_VL) s += rec_get(a + x) * rec_get(b + x);
    for (int i = 0; i < TM_VL; i++) sum += s[i];
    return sum;
}

/* A factor of a product: a[i * row + x * col] for row i, term x. */
typedef struct {
    const float *a;
    int64_t row, col;
    const float *b; /* its rows x, ldb apart */
    int64_t ldb;
    int n;
} rec_factor;

enum { REC_NEW, REC_BY_ROW, REC_BY_COLUMN }; /* c begins at 0, at c times a number for each row, or at ``from`` times one for each column */

TM_INLINE void rec_tile(const int rows, const int nv, const int mode, const int two, float *c, int64_t ldc, const float *by, const float *from,
                        const rec_factor *f, const rec_factor *f2) {
    tm_vf s[8][4];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < nv; v++) {
            if (mode == REC_NEW) s[i][v] = (tm_vf){0};
            if (mode == REC_BY_ROW) s[i][v] = rec_all(by[i]) * rec_get(c + i * ldc + v * TM_VL);
            if (mode == REC_BY_COLUMN) s[i][v] = rec_get(by + v * TM_VL) * rec_get(from + i * ldc + v * TM_VL);
        }
    for (int x = 0; x < f->n; x++) {
        tm_vf b[4];
#pragma GCC unroll 4
        for (int v = 0; v < nv; v++) b[v] = rec_get(f->b + x * f->ldb + v * TM_VL);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            tm_vf a = rec_all(f->a[i * f->row + x * f->col]);
#pragma GCC unroll 4
            for (int v = 0; v < nv; v++) s[i][v] += a * b[v];
        }
    }
    if (two)
        for (int x = 0; x < f2->n; x++) {
            tm_vf b[4];
#pragma GCC unroll 4
            for (int v = 0; v < nv; v++) b[v] = rec_get(f2->b + x * f2->ldb + v * TM_VL);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                tm_vf a = rec_all(f2->a[i * f2->row + x * f2->col]);
#pragma GCC unroll 4
                for (int v = 0; v < nv; v++) s[i][v] += a * b[v];
            }
        }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < nv; v++) rec_put(c + i * ldc + v * TM_VL, s[i][v]);
}

/* c (m x nv vectors) = what it begins at + f + f2. */
TM_INLINE void rec_product(const int nv, const int mode, const int two, int m, float *c, int64_t ldc, const float *by, const float *from, rec_factor f,
                           rec_factor f2) {
    const int step = mode == REC_BY_ROW ? 1 : 0, most = nv > 2 ? REC_ROWS / 2 : REC_ROWS;
    int i = 0;
#define REC_TILE(rows)                                                                                                                                         \
    do {                                                                                                                                                       \
        rec_tile(rows, nv, mode, two, c, ldc, by, from, &f, &f2);                                                                                                    \
        i += rows, c += rows * ldc, f.a += rows * f.row, f2.a += two ? rows * f2.row : 0, by += step * rows, from += rows * ldc;                                                   \
    } while (0)
    if (most >= 8)
        while (i + 8 <= m) REC_TILE(8);
    while (i + 4 <= m) REC_TILE(4);
    if (i + 2 <= m) REC_TILE(2);
    if (i < m) REC_TILE(1);
#undef REC_TILE
}

static const rec_factor rec_none = {0};

/* The products of the two passes, each compiled once. */
static __attribute__((noinline)) void rec_rows(int m, float *c, int64_t ldc, rec_factor f) { rec_product(REC_V, REC_NEW, 0, m, c, ldc, c, c, f, rec_none); }
static __attribute__((noinline)) void rec_rows2(int m, float *c, int64_t ldc, rec_factor f, rec_factor f2) {
    rec_product(REC_V, REC_NEW, 1, m, c, ldc, c, c, f, f2);
}
static __attribute__((noinline)) void rec_pairs_of(int m, float *c, rec_factor f) {
    rec_product(REC_C / TM_VL, REC_NEW, 0, m, c, REC_C, c, c, f, rec_none);
}
static __attribute__((noinline)) void rec_update(int m, float *c, int64_t ldc, const float *by, rec_factor f) {
    rec_product(REC_V, REC_BY_ROW, 0, m, c, ldc, by, c, f, rec_none);
}
static __attribute__((noinline)) void rec_update2(int m, float *c, int64_t ldc, const float *by, rec_factor f, rec_factor f2) {
    rec_product(REC_V, REC_BY_ROW, 1, m, c, ldc, by, c, f, f2);
}
static __attribute__((noinline)) void rec_update_turned(int m, float *c, int64_t ldc, const float *by, const float *from, rec_factor f) {
    rec_product(REC_V, REC_BY_COLUMN, 0, m, c, ldc, by, from, f, rec_none);
}

/* A row of n numbers, zeros up to np. A call of memcpy for each would cost more than the copy. */
TM_INLINE void rec_load(float *row, const float *a, int n, int np) {
    int x = 0;
    for (; x + TM_VL <= n; x += TM_VL) rec_put(row + x, rec_get(a + x));
    for (; x < n; x++) row[x] = a[x];
    for (; x < np; x++) row[x] = 0.0f;
}

TM_INLINE void rec_store(float *a, const float *row, int n) { rec_load(a, row, n, n); }

/* What is to be asked for ahead: ``width`` numbers from a on, in rows ``stride`` apart, of the tokens ``step`` after those of a chunk. Rows of a head lie whole
   tokens apart, and no processor sees that pattern by itself. A few lines are asked for at a time, between two products: more than the processor can have under
   way would stop it. */
typedef struct {
    const rec_chunk *c;
    int64_t step, T, stride[8];
    const float *a[8];
    int width[8], count, of, i, x;
} rec_asks;

TM_INLINE void rec_ask_for(rec_asks *s, const float *a, int64_t stride, int width) { s->a[s->count] = a, s->stride[s->count] = stride, s->width[s->count++] = width; }

static __attribute__((noinline)) void rec_ask(rec_asks *s, int lines) {
    while (lines > 0 && s->of < s->count) {
        const float *p = s->a[s->of] + tm_max(0, tm_min(s->T - 1, s->c->t[s->i] + s->step)) * s->stride[s->of];
        for (; s->x < s->width[s->of] && lines > 0; s->x += 16, lines--) __builtin_prefetch(p + s->x, 0, 2);
        if (s->x < s->width[s->of]) return;
        s->x = 0;
        if (++s->i == s->c->n) s->i = 0, s->of++;
    }
}

/* Products in parts, which ask in between. */
TM_INLINE void rec_rows_ask(rec_asks *s, int m, float *c, int64_t ldc, rec_factor f) {
    for (int i = 0; i < m; i += REC_PART, f.a += REC_PART * f.row) rec_rows((int)tm_min(REC_PART, m - i), c + i * ldc, ldc, f), rec_ask(s, REC_LINES);
}

TM_INLINE void rec_rows2_ask(rec_asks *s, int m, float *c, int64_t ldc, rec_factor f, rec_factor f2) {
    for (int i = 0; i < m; i += REC_PART, f.a += REC_PART * f.row, f2.a += REC_PART * f2.row)
        rec_rows2((int)tm_min(REC_PART, m - i), c + i * ldc, ldc, f, f2), rec_ask(s, REC_LINES);
}

/* The products of keys and queries of each pair of tokens; by feature each key decays on its way, in c->kr. */
TM_INLINE void rec_pair_block(const int count, const int by_feature, const int decays, rec_chunk *c, int i, int j, int Kp, float *qs, float *ks) {
    tm_vf sq[4], sk[4];
#pragma GCC unroll 4
    for (int m = 0; m < count; m++) sq[m] = sk[m] = (tm_vf){0};
    for (int x = 0; x < Kp; x += TM_VL) {
        tm_vf q = rec_get(c->q + i * REC_LD + x), k = rec_get(c->k + i * REC_LD + x), e = {0};
        if (decays) e = rec_get(c->e + i * REC_LD + x);
#pragma GCC unroll 4
        for (int m = 0; m < count; m++) {
            tm_vf w = rec_get((by_feature ? c->kr : c->k) + (j + m) * REC_LD + x);
            if (decays) w *= e, rec_put(c->kr + (j + m) * REC_LD + x, w);
            sq[m] += q * w, sk[m] += k * w;
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < count; m++) rec_put(qs + (j + m) * TM_VL, sq[m]), rec_put(ks + (j + m) * TM_VL, sk[m]);
}

static __attribute__((noinline)) void rec_pairs(const int feature, rec_chunk *c, int Kp) {
    float qs[REC_C * TM_VL] __attribute__((aligned(64))), ks[REC_C * TM_VL] __attribute__((aligned(64)));
    memset(qs, 0, sizeof qs), memset(ks, 0, sizeof ks);
    for (int i = 0; i < c->n; i++) {
        int j = 0;
        for (; j + 4 <= i; j += 4) rec_pair_block(4, feature, feature, c, i, j, Kp, qs, ks);
        for (; j < i; j++) rec_pair_block(1, feature, feature, c, i, j, Kp, qs, ks);
        rec_pair_block(1, feature, 0, c, i, i, Kp, qs, ks);
        for (int m = 0; m < TM_VL; m++) ks[i * TM_VL + m] = 0.0f;
        for (int m = 0; m < REC_C; m += TM_VL) {
            rec_put(c->seen + i * REC_C + m, rec_sums(qs + m * TM_VL));
            rec_put(c->keys + i * REC_C + m, rec_sums(ks + m * TM_VL));
        }
    }
}

/* The inverse of I + A, rows of 16: A_ij = keys_ij left_i right_j for j < i. */
static __attribute__((noinline)) void rec_invert(rec_chunk *c, const float *left, const float *right) {
    for (int i = 0; i < c->n; i++) {
        tm_vf s[REC_C / TM_VL];
        float row[REC_C] = {0};
        row[i] = 1.0f;
        for (int m = 0; m < REC_C / TM_VL; m++) s[m] = rec_get(row + m * TM_VL);
        for (int j = 0; j < i; j++) {
            tm_vf a = rec_all(c->keys[i * REC_C + j] * left[i] * right[j]);
            for (int m = 0; m < REC_C / TM_VL; m++) s[m] -= a * rec_get(c->inverse + j * REC_C + m * TM_VL);
        }
        for (int m = 0; m < REC_C / TM_VL; m++) rec_put(c->inverse + i * REC_C + m * TM_VL, s[m]);
    }
}

/* Decays per head: the factors of rows, of pairs and of the state. */
static __attribute__((noinline)) void rec_decay_head(const rec_in *a, rec_chunk *c, const float *e, const rec_size *z) {
    float p = 1.0f, r = 1.0f;
    memset(c->between, 0, sizeof c->between);
    for (int i = 0; i < c->n; i++) {
        p *= e[i], c->before[i] = p;
        for (int j = 0; j < i; j++) c->between[i * REC_C + j] = c->between[(i - 1) * REC_C + j] * e[i];
        c->between[i * REC_C + i] = 1.0f;
        for (int x = 0; x < z->Kp; x++) c->qd[i * REC_LD + x] = p * c->q[i * REC_LD + x];
        if (a->delta)
            for (int x = 0; x < z->Kp; x++) c->kd[i * REC_LD + x] = p * c->k[i * REC_LD + x];
    }
    for (int i = c->n - 1; i >= 0; i--) {
        c->after[i] = r;
        for (int x = 0; x < z->Kp; x++) c->kr[i * REC_LD + x] = r * c->k[i * REC_LD + x];
        r *= e[i];
    }
    for (int x = 0; x < z->Kp; x++) c->through[x] = p;
    for (int i = 0; i < c->n; i++)
        for (int j = 0; j < REC_C; j++) c->seen[i * REC_C + j] *= c->between[i * REC_C + j], c->keys[i * REC_C + j] *= c->between[i * REC_C + j];
}

static __attribute__((noinline)) void rec_decay_feature(const rec_in *a, rec_chunk *c, const rec_size *z) {
    for (int x = 0; x < z->Kp; x++) c->through[x] = 1.0f;
    for (int i = 0; i < c->n; i++)
        for (int x = 0; x < z->Kp; x++) {
            float p = c->through[x] * c->e[i * REC_LD + x];
            c->through[x] = p, c->qd[i * REC_LD + x] = p * c->q[i * REC_LD + x];
            if (a->delta) c->kd[i * REC_LD + x] = p * c->k[i * REC_LD + x];
        }
}

/* Read n tokens of head h, and compute all that does not depend on values. back: the inverse is that of the backward pass. */
static __attribute__((noinline)) void rec_prepare(const rec_in *a, const rec_size *z, int64_t b, int64_t h, const int64_t *t, int n, rec_chunk *c, int back) {
    int64_t hk = h / (a->H / a->HK);
    float e[REC_C];
    c->t = t, c->n = n;
    for (int i = 0; i < n; i++) {
        int64_t at = (b * a->T + t[i]) * a->H + h;
        float *q = c->q + i * REC_LD, *row = c->e + i * REC_LD;
        int start = a->mask && (a->mask[b * a->T + t[i]] & 2);
        rec_load(q, a->q + b * a->qb + t[i] * a->qt + hk * a->qh, z->K, z->Kp);
        for (int x = 0; x < z->Kp; x++) q[x] *= (float)a->scale;
        rec_load(c->k + i * REC_LD, a->k + b * a->kb + t[i] * a->kt + hk * a->kh, z->K, z->Kp);
        c->one[i] = 1.0f, c->b[i] = a->b ? a->b[at] : 1.0f;
        e[i] = start ? 0.0f : a->kind == 1 ? tm_exp(a->g[at]) : 1.0f;
        if (a->kind == 2) {
            const float *g = a->g + at * z->K;
            TM_IVDEP
            for (int x = 0; x < z->K; x++) row[x] = start ? 0.0f : tm_exp(g[x]);
            for (int x = z->K; x < z->Kp; x++) row[x] = 0.0f;
            rec_store(c->kr + i * REC_LD, c->k + i * REC_LD, z->Kp);
        }
    }
    if (a->kind == 2) {
        rec_pairs(1, c, z->Kp);
        rec_decay_feature(a, c, z);
    } else {
        rec_pairs(0, c, z->Kp);
        rec_decay_head(a, c, e, z);
    }
    if (a->delta) rec_invert(c, back ? c->b : c->one, back ? c->one : c->b);
}

/* The outputs of a chunk for one block of columns from c0, and its state s (K x REC_W). */
static __attribute__((noinline)) void rec_forward_block(const rec_in *a, const rec_size *z, int64_t b, int64_t h, const rec_chunk *c, float *s, int c0) {
    float v[REC_C * REC_W] __attribute__((aligned(64))) = {0}, o[REC_C * REC_W] __attribute__((aligned(64))), d[REC_C * REC_W] __attribute__((aligned(64)));
    int n = c->n, w = (int)tm_min(REC_W, z->V - c0), k0 = c0 * z->K / z->V, k1 = (c0 + w) * z->K / z->V, hk = (int)(h / (a->H / a->HK));
    int64_t row = b * a->T * a->H + h;
    rec_asks asks = {.c = c, .step = REC_C * REC_GROUP, .T = a->T};
    rec_ask_for(&asks, a->q + b * a->qb + hk * a->qh + k0, a->qt, k1 - k0);
    rec_ask_for(&asks, a->k + b * a->kb + hk * a->kh + k0, a->kt, k1 - k0);
    rec_ask_for(&asks, a->v + b * a->vb + h * a->vh + c0, a->vt, w);
    rec_ask_for(&asks, a->y + row * z->V + c0, a->H * z->V, w);
    if (a->kind == 2) rec_ask_for(&asks, a->g + row * z->K + k0, a->H * z->K, k1 - k0);
    for (int i = 0; i < n; i++) rec_load(v + i * REC_W, a->v + b * a->vb + c->t[i] * a->vt + h * a->vh + c0, w, REC_W);
    if (a->delta) {
        rec_rows_ask(&asks, n, o, REC_W, (rec_factor){c->kd, REC_LD, 1, s, REC_W, z->K});
        for (int i = 0; i < n * REC_W; i++) v[i] -= o[i];
        rec_rows(n, d, REC_W, (rec_factor){c->inverse, REC_C, 1, v, REC_W, n});
        for (int i = 0; i < n; i++) {
            if (a->u) rec_store(a->u + ((b * a->T + c->t[i]) * a->H + h) * z->V + c0, d + i * REC_W, w);
            for (int x = 0; x < REC_W; x++) d[i * REC_W + x] *= c->b[i];
        }
    }
    const float *new = a->delta ? d : v;
    rec_rows2_ask(&asks, n, o, REC_W, (rec_factor){c->qd, REC_LD, 1, s, REC_W, z->K}, (rec_factor){c->seen, REC_C, 1, new, REC_W, n});
    for (int i = 0; i < n; i++) rec_store(a->y + ((b * a->T + c->t[i]) * a->H + h) * z->V + c0, o + i * REC_W, w);
    for (int x = 0; x < z->K; x += REC_C) {
        rec_update((int)tm_min(REC_C, z->K - x), s + x * REC_W, REC_W, c->through + x, (rec_factor){c->kr + x, 1, REC_LD, new, REC_W, n});
        rec_ask(&asks, REC_LINES);
    }
    rec_ask(&asks, 8 * REC_C * REC_D);
}

/* A state (K, V) in blocks of columns s, (Vp / REC_W) of Kp x REC_W, and back; NULL is zero. */
static void rec_spread(const float *state, float *s, const rec_size *z) {
    if (!state || z->Kp > z->K) memset(s, 0, 4 * (size_t)z->Kp * z->Vp);
    if (!state) return;
    for (int c0 = 0; c0 < z->V; c0 += REC_W)
        for (int x = 0; x < z->K; x++) rec_load(s + c0 * z->Kp + x * REC_W, state + (int64_t)x * z->V + c0, (int)tm_min(REC_W, z->V - c0), REC_W);
}

static void rec_collect(float *state, const float *s, const rec_size *z) {
    for (int c0 = 0; c0 < z->V; c0 += REC_W)
        for (int x = 0; x < z->K; x++) rec_store(state + (int64_t)x * z->V + c0, s + c0 * z->Kp + x * REC_W, (int)tm_min(REC_W, z->V - c0));
}

static rec_size rec_sizes(const rec_in *a) {
    return (rec_size){(int)a->K, (int)a->V, (int)(tm_ceil(a->K, REC_W) * REC_W), (int)(tm_ceil(a->V, REC_W) * REC_W)};
}

/* Row r: where it begins, which batch row it is in, its live tokens, and where its kept states begin. */
typedef struct {
    int64_t b, first, end, live, slot;
    int64_t *t;
} rec_row;

static rec_row rec_tokens(const rec_in *a, int64_t r, int64_t *t) {
    int64_t group = REC_C * REC_GROUP;
    rec_row row = {a->ends ? 0 : r, a->ends ? a->ends[r] : 0, a->ends ? a->ends[r + 1] : a->T, 0, 0, t};
    row.slot = a->ends ? a->ends[r] / group + r : r * tm_ceil(a->T, group);
    for (int64_t i = row.first; i < row.end; i++)
        if (!a->mask || (a->mask[row.b * a->T + i] & 1)) t[row.live++] = i;
    return row;
}

/* Masked tokens have outputs of 0. */
static void rec_forward_masked(const rec_in *a, const rec_row *row, int64_t h) {
    for (int64_t t = row->first; t < row->end; t++) {
        int64_t at = ((row->b * a->T + t) * a->H + h) * a->V;
        if (a->mask[row->b * a->T + t] & 1) continue;
        memset(a->y + at, 0, 4 * (size_t)a->V);
        if (a->u) memset(a->u + at, 0, 4 * (size_t)a->V);
    }
}

/* One token, from the state to the next one without a copy of either; nothing is kept. */
static void rec_forward_one(const rec_in *a, const rec_row *row, int64_t r, int64_t h) {
    int64_t t = row->t[0], at = (row->b * a->T + t) * a->H + h, hk = h / (a->H / a->HK), size = a->K * a->V;
    const float *restrict q = a->q + row->b * a->qb + t * a->qt + hk * a->qh, *restrict k = a->k + row->b * a->kb + t * a->kt + hk * a->kh;
    const float *restrict v = a->v + row->b * a->vb + t * a->vt + h * a->vh, *restrict s = a->past ? a->past + (r * a->H + h) * size : NULL;
    float *restrict next = a->state + (r * a->H + h) * size, e[REC_D], read[REC_D] = {0}, y[REC_D] = {0}, new[REC_D];
    int start = a->mask && (a->mask[row->b * a->T + t] & 2);
    for (int x = 0; x < a->K; x++) e[x] = start ? 0.0f : a->kind ? tm_exp(a->g[a->kind == 2 ? at * a->K + x : at]) : 1.0f;
    for (int x = 0; s && a->delta && x < a->K; x++) {
        float w = e[x] * k[x];
        TM_IVDEP
        for (int c = 0; c < a->V; c++) read[c] += w * s[x * a->V + c];
    }
    for (int c = 0; c < a->V; c++) new[c] = a->delta ? (a->b ? a->b[at] : 1.0f) * (v[c] - read[c]) : v[c];
    for (int x = 0; x < a->K; x++) {
        float kx = k[x], qx = (float)a->scale * q[x], ex = e[x], *to = next + x * a->V;
        const float *from = s ? s + x * a->V : to;
        if (!s) memset(to, 0, 4 * (size_t)a->V);
        TM_IVDEP
        for (int c = 0; c < a->V; c++) {
            float kept = ex * from[c] + kx * new[c];
            to[c] = kept, y[c] += qx * kept;
        }
    }
    memcpy(a->y + at * a->V, y, 4 * (size_t)a->V);
}

static __attribute__((noinline)) void rec_forward_head(const rec_in *a, int64_t r, int64_t h) {
    rec_size z = rec_sizes(a);
    rec_row row = rec_tokens(a, r, tm_scratch(8 * (size_t)a->T + 8));
    int64_t group = REC_C * REC_GROUP;
    if (row.live < row.end - row.first) rec_forward_masked(a, &row, h);
    if (row.live == 1 && !a->starts && a->state) {
        rec_forward_one(a, &row, r, h);
        free(row.t);
        return;
    }
    float *s = tm_scratch(4 * (size_t)z.Kp * z.Vp);
    rec_chunk *c = tm_scratch(REC_GROUP * sizeof(rec_chunk));
    rec_spread(a->past ? a->past + (r * a->H + h) * a->K * a->V : NULL, s, &z);
    for (int64_t i = 0; i < row.live; i += group) {
        int count = 0;
        if (a->starts) rec_collect(a->starts + ((row.slot + i / group) * a->H + h) * a->K * a->V, s, &z);
        for (int64_t j = i; j < tm_min(row.live, i + group); j += REC_C)
            rec_prepare(a, &z, row.b, h, row.t + j, (int)tm_min(REC_C, row.live - j), c + count++, 0);
        for (int c0 = 0; c0 < z.V; c0 += REC_W)
            for (int m = 0; m < count; m++) rec_forward_block(a, &z, row.b, h, c + m, s + c0 * z.Kp, c0);
    }
    if (a->state) rec_collect(a->state + (r * a->H + h) * a->K * a->V, s, &z);
    free(c), free(s), free(row.t);
}

TM_EXPORT(recurrence_forward)(const rec_in *a) {
    int64_t units = a->R * a->H;
#pragma omp parallel for schedule(static, 1) num_threads((int)a->threads) if (units > 1 && a->threads > 1)
    for (int64_t i = 0; i < units; i++) {
        uint64_t before = tm_flush_small();
        rec_forward_head(a, i / a->H, i % a->H);
        tm_restore(before);
    }
}

/* Room of the backward pass of one head. st: the states before each chunk of a group, transposed: blocks of features of Vp x REC_W; ds and dst: the gradient of
   the state after a chunk, both ways. Panels of a chunk: g of the outputs, u, new = b u, e and x of the equations above, less = -b x, and of the gradients of the
   three panels of keys and queries. */
typedef struct {
    float *st, *ds, *dst, *dq, *dk;
    rec_chunk c[REC_GROUP];
    float new[REC_GROUP][REC_C * REC_LD], u[REC_GROUP][REC_C * REC_LD];
    float g[REC_C * REC_LD], e[REC_C * REC_LD], x[REC_C * REC_LD], less[REC_C * REC_LD];
    float dqd[REC_C * REC_LD], dkd[REC_C * REC_LD], dkr[REC_C * REC_LD], dg[REC_C * REC_LD];
    float turned[(REC_D + REC_W) * REC_C], dseen[REC_C * REC_C], dkeys[REC_C * REC_C], dthrough[REC_LD], db[REC_C];
} rec_room;

/* A blocked matrix s (columns / REC_W blocks of rows x REC_W) transposed. */
static __attribute__((noinline)) void rec_turn_all(const float *s, int rows, int columns, float *to) {
    for (int v = 0; v < columns; v += TM_VL)
        for (int x = 0; x < rows; x += TM_VL)
            rec_turn(s + (int64_t)(v / REC_W) * rows * REC_W + x * REC_W + v % REC_W, REC_W,
                     to + (int64_t)(x / REC_W) * columns * REC_W + v * REC_W + x % REC_W, REC_W);
}

/* A panel of 16 rows of n numbers as n rows of 16; the rows from ``count`` on are zero. */
static __attribute__((noinline)) void rec_turn_panel(float *panel, int count, int n, float *to) {
    for (int i = count; i < REC_C; i++) memset(panel + i * REC_LD, 0, 4 * (size_t)n);
    for (int i = 0; i < REC_C; i += TM_VL)
        for (int x = 0; x < n; x += TM_VL) rec_turn(panel + i * REC_LD + x, REC_LD, to + x * REC_C + i, REC_C);
}

/* Of features, the gradients through pairs and keys that decay on their way: from dqd, dkd, dkr to dq, dk, dg of the chunk, in the same panels. */
static __attribute__((noinline)) void rec_back_feature(const rec_size *z, const rec_chunk *c, rec_room *o) {
    int n = c->n;
    for (int x = 0; x < z->Kp; x += TM_VL) {
        tm_vf kept[REC_C * REC_C], G[REC_C], p[REC_C], sum = rec_get(o->dthrough + x) * rec_get(c->through + x);
        for (int i = 0; i < n; i++) {
            tm_vf e = rec_get(c->e + i * REC_LD + x);
            p[i] = e;
            if (i) p[i] *= p[i - 1];
            for (int j = 0; j < i; j++) kept[i * REC_C + j] = kept[(i - 1) * REC_C + j] * e;
            kept[i * REC_C + i] = rec_get(c->k + i * REC_LD + x), G[i] = rec_get(o->dkr + i * REC_LD + x);
        }
        for (int i = n - 1; i >= 0; i--) {
            int64_t at = i * REC_LD + x;
            tm_vf q = rec_get(c->q + at), k = rec_get(c->k + at), e = rec_get(c->e + at), dq = rec_get(o->dqd + at) * p[i], dk = rec_get(o->dkd + at) * p[i];
            tm_vf dg = {0};
            sum += dq * q + dk * k;
            dq += rec_all(o->dseen[i * REC_C + i]) * k, G[i] += rec_all(o->dseen[i * REC_C + i]) * q;
            for (int j = 0; j < i; j++) {
                tm_vf w = kept[i * REC_C + j], a = rec_all(o->dseen[i * REC_C + j]), b = rec_all(o->dkeys[i * REC_C + j]), d = G[j] + a * q + b * k;
                dq += a * w, dk += b * w, dg += d * w, G[j] = d * e;
            }
            rec_put(o->dqd + at, dq), rec_put(o->dkd + at, dk + G[i]), rec_put(o->dg + at, dg + sum);
        }
    }
}

/* Of decays per head; dg is one number for each token. */
static __attribute__((noinline)) void rec_back_head(const rec_size *z, const rec_chunk *c, rec_room *o, int delta) {
    float both[REC_C * REC_C] = {0}, sum = 0.0f, early[REC_C], late = 0.0f;
    int n = c->n;
    for (int x = 0; x < z->Kp; x++) sum += o->dthrough[x] * c->through[x];
    for (int i = 0; i < n; i++) {
        float *dq = o->dqd + i * REC_LD, *dk = o->dkd + i * REC_LD, *dr = o->dkr + i * REC_LD;
        early[i] = rec_dot(dq, c->qd + i * REC_LD, z->Kp) + (delta ? rec_dot(dk, c->kd + i * REC_LD, z->Kp) : 0.0f);
        o->dg[i] = rec_dot(dr, c->kr + i * REC_LD, z->Kp);
        for (int x = 0; x < z->Kp; x++) dq[x] *= c->before[i], dk[x] = dk[x] * c->before[i] + dr[x] * c->after[i];
        for (int j = 0; j < i; j++) both[i * REC_C + j] = o->dseen[i * REC_C + j] * c->seen[i * REC_C + j] + o->dkeys[i * REC_C + j] * c->keys[i * REC_C + j];
        for (int j = 0; j < REC_C; j++) o->dseen[i * REC_C + j] *= c->between[i * REC_C + j], o->dkeys[i * REC_C + j] *= c->between[i * REC_C + j];
    }
    for (int i = n - 1; i >= 0; i--) {
        if (i < n - 1)
            for (int j = 0; j < i; j++) both[i * REC_C + j] += both[(i + 1) * REC_C + j];
    }
    for (int i = n - 1; i >= 0; i--) sum += early[i], early[i] = sum;
    for (int i = 0; i < n; i++) {
        float pairs = 0.0f;
        for (int j = 0; j < i; j++) pairs += both[i * REC_C + j];
        float own = o->dg[i];
        o->dg[i] = early[i] + late + pairs, late += own;
    }
    for (int x = 0; x < z->Kp; x += REC_W) {
        float more[REC_C * REC_W] __attribute__((aligned(64))) = {0};
        rec_rows(n, more, REC_W, (rec_factor){o->dseen, REC_C, 1, c->k + x, REC_LD, n});
        for (int i = 0; i < n; i++)
            for (int m = 0; m < REC_W; m++) o->dqd[i * REC_LD + x + m] += more[i * REC_W + m];
        rec_rows2(n, more, REC_W, (rec_factor){o->dseen, 1, REC_C, c->q + x, REC_LD, n}, (rec_factor){o->dkeys, 1, REC_C, c->k + x, REC_LD, n});
        for (int i = 0; i < n; i++)
            for (int m = 0; m < REC_W; m++) o->dkd[i * REC_LD + x + m] += more[i * REC_W + m];
        rec_rows(n, more, REC_W, (rec_factor){o->dkeys, REC_C, 1, c->k + x, REC_LD, n});
        for (int i = 0; i < n; i++)
            for (int m = 0; m < REC_W; m++) o->dkd[i * REC_LD + x + m] += more[i * REC_W + m];
    }
}

/* The gradients of a chunk, from those of its outputs and of the state after it; st is the state before it. */
static __attribute__((noinline)) void rec_back_chunk(const rec_in *a, const rec_size *z, int64_t b, int64_t h, int m, rec_room *o, const float *st, int last) {
    rec_chunk *c = o->c + m;
    float *new = o->new[m];
    int n = c->n, delta = (int)a->delta, hk = (int)(h / (a->H / a->HK));
    int64_t row = b * a->T * a->H + h, key = b * a->T * a->HK + hk;
    rec_asks asks = {.c = c, .step = -REC_C * REC_GROUP, .T = a->T};
    rec_ask_for(&asks, a->dy + row * z->V, a->H * z->V, z->V);
    rec_ask_for(&asks, a->dv + row * z->V, a->H * z->V, z->V);
    rec_ask_for(&asks, a->q + b * a->qb + hk * a->qh, a->qt, z->K);
    rec_ask_for(&asks, a->k + b * a->kb + hk * a->kh, a->kt, z->K);
    rec_ask_for(&asks, a->dq + key * z->K, a->HK * z->K, z->K);
    rec_ask_for(&asks, a->dk + key * z->K, a->HK * z->K, z->K);
    if (delta)
        rec_ask_for(&asks, a->u + row * z->V, a->H * z->V, z->V);
    else
        rec_ask_for(&asks, a->v + b * a->vb + h * a->vh, a->vt, z->V);
    if (a->kind == 2) rec_ask_for(&asks, a->g + row * z->K, a->H * z->K, z->K);
    for (int i = 0; i < n; i++) rec_load(o->g + i * REC_LD, a->dy + ((b * a->T + c->t[i]) * a->H + h) * z->V, z->V, z->Vp);
    for (int v = 0; v < z->Vp; v += REC_W) {
        float *e = o->e + v;
        rec_factor late = {c->seen, 1, REC_C, o->g + v, REC_LD, n};
        rec_rows2_ask(&asks, n, e, REC_LD, (rec_factor){c->kr, REC_LD, 1, o->ds + v * z->Kp, REC_W, z->K}, late);
        if (delta) rec_rows_ask(&asks, n, o->x + v, REC_LD, (rec_factor){c->inverse, 1, REC_C, e, REC_LD, n});
    }
    for (int i = 0; i < n; i++) {
        int64_t at = (b * a->T + c->t[i]) * a->H + h;
        float *dv = o->e + i * REC_LD, *x = o->x + i * REC_LD, *less = o->less + i * REC_LD;
        if (delta) {
            if (a->db) a->db[at] = rec_dot(x, o->u[m] + i * REC_LD, z->Vp);
            for (int v = 0; v < z->Vp; v++) dv[v] = c->b[i] * x[v], less[v] = -dv[v];
        }
        rec_store(a->dv + at * z->V, dv, z->V);
    }
    for (int x = 0; x < z->Kp; x += REC_W) {
        rec_factor s = {o->g, REC_LD, 1, st + x * z->Vp, REC_W, z->V};
        rec_rows_ask(&asks, n, o->dqd + x, REC_LD, s);
        s.a = o->less;
        if (delta) rec_rows_ask(&asks, n, o->dkd + x, REC_LD, s);
        rec_rows_ask(&asks, n, o->dkr + x, REC_LD, (rec_factor){new, REC_LD, 1, o->dst + x * z->Vp, REC_W, z->V});
        for (int y = x; y < x + REC_W; y += TM_VL) {
            tm_vf sum[2] = {{0}, {0}};
            const float *s0 = st + x * z->Vp + y - x, *d0 = o->dst + x * z->Vp + y - x;
            for (int v = 0; v < z->Vp; v += 2) {
                sum[0] += rec_get(s0 + v * REC_W) * rec_get(d0 + v * REC_W);
                sum[1] += rec_get(s0 + (v + 1) * REC_W) * rec_get(d0 + (v + 1) * REC_W);
            }
            rec_put(o->dthrough + y, sum[0] + sum[1]);
        }
    }
    if (!delta)
        for (int i = 0; i < n; i++) memset(o->dkd + i * REC_LD, 0, 4 * (size_t)z->Kp);
    rec_turn_panel(new, n, z->Vp, o->turned);
    memset(o->dkeys, 0, sizeof o->dkeys);
    rec_pairs_of(n, o->dseen, (rec_factor){o->g, REC_LD, 1, o->turned, REC_C, z->V});
    if (delta) rec_pairs_of(n, o->dkeys, (rec_factor){o->less, REC_LD, 1, o->turned, REC_C, z->V});
    for (int i = 0; i < n; i++)
        for (int j = i; j < REC_C; j++) o->dkeys[i * REC_C + j] = 0.0f, o->dseen[i * REC_C + j] *= j == i;
    if (a->kind == 2)
        rec_back_feature(z, c, o);
    else
        rec_back_head(z, c, o, delta);
    for (int v = 0; v < z->Vp; v += REC_W) {
        for (int x = 0; x < z->K; x += REC_C) {
            int m = (int)tm_min(REC_C, z->K - x);
            float *ds = o->ds + v * z->Kp + x * REC_W;
            rec_factor outputs = {c->qd + x, 1, REC_LD, o->g + v, REC_LD, n};
            if (delta)
                rec_update2(m, ds, REC_W, c->through + x, outputs, (rec_factor){c->kd + x, 1, REC_LD, o->less + v, REC_LD, n});
            else
                rec_update(m, ds, REC_W, c->through + x, outputs);
            rec_ask(&asks, REC_LINES);
        }
    }
    rec_ask(&asks, 8 * REC_C * REC_D);
    if (!last) rec_turn_all(o->ds, z->Kp, z->Vp, o->dst);
}

/* Write the gradients of a chunk; heads that share a key add up in dq and dk of the room. */
static __attribute__((noinline)) void rec_back_write(const rec_in *a, const rec_size *z, int64_t b, int64_t h, const rec_chunk *c, rec_room *o, int first, int end) {
    int64_t hk = h / (a->H / a->HK);
    for (int i = 0; i < c->n; i++) {
        int64_t t = c->t[i], at = (b * a->T + t) * a->H + h, to = ((b * a->T + t) * a->HK + hk) * z->K;
        float *dq = o->dqd + i * REC_LD, *dk = o->dkd + i * REC_LD;
        for (int x = 0; x < z->K; x++) dq[x] *= (float)a->scale;
        if (o->dq) {
            float *sq = o->dq + t * z->K, *sk = o->dk + t * z->K;
            if (!first)
                for (int x = 0; x < z->K; x++) dq[x] += sq[x], dk[x] += sk[x];
            rec_store(sq, dq, z->K), rec_store(sk, dk, z->K);
        }
        if (end) rec_store(a->dq + to, dq, z->K), rec_store(a->dk + to, dk, z->K);
        if (a->dg && a->kind == 1) a->dg[at] = o->dg[i];
        if (a->dg && a->kind == 2) rec_store(a->dg + at * z->K, o->dg + i * REC_LD, z->K);
    }
}

/* Masked tokens have no gradient. */
static __attribute__((noinline)) void rec_back_masked(const rec_in *a, const rec_row *row, int64_t h) {
    int64_t hk = h / (a->H / a->HK);
    float zero[REC_D] = {0};
    for (int64_t t = row->first; t < row->end; t++) {
        int64_t at = (row->b * a->T + t) * a->H + h, to = ((row->b * a->T + t) * a->HK + hk) * a->K;
        if (a->mask[row->b * a->T + t] & 1) continue;
        rec_store(a->dv + at * a->V, zero, (int)a->V);
        rec_store(a->dq + to, zero, (int)a->K), rec_store(a->dk + to, zero, (int)a->K);
        if (a->db) a->db[at] = 0.0f;
        if (a->dg) memset(a->dg + (a->kind == 2 ? at * a->K : at), 0, a->kind == 2 ? 4 * (size_t)a->K : 4);
    }
}

static __attribute__((noinline)) void rec_back_head_of(const rec_in *a, const rec_size *z, const rec_row *row, int64_t r, int64_t h, rec_room *o, int first, int end) {
    int64_t size = a->K * a->V, group = REC_C * REC_GROUP, padded = (int64_t)z->Kp * z->Vp;
    rec_spread(a->dstate ? a->dstate + (r * a->H + h) * size : NULL, o->ds, z);
    rec_turn_all(o->ds, z->Kp, z->Vp, o->dst);
    if (row->live < row->end - row->first) rec_back_masked(a, row, h);
    for (int64_t i = (row->live - 1) / group * group; row->live && i >= 0; i -= group) {
        int count = (int)tm_ceil(tm_min(group, row->live - i), REC_C);
        rec_spread(a->starts + ((row->slot + i / group) * a->H + h) * size, o->st + padded * REC_GROUP, z);
        rec_turn_all(o->st + padded * REC_GROUP, z->Kp, z->Vp, o->st);
        for (int m = 0; m < count; m++) {
            rec_chunk *c = o->c + m;
            int64_t from = i + m * REC_C;
            rec_prepare(a, z, row->b, h, row->t + from, (int)tm_min(REC_C, row->live - from), c, 1);
            for (int y = 0; y < c->n; y++) {
                int64_t at = (row->b * a->T + c->t[y]) * a->H + h;
                float *new = o->new[m] + y * REC_LD, *u = o->u[m] + y * REC_LD;
                if (!a->delta)
                    rec_load(new, a->v + row->b * a->vb + c->t[y] * a->vt + h * a->vh, z->V, z->Vp);
                else {
                    rec_load(u, a->u + at * z->V, z->V, z->Vp);
                    for (int v = 0; v < z->Vp; v++) new[v] = c->b[y] * u[v];
                }
            }
            if (m == count - 1) break;
            float *next = o->st + padded * (m + 1);
            if (z->Vp > z->V) memset(next, 0, 4 * (size_t)padded);
            for (int x = 0; x < z->Kp; x += REC_W)
                rec_update_turned(z->V, next + x * z->Vp, REC_W, c->through + x, next - padded + x * z->Vp,
                                  (rec_factor){o->new[m], 1, REC_LD, c->kr + x, REC_LD, c->n});
        }
        for (int m = count - 1; m >= 0; m--) {
            rec_back_chunk(a, z, row->b, h, m, o, o->st + padded * m, i == 0 && m == 0);
            rec_back_write(a, z, row->b, h, o->c + m, o, first, end);
        }
    }
    if (a->dpast) rec_collect(a->dpast + (r * a->H + h) * size, o->ds, z);
}

static __attribute__((noinline)) void rec_backward_row(const rec_in *a, int64_t r, int64_t hk) {
    rec_size z = rec_sizes(a);
    rec_row row = rec_tokens(a, r, tm_scratch(8 * (size_t)a->T + 8));
    int64_t each = a->H / a->HK, padded = (int64_t)z.Kp * z.Vp, sums = each > 1 ? a->T * z.K : 0;
    rec_room *o = tm_scratch(sizeof(rec_room));
    float *room = tm_scratch(4 * (size_t)((REC_GROUP + 3) * padded + 2 * sums));
    o->st = room, o->ds = room + (REC_GROUP + 1) * padded, o->dst = o->ds + padded;
    o->dq = sums ? o->dst + padded : NULL, o->dk = sums ? o->dq + sums : NULL;
    for (int64_t h = hk * each; h < (hk + 1) * each; h++) rec_back_head_of(a, &z, &row, r, h, o, h == hk * each, h == (hk + 1) * each - 1);
    free(room), free(o), free(row.t);
}

TM_EXPORT(recurrence_backward)(const rec_in *a) {
    int64_t units = a->R * a->HK;
#pragma omp parallel for schedule(static, 1) num_threads((int)a->threads) if (units > 1 && a->threads > 1)
    for (int64_t i = 0; i < units; i++) {
        uint64_t before = tm_flush_small();
        rec_backward_row(a, i / a->HK, i % a->HK);
        tm_restore(before);
    }
}
