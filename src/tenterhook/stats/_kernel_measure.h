/* Measuring memory of any layout, chunk by chunk in logical order. Knows no Python. */
#ifndef TENTERHOOK_KERNEL_MEASURE_H
#define TENTERHOOK_KERNEL_MEASURE_H

#include "_kernel_types.h"

#define MAX_DIMS 64
#define SEGMENT_ELEMENTS 65536 /* elements that one thread measures at a time; fixed, so that threads do not change the result */

/* Elements in row-major order of `size`; strides in bytes. `next` is the element that comes next. */
typedef struct {
    const char *first, *next;
    int itemsize, dims;
    int64_t numel, size[MAX_DIMS], stride[MAX_DIMS], index[MAX_DIMS];
} Walk;

/* Where the results of one tensor go; a null pointer leaves a group out. */
typedef struct {
    double *statistics; /* 11, in the order of layout.STATISTICS */
    float *sketch;
    uint64_t *digest;
} Row;

typedef struct {
    uint8_t raw[CHUNK * 16];
    union {
        float f32[CHUNK * 2]; /* the upper half also for the finite ones of the lower */
        double finite[CHUNK];
    };
    double f64[CHUNK];
    float shift; /* of the chunk before */
} __attribute__((aligned(64))) Scratch;

/* Adds a dimension inside those so far, joined to the one before where both are one run of memory. */
static int walk_push(Walk *walk, int64_t size, int64_t stride)
{
    if (size == 1) return 1;
    int last = walk->dims - 1;
    if (last >= 0 && walk->stride[last] == (int64_t)((uint64_t)stride * (uint64_t)size)) {
        walk->size[last] *= size;
        walk->stride[last] = stride;
        return 1;
    }
    if (walk->dims == MAX_DIMS) return 0;
    walk->size[walk->dims] = size;
    walk->stride[walk->dims] = stride;
    walk->index[walk->dims++] = 0;
    return 1;
}

static void walk_rewind(Walk *walk)
{
    walk->next = walk->first;
    for (int i = 0; i < walk->dims; i++) walk->index[i] = 0;
}

static void copy_run(uint8_t *to, const char *from, int64_t stride, int64_t count, int itemsize)
{
#define COPY_ITEMS(size)                                                                                                       \
    case size:                                                                                                                 \
        for (int64_t i = 0; i < count; i++) memcpy(to + i * (size), from + i * stride, size);                                  \
        break
    if (stride == itemsize) {
        memcpy(to, from, (size_t)(count * itemsize));
        return;
    }
    switch (itemsize) {
        COPY_ITEMS(1);
        COPY_ITEMS(2);
        COPY_ITEMS(4);
        COPY_ITEMS(8);
        COPY_ITEMS(16);
    }
#undef COPY_ITEMS
}

static void walk_on(Walk *walk, int64_t count)
{
    int dim = walk->dims - 1;
    walk->next += count * walk->stride[dim];
    walk->index[dim] += count;
    for (; dim > 0 && walk->index[dim] == walk->size[dim]; dim--) {
        walk->next += walk->stride[dim - 1] - walk->size[dim] * walk->stride[dim];
        walk->index[dim] = 0;
        walk->index[dim - 1]++;
    }
}

/* Gives the next `count` elements as contiguous, aligned memory: in place where they are that, else copied to `raw`. */
static const void *walk_take(Walk *walk, int count, uint8_t *raw)
{
    if (walk->dims == 0) {
        memcpy(raw, walk->next, (size_t)walk->itemsize);
        return raw;
    }
    int last = walk->dims - 1, alignment = walk->itemsize < 8 ? walk->itemsize : 8;
    if (walk->stride[last] == walk->itemsize && walk->size[last] - walk->index[last] >= count
        && (uintptr_t)walk->next % (uintptr_t)alignment == 0) {
        const void *here = walk->next;
        walk_on(walk, count);
        return here;
    }
    for (uint8_t *to = raw; count > 0;) {
        int64_t left = walk->size[last] - walk->index[last], run = left < count ? left : count;
        copy_run(to, walk->next, walk->stride[last], run, walk->itemsize);
        walk_on(walk, run);
        to += run * walk->itemsize;
        count -= (int)run;
    }
    return raw;
}

