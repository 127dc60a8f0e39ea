/* The double normalisation of external attention: each slot's softmax over the tokens, then each token's weights over eps + their sum over the slots.

   With z_ts = x_ts - log sum_t' e^{x_t's} and u_t the largest z_ts of a token, w_ts = e^{z_ts - u_t} / (sum_s e^{z_ts - u_t} + eps e^{-u_t}): exact however
   far the logits lie apart. The sums over tokens of a block of 64 are made under the block's own maxima, blocks are joined in float64 in their order.

   Backward, with D_ts = w_ts (g_ts - sum_s' w_ts' g_ts'):  dx_ts = D_ts - e^{z_ts} sum_t' D_t's. */
#include "tm.h"

#define EXTERNAL_T 64

enum { EXTERNAL_DOUBLE, EXTERNAL_TOKENS };

typedef struct {
    const float *x, *g, *w;
    const uint8_t *mask;
    float eps;
    int norm, S;
    int64_t T, H;
} external_in;

TM_INLINE int external_live(const external_in *a, int64_t b, int64_t t) { return !a->mask || a->mask[b * a->T + t]; }

/* m and the sum of e^{x - m} of each column over block i: part[0..n), part[n..2n). */
static void external_block(const external_in *a, int64_t b, int64_t i, float *restrict part) {
    int64_t n = a->H * a->S, t1 = tm_min(a->T, (i + 1) * EXTERNAL_T);
    float *restrict m = part, *restrict sum = part + n;
    for (int64_t c = 0; c < n; c++) m[c] = TM_FLOOR, sum[c] = 0.0f;
    for (int64_t t = i * EXTERNAL_T; t < t1; t++) {
        if (!external_live(a, b, t)) continue;
        const float *restrict x = a->x + (b * a->T + t) * n;
        TM_IVDEP
        for (int64_t c = 0; c < n; c++) m[c] = x[c] > m[c] ? x[c] : m[c];
    }
    for (int64_t t = i * EXTERNAL_T; t < t1; t++) {
        if (!external_live(a, b, t)) continue;
        const float *restrict x = a->x + (b * a->T + t) * n;
        TM_IVDEP
        for (int64_t c = 0; c < n; c++) sum[c] += tm_exp_neg(x[c] - m[c]);
    }
}

/* The parts (blocks, 2, n) of one batch joined: the maximum of each column and the logarithm of its sum under it, 0 where nothing is live. */
static void external_levels(const float *part, int64_t blocks, int64_t n, float *level) {
    for (int64_t c = 0; c < n; c++) {
        float m = TM_FLOOR;
        double sum = 0.0;
        for (int64_t i = 0; i < blocks; i++) m = part[2 * i * n + c] > m ? part[2 * i * n + c] : m;
        for (int64_t i = 0; i < blocks; i++) sum += part[(2 * i + 1) * n + c] * (double)tm_exp_neg(part[2 * i * n + c] - m);
        level[c] = sum == 0 ? 0.0f : m;
        level[n + c] = sum == 0 ? 0.0f : (float)log(sum);
    }
}

/* One token's S weights of one head. */
TM_INLINE void external_row(const external_in *a, const float *restrict x, const float *restrict m, const float *restrict l, float *restrict w) {
    int S = a->S;
    float top[TM_VL], sum[TM_VL], u = TM_FLOOR, total = 0.0f;
    TM_IVDEP
    for (int s = 0; s < S; s++) w[s] = (x[s] - m[s]) - l[s];
    if (a->norm == EXTERNAL_TOKENS) {
        TM_IVDEP
        for (int s = 0; s < S; s++) { /* nothing divides them: keep them down to the smallest float32 */
            int low = w[s] < -60.0f;
            w[s] = tm_exp(low ? w[s] + 40.0f : w[s]) * (low ? 4.2483542552915889e-18f : 1.0f);
        }
        return;
    }
    for (int c = 0; c < TM_VL; c++) top[c] = TM_FLOOR, sum[c] = 0.0f;
    int s = 0;
    for (; s + TM_VL <= S; s += TM_VL) {
        TM_IVDEP
        for (int c = 0; c < TM_VL; c++) top[c] = w[s + c] > top[c] ? w[s + c] : top[c];
    }
    for (; s < S; s++) top[0] = w[s] > top[0] ? w[s] : top[0];
    for (int c = 0; c < TM_VL; c++) u = top[c] > u ? top[c] : u;
    TM_IVDEP
    for (s = 0; s < S; s++) w[s] = tm_exp_neg(w[s] - u);
    for (s = 0; s + TM_VL <= S; s += TM_VL) {
        TM_IVDEP
        for (int c = 0; c < TM_VL; c++) sum[c] += w[s + c];
    }
    for (; s < S; s++) total += w[s];
    for (int c = 0; c < TM_VL; c++) total += sum[c];
    float inv = a->eps > 0 ? (float)(1.0 / (total + a->eps * exp(-(double)u))) : 1.0f / total;
    TM_IVDEP
    for (s = 0; s < S; s++) w[s] *= inv;
}

