/* Whether the processor takes subnormal numbers for zero, which a thread may have set for itself. */
#ifndef TENTERHOOK_KERNEL_MODE_H
#define TENTERHOOK_KERNEL_MODE_H

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
typedef unsigned FloatMode;
static FloatMode exact_subnormals(void)
{
    FloatMode mode = _mm_getcsr();
    if (mode & 0x8040) _mm_setcsr(mode & ~0x8040u);
    return mode;
}
static void restore_mode(FloatMode mode)
{
    if (mode & 0x8040) _mm_setcsr(mode);
}
#elif defined(__aarch64__)
typedef uint64_t FloatMode;
static FloatMode exact_subnormals(void)
{
    FloatMode mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    if (mode & (1u << 24)) __asm__ volatile("msr fpcr, %0" ::"r"(mode & ~(FloatMode)(1u << 24)) : "memory");
    return mode;
}
static void restore_mode(FloatMode mode)
{
    if (mode & (1u << 24)) __asm__ volatile("msr fpcr, %0" ::"r"(mode) : "memory");
}
#else
typedef int FloatMode;
static FloatMode exact_subnormals(void) { return 0; }
static void restore_mode(FloatMode mode) { (void)mode; }
#endif

#endif
