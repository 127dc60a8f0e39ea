/* What all kernels share: names per instruction set, vectors, exp, and reading and writing half precision.
   Every kernel is a serial function over one block of the work; OpenMP only hands out blocks, whose sizes depend on shapes and never on threads. */
#ifndef TM_H
#define TM_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#ifndef TM_ISA
#define TM_ISA base
#endif
#define TM_PASTE_(a, b) tm_##a##_##b
#define TM_PASTE(a, b) TM_PASTE_(a, b)
#define TM_EXPORT(name) __attribute__((visibility("default"))) void TM_PASTE(TM_ISA, name)
#ifndef TM_INLINE /* the sanitizers, whose code is large, inline nothing */
#define TM_INLINE static inline __attribute__((always_inline))
#endif

#if defined(__AVX512F__)
#define TM_VL 16 /* floats in a vector register */
#define TM_REGISTERS 32
#elif defined(__AVX2__)
#define TM_VL 8
#define TM_REGISTERS 16
#elif defined(__aarch64__)
#define TM_VL 4
#define TM_REGISTERS 32
#else
#define TM_VL 4
#define TM_REGISTERS 16
#endif
typedef float tm_vf __attribute__((vector_size(4 * TM_VL), aligned(4 * TM_VL), may_alias));
typedef float tm_vfu __attribute__((vector_size(4 * TM_VL), aligned(4), may_alias)); /* unaligned */

