/* What a plan (see isa.c) needs beside the steps of decode.c: products with weights, norms, attention over kept keys, work on single numbers. Every function takes
   one pointer to its fields, each of 8 bytes. */
#include "tm.h"

/* ---- products with weights ---- */

#define PLAN_ROWS 4        /* rows of the weights that one strip of x meets at once */
#define PLAN_SHARE 16      /* rows of a block of work */
#define PLAN_WORK (1 << 17) /* products from which on several threads are worth their start */

enum { PLAN_INT8 = 3 }; /* a kind of weights beside TM_F32, TM_BF16 and TM_F16 */

typedef uint16_t plan_vh __attribute__((vector_size(2 * TM_VL), aligned(2), may_alias));
typedef int8_t plan_vb __attribute__((vector_size(TM_VL), aligned(1), may_alias));
typedef int16_t plan_vs __attribute__((vector_size(2 * TM_VL), aligned(2 * TM_VL), may_alias));
typedef int32_t plan_vi __attribute__((vector_size(4 * TM_VL), aligned(4 * TM_VL), may_alias));
typedef uint32_t plan_vu __attribute__((vector_size(4 * TM_VL), aligned(4 * TM_VL), may_alias));

/* TM_VL weights as float32. GCC widens vectors of 8 and 16 bits half by half, or number by number, where one instruction does it. */
#if defined(__AVX512F__)
TM_INLINE plan_vu plan_widen_u16(const uint16_t *w) { return (plan_vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)w)); }
TM_INLINE plan_vi plan_widen_i8(const int8_t *w) { return (plan_vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)w)); }
#elif defined(__AVX2__)
TM_INLINE plan_vu plan_widen_u16(const uint16_t *w) { return (plan_vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)w)); }
TM_INLINE plan_vi plan_widen_i8(const int8_t *w) { return (plan_vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)w)); }
#else
TM_INLINE plan_vu plan_widen_u16(const uint16_t *w) { return __builtin_convertvector(*(const plan_vh *)w, plan_vu); }
TM_INLINE plan_vi plan_widen_i8(const int8_t *w) { return __builtin_convertvector(__builtin_convertvector(*(const plan_vb *)w, plan_vs), plan_vi); }
#endif

TM_INLINE tm_vf plan_load(const int kind, const void *w, int64_t at) {
    if (kind == TM_BF16) return (tm_vf)(plan_widen_u16((const uint16_t *)w + at) << 16);
    if (kind == PLAN_INT8) return __builtin_convertvector(plan_widen_i8((const int8_t *)w + at), tm_vf);
    return *(const tm_vfu *)((const float *)w + at);
}

TM_INLINE float plan_weight(const int kind, const void *w, int64_t at) {
    if (kind == TM_BF16) return tm_from_bf16(((const uint16_t *)w)[at]);
    if (kind == PLAN_INT8) return (float)((const int8_t *)w)[at];
    return ((const float *)w)[at];
}

typedef struct {
    int64_t dtype, kind; /* of x, bias and y; of the weights */
    const void *x, *w;
    const float *scales; /* (N,) of int8 rows, else NULL */
    const void *bias;    /* (N,) or NULL */
    void *y;
    int64_t B, K, N, threads;
} plan_linear_in;

/* sum_k w[n + r][k] x[k] for each of ``rows`` rows r. */
TM_INLINE void plan_products(const int kind, const int rows, const void *w, int64_t n, int64_t K, const float *restrict x, float *restrict out) {
    tm_vf even[PLAN_ROWS] = {{0}}, odd[PLAN_ROWS] = {{0}};
    int64_t k = 0;
    for (; k + 2 * TM_VL <= K; k += 2 * TM_VL) {
        tm_vf a = *(const tm_vfu *)(x + k), b = *(const tm_vfu *)(x + k + TM_VL);
        for (int r = 0; r < rows; r++) even[r] += plan_load(kind, w, (n + r) * K + k) * a, odd[r] += plan_load(kind, w, (n + r) * K + k + TM_VL) * b;
    }
    for (int r = 0; r < rows; r++) {
        float sum = tm_sum(even[r] + odd[r]);
        for (int64_t i = k; i < K; i++) sum += plan_weight(kind, w, (n + r) * K + i) * x[i];
        out[r] = sum;
    }
}