/* Chan, Golub & LeVeque 1983. */
static void merge_part(Part *all, const Part *part)
{
    all->zeros += part->zeros, all->nans += part->nans, all->posinfs += part->posinfs, all->neginfs += part->neginfs;
    if (part->n == 0) return;
    double n = all->n + part->n, apart = part->mean - all->mean;
    if (all->n == 0) {
        all->mean = part->mean, all->m2 = part->m2, all->min = part->min, all->max = part->max;
    } else {
        all->mean += apart * (part->n / n);
        all->m2 += part->m2 + apart * apart * (all->n * (part->n / n));
        all->min = part->min < all->min ? part->min : all->min;
        all->max = part->max > all->max ? part->max : all->max;
    }
    all->n = n;
}

static double absmax_of(const Part *part)
{
    return part->n == 0 ? 0 : -part->min > part->max ? -part->min : part->max;
}

static void sketch_edge(const Lanes *lanes, const float *x, int count, int lane, uint64_t block, double *sums)
{
    float padded[BUCKETS] = {0};
    memcpy(padded + lane, x, sizeof(float) * (size_t)count);
    lanes->sketch(padded, 1, block, sums);
}

/* Adds `count` finite values, the first of which has flat index `start`. */
static void sketch_values(const Lanes *lanes, const float *x, int count, uint64_t start, double *sums)
{
    int lane = (int)(start % BUCKETS);
    if (lane) {
        int head = BUCKETS - lane < count ? BUCKETS - lane : count;
        sketch_edge(lanes, x, head, lane, start / BUCKETS, sums);
        x += head, count -= head, start += (uint64_t)head;
    }
    int whole = count / BUCKETS;
    if (whole) lanes->sketch(x, whole, start / BUCKETS, sums);
    if (count % BUCKETS) sketch_edge(lanes, x + whole * BUCKETS, count % BUCKETS, 0, start / BUCKETS + (uint64_t)whole, sums);
}

/* The same for values of any size, of which the infinite and NaN count as 0; slow. */
static void sketch_any(int dtype, const void *values, int count, uint64_t start, double *sums)
{
    for (int i = 0; i < count; i++, start++) {
        double v = dtype == F32 ? ((const float *)values)[i] : ((const double *)values)[i];
        if (!(v >= -DBL_MAX && v <= DBL_MAX)) continue;
        uint64_t bits = mix64((start / BUCKETS + 1) * GOLDEN), lane = start % BUCKETS;
        sums[lane ^ ((bits * ROTATION) >> 58)] += (bits >> lane) & 1 ? -v : v;
    }
}

static void copy_counts(Part *part, const Part *counts)
{
    part->nans = counts->nans, part->posinfs = counts->posinfs, part->neginfs = counts->neginfs;
}

static void part_of_doubles(const Lanes *lanes, const double *x, int n, Scratch *scratch, Part *part)
{
    if (lanes->stats_f64(x, n, part)) return;
    Part counts;
    int kept = lanes->finite_f64(x, n, &counts, scratch->finite);
    *part = (Part){0};
    if (kept && (kept == n || !lanes->stats_f64(scratch->finite, kept, part))) lanes->stats_any(scratch->finite, kept, part);
    copy_counts(part, &counts);
}

static void part_of_singles(const Lanes *lanes, const float *x, int n, Scratch *scratch, Part *part)
{
    if (lanes->stats_f32(x, n, &scratch->shift, part)) return;
    Part counts;
    float *finite = scratch->f32 + CHUNK;
    int kept = lanes->finite_f32(x, n, &counts, finite);
    *part = (Part){0};
    if (kept && (kept == n || !lanes->stats_f32(finite, kept, &scratch->shift, part))) {
        lanes->to_f64(F32, finite, kept, 1, scratch->f64);
        if (!lanes->stats_f64(scratch->f64, kept, part)) lanes->stats_any(scratch->f64, kept, part);
    }
    copy_counts(part, &counts);
}