/* The sum of a vector's numbers, quarter by quarter: a loop over the numbers would add one after the other. */
typedef float tm_v4 __attribute__((vector_size(16), aligned(16), may_alias));
TM_INLINE float tm_sum(tm_vf a) {
    tm_v4 part[TM_VL / 4], sum;
    memcpy(part, &a, sizeof a);
    sum = part[0];
    for (int i = 1; i < TM_VL / 4; i++) sum += part[i];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

#if defined(__clang__)
#define TM_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#else
#define TM_IVDEP _Pragma("GCC ivdep")
#endif

enum { TM_F32 = 0, TM_BF16 = 1, TM_F16 = 2 };

/* Count numbers below 2^-126 as 0 in this thread, until tm_restore is given what this returned: they would slow each operation by a hundred times. The arithmetic
   between the two must be in a function that is not inlined, as a compiler does not know what it depends on. */
#if defined(__SSE__)
TM_INLINE uint64_t tm_flush_small(void) {
    uint64_t before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr((unsigned)before | 0x8040u);
    return before;
}
TM_INLINE void tm_restore(uint64_t before) { __builtin_ia32_ldmxcsr((unsigned)before); }
#elif defined(__aarch64__)
TM_INLINE void tm_restore(uint64_t before) { __asm__ volatile("msr fpcr, %0" ::"r"(before)); }
TM_INLINE uint64_t tm_flush_small(void) {
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    tm_restore(before | (uint64_t)1 << 24);
    return before;
}
#else
TM_INLINE uint64_t tm_flush_small(void) { return 0; }
TM_INLINE void tm_restore(uint64_t before) { (void)before; }
#endif

/* The least maximum: one float32 step above the key of a dead token, so that no difference is NaN and exp(dead - TM_FLOOR) is 0. */
#define TM_FLOOR (-0x1.fffffcp127f)

/* exp(x) for x <= 0, 0 below -87, NaN for NaN; about one unit in the last place, no branch. The sum with 1.5 * 2^23 is rounded to a whole number, which then
   stands in its lowest bits: that power of two is read from them, as to convert NaN to an integer is undefined. */
TM_INLINE float tm_exp_neg(float x) {
    float c = x < -87.0f ? -87.0f : x;
    float shifted = c * 1.44269504088896341f + 12582912.0f, n = shifted - 12582912.0f, scale;
    uint32_t bits;
    float r = n * -0.693359375f + c;
    r = n * 2.12194440e-4f + r;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + (r + 1.0f);
    memcpy(&bits, &shifted, 4);
    bits = (bits + 127u) << 23;
    memcpy(&scale, &bits, 4);
    return x < -87.0f ? 0.0f : p * scale;
}

/* exp(x), 0 below -87, exp(88) above 88. */
TM_INLINE float tm_exp(float x) {
    float c = x > 88.0f ? 88.0f : x;
    return tm_exp_neg(c);
}

TM_INLINE float tm_sigmoid(float x) {
    float e = tm_exp_neg(-fabsf(x));
    float a = 1.0f / (1.0f + e);
    return x >= 0 ? a : e * a;
}

/* sum_i a_i b_i, in float64: squares of large numbers stay finite. */
TM_INLINE double tm_dot(const float *restrict a, const float *restrict b, int n) {
    double part[TM_VL], sum = 0.0;
    int c = 0;
    for (int i = 0; i < TM_VL; i++) part[i] = 0.0;
    for (; c + TM_VL <= n; c += TM_VL) {
        TM_IVDEP
        for (int i = 0; i < TM_VL; i++) part[i] += (double)a[c + i] * (double)b[c + i];
    }
    for (; c < n; c++) sum += (double)a[c] * (double)b[c];
    for (int half = TM_VL / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return sum + part[0];
}

TM_INLINE float tm_from_bf16(uint16_t u) {
    uint32_t i = (uint32_t)u << 16;
    float f;
    memcpy(&f, &i, 4);
    return f;
}

TM_INLINE uint16_t tm_to_bf16(float f) {
    uint32_t i;
    memcpy(&i, &f, 4);
    uint32_t rounded = (i + 0x7fff + ((i >> 16) & 1)) >> 16;
    return (uint16_t)((i & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

TM_INLINE float tm_from_f16(uint16_t u) {
    uint32_t sign = (uint32_t)(u & 0x8000) << 16, rest = u & 0x7fff;
    uint32_t normal = (rest << 13) + 0x38000000, big = (rest << 13) | 0x7f800000;
    uint32_t i = sign | (rest >= 0x7c00 ? big : normal);
    float f, small = (float)(int32_t)rest * 0x1p-24f;
    memcpy(&f, &i, 4);
    return rest < 0x0400 ? (sign ? -small : small) : f;
}

TM_INLINE uint16_t tm_to_f16(float f) {
    uint32_t i;
    memcpy(&i, &f, 4);
    uint32_t sign = (i >> 16) & 0x8000, rest = i & 0x7fffffff;
    float magnitude;
    memcpy(&magnitude, &rest, 4);
    uint32_t normal = (rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13;
    float shifted = magnitude + 0.5f; /* rounds to multiples of 2^-24, as the smallest float16 numbers do */
    uint32_t small;
    memcpy(&small, &shifted, 4);
    small -= 0x3f000000;
    uint32_t half = rest < 0x38800000 ? small : rest >= 0x47800000 ? (rest > 0x7f800000 ? 0x7e00 : 0x7c00) : normal;
    return (uint16_t)(sign | half);
}

/* The whole vectors of n float16 numbers to float32, and back, where the processor has an instruction for it; returns how many. */
TM_INLINE int tm_widen_f16(const uint16_t *p, float *buffer, int n) {
    int c = 0;
#if defined(__F16C__)
    for (; c + 8 <= n; c += 8) _mm256_storeu_ps(buffer + c, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p + c))));
#endif
    return c;
}

TM_INLINE int tm_round_f16(uint16_t *p, const float *buffer, int n) {
    int c = 0;
#if defined(__F16C__)
    for (; c + 8 <= n; c += 8) _mm_storeu_si128((__m128i *)(void *)(p + c), _mm256_cvtps_ph(_mm256_loadu_ps(buffer + c), _MM_FROUND_TO_NEAREST_INT));
#endif
    return c;
}

/* n half-precision numbers to float32, and back. */
static __attribute__((noinline, unused)) void tm_widen(int dtype, const uint16_t *p, float *buffer, int n) {
    if (dtype == TM_BF16) {
        TM_IVDEP
        for (int c = 0; c < n; c++) buffer[c] = tm_from_bf16(p[c]);
    } else {
        TM_IVDEP
        for (int c = tm_widen_f16(p, buffer, n); c < n; c++) buffer[c] = tm_from_f16(p[c]);
    }
}

static __attribute__((noinline, unused)) void tm_round(int dtype, uint16_t *p, const float *buffer, int n) {
    if (dtype == TM_BF16) {
        TM_IVDEP
        for (int c = 0; c < n; c++) p[c] = tm_to_bf16(buffer[c]);
    } else {
        TM_IVDEP
        for (int c = tm_round_f16(p, buffer, n); c < n; c++) p[c] = tm_to_f16(buffer[c]);
    }
}

/* n numbers of one row at element offset ``at`` of an array of dtype; the address itself where they are float32 already. */
TM_INLINE const float *tm_read(int dtype, const void *a, int64_t at, float *buffer, int n) {
    if (dtype == TM_F32) return (const float *)a + at;
    tm_widen(dtype, (const uint16_t *)a + at, buffer, n);
    return buffer;
}

/* Where a row of results is computed: in place for float32, else in the buffer, which tm_write then rounds. */
TM_INLINE float *tm_target(int dtype, void *a, int64_t at, float *buffer) { return dtype == TM_F32 ? (float *)a + at : buffer; }

TM_INLINE void tm_write(int dtype, void *a, int64_t at, const float *buffer, int n) {
    if (dtype != TM_F32) tm_round(dtype, (uint16_t *)a + at, buffer, n);
}

/* Ask for n numbers of a row that will be read or written soon: a strip of a row is too short for the processor to see the pattern by itself. Into the second
   cache: rows that lie a power of two apart would crowd each other out of the first. */
TM_INLINE void tm_ahead(int dtype, const void *a, int64_t at, int n) {
    const char *p = (const char *)a + at * (dtype == TM_F32 ? 4 : 2);
    for (int i = 0; i < n * (dtype == TM_F32 ? 4 : 2); i += 64) __builtin_prefetch(p + i, 0, 2);
}

/* Whether x is NaN or infinite. */
TM_INLINE int tm_odd(float x) { return !(fabsf(x) <= FLT_MAX); }

/* Tells the caller, if he asks, that some result is not finite. */
TM_INLINE void tm_tell(int some, int *odd) {
    if (some && odd) __atomic_store_n(odd, 1, __ATOMIC_RELAXED);
}

TM_INLINE int64_t tm_min(int64_t a, int64_t b) { return a < b ? a : b; }
TM_INLINE int64_t tm_max(int64_t a, int64_t b) { return a > b ? a : b; }
TM_INLINE int64_t tm_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Scratch memory of whole cache lines; NULL never returns: there is no way to report it through the caller's loop. */
TM_INLINE void *tm_scratch(size_t bytes) {
    void *p = NULL;
    if (posix_memalign(&p, 64, (bytes + 63) / 64 * 64 + 64)) abort();
    return p;
}

#endif
