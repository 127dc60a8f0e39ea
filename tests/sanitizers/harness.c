/* Repeats recorded calls of the kernels under a sanitizer: harness FILE.

   Every buffer is a heap block of its own, exactly as long as the tensor was and as far into a cache line, so that any overrun is seen. Each call runs
   on one thread, on two and on seven, and must leave the same bits; then all calls run again from several threads at once, which finds shared state.
   OpenMP's runtime is replaced by one of pthreads, written here, which ThreadSanitizer understands: what it reports is a race between blocks of work. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define POISON(at, n) ASAN_POISON_MEMORY_REGION(at, n)
#define UNPOISON(at, n) ASAN_UNPOISON_MEMORY_REGION(at, n)
#else
#define POISON(at, n) (void)(at)
#define UNPOISON(at, n) (void)(at)
#endif

/* ---- OpenMP on pthreads ---- */

enum { LOOPS = 64 };
typedef struct {
    void (*run)(void *);
    void *data;
    int threads;
    pthread_mutex_t lock;
    pthread_barrier_t barrier;
    int started;       /* loops that some thread has begun */
    long next[LOOPS];  /* of each loop, the first iteration that nobody has */
    long end[LOOPS], step[LOOPS];
} team_t;
typedef struct {
    team_t *team;
    int id;
    int loop;
} member_t;

static __thread member_t me;
static pthread_mutex_t critical = PTHREAD_MUTEX_INITIALIZER;

int omp_get_thread_num(void) { return me.id; }
int omp_get_num_threads(void) { return me.team ? me.team->threads : 1; }
int omp_get_max_threads(void) { return 2; }

static void *member(void *given) {
    me = *(member_t *)given;
    me.team->run(me.team->data);
    return NULL;
}

static void fork_join(team_t *t) {
    member_t before = me, all[64];
    pthread_t ids[64];
    if (t->threads < 1) t->threads = 2;
    if (t->threads > 64) t->threads = 64;
    pthread_mutex_init(&t->lock, NULL), pthread_barrier_init(&t->barrier, NULL, (unsigned)t->threads);
    for (int i = 1; i < t->threads; i++) {
        all[i] = (member_t){t, i, 0};
        if (pthread_create(&ids[i], NULL, member, &all[i])) abort();
    }
    me = (member_t){t, 0, 0};
    t->run(t->data);
    for (int i = 1; i < t->threads; i++) pthread_join(ids[i], NULL);
    me = before;
    pthread_mutex_destroy(&t->lock), pthread_barrier_destroy(&t->barrier);
}

void GOMP_parallel(void (*run)(void *), void *data, unsigned threads, unsigned flags) {
    team_t t = {.run = run, .data = data, .threads = (int)threads};
    (void)flags;
    fork_join(&t);
}

void GOMP_barrier(void) { pthread_barrier_wait(&me.team->barrier); }
void GOMP_critical_start(void) { pthread_mutex_lock(&critical); }
void GOMP_critical_end(void) { pthread_mutex_unlock(&critical); }
void GOMP_atomic_start(void) { pthread_mutex_lock(&critical); }
void GOMP_atomic_end(void) { pthread_mutex_unlock(&critical); }

static _Bool loop_next(long *from, long *to) {
    team_t *t = me.team;
    int at = me.loop - 1;
    pthread_mutex_lock(&t->lock);
    *from = t->next[at];
    long left = t->end[at] - *from;
    *to = left < t->step[at] ? t->end[at] : *from + t->step[at];
    t->next[at] = *to;
    pthread_mutex_unlock(&t->lock);
    return left > 0;
}

static _Bool loop_start(long start, long end, long step, long chunk, long *from, long *to) {
    team_t *t = me.team;
    if (step != 1 || me.loop >= LOOPS) abort();
    pthread_mutex_lock(&t->lock);
    if (t->started == me.loop) t->next[me.loop] = start, t->end[me.loop] = end, t->step[me.loop] = chunk, t->started++;
    pthread_mutex_unlock(&t->lock);
    me.loop++;
    return loop_next(from, to);
}

static void loop_parallel(void (*run)(void *), void *data, unsigned threads, long start, long end, long step, long chunk) {
    team_t t = {.run = run, .data = data, .threads = (int)threads, .started = 1, .next = {start}, .end = {end}, .step = {chunk}};
    if (step != 1) abort();
    fork_join(&t);
}

void GOMP_loop_end(void) { GOMP_barrier(); }
void GOMP_loop_end_nowait(void) {}

#define SCHEDULE(kind)                                                                                                                                         \
    _Bool GOMP_loop_##kind##_start(long start, long end, long step, long chunk, long *from, long *to) {                                                        \
        return loop_start(start, end, step, chunk, from, to);                                                                                                  \
    }                                                                                                                                                          \
    _Bool GOMP_loop_##kind##_next(long *from, long *to) {                                                                                                      \
        if (!me.loop) me.loop = 1;                                                                                                                             \
        return loop_next(from, to);                                                                                                                            \
    }                                                                                                                                                          \
    void GOMP_parallel_loop_##kind(void (*run)(void *), void *data, unsigned threads, long start, long end, long step, long chunk, unsigned flags) {           \
        (void)flags;                                                                                                                                           \
        loop_parallel(run, data, threads, start, end, step, chunk);                                                                                            \
    }
