/* The inner loops, written once over vector macros; included for each instruction set (see _kernel_sets.h).
 *
 * LN(name) names a function for the set and TARGET lets the compiler use it. VF is a vector of W floats, VI of W int32
 * counters, or one count of them all, VD of W/2 doubles, VL of W/2 int64 counters; U vectors are summed side by side to hide the
 * latency of additions.
 */

#define UNROLLED _Pragma("GCC unroll 16") /* early, so that what is summed stays in registers */
#define SEGMENT (16 * U * W) /* floats whose sums stay in float32: no lane adds more than 16 of them, then float64 takes over */

/* Adds a block of 64 values. It is hashed here, by the scalar units, which have nothing else to do; `key` is (its number + 1) * GOLDEN. */
static TARGET inline __attribute__((always_inline)) void LN(sketch_block)(const float *x, uint64_t key, VF *sums)
{
    uint64_t bits = mix64(key), rotated = bits * ROTATION;
    __asm__("" : "+m"(bits)); /* to be read from memory, piece by piece, not to be shifted */
    unsigned mask = (unsigned)(rotated >> 58), far = mask & ~(unsigned)(W - 1);
    VPERM_PREPARE(mask & (W - 1));
    UNROLLED for (int j = 0; j < BUCKETS / W; j++) {
        unsigned from = (unsigned)(j * W) ^ far;
        sums[j] = VADD(sums[j], VPERM(VFLIP(VLOAD(x + from), bits, from)));
    }
}

/* Sums x - shift and its square, and finds the rest on the way; with `sketch` it sketches, too, x being
 * whole blocks from number `block` on: the two keep different units of the processor busy. `shifted` and whether there is a
 * `sketch` are constants wherever this is inlined. */
static TARGET inline __attribute__((always_inline)) void LN(sums_f32)(const float *x, int n, float shift, int shifted, double *s1, double *s2,
                                                                     Part *out, uint64_t block, VF *sketch)
{
    VF k = VSET1(shift), low[U], high[U];
    VI zero = VIZERO();
    const float *last = x + n, *at = x;
    uint64_t key = (block + 1) * GOLDEN;
    UNROLLED for (int u = 0; u < U; u++) low[u] = VSET1(x[0]), high[u] = VSET1(x[0]);
#define SUM_VECTOR(u)                                                                                                          \
    do {                                                                                                                       \
        VF v_ = VLOAD(at + (u) * W), d_ = shifted ? VSUB(v_, k) : v_;                                                          \
        low[u] = VMIN(low[u], v_);                                                                                             \
        high[u] = VMAX(high[u], v_);                                                                                           \
        zero = VCOUNT0(zero, v_);                                                                                              \
        a[u] = VADD(a[u], d_);                                                                                                 \
        b[u] = VFMA(d_, d_, b[u]);                                                                                             \
    } while (0)
    while (last - at >= W) {
        VF a[U], b[U];
        UNROLLED for (int u = 0; u < U; u++) a[u] = VSET1(0), b[u] = VSET1(0);
        const float *end = last - at < SEGMENT ? last : at + SEGMENT;
        for (; end - at >= U * W; at += U * W) {
            UNROLLED for (int u = 0; u < U; u++) SUM_VECTOR(u);
            if (sketch) LN(sketch_block)(at, key, sketch), key += GOLDEN;
        }
        for (; end - at >= W; at += W) SUM_VECTOR(0);
        UNROLLED for (int u = 1; u < U; u++) a[0] = VADD(a[0], a[u]), b[0] = VADD(b[0], b[u]);
        *s1 += VSUM(a[0]);
        *s2 += VSUM(b[0]);
    }
#undef SUM_VECTOR
    UNROLLED for (int u = 1; u < U; u++) low[0] = VMIN(low[0], low[u]), high[0] = VMAX(high[0], high[u]);
    float least = VLEAST(low[0]), most = VMOST(high[0]);
    int64_t zeros = VISUM(zero);
    for (; at < last; at++) {
        double d = (double)*at - shift;
        least = *at < least ? *at : least;
        most = *at > most ? *at : most;
        zeros += *at == 0;
        *s1 += d;
        *s2 += d * d;
    }
    *out = (Part){n, 0, 0, least, most, zeros, 0, 0, 0};
}