TM_INLINE void plan_linear_rows(const int kind, const plan_linear_in *a, const float *x, const float *bias, float *y, int64_t from, int64_t to) {
    for (int64_t n = from; n < to; n += PLAN_ROWS) {
        int rows = (int)tm_min(PLAN_ROWS, to - n);
        for (int64_t b = 0; b < a->B; b++) {
            float out[PLAN_ROWS];
            if (rows == PLAN_ROWS) plan_products(kind, PLAN_ROWS, a->w, n, a->K, x + b * a->K, out);
            else
                for (int r = 0; r < rows; r++) plan_products(kind, 1, a->w, n + r, a->K, x + b * a->K, out + r);
            for (int r = 0; r < rows; r++) y[b * a->N + n + r] = out[r] * (a->scales ? a->scales[n + r] : 1.0f) + (bias ? bias[n + r] : 0.0f);
        }
    }
}

TM_INLINE void plan_linear_share(const plan_linear_in *a, const float *x, const float *bias, float *y, int64_t from, int64_t to) {
    if (a->kind == TM_F32) plan_linear_rows(TM_F32, a, x, bias, y, from, to);
    else if (a->kind == TM_BF16) plan_linear_rows(TM_BF16, a, x, bias, y, from, to);
    else plan_linear_rows(PLAN_INT8, a, x, bias, y, from, to);
}

/* y = x W^T + bias: x (B, K), W (N, K) by rows, y (B, N). Weights of float16 are given as another kind. */
TM_EXPORT(plan_linear)(const plan_linear_in *a) {
    int dtype = (int)a->dtype, narrow = dtype != TM_F32;
    float *room = narrow ? tm_scratch(sizeof(float) * (a->B * (a->K + a->N) + a->N)) : NULL, *wide = narrow ? room + a->B * a->K : (float *)a->y;
    const float *x = tm_read(dtype, a->x, 0, room, (int)(a->B * a->K)), *bias = a->bias ? tm_read(dtype, a->bias, 0, narrow ? wide + a->B * a->N : NULL, (int)a->N) : NULL;
    if (a->threads > 1 && a->B * a->K * a->N > PLAN_WORK) {
#pragma omp parallel for schedule(static) num_threads((int)a->threads)
        for (int64_t i = 0; i < tm_ceil(a->N, PLAN_SHARE); i++) plan_linear_share(a, x, bias, wide, i * PLAN_SHARE, tm_min((i + 1) * PLAN_SHARE, a->N));
    } else
        plan_linear_share(a, x, bias, wide, 0, a->N);
    tm_write(dtype, a->y, 0, wide, (int)(a->B * a->N));
    free(room);
}

/* ---- norms ---- */

typedef struct {
    int64_t dtype;
    const void *x, *w, *bias; /* w, bias (n) or NULL */
    void *y;
    int64_t rows, n;
    double eps;
} plan_layer_norm_in;

/* y = (x - mean x) / sqrt(var x + eps) w + bias in each row. */
TM_EXPORT(plan_layer_norm)(const plan_layer_norm_in *a) {
    int dtype = (int)a->dtype, n = (int)a->n;
    float *room = tm_scratch(sizeof(float) * 4 * a->n);
    const float *w = a->w ? tm_read(dtype, a->w, 0, room, n) : NULL, *bias = a->bias ? tm_read(dtype, a->bias, 0, room + n, n) : NULL;
    for (int64_t r = 0; r < a->rows; r++) {
        const float *x = tm_read(dtype, a->x, r * n, room + 2 * n, n);
        float *y = tm_target(dtype, a->y, r * n, room + 3 * n);
        double sum = 0.0, square = 0.0;
        for (int c = 0; c < n; c++) sum += (double)x[c];
        double mean = sum / n;
        for (int c = 0; c < n; c++) square += ((double)x[c] - mean) * ((double)x[c] - mean);
        float scale = (float)(1.0 / sqrt(square / n + a->eps));
        for (int c = 0; c < n; c++) y[c] = (float)((double)x[c] - mean) * scale * (w ? w[c] : 1.0f) + (bias ? bias[c] : 0.0f);
        tm_write(dtype, a->y, r * n, y, n);
    }
    free(room);
}

