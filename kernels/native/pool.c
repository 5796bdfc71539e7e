// A fixed set of threads that help the caller with one task at a time. With one worker there are none: the caller works.
//
// The caller never waits for a helper to arrive, only for those that have begun: a helper that has lost its core to
// another process finds the task closed when it comes, and costs nothing.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "baton.h"

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() ((void)0)
#endif

// A step has hundreds of tasks microseconds apart: worth spinning for one, not worth burning a core between steps.
enum { MAX_SPINS = 4000 };

typedef struct {
    baton_pool *pool;
    void *scratch;
    pthread_t thread;
} worker;

struct baton_pool {
    int num_workers;
    worker *workers;  // workers[0] is whoever calls
    void *memory[BATON_NUM_USES];  // the caller's, between tasks
    int64_t memory_bytes[BATON_NUM_USES];
    baton_task task;
    void *job;
    atomic_ulong round;  // of the task; changed under `lock`
    atomic_int is_open;  // whether helpers may still begin
    atomic_int num_inside;
    atomic_int is_ending;
    pthread_mutex_t lock;
    pthread_cond_t begun;
};

static void *work(void *arg) {
    worker *self = arg;
    baton_pool *pool = self->pool;
    unsigned long seen = 0;
    for (;;) {
        for (int i = 0; i < MAX_SPINS && atomic_load_explicit(&pool->round, memory_order_acquire) == seen; i++) RELAX();
        if (atomic_load(&pool->round) == seen) {
            pthread_mutex_lock(&pool->lock);
            while (atomic_load(&pool->round) == seen) pthread_cond_wait(&pool->begun, &pool->lock);
            pthread_mutex_unlock(&pool->lock);
        }
        if (atomic_load(&pool->is_ending)) return NULL;
        seen = atomic_load(&pool->round);
        // First announced, then asked: the caller closes first, then looks who is inside. One of the two sees the other.
        atomic_fetch_add(&pool->num_inside, 1);
        if (atomic_load(&pool->is_open)) pool->task(pool->job, self->scratch);
        atomic_fetch_sub(&pool->num_inside, 1);
    }
}

// On a cache line; null: there is not so much.
static void *allocate(int64_t bytes) {
    void *memory;
    return posix_memalign(&memory, 64, (size_t)bytes) ? NULL : memory;
}

static void begin(baton_pool *pool) {
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->round, 1);
    pthread_cond_broadcast(&pool->begun);
    pthread_mutex_unlock(&pool->lock);
}

// Returns null when memory or threads are short.
baton_pool *baton_pool_create(int num_workers) {
    baton_pool *pool = calloc(1, sizeof *pool);
    worker *workers = calloc((size_t)num_workers, sizeof *workers);
    if (!pool || !workers) {
        free(pool);
        free(workers);
        return NULL;
    }
    pool->workers = workers;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->begun, NULL);
    for (int i = 0; i < num_workers; i++) {
        workers[i] = (worker){.pool = pool, .scratch = allocate(BATON_SCRATCH_BYTES)};
        int failed = !workers[i].scratch || (i && pthread_create(&workers[i].thread, NULL, work, &workers[i]));
        if (failed) {
            free(workers[i].scratch);
            baton_pool_destroy(pool);
            return NULL;
        }
        pool->num_workers = i + 1;
    }
    return pool;
}

void baton_pool_destroy(baton_pool *pool) {
    atomic_store(&pool->is_ending, 1);
    begin(pool);
    for (int i = 0; i < pool->num_workers; i++) {
        if (i) pthread_join(pool->workers[i].thread, NULL);
        free(pool->workers[i].scratch);
    }
    pthread_cond_destroy(&pool->begun);
    pthread_mutex_destroy(&pool->lock);
    for (int use = 0; use < BATON_NUM_USES; use++) free(pool->memory[use]);
    free(pool->workers);
    free(pool);
}

// At least so many bytes, the caller's until the next call of this for the same use; null: there are not so many.
void *baton_pool_memory(baton_pool *pool, baton_use use, int64_t bytes) {
    if (!pool->memory[use] || bytes > pool->memory_bytes[use]) {
        free(pool->memory[use]);
        pool->memory[use] = allocate(bytes);
        pool->memory_bytes[use] = pool->memory[use] ? bytes : 0;
    }
    return pool->memory[use];
}

int baton_pool_size(const baton_pool *pool) { return pool->num_workers; }

// Carries out a task that falls into so many pieces, and returns when it is done.
void baton_run(baton_pool *pool, baton_task task, void *job, int64_t num_pieces) {
    int is_shared = pool->num_workers > 1 && num_pieces > 1;
    if (is_shared) {
        pool->task = task;
        pool->job = job;
        atomic_store(&pool->is_open, 1);
        begin(pool);
    }
    task(job, pool->workers[0].scratch);
    if (!is_shared) return;
    atomic_store(&pool->is_open, 0);
    for (int i = 0; atomic_load(&pool->num_inside); i++) {
        // A helper may lose its core in the middle of a piece: let it have this one.
        if (i < MAX_SPINS) RELAX();
        else sched_yield();
    }
}
