/* What the library was built from, and the best instruction set of this machine that it was built for. */
#ifndef TM_HASH
#define TM_HASH "unknown"
#endif
#define TM_PUBLIC __attribute__((visibility("default")))

TM_PUBLIC const char *tm_hash(void) { return TM_HASH; }

TM_PUBLIC const char *tm_isa(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512cd"))
        return "v4";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return "v3";
#endif
    return "base";
}
