// A fixed set of threads that carry out one task at a time together. With one worker there are none: the caller works.
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
    int number;
    void *scratch;
    pthread_t thread;
} worker;

struct baton_pool {
    int num_workers;
    worker *workers;  // workers[0] is whoever calls
    baton_task task;
    void *job;
    atomic_ulong round;  // of the task; changed under `lock`
    atomic_int num_busy;
    int is_ending;
    pthread_mutex_t lock;
    pthread_cond_t begun;
};

static void *work(void *arg) {
    worker *self = arg;
    baton_pool *pool = self->pool;
    unsigned long seen = 0;
    for (;;) {
        for (int i = 0; i < MAX_SPINS && atomic_load_explicit(&pool->round, memory_order_acquire) == seen; i++) RELAX();
        pthread_mutex_lock(&pool->lock);
        while (atomic_load(&pool->round) == seen) pthread_cond_wait(&pool->begun, &pool->lock);
        seen = atomic_load(&pool->round);
        pthread_mutex_unlock(&pool->lock);
        if (pool->is_ending) return NULL;
        pool->task(pool->job, self->number, pool->num_workers, self->scratch);
        atomic_fetch_sub_explicit(&pool->num_busy, 1, memory_order_release);
    }
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
        workers[i] = (worker){.pool = pool, .number = i};
        if (posix_memalign(&workers[i].scratch, 64, BATON_SCRATCH_BYTES)) workers[i].scratch = NULL;
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
    pool->is_ending = 1;
    begin(pool);
    for (int i = 0; i < pool->num_workers; i++) {
        if (i) pthread_join(pool->workers[i].thread, NULL);
        free(pool->workers[i].scratch);
    }
    pthread_cond_destroy(&pool->begun);
    pthread_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(pool);
}

int baton_pool_size(const baton_pool *pool) { return pool->num_workers; }

// Calls `task` once in every worker, and returns when all are done.
void baton_run(baton_pool *pool, baton_task task, void *job) {
    if (pool->num_workers > 1) {
        pool->task = task;
        pool->job = job;
        atomic_store(&pool->num_busy, pool->num_workers - 1);
        begin(pool);
    }
    task(job, 0, pool->num_workers, pool->workers[0].scratch);
    for (int i = 0; atomic_load_explicit(&pool->num_busy, memory_order_acquire); i++) {
        // A worker may have lost its core to another process: let it have this one.
        if (i < MAX_SPINS) RELAX();
        else sched_yield();
    }
}