/* Turns the sums about a shift into mean and m2; 0 where the shift is so far from the mean that m2 would be lost. */
static inline int LN(finish)(double s1, double s2, double shift, Part *out)
{
    double m2 = s2 - s1 * s1 / out->n;
    out->mean = out->min == out->max ? out->min : shift + s1 / out->n;
    out->m2 = out->min == out->max || m2 < 0 ? 0 : m2;
    return out->min == out->max || s1 * s1 <= 4 * out->n * m2;
}

/* Statistics of finite float32 values whose squares neither over- nor underflow; 0 where that does not hold. The shift is 0
 * until a chunk's mean lies more than two standard deviations from it, then that mean. */
static TARGET int LN(stats_f32)(const float *x, int n, float *shift, Part *out)
{
    for (int attempt = 0; attempt < 2; attempt++) {
        double s1 = 0, s2 = 0;
        if (*shift == 0)
            LN(sums_f32)(x, n, 0, 0, &s1, &s2, out, 0, NULL);
        else
            LN(sums_f32)(x, n, *shift, 1, &s1, &s2, out, 0, NULL);
        if (!(s1 >= -DBL_MAX && s1 <= DBL_MAX && s2 <= DBL_MAX)) return 0;
        if (out->min != out->max && s2 < n * 0x1p-124) return 0;
        if (LN(finish)(s1, s2, *shift, out)) return 1;
        *shift = (float)(*shift + s1 / n);
    }
    return 0;
}

#if defined(FUSED)
/* Statistics and sketch of a whole chunk in one loop; 0, with nothing changed, where either cannot be had in this way. The same
 * numbers to the bit as one after the other. */
static TARGET int LN(fused_f32)(const float *x, uint64_t block, float *shift, Part *out, double *sums)
{
    VF sketch[BUCKETS / W];
    UNROLLED for (int j = 0; j < BUCKETS / W; j++) sketch[j] = VSET1(0);
    double s1 = 0, s2 = 0;
    if (*shift == 0)
        LN(sums_f32)(x, CHUNK, 0, 0, &s1, &s2, out, block, sketch);
    else
        LN(sums_f32)(x, CHUNK, *shift, 1, &s1, &s2, out, block, sketch);
    if (!(s1 >= -DBL_MAX && s1 <= DBL_MAX && s2 <= DBL_MAX)) return 0;
    if (out->min != out->max && s2 < CHUNK * 0x1p-124) return 0;
    if (out->max > SKETCH_LIMIT || out->min < -SKETCH_LIMIT) return 0;
    if (!LN(finish)(s1, s2, *shift, out)) return 0;
    float stored[BUCKETS];
    UNROLLED for (int j = 0; j < BUCKETS / W; j++) VSTORE(stored + j * W, sketch[j]);
    for (int i = 0; i < BUCKETS; i++) sums[i] += stored[i];
    return 1;
}
#else
#define FUSED NULL
#endif

/* The same for float64; the first value is the shift, then the mean. */
static TARGET int LN(stats_f64)(const double *x, int n, Part *out)
{
    enum { D = W / 2 };
    double shift = x[0];
    for (int attempt = 0; attempt < 2; attempt++) {
        VD k = VDSET1(shift), low[2], high[2], a[2], b[2];
        VL zero = VLZERO();
        for (int u = 0; u < 2; u++) low[u] = high[u] = VDSET1(x[0]), a[u] = b[u] = VDSET1(0);
        int i = 0;
        for (; i + 2 * D <= n; i += 2 * D) {
            for (int u = 0; u < 2; u++) {
                VD v = VDLOAD(x + i + u * D), d = VDSUB(v, k);
                low[u] = VDMIN(low[u], v);
                high[u] = VDMAX(high[u], v);
                zero = VDCOUNT0(zero, v);
                a[u] = VDADD(a[u], d);
                b[u] = VDFMA(d, d, b[u]);
            }
        }
        double s1 = VDSUM(VDADD(a[0], a[1])), s2 = VDSUM(VDADD(b[0], b[1]));
        double least = VDLEAST(VDMIN(low[0], low[1])), most = VDMOST(VDMAX(high[0], high[1]));
        int64_t zeros = VLSUM(zero);
        for (; i < n; i++) {
            double d = x[i] - shift;
            least = x[i] < least ? x[i] : least;
            most = x[i] > most ? x[i] : most;
            zeros += x[i] == 0;
            s1 += d;
            s2 += d * d;
        }
        if (!(s1 >= -DBL_MAX && s1 <= DBL_MAX && s2 <= DBL_MAX)) return 0;
        *out = (Part){n, 0, 0, least, most, zeros, 0, 0, 0};
        if (LN(finish)(s1, s2, shift, out)) return 1;
        shift += s1 / n;
    }
    return 0;
}

