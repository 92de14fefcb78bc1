/* The instruction sets: what the vector macros of _kernel_lanes.h mean on each, and which of them this machine has. */
#ifndef TENTERHOOK_KERNEL_SETS_H
#define TENTERHOOK_KERNEL_SETS_H

#include "_kernel_types.h"

/* ---- any machine: GCC's vector extension, four floats wide (SSE2, NEON, ...) ---- */

typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef uint32_t u4 __attribute__((vector_size(16)));
typedef double d2 __attribute__((vector_size(16)));
typedef int64_t l2 __attribute__((vector_size(16)));

#if defined(__clang__)
#define SHUFFLE4(v, a, b, c, d) __builtin_shufflevector(v, v, a, b, c, d)
#else
#define SHUFFLE4(v, a, b, c, d) __builtin_shuffle(v, (i4){a, b, c, d})
#endif

static inline f4 f4_load(const float *p) { f4 v; memcpy(&v, p, 16); return v; }
static inline d2 d2_load(const double *p) { d2 v; memcpy(&v, p, 16); return v; }
static inline f4 f4_pick(i4 mask, f4 a, f4 b) { return (f4)((mask & (i4)a) | (~mask & (i4)b)); }
static inline d2 d2_pick(l2 mask, d2 a, d2 b) { return (d2)((mask & (l2)a) | (~mask & (l2)b)); }
static inline f4 f4_swap(f4 v, unsigned mask)
{
    switch (mask) {
    case 1: return SHUFFLE4(v, 1, 0, 3, 2);
    case 2: return SHUFFLE4(v, 2, 3, 0, 1);
    case 3: return SHUFFLE4(v, 3, 2, 1, 0);
    default: return v;
    }
}
static inline void any_widen_f16(const uint16_t *x, int n, float *out)
{
    for (int i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)(x[i] & 0x7fff) << 13;
        float value;
        memcpy(&value, &bits, 4);
        value *= 0x1p112f; /* moves the exponent's bias, and makes subnormals normal */
        memcpy(&bits, &value, 4);
        bits |= value >= 65536.0f ? 0x7f800000u : 0; /* infinities and NaN */
        bits |= (uint32_t)(x[i] & 0x8000) << 16;
        memcpy(out + i, &bits, 4);
    }
}

#define TARGET
#define LN(name) any_##name
#define LANES_NAME "native"
#define W 4
#define U 2
#define VF f4
#define VI i4
#define VD d2
#define VL l2
#define VLOAD(p) f4_load(p)
#define VSTORE(p, v) do { f4 stored_ = (v); memcpy(p, &stored_, 16); } while (0)
#define VSET1(s) ((f4){s, s, s, s})
#define VADD(a, b) ((a) + (b))
#define VSUB(a, b) ((a) - (b))
#define VFMA(a, b, c) ((a) * (b) + (c))
#define VMIN(a, b) f4_pick((b) < (a), b, a)
#define VMAX(a, b) f4_pick((b) > (a), b, a)
#define VCOUNT0(count, v) ((count) - (i4)((v) == 0))
#define VIZERO() ((i4){0})
#define VSUM(v) ((double)(v)[0] + (v)[1] + ((double)(v)[2] + (v)[3]))
#define VISUM(v) ((int64_t)(v)[0] + (v)[1] + (v)[2] + (v)[3])
#define LESS(a, b) ((a) < (b) ? (a) : (b))
#define MORE(a, b) ((a) > (b) ? (a) : (b))
#define VLEAST(v) LESS(LESS((v)[0], (v)[1]), LESS((v)[2], (v)[3]))
#define VMOST(v) MORE(MORE((v)[0], (v)[1]), MORE((v)[2], (v)[3]))
#define VDLOAD(p) d2_load(p)
#define VDSET1(s) ((d2){s, s})
#define VDADD(a, b) ((a) + (b))
#define VDSUB(a, b) ((a) - (b))
#define VDFMA(a, b, c) ((a) * (b) + (c))
#define VDMIN(a, b) d2_pick((b) < (a), b, a)
#define VDMAX(a, b) d2_pick((b) > (a), b, a)
#define VDCOUNT0(count, v) ((count) - (l2)((v) == 0))
#define VLZERO() ((l2){0})
#define VDSUM(v) ((v)[0] + (v)[1])
#define VLSUM(v) ((v)[0] + (v)[1])
#define VDLEAST(v) LESS((v)[0], (v)[1])
#define VDMOST(v) MORE((v)[0], (v)[1])
#define VFLIP(v, bits, from) ((f4)((u4)(v) ^ (((u4){0, 0, 0, 0} + (uint32_t)((bits) >> (from))) << (u4){31, 30, 29, 28} & 0x80000000u)))
#define VPERM_PREPARE(mask) unsigned swap_ = (mask)
#define VPERM(v) f4_swap(v, swap_)
#define DIGEST_START() uint64_t total_ = 0
#define DIGEST_TOTAL() total_
#define DIGEST_BEGIN() uint64_t cell_[DIGEST_LANES] = {0}
#define DIGEST_STRIPE(p, keys)                                                                                                 \
    do {                                                                                                                       \
        uint64_t word_[DIGEST_LANES];                                                                                          \
        memcpy(word_, p, STRIPE_BYTES);                                                                                        \
        for (int l_ = 0; l_ < DIGEST_LANES; l_++) {                                                                            \
            uint64_t keyed_ = word_[l_] ^ (keys)[l_];                                                                          \
            cell_[l_] += (keyed_ & 0xffffffffu) * (keyed_ >> 32) + word_[l_ ^ 1];                                              \
        }                                                                                                                      \
    } while (0)