/* Kernels that take their arguments one by one, with the same arguments as fields. */
typedef struct {
    int64_t dtype;
    const void *x, *w;
    void *y;
    float *inverse;
    int64_t rows, n;
    double eps;
    int64_t threads;
} plan_rms_in;

TM_EXPORT(plan_rms_forward)(const plan_rms_in *a) {
    TM_PASTE(TM_ISA, rms_forward)((int)a->dtype, a->x, a->w, a->y, a->inverse, a->rows, a->n, a->eps, 1);
}

typedef struct {
    int64_t dtype, heads;
    double eps;
    const void *q, *k, *v, *d;
    const uint8_t *mask;
    void *y;
    float *saved;
    const double *m0, *num0, *den0;
    double *m1, *num1, *den1;
    int64_t B, T, D, qb, qt, kb, kt, vb, vt, db, dt, threads;
} plan_fade_in;

TM_EXPORT(plan_fade_forward)(const plan_fade_in *a) {
    TM_PASTE(TM_ISA, fade_forward)((int)a->dtype, (int)a->heads, a->eps, a->q, a->k, a->v, a->d, a->mask, a->y, a->saved, a->m0, a->num0, a->den0, a->m1, a->num1, a->den1, a->B, a->T,
                                   a->D, a->qb, a->qt, a->kb, a->kt, a->vb, a->vt, a->db, a->dt, 1);
}

typedef struct {
    int64_t dtype, heads, R, norm;
    double eps;
    const void *q, *k, *v;
    const float *a, *b, *g;
    const uint8_t *mask;
    void *y;
    float *saved;
    const double *m0, *num0, *den0;
    double *m1, *num1, *den1;
    int64_t B, T, D, qb, qt, kb, kt, vb, vt, threads;
} plan_pairs_in;

TM_EXPORT(plan_pairs_forward)(const plan_pairs_in *a) {
    TM_PASTE(TM_ISA, pairs_forward)((int)a->dtype, (int)a->heads, (int)a->R, (int)a->norm, a->eps, a->q, a->k, a->v, a->a, a->b, a->g, a->mask, a->y, a->saved, a->m0, a->num0, a->den0,
                                    a->m1, a->num1, a->den1, a->B, a->T, a->D, a->qb, a->qt, a->kb, a->kt, a->vb, a->vt, 1);
}

typedef struct {
    int64_t dtype;
    const void *x;
    const float *cosines, *sines;
    void *y;
    int64_t interleaved, shared;
    double s;
    int64_t B, T, H, e, m, threads;
} plan_rotate_in;

TM_EXPORT(plan_rotate)(const plan_rotate_in *a) {
    TM_PASTE(TM_ISA, rotate)((int)a->dtype, a->x, a->cosines, a->sines, a->y, (int)a->interleaved, (int)a->shared, (float)a->s, a->B, a->T, a->H, a->e, a->m, 1);
}

/* ---- attention over kept keys ---- */

typedef struct {
    int64_t dtype;
    const void *q, *k, *v; /* (B, H, e), (B, G, e): a new token */
    void *keys, *values;   /* (B, G, most, e): of the tokens so far, to which the new one is added */
    uint8_t *valid;        /* (B, most) */
    const int64_t *at;     /* (1): how many tokens there are */
    void *y;               /* (B, H, e) */
    int64_t B, H, G, e, most;
    double scale;
    int64_t threads;
} plan_attend_in;

/* sum_s w[s] v[s] for n rows of e numbers, added to ``sum``. */
TM_INLINE void plan_mix(const int dtype, const void *v, int64_t from, const float *restrict w, int64_t n, int e, float *restrict sum, float *room) {
    int64_t s = 0;
    for (; dtype == TM_F32 && s + PLAN_ROWS <= n; s += PLAN_ROWS) {
        const float *a = (const float *)v + from + s * e, *b = a + e, *c = b + e, *d = c + e;
        TM_IVDEP
        for (int i = 0; i < e; i++) sum[i] += (w[s] * a[i] + w[s + 1] * b[i]) + (w[s + 2] * c[i] + w[s + 3] * d[i]);
    }
    for (; s < n; s++) {
        const float *a = tm_read(dtype, v, from + s * e, room, e);
        TM_IVDEP
        for (int i = 0; i < e; i++) sum[i] += w[s] * a[i];
    }
}