/* level (B, 2, H S) is kept for the backward pass, part (B, blocks, 2, H S) is working space; x and w (B, T, H, S) contiguous. */
TM_EXPORT(external_forward)(int norm, float eps, const float *x, const uint8_t *mask, float *w, float *level, float *part, int64_t B, int64_t T, int64_t H, int64_t S,
                            int threads) {
    external_in in = {x, NULL, NULL, mask, eps, norm, (int)S, T, H}, *a = &in;
    int64_t blocks = tm_ceil(T, EXTERNAL_T), n = H * S;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t j = 0; j < B * blocks; j++) external_block(a, j / blocks, j % blocks, part + j * 2 * n);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < B; b++) external_levels(part + b * blocks * 2 * n, blocks, n, level + b * 2 * n);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t j = 0; j < B * T; j++) {
        const float *m = level + j / T * 2 * n;
        if (!external_live(a, j / T, j % T)) {
            memset(w + j * n, 0, sizeof(float) * n);
            continue;
        }
        for (int64_t h = 0; h < H; h++) external_row(a, x + j * n + h * S, m + h * S, m + n + h * S, w + j * n + h * S);
    }
}

/* D of a block, to dx, and its column sums. */
static void external_back_block(const external_in *a, int64_t b, int64_t i, float *dx, float *restrict part) {
    int64_t n = a->H * a->S;
    memset(part, 0, sizeof(float) * n);
    for (int64_t t = i * EXTERNAL_T; t < tm_min(a->T, (i + 1) * EXTERNAL_T); t++) {
        int64_t at = (b * a->T + t) * n;
        if (!external_live(a, b, t)) continue;
        for (int64_t h = 0; h < a->H; h++, at += a->S) {
            const float *restrict g = a->g + at, *restrict w = a->w + at;
            float *restrict d = dx + at, *restrict to = part + h * a->S, sum[TM_VL], along = 0.0f;
            int s = 0, whole = a->norm == EXTERNAL_DOUBLE ? a->S : 0;
            for (int c = 0; c < TM_VL; c++) sum[c] = 0.0f;
            for (; s + TM_VL <= whole; s += TM_VL) {
                TM_IVDEP
                for (int c = 0; c < TM_VL; c++) sum[c] += g[s + c] * w[s + c];
            }
            for (; s < whole; s++) along += g[s] * w[s];
            for (int c = 0; c < TM_VL; c++) along += sum[c];
            TM_IVDEP
            for (s = 0; s < a->S; s++) {
                float x = w[s] * (g[s] - along);
                d[s] = x, to[s] += x;
            }
        }
    }
}

/* g, w and dx (B, T, H, S) contiguous; part (B, blocks, H S) is working space, level as the forward pass left it. */
TM_EXPORT(external_backward)(int norm, const float *g, const float *x, const uint8_t *mask, const float *w, const float *level, float *part, float *dx, int64_t B, int64_t T,
                             int64_t H, int64_t S, int threads) {
    external_in in = {x, g, w, mask, 0.0f, norm, (int)S, T, H}, *a = &in;
    int64_t blocks = tm_ceil(T, EXTERNAL_T), n = H * S;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t j = 0; j < B * blocks; j++) external_back_block(a, j / blocks, j % blocks, dx, part + j * n);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < B; b++) {
        float *first = part + b * blocks * n;
        for (int64_t c = 0; c < n; c++) {
            double sum = 0.0;
            for (int64_t i = 0; i < blocks; i++) sum += first[i * n + c];
            first[c] = (float)sum;
        }
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t j = 0; j < B * T; j++) {
        const float *restrict m = level + j / T * 2 * n, *restrict all = part + j / T * blocks * n, *restrict row = x + j * n;
        float *restrict d = dx + j * n;
        if (!external_live(a, j / T, j % T)) {
            memset(d, 0, sizeof(float) * n);
            continue;
        }
        TM_IVDEP
        for (int64_t c = 0; c < n; c++) d[c] -= tm_exp((row[c] - m[c]) - m[n + c]) * all[c];
    }
}