#define DIGEST_END(place)                                                                                                      \
    for (int l_ = 0; l_ < DIGEST_LANES; l_++) total_ += mix64(cell_[l_] + (place) + (uint64_t)l_ * GOLDEN)
#include "_kernel_lanes.h"
#include "_kernel_unset.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

/* ---- AVX2 with FMA and F16C ---- */

#define TARGET __attribute__((target("avx2,fma,f16c")))

static TARGET inline double avx2_sum(__m256d v)
{
    __m128d half = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(half) + _mm_cvtsd_f64(_mm_unpackhi_pd(half, half));
}
static TARGET inline float avx2_least(__m256 v)
{
    __m128 h = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    h = _mm_min_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_min_ss(h, _mm_movehdup_ps(h)));
}
static TARGET inline double avx2_least_f64(__m256d v)
{
    __m128d half = _mm_min_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_min_sd(half, _mm_unpackhi_pd(half, half)));
}
static TARGET inline int64_t avx2_count(__m256i v)
{
    int32_t c[8];
    _mm256_storeu_si256((__m256i *)c, v);
    return (int64_t)c[0] + c[1] + c[2] + c[3] + c[4] + c[5] + c[6] + c[7];
}
static TARGET inline __m256 avx2_flip(__m256 v, uint32_t bits)
{
    __m256i signs = _mm256_sllv_epi32(_mm256_set1_epi32((int)bits), _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24));
    return _mm256_xor_ps(v, _mm256_and_ps(_mm256_castsi256_ps(signs), _mm256_set1_ps(-0.0f)));
}
static TARGET inline __m256i avx2_product(__m256i word, __m256i key)
{
    __m256i keyed = _mm256_xor_si256(word, key);
    return _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
}
static TARGET void avx2_widen_f16(const uint16_t *x, int n, float *out)
{
    int i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
    for (; i < n; i++) out[i] = _cvtsh_ss(x[i]);
}

#define LN(name) avx2_##name
#define LANES_NAME "native avx2"
#define W 8
#define U 2
#define VF __m256
#define VI __m256i
#define VD __m256d
#define VL __m256i
#define VLOAD(p) _mm256_loadu_ps(p)
#define VSTORE(p, v) _mm256_storeu_ps(p, v)
#define VSET1(s) _mm256_set1_ps(s)
#define VADD(a, b) _mm256_add_ps(a, b)
#define VSUB(a, b) _mm256_sub_ps(a, b)
#define VFMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define VMIN(a, b) _mm256_min_ps(a, b)
#define VMAX(a, b) _mm256_max_ps(a, b)
#define VCOUNT0(count, v)                                                                                                      \
    _mm256_sub_epi32(count, _mm256_castps_si256(_mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_EQ_OQ)))
#define VIZERO() _mm256_setzero_si256()
#define VSUM(v)                                                                                                                \
    avx2_sum(_mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1))))
#define VISUM(v) avx2_count(v)
#define VLEAST(v) avx2_least(v)
#define VMOST(v) (-avx2_least(_mm256_xor_ps(v, _mm256_set1_ps(-0.0f))))
#define VDLOAD(p) _mm256_loadu_pd(p)
#define VDSET1(s) _mm256_set1_pd(s)
#define VDADD(a, b) _mm256_add_pd(a, b)
#define VDSUB(a, b) _mm256_sub_pd(a, b)
#define VDFMA(a, b, c) _mm256_fmadd_pd(a, b, c)
#define VDMIN(a, b) _mm256_min_pd(a, b)
#define VDMAX(a, b) _mm256_max_pd(a, b)
#define VDCOUNT0(count, v)                                                                                                     \
    _mm256_sub_epi64(count, _mm256_castpd_si256(_mm256_cmp_pd(v, _mm256_setzero_pd(), _CMP_EQ_OQ)))