static void plan_attend_head(const plan_attend_in *a, int64_t b, int64_t h) {
    int dtype = (int)a->dtype, e = (int)a->e;
    int64_t n = *a->at + 1, group = b * a->G + h / (a->H / a->G), from = group * a->most * e, head = (b * a->H + h) * e, s = 0;
    float *room = tm_scratch(sizeof(float) * (size_t)(n + 4 * e)), *weights = room + 4 * e, *sum = room + 2 * e, top = -INFINITY, total = 0.0f;
    const float *q = tm_read(dtype, a->q, head, room, e);
    for (; dtype == TM_F32 && s + PLAN_ROWS <= n; s += PLAN_ROWS) plan_products(TM_F32, PLAN_ROWS, (const float *)a->keys + from, s, e, q, weights + s);
    for (; s < n; s++) weights[s] = (float)tm_dot(q, tm_read(dtype, a->keys, from + s * e, room + e, e), e);
    for (s = 0; s < n; s++) {
        weights[s] = a->valid[b * a->most + s] ? weights[s] * (float)a->scale : -INFINITY;
        top = weights[s] > top ? weights[s] : top;
    }
    TM_IVDEP
    for (s = 0; s < n; s++) weights[s] = tm_exp_neg(weights[s] - top);
    for (s = 0; s < n; s++) total += weights[s];
    for (int c = 0; c < e; c++) sum[c] = 0.0f;
    plan_mix(dtype, a->values, from, weights, n, e, sum, room + e);
    float *y = tm_target(dtype, a->y, head, room + 3 * e);
    for (int c = 0; c < e; c++) y[c] = sum[c] / total;
    tm_write(dtype, a->y, head, y, e);
    free(room);
}

/* y = softmax(scale q k^T) v over all tokens so far and the new one. */
TM_EXPORT(plan_attend)(const plan_attend_in *a) {
    int64_t size = a->e * (a->dtype == TM_F32 ? 4 : 2);
    for (int64_t i = 0; i < a->B * a->G; i++) {
        memcpy((char *)a->keys + (i * a->most + *a->at) * size, (const char *)a->k + i * size, (size_t)size);
        memcpy((char *)a->values + (i * a->most + *a->at) * size, (const char *)a->v + i * size, (size_t)size);
    }
    for (int64_t b = 0; b < a->B; b++) a->valid[b * a->most + *a->at] = 1;
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1 && a->B * a->H * (*a->at + 1) * a->e > PLAN_WORK)
    for (int64_t i = 0; i < a->B * a->H; i++) plan_attend_head(a, i / a->H, i % a->H);
}

/* ---- single numbers ---- */

enum { PLAN_F64 = 3, PLAN_I64 = 4, PLAN_U8 = 5, PLAN_I32 = 6 }; /* dtypes beside TM_F32, TM_BF16 and TM_F16 */
enum { PLAN_AXES = 5 };

enum {
    PLAN_COPY, PLAN_ADD, PLAN_SUB, PLAN_MUL, PLAN_DIV, PLAN_MAXIMUM, PLAN_SILU_GATE, /* of a and b */
    PLAN_SCALE, PLAN_SHIFT, PLAN_AT_LEAST, PLAN_AT_MOST,                             /* of a and a number */
    PLAN_NEG, PLAN_EXP, PLAN_SIN, PLAN_COS, PLAN_FLOOR, PLAN_SIGMOID, PLAN_SILU, PLAN_SOFTPLUS, PLAN_RSQRT, PLAN_SQRT, PLAN_SQUARE, PLAN_RECIPROCAL, PLAN_ABS, PLAN_TANH, PLAN_RELU, PLAN_GELU, PLAN_LOG /* of a */
};

typedef struct {
    int64_t op, to, from_a, from_b; /* dtypes of the result and of its arguments */
    void *y;
    const void *a, *b;
    int64_t shape[PLAN_AXES], ys[PLAN_AXES], as[PLAN_AXES], bs[PLAN_AXES];
    double number; /* of PLAN_ADD and PLAN_SUB a factor of b */
} plan_map_in;

