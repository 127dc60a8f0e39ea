/* What a block does to each token alone, each in one pass over memory: RMS norm, rotary positions, and the gate of a SwiGLU. */
#include "tm.h"

#define TOKENWISE_ROWS 64   /* rows of a block of work */
#define TOKENWISE_STRIP 2048 /* numbers of a block of the gate */

/* y_i = w_i x_i / sqrt(mean x^2 + eps) in each row of n; x, y (rows, n), w (n) or NULL, inverse (rows) of float32 is kept if it is not NULL. */
TM_EXPORT(rms_forward)(int dtype, const void *x, const void *w, void *y, float *inverse, int64_t rows, int64_t n, double eps, int threads) {
    float *wide = tm_scratch(sizeof(float) * n);
    const float *weights = w ? tm_read(dtype, w, 0, wide, (int)n) : NULL;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t block = 0; block < tm_ceil(rows, TOKENWISE_ROWS); block++) {
        float *from = tm_scratch(2 * sizeof(float) * n), *to = from + n;
        for (int64_t r = block * TOKENWISE_ROWS; r < tm_min(rows, (block + 1) * TOKENWISE_ROWS); r++) {
            const float *restrict row = tm_read(dtype, x, r * n, from, (int)n);
            float *restrict out = tm_target(dtype, y, r * n, to);
            float scale = (float)(1.0 / sqrt(tm_dot(row, row, (int)n) / (double)n + eps));
            if (inverse) inverse[r] = scale;
            if (w) {
                TM_IVDEP
                for (int64_t c = 0; c < n; c++) out[c] = row[c] * scale * weights[c];
            } else {
                TM_IVDEP
                for (int64_t c = 0; c < n; c++) out[c] = row[c] * scale;
            }
            tm_write(dtype, y, r * n, out, (int)n);
        }
        free(from);
    }
    free(wide);
}

/* With u = x / rms and h = w g:  dx = (h - u mean(h u)) / rms,  dw = sum over rows of g u, whose parts by block of rows are added in float64. */
TM_EXPORT(rms_backward)(int dtype, const void *g, const void *x, const void *w, const float *inverse, void *dx, void *dw, int64_t rows, int64_t n, int threads) {
    int64_t blocks = tm_ceil(rows, TOKENWISE_ROWS);
    float *wide = tm_scratch(sizeof(float) * n), *parts = w ? tm_scratch(sizeof(float) * n * tm_max(blocks, 1)) : NULL;
    const float *weights = w ? tm_read(dtype, w, 0, wide, (int)n) : NULL;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t block = 0; block < blocks; block++) {
        float *room = tm_scratch(5 * sizeof(float) * n), *restrict u = room + 3 * n, *restrict h = room + 4 * n, *part = w ? parts + block * n : NULL;
        if (w) memset(part, 0, sizeof(float) * n);
        for (int64_t r = block * TOKENWISE_ROWS; r < tm_min(rows, (block + 1) * TOKENWISE_ROWS); r++) {
            const float *restrict given = tm_read(dtype, g, r * n, room, (int)n), *restrict row = tm_read(dtype, x, r * n, room + n, (int)n);
            float *restrict out = tm_target(dtype, dx, r * n, room + 2 * n);
            float scale = inverse[r];
            if (w) {
                TM_IVDEP
                for (int64_t c = 0; c < n; c++) u[c] = row[c] * scale, h[c] = given[c] * weights[c], part[c] += given[c] * u[c];
            } else {
                TM_IVDEP
                for (int64_t c = 0; c < n; c++) u[c] = row[c] * scale, h[c] = given[c];
            }
            float along = (float)(tm_dot(h, u, (int)n) / (double)n);
            TM_IVDEP
            for (int64_t c = 0; c < n; c++) out[c] = (h[c] - u[c] * along) * scale;
            tm_write(dtype, dx, r * n, out, (int)n);
        }
        free(room);
    }
    if (w) {
        float *room = tm_scratch(sizeof(float) * n), *to = tm_target(dtype, dw, 0, room);
        for (int64_t c = 0; c < n; c++) {
            double sum = 0.0;
            for (int64_t block = 0; block < blocks; block++) sum += parts[block * n + c];
            to[c] = (float)sum;
        }
        tm_write(dtype, dw, 0, to, (int)n);
        free(room), free(parts);
    }
    free(wide);
}