#define VLZERO() _mm256_setzero_si256()
#define VDSUM(v) avx2_sum(v)
#define VLSUM(v) avx2_count(v) /* the counts are small: their upper halves are 0 */
#define VDLEAST(v) avx2_least_f64(v)
#define VDMOST(v) (-avx2_least_f64(_mm256_xor_pd(v, _mm256_set1_pd(-0.0))))
#define VFLIP(v, bits, from) avx2_flip(v, (uint32_t)((bits) >> (from)))
#define VPERM_PREPARE(mask)                                                                                                    \
    __m256i swap_ = _mm256_xor_si256(_mm256_set1_epi32((int)(mask)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
#define VPERM(v) _mm256_permutevar8x32_ps(v, swap_)
#define DIGEST_START() uint64_t total_ = 0
#define DIGEST_TOTAL() total_
#define DIGEST_BEGIN() __m256i cell_[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()}, words_[2] = {cell_[0], cell_[0]}
#define DIGEST_STRIPE(p, keys)                                                                                                 \
    for (int h_ = 0; h_ < 2; h_++) {                                                                                           \
        __m256i word_ = _mm256_loadu_si256((const __m256i *)(p) + h_);                                                         \
        __m256i product_ = avx2_product(word_, _mm256_load_si256((const __m256i *)(keys) + h_));                               \
        cell_[h_] = _mm256_add_epi64(cell_[h_], product_);                                                                     \
        words_[h_] = _mm256_add_epi64(words_[h_], word_);                                                                      \
    }
#define DIGEST_END(place)                                                                                                      \
    do {                                                                                                                       \
        uint64_t sums_[DIGEST_LANES] __attribute__((aligned(32)));                                                             \
        for (int h_ = 0; h_ < 2; h_++)                                                                                         \
            _mm256_store_si256((__m256i *)sums_ + h_, _mm256_add_epi64(cell_[h_], _mm256_shuffle_epi32(words_[h_], 0x4E)));    \
        for (int l_ = 0; l_ < DIGEST_LANES; l_++) total_ += mix64(sums_[l_] + (place) + (uint64_t)l_ * GOLDEN);                \
    } while (0)
#include "_kernel_lanes.h"
#include "_kernel_unset.h"

/* ---- AVX-512 F, BW, DQ, VL ---- */

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,popcnt")))

static TARGET void avx512_widen_f16(const uint16_t *x, int n, float *out)
{
    int i = 0;
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(x + i))));
    for (; i < n; i++) out[i] = _cvtsh_ss(x[i]);
}
/* Sixteen of the 64 bits, from the memory that they lie in; compilers would take them through a general register, which is slower. */
static TARGET inline __mmask16 avx512_bits(const uint64_t *bits, unsigned from)
{
    typedef uint16_t __attribute__((may_alias)) Half;
    __mmask16 mask;
    __asm__("kmovw %1, %0" : "=Yk"(mask) : "m"(((const Half *)bits)[from / 16]));
    return mask;
}
static TARGET inline __m512i avx512_product(__m512i word, __m512i key)
{
    __m512i keyed = _mm512_xor_si512(word, key);
    return _mm512_mul_epu32(keyed, _mm512_shuffle_epi32(keyed, 0xF5)); /* by its upper halves */
}

/* mix64 of each lane, to which its place is added first. */
static TARGET inline __m512i avx512_mix(__m512i z, uint64_t place)
{
    const __m512i lanes = _mm512_setr_epi64(0, GOLDEN, GOLDEN * 2, GOLDEN * 3, GOLDEN * 4, GOLDEN * 5, GOLDEN * 6, GOLDEN * 7);
    z = _mm512_add_epi64(z, _mm512_add_epi64(_mm512_set1_epi64((int64_t)place), lanes));
    z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 30)), _mm512_set1_epi64((int64_t)0xBF58476D1CE4E5B9ull));
    z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 27)), _mm512_set1_epi64((int64_t)0x94D049BB133111EBull));
    return _mm512_xor_si512(z, _mm512_srli_epi64(z, 31));
}