TM_INLINE double plan_get(int64_t dtype, const void *a, int64_t at) {
    switch (dtype) {
    case TM_F32: return (double)((const float *)a)[at];
    case TM_BF16: return (double)tm_from_bf16(((const uint16_t *)a)[at]);
    case TM_F16: return (double)tm_from_f16(((const uint16_t *)a)[at]);
    case PLAN_F64: return ((const double *)a)[at];
    case PLAN_I64: return (double)((const int64_t *)a)[at];
    case PLAN_I32: return (double)((const int32_t *)a)[at];
    default: return (double)((const uint8_t *)a)[at];
    }
}

TM_INLINE void plan_put(int64_t dtype, void *y, int64_t at, double x) {
    switch (dtype) {
    case TM_F32: ((float *)y)[at] = (float)x; break;
    case TM_BF16: ((uint16_t *)y)[at] = tm_to_bf16((float)x); break;
    case TM_F16: ((uint16_t *)y)[at] = tm_to_f16((float)x); break;
    case PLAN_F64: ((double *)y)[at] = x; break;
    case PLAN_I64: ((int64_t *)y)[at] = (int64_t)x; break;
    case PLAN_I32: ((int32_t *)y)[at] = (int32_t)x; break;
    default: ((uint8_t *)y)[at] = (uint8_t)(x != 0.0);
    }
}

static double plan_value(int64_t op, double a, double b, double number) {
    switch (op) {
    case PLAN_COPY: return a;
    case PLAN_ADD: return a + number * b;
    case PLAN_SUB: return a - number * b;
    case PLAN_MUL: return a * b;
    case PLAN_DIV: return a / b;
    case PLAN_MAXIMUM: return a != a || a > b ? a : b;
    case PLAN_SILU_GATE: return a / (1.0 + exp(-a)) * b;
    case PLAN_SCALE: return a * number;
    case PLAN_SHIFT: return a + number;
    case PLAN_AT_LEAST: return a < number ? number : a;
    case PLAN_AT_MOST: return a > number ? number : a;
    case PLAN_NEG: return -a;
    case PLAN_EXP: return exp(a);
    case PLAN_SIN: return sin(a);
    case PLAN_COS: return cos(a);
    case PLAN_FLOOR: return floor(a);
    case PLAN_SIGMOID: return 1.0 / (1.0 + exp(-a));
    case PLAN_SILU: return a / (1.0 + exp(-a));
    case PLAN_SOFTPLUS: return a > 20.0 ? a : log1p(exp(a)); /* torch's threshold */
    case PLAN_RSQRT: return 1.0 / sqrt(a);
    case PLAN_SQRT: return sqrt(a);
    case PLAN_SQUARE: return a * a;
    case PLAN_RECIPROCAL: return 1.0 / a;
    case PLAN_ABS: return fabs(a);
    case PLAN_TANH: return tanh(a);
    case PLAN_RELU: return a < 0.0 ? 0.0 : a;
    case PLAN_GELU: return 0.5 * a * (1.0 + erf(a * 0.70710678118654752440));
    default: return log(a);
    }
}

/* n neighbours of float32, of which b is one for all or one for each; 0 if the operation has no short way. */
TM_INLINE int plan_map_fast(int64_t op, float *restrict y, const float *restrict a, const float *restrict b, int each, double number, int64_t n) {
    float s = (float)number, one = b && !each ? *b : 0.0f;
#define PLAN_LOOP(value) \
    TM_IVDEP for (int64_t i = 0; i < n; i++) { float p = a[i], q = each ? b[i] : one; (void)q; y[i] = (value); } \
    return 1
    switch (op) {
    case PLAN_ADD: PLAN_LOOP(p + s * q);
    case PLAN_SUB: PLAN_LOOP(p - s * q);
    case PLAN_MUL: PLAN_LOOP(p * q);
    case PLAN_SCALE: PLAN_LOOP(p * s);
    case PLAN_SHIFT: PLAN_LOOP(p + s);
    case PLAN_NEG: PLAN_LOOP(-p);
    case PLAN_SQUARE: PLAN_LOOP(p * p);
    case PLAN_RELU: PLAN_LOOP(p < 0.0f ? 0.0f : p);
    case PLAN_SIGMOID: PLAN_LOOP(tm_sigmoid(p));
    case PLAN_SILU: PLAN_LOOP(p * tm_sigmoid(p));
    case PLAN_SILU_GATE: PLAN_LOOP(p * tm_sigmoid(p) * q);
    default: return 0;
    }
#undef PLAN_LOOP
}

