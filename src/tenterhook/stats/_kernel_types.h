/* What the parts of the kernel share: sizes, hashes, the sums of one chunk, the table of one instruction set. */
#ifndef TENTERHOOK_KERNEL_TYPES_H
#define TENTERHOOK_KERNEL_TYPES_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#if !defined(__GNUC__)
#error "the kernel needs GCC or Clang; without it the NumPy twin does the same work"
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the digest reads little-endian words; the NumPy twin serves big-endian machines"
#endif

#define CHUNK 2048         /* elements that are measured together: they stay in the first-level cache between passes */
#define BUCKETS 64         /* of a sketch; also the elements of one hashed block */
#define DIGEST_LANES 8     /* 64-bit words in a stripe */
#define PAGE_STRIPES 32    /* stripes in a page of 2048 bytes; a chunk of any dtype is whole pages */
#define STRIPE_BYTES (8 * DIGEST_LANES)
#define PAGE_BYTES (STRIPE_BYTES * PAGE_STRIPES)
#define GOLDEN 0x9E3779B97F4A7C15ull
#define ROTATION 0xD6E8FEB86659FD93ull
#define SEED 0x243F6A8885A308D3ull
#define SKETCH_LIMIT 1e36  /* larger values could overflow the float32 sums of one chunk */

/* The codes of layout.DTYPE_CODES. */
enum {
    F32, F64, F16, BF16, E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, I8, U8, I16, U16, I32, U32, I64, U64, BOOL, C64, C128, E8M0FNU, C32,
    DTYPE_COUNT
};

static const uint8_t ITEMSIZE[DTYPE_COUNT] = {4, 8, 2, 2, 1, 1, 1, 1, 1, 1, 2, 2, 4, 4, 8, 8, 1, 8, 16, 1, 4};

/* Sums over the finite values of a chunk, or of all chunks so far. */
typedef struct {
    double n, mean, m2; /* count, mean, sum of squared distances from it */
    double min, max;
    int64_t zeros, nans, posinfs, neginfs;
} Part;

/* The inner loops, once for each instruction set. */
typedef struct {
    const char *name;
    int (*stats_f32)(const float *x, int n, float *shift, Part *out); /* 0: not plain numbers */
    int (*stats_f64)(const double *x, int n, Part *out);
    void (*stats_any)(const double *x, int n, Part *out); /* finite values only, as all that follows */
    int (*finite_f32)(const float *x, int n, Part *counts, float *out);
    int (*finite_f64)(const double *x, int n, Part *counts, double *out);
    void (*sketch)(const float *x, int blocks, uint64_t first_block, double *out);
    uint64_t (*digest)(const uint8_t *bytes, int64_t size, uint64_t first_page);
    void (*to_f32)(int dtype, const void *raw, int n, float *out);
    void (*to_f64)(int dtype, const void *raw, int n, double scale, double *out);
    void (*narrow)(const double *x, int n, float *out);
    void (*clean)(const float *x, int n, float *out);
    int (*fused_f32)(const float *x, uint64_t block, float *shift, Part *out, double *sums); /* NULL: none of this set */
} Lanes;

static uint64_t digest_keys[PAGE_STRIPES * DIGEST_LANES] __attribute__((aligned(64)));
static int32_t lane_swaps[16][16] __attribute__((aligned(64))); /* [mask][lane]: lane ^ mask */
static float float8_values[5][256]; /* E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0FNU */

static inline uint64_t mix64(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static inline double small_float(int exponent_bits, int mantissa_bits, int bias, unsigned bits)
{
    unsigned exponent = (bits >> mantissa_bits) & ((1u << exponent_bits) - 1);
    double mantissa = bits & ((1u << mantissa_bits) - 1);
    int power = (exponent ? (int)exponent : 1) - bias - mantissa_bits;
    double value = mantissa + (exponent ? (double)(1u << mantissa_bits) : 0.0);
    for (; power > 0; power--) value *= 2;
    for (; power < 0; power++) value /= 2;
    return value;
}

static void fill_tables(void)
{
    for (uint64_t i = 0; i < PAGE_STRIPES * DIGEST_LANES; i++) digest_keys[i] = mix64(SEED + (i + 1) * GOLDEN);
    for (int32_t i = 0; i < 256; i++) lane_swaps[i / 16][i % 16] = i / 16 ^ i % 16;
    for (unsigned i = 0; i < 256; i++) {
        unsigned magnitude = i & 0x7f;
        float sign = i & 0x80 ? -1.0f : 1.0f, nan = __builtin_nanf(""), inf = __builtin_inff();
        float8_values[0][i] = magnitude == 0x7f ? nan : sign * (float)small_float(4, 3, 7, magnitude);
        float8_values[1][i] = magnitude > 0x7c ? nan : magnitude == 0x7c ? sign * inf
                                                     : sign * (float)small_float(5, 2, 15, magnitude);
        float8_values[2][i] = i == 0x80 ? nan : sign * (float)small_float(4, 3, 8, magnitude);
        uint32_t power = i == 0 ? 0x400000 : i == 0xff ? 0x7fc00000 : i << 23; /* of two, from 2**-127, which is subnormal */
        memcpy(&float8_values[4][i], &power, sizeof power);
        float8_values[3][i] = i == 0x80 ? nan : sign * (float)small_float(5, 2, 16, magnitude);
    }
}

#endif