SCHEDULE(dynamic)
SCHEDULE(nonmonotonic_dynamic)
SCHEDULE(guided)
SCHEDULE(nonmonotonic_guided)

/* ---- recorded calls ---- */

typedef struct {
    char letter; /* of the signature; 0 for a pointer to nothing */
    int64_t whole;
    double real;
    int64_t offset;
    char *bytes;
} argument;
typedef union {
    int i;
    int64_t l;
    float f;
    double d;
    void *p;
} value;
typedef struct {
    char name[33];
    int64_t count;
    argument *args;
    uint64_t result;
} call;

#include "calls.h" /* typedef: invoke(name, value *, threads), made from the signatures */

static void take(void *to, size_t n, FILE *file) {
    if (n && fread(to, 1, n, file) != n) fprintf(stderr, "the recording ends early\n"), exit(3);
}

static call *load(const char *path, int *calls) {
    FILE *file = fopen(path, "rb");
    call *all = NULL;
    int32_t more;
    if (!file) perror(path), exit(3);
    for (*calls = 0; take(&more, 4, file), more; ++*calls) {
        all = realloc(all, sizeof(call) * (size_t)(*calls + 1));
        call *c = all + *calls;
        int64_t index;
        memset(c, 0, sizeof *c);
        take(c->name, 32, file), take(&c->count, 8, file), take(&index, 8, file);
        c->args = calloc((size_t)c->count, sizeof(argument));
        for (int64_t i = 0; i < c->count; i++) {
            argument *a = c->args + i;
            take(&a->letter, 1, file), take(&a->whole, 8, file), take(&a->real, 8, file), take(&a->offset, 8, file);
            if (a->letter == 'p') a->bytes = malloc((size_t)a->whole + 1), take(a->bytes, (size_t)a->whole, file);
        }
    }
    fclose(file);
    return all;
}

/* Runs a call on memory of its own and returns a sum over all of the bits it left. */
static uint64_t run(const call *c, int threads) {
    value values[64];
    char *blocks[64] = {NULL};
    uint64_t sum = 14695981039346656037u;
    if (c->count > 64) abort();
    for (int64_t i = 0; i < c->count; i++) {
        const argument *a = c->args + i;
        switch (a->letter) {
        case 'i': values[i].i = (int)a->whole; break;
        case 'l': values[i].l = a->whole; break;
        case 'f': values[i].f = (float)a->real; break;
        case 'd': values[i].d = a->real; break;
        case 'p': {
            void *block;
            if (posix_memalign(&block, 64, (size_t)(a->offset + a->whole))) abort();
            blocks[i] = block, values[i].p = blocks[i] + a->offset;
            memcpy(values[i].p, a->bytes, (size_t)a->whole);
            POISON(block, (size_t)a->offset / 8 * 8);
            break;
        }
        default: values[i].p = NULL;
        }
    }
    if (!invoke(c->name, values, threads)) fprintf(stderr, "no function is called %s\n", c->name), exit(3);
    for (int64_t i = 0; i < c->count; i++) {
        if (!blocks[i]) continue;
        for (int64_t n = 0; n < c->args[i].whole; n++) sum = (sum ^ (unsigned char)blocks[i][c->args[i].offset + n]) * 1099511628211u;
        UNPOISON(blocks[i], (size_t)c->args[i].offset);
        free(blocks[i]);
    }
    return sum;
}

enum { WORKERS = 4 };
typedef struct {
    call *all;
    int calls, first, wrong;
} work;

static void *worker(void *given) {
    work *w = given;
    for (int i = w->first; i < w->calls; i++) w->wrong += run(w->all + i, 1) != w->all[i].result; /* several threads on the same call */
    return NULL;
}

int main(int count, char **args) {
    static const int teams[] = {2, 7};
    int calls, wrong = 0;
    if (count != 2) return 3;
    call *all = load(args[1], &calls);
    for (int i = 0; i < calls; i++) {
        all[i].result = run(all + i, 1);
        for (int t = 0; t < 2; t++)
            if (run(all + i, teams[t]) != all[i].result) fprintf(stderr, "call %d, %s: %d threads give other bits than one\n", i, all[i].name, teams[t]), wrong++;
    }
    pthread_t ids[WORKERS];
    work some[WORKERS];
    for (int w = 0; w < WORKERS; w++) {
        some[w] = (work){all, calls, w / 2, 0};
        if (pthread_create(&ids[w], NULL, worker, some + w)) abort();
    }
    for (int w = 0; w < WORKERS; w++) pthread_join(ids[w], NULL), wrong += some[w].wrong;
    for (int i = 0; i < calls; i++) {
        for (int64_t a = 0; a < all[i].count; a++) free(all[i].args[a].bytes);
        free(all[i].args);
    }
    free(all);
    printf("%d calls, %d wrong\n", calls, wrong);
    return wrong ? 2 : 0;
}