/* Statistics, and sketch where `sums` is given, of one chunk. */
static void measure_chunk(const Lanes *lanes, int dtype, const void *raw, int n, uint64_t start, Scratch *scratch, Part *part, double *sums)
{
    if (dtype == C32) { /* as the same numbers in float32, which have room behind those that may have been copied */
        float *wide = (float *)(scratch->raw + CHUNK * sizeof(float));
        lanes->to_f32(F16, raw, 2 * n, wide);
        raw = wide, dtype = C64;
    }
    int complex = dtype == C64 || dtype == C128, doubles = dtype == F64 || complex || (dtype >= I32 && dtype <= U64);
    const float *singles = raw;
    const double *wide = raw;
    if (doubles) {
        if (dtype != F64) lanes->to_f64(dtype, raw, n, 1, scratch->f64), wide = scratch->f64;
        part_of_doubles(lanes, wide, n, scratch, part);
    } else {
        if (dtype != F32) lanes->to_f32(dtype, raw, n, scratch->f32), singles = scratch->f32;
        if (sums && lanes->fused_f32 && n == CHUNK && start % BUCKETS == 0
            && lanes->fused_f32(singles, start / BUCKETS, &scratch->shift, part, sums))
            return;
        part_of_singles(lanes, singles, n, scratch, part);
    }
    if (!sums) return;
    int plain = part->nans + part->posinfs + part->neginfs == 0;
    int count = complex ? 2 * n : n; /* a complex tensor is sketched as its interleaved parts */
    if (complex) start *= 2, wide = raw;
    if (absmax_of(part) > SKETCH_LIMIT || (complex && !plain)) {
        sketch_any(dtype == C64 || !doubles ? F32 : F64, dtype == C64 ? raw : doubles ? (const void *)wide : singles, count, start, sums);
        return;
    }
    if (doubles && dtype != C64) {
        lanes->narrow(wide, count, scratch->f32);
        singles = scratch->f32;
    } else if (!plain) {
        lanes->clean(singles, n, scratch->f32);
        singles = scratch->f32;
    }
    sketch_values(lanes, singles, count, start, sums);
}

/* Mean, std and rms of float64 values whose squares over- or underflow: again, scaled by a power of two. */
static double measure_scaled(const Lanes *lanes, int dtype, Walk *walk, Scratch *scratch, Part *all)
{
    double scale = absmax_of(all) > 1 ? 0x1p-600 : 0x1p+600;
    *all = (Part){0};
    walk_rewind(walk);
    for (int64_t done = 0; done < walk->numel;) {
        int n = walk->numel - done < CHUNK ? (int)(walk->numel - done) : CHUNK;
        Part part;
        lanes->to_f64(dtype, walk_take(walk, n, scratch->raw), n, scale, scratch->f64);
        part_of_doubles(lanes, scratch->f64, n, scratch, &part);
        merge_part(all, &part);
        done += n;
    }
    return scale;
}

static void write_statistics(double *to, int64_t numel, const Part *all, const Part *scaled, double scale)
{
    const double nan = __builtin_nan("");
    to[0] = (double)numel;
    if (all->n > 0) {
        double m2 = scaled->m2 > 0 ? scaled->m2 / scaled->n : 0;
        to[1] = all->min;
        to[2] = all->max;
        to[3] = scaled->mean / scale;
        to[4] = __builtin_sqrt(m2) / scale;
        to[5] = __builtin_sqrt(m2 + scaled->mean * scaled->mean) / scale;
        to[6] = absmax_of(all) + 0.0; /* not -0 */
    } else {
        for (int i = 1; i < 7; i++) to[i] = nan;
    }
    to[7] = (double)all->nans;
    to[8] = (double)all->posinfs;
    to[9] = (double)all->neginfs;
    to[10] = (double)all->zeros;
}