/* Pairs (a, b) of each head's first 2 m numbers turned to (a cos - s b sin, b cos + s a sin), the rest copied; s is 1, or -1 to turn back.
   x, y (B, T, H, e); cos and sin (B, T, m), or (T, m) for all batches if ``shared``; pairs lie m apart ("half") or side by side. */
TM_EXPORT(rotate)(int dtype, const void *x, const float *cosines, const float *sines, void *y, int interleaved, int shared, float s, int64_t B, int64_t T, int64_t H, int64_t e,
                  int64_t m, int threads) {
    int64_t n = H * e;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t block = 0; block < tm_ceil(B * T, TOKENWISE_ROWS); block++) {
        float *from = tm_scratch(2 * sizeof(float) * n), *to = from + n;
        for (int64_t r = block * TOKENWISE_ROWS; r < tm_min(B * T, (block + 1) * TOKENWISE_ROWS); r++) {
            const float *row = tm_read(dtype, x, r * n, from, (int)n);
            float *out = tm_target(dtype, y, r * n, to);
            const float *restrict c = cosines + (shared ? r % T : r) * m, *restrict d = sines + (shared ? r % T : r) * m;
            for (int64_t h = 0; h < H; h++) {
                const float *restrict a = row + h * e;
                float *restrict turned = out + h * e;
                if (interleaved) {
                    TM_IVDEP
                    for (int64_t i = 0; i < m; i++) {
                        turned[2 * i] = a[2 * i] * c[i] - s * a[2 * i + 1] * d[i];
                        turned[2 * i + 1] = a[2 * i + 1] * c[i] + s * a[2 * i] * d[i];
                    }
                } else {
                    TM_IVDEP
                    for (int64_t i = 0; i < m; i++) {
                        turned[i] = a[i] * c[i] - s * a[m + i] * d[i];
                        turned[m + i] = a[m + i] * c[i] + s * a[i] * d[i];
                    }
                }
                if (e > 2 * m) memcpy(turned + 2 * m, a + 2 * m, sizeof(float) * (size_t)(e - 2 * m));
            }
            tm_write(dtype, y, r * n, out, (int)n);
        }
        free(from);
    }
}

/* y = gate sigmoid(gate) x, for n numbers each. */
TM_EXPORT(gated_forward)(int dtype, const void *gate, const void *x, void *y, int64_t n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t block = 0; block < tm_ceil(n, TOKENWISE_STRIP); block++) {
        float room[3][TOKENWISE_STRIP];
        int64_t at = block * TOKENWISE_STRIP;
        int count = (int)tm_min(TOKENWISE_STRIP, n - at);
        const float *restrict a = tm_read(dtype, gate, at, room[0], count), *restrict b = tm_read(dtype, x, at, room[1], count);
        float *restrict out = tm_target(dtype, y, at, room[2]);
        TM_IVDEP
        for (int c = 0; c < count; c++) out[c] = a[c] * tm_sigmoid(a[c]) * b[c];
        tm_write(dtype, y, at, out, count);
    }
}

/* With p = sigmoid(gate):  dgate = g x p (1 + gate (1 - p)),  dx = g gate p. */
TM_EXPORT(gated_backward)(int dtype, const void *g, const void *gate, const void *x, void *dgate, void *dx, int64_t n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t block = 0; block < tm_ceil(n, TOKENWISE_STRIP); block++) {
        float room[5][TOKENWISE_STRIP];
        int64_t at = block * TOKENWISE_STRIP;
        int count = (int)tm_min(TOKENWISE_STRIP, n - at);
        const float *restrict given = tm_read(dtype, g, at, room[0], count), *restrict a = tm_read(dtype, gate, at, room[1], count);
        const float *restrict b = tm_read(dtype, x, at, room[2], count);
        float *restrict da = tm_target(dtype, dgate, at, room[3]), *restrict db = tm_target(dtype, dx, at, room[4]);
        TM_IVDEP
        for (int c = 0; c < count; c++) {
            float p = tm_sigmoid(a[c]), open = a[c] * p;
            da[c] = given[c] * b[c] * (p + open * (1.0f - p));
            db[c] = given[c] * open;
        }
        tm_write(dtype, dgate, at, da, count);
        tm_write(dtype, dx, at, db, count);
    }
}