/* Not the reduction that the compiler has, which adds as signed integers. */
static TARGET inline uint64_t avx512_total(__m512i v)
{
    uint64_t parts[DIGEST_LANES] __attribute__((aligned(64)));
    _mm512_store_si512(parts, v);
    return parts[0] + parts[1] + parts[2] + parts[3] + parts[4] + parts[5] + parts[6] + parts[7];
}

#define LN(name) avx512_##name
#define LANES_NAME "native avx512"
#define W 16
#define U 4
#define FUSED avx512_fused_f32 /* the others have too few registers for it */
#define VF __m512
#define VI int64_t
#define VD __m512d
#define VL __m512i
#define VLOAD(p) _mm512_loadu_ps(p)
#define VSTORE(p, v) _mm512_storeu_ps(p, v)
#define VSET1(s) _mm512_set1_ps(s)
#define VADD(a, b) _mm512_add_ps(a, b)
#define VSUB(a, b) _mm512_sub_ps(a, b)
#define VFMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define VMIN(a, b) _mm512_min_ps(a, b)
#define VMAX(a, b) _mm512_max_ps(a, b)
/* Zeros are counted by the scalar units, and the masks of signs come from memory: the vector units have the rest to do. */
#define VCOUNT0(count, v) ((count) + __builtin_popcount(_mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_EQ_OQ)))
#define VIZERO() 0
#define VSUM(v)                                                                                                                \
    _mm512_reduce_add_pd(_mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(v)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1))))
#define VISUM(v) (v)
#define VLEAST(v) _mm512_reduce_min_ps(v)
#define VMOST(v) _mm512_reduce_max_ps(v)
#define VDLOAD(p) _mm512_loadu_pd(p)
#define VDSET1(s) _mm512_set1_pd(s)
#define VDADD(a, b) _mm512_add_pd(a, b)
#define VDSUB(a, b) _mm512_sub_pd(a, b)
#define VDFMA(a, b, c) _mm512_fmadd_pd(a, b, c)
#define VDMIN(a, b) _mm512_min_pd(a, b)
#define VDMAX(a, b) _mm512_max_pd(a, b)
#define VDCOUNT0(count, v)                                                                                                     \
    _mm512_mask_add_epi64(count, _mm512_cmp_pd_mask(v, _mm512_setzero_pd(), _CMP_EQ_OQ), count, _mm512_set1_epi64(1))
#define VLZERO() _mm512_setzero_si512()
#define VDSUM(v) _mm512_reduce_add_pd(v)
#define VLSUM(v) ((int64_t)_mm512_reduce_add_epi64(v))
#define VDLEAST(v) _mm512_reduce_min_pd(v)
#define VDMOST(v) _mm512_reduce_max_pd(v)
#define VFLIP(v, bits, from) _mm512_mask_xor_ps(v, avx512_bits(&(bits), from), v, _mm512_set1_ps(-0.0f))
#define VPERM_PREPARE(mask) __m512i swap_ = _mm512_load_si512(lane_swaps[mask])
#define VPERM(v) _mm512_permutexvar_ps(swap_, v)
#define DIGEST_START() __m512i total_ = _mm512_setzero_si512()
#define DIGEST_TOTAL() avx512_total(total_)
#define DIGEST_BEGIN() __m512i cell_ = _mm512_setzero_si512(), words_ = cell_
#define DIGEST_STRIPE(p, keys)                                                                                                 \
    do {                                                                                                                       \
        __m512i word_ = _mm512_loadu_si512(p);                                                                                 \
        __asm__("" : "+v"(word_)); /* to be loaded once, where compilers would twice */                                        \
        cell_ = _mm512_add_epi64(cell_, avx512_product(word_, _mm512_load_si512(keys)));                                       \
        words_ = _mm512_add_epi64(words_, word_);                                                                              \
    } while (0)
#define DIGEST_END(place)                                                                                                      \
    total_ = _mm512_add_epi64(total_, avx512_mix(_mm512_add_epi64(cell_, _mm512_shuffle_epi32(words_, 0x4E)), place))
#include "_kernel_lanes.h"
#include "_kernel_unset.h"
#endif

/* Lists the sets that this machine has, the fastest first; returns how many. */
static int available_lanes(const Lanes **found)
{
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0; /* Clang's builtin does not know "f16c" */
    int f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("popcnt"))
        found[count++] = &avx512_lanes;
    if (avx2) found[count++] = &avx2_lanes;
#endif
    found[count++] = &any_lanes;
    return count;
}

#endif