/* Statistics of any finite values, in two passes. */
static TARGET void LN(stats_any)(const double *x, int n, Part *out)
{
    double sum = 0, rest = 0, squares = 0;
    *out = (Part){n, 0, 0, x[0], x[0], 0, 0, 0, 0};
    for (int i = 0; i < n; i++) {
        out->min = x[i] < out->min ? x[i] : out->min;
        out->max = x[i] > out->max ? x[i] : out->max;
        out->zeros += x[i] == 0;
        sum += x[i];
    }
    double mean = sum / n;
    for (int i = 0; i < n; i++) {
        double d = x[i] - mean;
        rest += d;
        squares += d * d;
    }
    out->mean = mean + rest / n;
    out->m2 = squares - rest * rest / n;
}

/* Counts NaN and infinities and copies the other values, closed up; returns how many. */
#define FINITE(name, type, limit, magnitude)                                                                                           \
    static TARGET int LN(name)(const type *restrict x, int n, Part *counts, type *restrict out)                                \
    {                                                                                                                          \
        int nans = 0, posinfs = 0, neginfs = 0, kept = 0;                                                                      \
        for (int i = 0; i < n; i++) nans += x[i] != x[i], posinfs += x[i] > limit, neginfs += x[i] < -limit;                   \
        counts->nans = nans, counts->posinfs = posinfs, counts->neginfs = neginfs;                                             \
        for (int i = 0; i < n; i++) {                                                                                          \
            out[kept] = x[i];                                                                                                  \
            kept += magnitude(x[i]) <= limit;                                                                                  \
        }                                                                                                                      \
        return kept;                                                                                                           \
    }
FINITE(finite_f32, float, FLT_MAX, __builtin_fabsf)
FINITE(finite_f64, double, DBL_MAX, __builtin_fabs)
#undef FINITE

/* Adds whole blocks of 64 finite values to the sketch. Prefetching the next chunk here was tried: it made long tensors slower. */
static TARGET void LN(sketch)(const float *x, int blocks, uint64_t block, double *out)
{
    VF sums[BUCKETS / W];
    UNROLLED for (int j = 0; j < BUCKETS / W; j++) sums[j] = VSET1(0);
    uint64_t key = (block + 1) * GOLDEN;
    for (int b = 0; b < blocks; b++, x += BUCKETS, key += GOLDEN) LN(sketch_block)(x, key, sums);
    float stored[BUCKETS];
    UNROLLED for (int j = 0; j < BUCKETS / W; j++) VSTORE(stored + j * W, sums[j]);
    for (int i = 0; i < BUCKETS; i++) out[i] += stored[i];
}

static TARGET uint64_t LN(digest)(const uint8_t *bytes, int64_t size, uint64_t page)
{
    DIGEST_START();
    for (; size > 0; size -= PAGE_BYTES, bytes += PAGE_BYTES, page++) {
        int stripes = size < PAGE_BYTES ? (int)(size / STRIPE_BYTES) : PAGE_STRIPES;
        int rest = size < PAGE_BYTES ? (int)(size % STRIPE_BYTES) : 0;
        DIGEST_BEGIN();
        for (int s = 0; s < stripes; s++) DIGEST_STRIPE(bytes + s * STRIPE_BYTES, digest_keys + s * DIGEST_LANES);
        if (rest) {
            uint8_t padded[STRIPE_BYTES] __attribute__((aligned(64))) = {0};
            memcpy(padded, bytes + stripes * STRIPE_BYTES, rest);
            DIGEST_STRIPE(padded, digest_keys + stripes * DIGEST_LANES);
        }
        DIGEST_END((page * DIGEST_LANES + 1) * GOLDEN);
    }
    return DIGEST_TOTAL();
}

