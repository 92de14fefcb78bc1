/* Several threads on one large tensor, for whoever comes first: who finds the pool busy measures alone.
 *
 * The threads are started when they are first needed and sleep in between; they know no Python. Segments are given out one by
 * one and merged in their order, so that the result does not depend on who measured what. A child of a fork has no threads
 * and starts its own.
 */
#ifndef TENTERHOOK_KERNEL_THREADS_H
#define TENTERHOOK_KERNEL_THREADS_H

#include <stdatomic.h>

#include "_kernel_measure.h"
#include "_kernel_mode.h"

#define MAX_THREADS 64
#define ROUND 64            /* segments between two merges: bounds the memory of their results */
#define THREADED_SEGMENTS 4 /* fewer are done before a sleeping thread is awake */

static atomic_int threads_wanted = 1;

#if defined(_WIN32)
static void prepare_threads(void) {}
static int measure_together(const Order *order, int64_t segments, Scratch *scratch, Share *all)
{
    (void)order, (void)segments, (void)scratch, (void)all;
    return 0;
}
#else
#include <pthread.h>
#include <signal.h>

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    int threads;          /* that have been started */
    int seats, running;   /* how many may still join the round, and how many are in it */
    const Order *order;   /* of the round, as are the next three */
    int64_t first, count; /* segments */
    atomic_llong next;
    Share shares[ROUND];
} pool;
static atomic_flag pool_busy = ATOMIC_FLAG_INIT;

static void reset_pool(void)
{
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.work, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.threads = pool.seats = pool.running = 0;
    atomic_flag_clear(&pool_busy);
}

static void prepare_threads(void)
{
    static atomic_flag prepared = ATOMIC_FLAG_INIT;
    if (atomic_flag_test_and_set(&prepared)) return;
    reset_pool();
    pthread_atfork(NULL, NULL, reset_pool);
}

static void work_through(Scratch *scratch)
{
    Walk walk;
    walk_copy(&walk, pool.order->walk);
    for (int64_t i; (i = atomic_fetch_add(&pool.next, 1)) < pool.count;)
        measure_segment(pool.order, pool.first + i, &walk, scratch, &pool.shares[i]);
}

static void *serve(void *nothing)
{
    Scratch scratch;
    exact_subnormals();
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.seats == 0) pthread_cond_wait(&pool.work, &pool.lock);
        pool.seats--, pool.running++;
        pthread_mutex_unlock(&pool.lock);
        work_through(&scratch);
        pthread_mutex_lock(&pool.lock);
        if (--pool.running == 0) pthread_cond_signal(&pool.done);
    }
    return nothing;
}

/* Starts threads until there are so many; signals are left to the threads of the program. */
static void start_threads(int count)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    if (pool.threads >= count || pthread_attr_init(&attributes)) return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 512 * 1024);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    while (pool.threads < count && !pthread_create(&thread, &attributes, serve, NULL)) pool.threads++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

/* Measures with the pool's threads; 0, and nothing done, where there are none or somebody else has them. */
static int measure_together(const Order *order, int64_t segments, Scratch *scratch, Share *all)
{
    int helpers = atomic_load(&threads_wanted) - 1;
    if (helpers < 1 || atomic_flag_test_and_set(&pool_busy)) return 0;
    start_threads(helpers);
    helpers = helpers < pool.threads ? helpers : pool.threads;
    memset(all, 0, sizeof *all);
    for (int64_t first = 0; first < segments; first += ROUND) {
        int64_t count = segments - first < ROUND ? segments - first : ROUND;
        pthread_mutex_lock(&pool.lock);
        pool.order = order, pool.first = first, pool.count = count;
        atomic_store(&pool.next, 0);
        pool.seats = helpers < count ? helpers : (int)count - 1;
        for (int i = 0; i < pool.seats; i++) pthread_cond_signal(&pool.work);
        pthread_mutex_unlock(&pool.lock);
        work_through(scratch);
        pthread_mutex_lock(&pool.lock);
        pool.seats = 0;
        while (pool.running) pthread_cond_wait(&pool.done, &pool.lock);
        pthread_mutex_unlock(&pool.lock);
        for (int64_t i = 0; i < count; i++) merge_share(all, &pool.shares[i]);
    }
    atomic_flag_clear(&pool_busy);
    return 1;
}
#endif

#endif
