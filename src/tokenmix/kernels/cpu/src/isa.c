/* What is compiled once, whatever the instruction set: what the library was built from, the best set of this machine that it was built for, and the plans. */
#include <stdint.h>

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

/* A plan: one token's step of a whole model as a list of calls over memory that stays where it is. */
typedef struct {
    void (*run)(const void *);
    const void *fields;
} tm_call;

typedef struct {
    const tm_call *calls;
    int64_t count;
    int64_t *fault; /* set by a call whose numbers the plan does not serve: those after it are left out */
} tm_plan;

TM_PUBLIC void tm_run(const tm_plan *a) {
    *a->fault = 0;
    for (int64_t i = 0; i < a->count && !*a->fault; i++) a->calls[i].run(a->calls[i].fields);
}