TM_INLINE int64_t plan_size(int64_t dtype) { return dtype == PLAN_F64 || dtype == PLAN_I64 ? 8 : dtype == TM_F32 || dtype == PLAN_I32 ? 4 : dtype == PLAN_U8 ? 1 : 2; }

/* y = op(a, b), number by number; strides in numbers, 0 where an argument is repeated. */
TM_EXPORT(plan_map)(const plan_map_in *a) {
    const int64_t *n = a->shape, *ys = a->ys, *as = a->as, *bs = a->bs;
    int same = a->to == a->from_a && ys[4] == 1 && as[4] == 1, copy = same && a->op == PLAN_COPY;
    int plain = same && a->to == TM_F32 && (!a->b || (a->from_b == TM_F32 && (bs[4] == 1 || bs[4] == 0)));
    int64_t size = plan_size(a->to);
    for (int64_t i0 = 0; i0 < n[0]; i0++)
        for (int64_t i1 = 0; i1 < n[1]; i1++)
            for (int64_t i2 = 0; i2 < n[2]; i2++)
                for (int64_t i3 = 0; i3 < n[3]; i3++) {
                    int64_t y = i0 * ys[0] + i1 * ys[1] + i2 * ys[2] + i3 * ys[3], x = i0 * as[0] + i1 * as[1] + i2 * as[2] + i3 * as[3];
                    int64_t z = i0 * bs[0] + i1 * bs[1] + i2 * bs[2] + i3 * bs[3];
                    if (copy) {
                        memcpy((char *)a->y + y * size, (const char *)a->a + x * size, (size_t)(n[4] * size));
                        continue;
                    }
                    if (plain && plan_map_fast(a->op, (float *)a->y + y, (const float *)a->a + x, a->b ? (const float *)a->b + z : NULL, a->b && bs[4] == 1, a->number, n[4])) continue;
                    for (int64_t i = 0; i < n[4]; i++) {
                        double second = a->b ? plan_get(a->from_b, a->b, z + i * bs[4]) : 0.0;
                        plan_put(a->to, a->y, y + i * ys[4], plan_value(a->op, plan_get(a->from_a, a->a, x + i * as[4]), second, a->number));
                    }
                }
}

typedef struct {
    int64_t most, dtype; /* the largest of n numbers, or their sum */
    void *y;
    const void *a;
    int64_t rows, n;
} plan_reduce_in;

/* Rows of n numbers reduced to one each. */
TM_EXPORT(plan_reduce)(const plan_reduce_in *a) {
    for (int64_t r = 0; r < a->rows; r++) {
        double all = a->most ? plan_get(a->dtype, a->a, r * a->n) : 0.0;
        for (int64_t i = 0; i < a->n; i++) {
            double x = plan_get(a->dtype, a->a, r * a->n + i);
            all = !a->most ? all + x : x != x || x > all ? x : all;
        }
        plan_put(a->dtype, a->y, r, all);
    }
}

typedef struct {
    int64_t size; /* bytes of a row */
    const char *table;
    const int64_t *rows;
    char *y;
    int64_t n;
} plan_gather_in;

/* Rows of a table, as of an embedding. */
TM_EXPORT(plan_gather)(const plan_gather_in *a) {
    for (int64_t i = 0; i < a->n; i++) memcpy(a->y + i * a->size, a->table + a->rows[i] * a->size, (size_t)a->size);
}

typedef struct {
    int64_t zero, dtype; /* whether the numbers must be 0 rather than finite */
    const void *a;
    int64_t n;
    int64_t *fault;
} plan_check_in;

/* The plan was made for such numbers; others are left to the caller. */
TM_EXPORT(plan_check)(const plan_check_in *a) {
    double sum = 0.0;
    for (int64_t i = 0; i < a->n; i++) sum += fabs(plan_get(a->dtype, a->a, i)) * (a->zero ? 1.0 : 0.0);
    if (sum != 0.0) *a->fault = 1;
}