#define EACH(type, expression)                                                                                                 \
    {                                                                                                                          \
        const type *v = raw;                                                                                                   \
        for (int i = 0; i < n; i++) out[i] = (expression);                                                                     \
    }                                                                                                                          \
    break

static TARGET void LN(to_f32)(int dtype, const void *restrict raw, int n, float *restrict out)
{
    switch (dtype) {
    case F16: LN(widen_f16)(raw, n, out); break;
    case BF16: {
        const uint16_t *v = raw;
        for (int i = 0; i < n; i++) {
            uint32_t bits = (uint32_t)v[i] << 16;
            memcpy(out + i, &bits, 4);
        }
        break;
    }
    case E4M3FN: case E5M2: case E4M3FNUZ: case E5M2FNUZ: case E8M0FNU: {
        const float *values = float8_values[dtype == E8M0FNU ? 4 : dtype - E4M3FN];
        EACH(uint8_t, values[v[i]]);
    }
    case I8: EACH(int8_t, v[i]);
    case U8: EACH(uint8_t, v[i]);
    case I16: EACH(int16_t, v[i]);
    case U16: EACH(uint16_t, v[i]);
    case BOOL: EACH(uint8_t, v[i] != 0);
    }
}

static TARGET void LN(to_f64)(int dtype, const void *restrict raw, int n, double scale, double *restrict out)
{
    const double inf = __builtin_inf();
    switch (dtype) {
    case F32: EACH(float, v[i]);
    case F64: EACH(double, v[i] * scale);
    case I32: EACH(int32_t, v[i]);
    case U32: EACH(uint32_t, v[i]);
    case I64: EACH(int64_t, (double)v[i]);
    case U64: EACH(uint64_t, (double)v[i]);
    case C64: {
        const float *v = raw;
        for (int i = 0; i < n; i++) {
            double re = v[2 * i], im = v[2 * i + 1], size = __builtin_sqrt(re * re + im * im);
            out[i] = ((__builtin_fabs(re) == inf) | (__builtin_fabs(im) == inf)) ? inf : size;
        }
        break;
    }
    case C128: {
        const double *v = raw;
        for (int i = 0; i < n; i++) { /* scaled, so that the squares neither over- nor underflow */
            double re = __builtin_fabs(v[2 * i] * scale), im = __builtin_fabs(v[2 * i + 1] * scale);
            double most = re > im ? re : im, ratio = (re > im ? im : re) / (most == 0 ? 1 : most);
            double size = most * __builtin_sqrt(1 + ratio * ratio);
            size = ((re != re) | (im != im)) ? __builtin_nan("") : size;
            out[i] = ((re == inf) | (im == inf)) ? inf : size;
        }
        break;
    }
    }
}

#undef EACH

static TARGET void LN(narrow)(const double *restrict x, int n, float *restrict out)
{
    for (int i = 0; i < n; i++) out[i] = (float)x[i]; /* in two loops: as one, compilers do not vectorise it */
    for (int i = 0; i < n; i++) out[i] = __builtin_fabsf(out[i]) <= FLT_MAX ? out[i] : 0.0f;
}

static TARGET void LN(clean)(const float *restrict x, int n, float *restrict out)
{
    for (int i = 0; i < n; i++) out[i] = __builtin_fabsf(x[i]) <= FLT_MAX ? x[i] : 0.0f;
}

static const Lanes LN(lanes) = {
    LANES_NAME, LN(stats_f32), LN(stats_f64), LN(stats_any), LN(finite_f32), LN(finite_f64),
    LN(sketch), LN(digest),    LN(to_f32),    LN(to_f64),    LN(narrow),     LN(clean),     FUSED,
};

#undef SEGMENT
#undef UNROLLED