/* What is measured of one segment; merged in the order of the segments, whoever measured them. */
typedef struct {
    Part part;
    double sums[BUCKETS];
    uint64_t cells;
} Share;

/* What is to be measured of a tensor. */
typedef struct {
    const Lanes *lanes;
    int dtype, sketch, digest;
    int64_t offset;
    const Walk *walk; /* not moved */
} Order;

/* Moves to the element with this number in logical order. */
static void walk_seek(Walk *walk, int64_t element)
{
    walk->next = walk->first;
    for (int dim = walk->dims - 1; dim >= 0; dim--) {
        walk->index[dim] = dim ? element % walk->size[dim] : element;
        walk->next += walk->index[dim] * walk->stride[dim];
        element /= walk->size[dim];
    }
}

/* Copies what is in use of a walk: it is long. */
static void walk_copy(Walk *to, const Walk *from)
{
    to->first = from->first, to->itemsize = from->itemsize, to->dims = from->dims, to->numel = from->numel;
    memcpy(to->size, from->size, sizeof(int64_t) * (size_t)from->dims);
    memcpy(to->stride, from->stride, sizeof(int64_t) * (size_t)from->dims);
}

static void measure_segment(const Order *order, int64_t segment, Walk *walk, Scratch *scratch, Share *share)
{
    int64_t done = segment * SEGMENT_ELEMENTS, end = done + SEGMENT_ELEMENTS < walk->numel ? done + SEGMENT_ELEMENTS : walk->numel;
    scratch->shift = 0;
    memset(share, 0, sizeof *share);
    if (segment == 0) walk_rewind(walk);
    else walk_seek(walk, done);
    while (done < end) {
        int n = end - done < CHUNK ? (int)(end - done) : CHUNK;
        const void *raw = walk_take(walk, n, scratch->raw);
        int64_t bytes = (int64_t)n * walk->itemsize;
        Part part;
        measure_chunk(order->lanes, order->dtype, raw, n, (uint64_t)(order->offset + done), scratch, &part,
                      order->sketch ? share->sums : NULL);
        merge_part(&share->part, &part);
        if (order->digest) share->cells += order->lanes->digest(raw, bytes, (uint64_t)(done * walk->itemsize) / PAGE_BYTES);
        done += n;
    }
}

static void merge_share(Share *all, const Share *share)
{
    merge_part(&all->part, &share->part);
    for (int i = 0; i < BUCKETS; i++) all->sums[i] += share->sums[i];
    all->cells += share->cells;
}

#include "_kernel_threads.h"

static void measure_walk(const Lanes *lanes, int dtype, Walk *walk, int64_t offset, const Row *row)
{
    Scratch scratch;
    Share all, share;
    Order order = {lanes, dtype, row->sketch != NULL, row->digest != NULL, offset, walk};
    int64_t segments = (walk->numel + SEGMENT_ELEMENTS - 1) / SEGMENT_ELEMENTS;
    if (segments < THREADED_SEGMENTS || !measure_together(&order, segments, &scratch, &all)) {
        measure_segment(&order, 0, walk, &scratch, &all);
        for (int64_t i = 1; i < segments; i++) {
            measure_segment(&order, i, walk, &scratch, &share);
            merge_share(&all, &share);
        }
    }
    Part scaled = all.part;
    double scale = 1, absmax = absmax_of(&scaled);
    if ((dtype == F64 || dtype == C128) && absmax > 0 && (absmax > 0x1p+400 || absmax < 0x1p-400))
        scale = measure_scaled(lanes, dtype, walk, &scratch, &scaled);
    write_statistics(row->statistics, walk->numel, &all.part, &scaled, scale);
    if (row->sketch)
        for (int i = 0; i < BUCKETS; i++) row->sketch[i] = (float)all.sums[i];
    if (row->digest) *row->digest = mix64((uint64_t)(walk->numel * walk->itemsize) * GOLDEN + SEED + all.cells);
}

#endif
