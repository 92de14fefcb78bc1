/* A pure read: the least that any statistic of the same bytes can cost. */
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
