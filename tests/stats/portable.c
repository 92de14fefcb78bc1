/* The kernel without Python: reads tensors from standard input and writes their rows, for compilers and processors of any kind.
 *
 * A tensor is 8 int64 (dtype code, threads, offset, dimensions, first byte, bytes of data, two unused), shape and strides in bytes
 * as int64, and its data. A row is 11 doubles, 64 floats and the digest, for each instruction set of the processor, after
 * their number as int64.
 */
#define _GNU_SOURCE /* as Python.h does: what threads need is not in plain C11 */

#include <stdio.h>
#include <stdlib.h>

#include "_kernel_sets.h"
#include "_kernel_measure.h"

static int64_t number(void)
{
    int64_t value;
    return fread(&value, sizeof value, 1, stdin) == 1 ? value : -1;
}

int main(void)
{
    fill_tables();
    prepare_threads();
    for (int64_t dtype; (dtype = number()) >= 0;) {
        static Walk walk;
        int64_t header[7], shape[MAX_DIMS];
        for (int i = 0; i < 7; i++) header[i] = number();
        int64_t threads = header[0], offset = header[1], dims = header[2], first = header[3], size = header[4];
        char *data = malloc((size_t)size + 64);
        walk.itemsize = ITEMSIZE[dtype], walk.dims = 0, walk.numel = 1, walk.first = data + first;
        for (int i = 0; i < dims; i++) shape[i] = number(), walk.numel *= shape[i];
        for (int i = 0; i < dims; i++) {
            int64_t stride = number();
            if (walk.numel) walk_push(&walk, shape[i], stride);
        }
        if (!data || fread(data, 1, (size_t)size, stdin) != (size_t)size) return 1;
        atomic_store(&threads_wanted, (int)threads);
        const Lanes *found[3];
        int64_t count = available_lanes(found);
        fwrite(&count, sizeof count, 1, stdout);
        for (int i = 0; i < count; i++) {
            double statistics[11];
            float sketch[BUCKETS];
            uint64_t digest;
            Row row = {statistics, sketch, &digest};
            FloatMode mode = exact_subnormals();
            measure_walk(found[i], (int)dtype, &walk, offset, &row);
            restore_mode(mode);
            fwrite(statistics, sizeof statistics, 1, stdout);
            fwrite(sketch, sizeof sketch, 1, stdout);
            fwrite(&digest, sizeof digest, 1, stdout);
        }
        free(data);
    }
    return 0;
}
