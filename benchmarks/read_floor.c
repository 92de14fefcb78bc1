/* A pure read: the least that any statistic of the same bytes can cost, by as many threads. */
#include <pthread.h>
#include <stdint.h>
#include <string.h>

typedef uint64_t words __attribute__((vector_size(64)));

uint64_t read_bytes(const char *bytes, int64_t size)
{
    words a = {0}, b = {0}, c = {0}, d = {0};
    int64_t i = 0;
    for (; i + 256 <= size; i += 256) {
        words v[4];
        memcpy(v, bytes + i, 256);
        a ^= v[0], b ^= v[1], c ^= v[2], d ^= v[3];
    }
    a ^= b ^ c ^ d;
    uint64_t all = a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
    for (; i < size; i++) all ^= (uint64_t)(unsigned char)bytes[i];
    return all;
}

#define PIECE 262144 /* bytes that a thread takes at a time, as the kernel's segments of float32 */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
static int threads, seats, running;
static const char *memory;
static int64_t length, next;
static uint64_t total;

static void read_pieces(void)
{
    uint64_t all = 0;
    for (int64_t at; (at = __atomic_fetch_add(&next, PIECE, __ATOMIC_SEQ_CST)) < length;)
        all ^= read_bytes(memory + at, length - at < PIECE ? length - at : PIECE);
    __atomic_fetch_xor(&total, all, __ATOMIC_SEQ_CST);
}

static void *serve(void *nothing)
{
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!seats) pthread_cond_wait(&work, &lock);
        seats--, running++;
        pthread_mutex_unlock(&lock);
        read_pieces();
        pthread_mutex_lock(&lock);
        if (--running == 0) pthread_cond_signal(&done);
    }
    return nothing;
}

/* The same by several threads, of which the caller is one. */
uint64_t read_together(const char *bytes, int64_t size, int count)
{
    pthread_t thread;
    for (; threads < count - 1; threads++) pthread_create(&thread, NULL, serve, NULL);
    pthread_mutex_lock(&lock);
    memory = bytes, length = size, next = 0, total = 0, seats = count - 1;
    for (int i = 0; i < count - 1; i++) pthread_cond_signal(&work);
    pthread_mutex_unlock(&lock);
    read_pieces();
    pthread_mutex_lock(&lock);
    seats = 0;
    while (running) pthread_cond_wait(&done, &lock);
    pthread_mutex_unlock(&lock);
    return total;
}
