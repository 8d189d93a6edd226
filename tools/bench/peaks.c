/* SPDX-License-Identifier: Apache-2.0
 *
 * What this machine can do at most: bytes read from memory a second, and int8 multiply-adds a second.
 * Compiled natively by tools.bench.roofline; usage: peaks THREADS. Prints "GB/s GMAC/s", best of several passes. */
#define _GNU_SOURCE
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { BYTES = 512 << 20, HUGE = 2 << 20, PASSES = 8, STEPS = 20000000, CHAINS = 12 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int64_t read_all(const int64_t *p, int threads) {
    int64_t sum = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : sum)
    for (int64_t i = 0; i < BYTES / 8; i++) sum += p[i];
    return sum;
}

/* STEPS times CHAINS independent dot instructions; returns the multiply-adds of one step. */
static int dots(int32_t *sink) {
#if defined(__AVX512VNNI__)
    __m512i acc[CHAINS], a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
    for (int c = 0; c < CHAINS; c++) acc[c] = _mm512_set1_epi32(c);
    for (int i = 0; i < STEPS; i++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) acc[c] = _mm512_dpbusd_epi32(acc[c], a, b);
        __asm__ volatile("" : "+v"(a), "+v"(b));
    }
    for (int c = 0; c < CHAINS; c++) *sink += _mm512_reduce_add_epi32(acc[c]);
    return CHAINS * 64;
#elif defined(__AVX2__)
    __m256i acc[CHAINS], a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(5), one = _mm256_set1_epi16(1);
    for (int c = 0; c < CHAINS; c++) acc[c] = _mm256_set1_epi32(c);
    for (int i = 0; i < STEPS; i++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++)
            acc[c] = _mm256_add_epi32(acc[c], _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), one));
        __asm__ volatile("" : "+x"(a), "+x"(b));
    }
    for (int c = 0; c < CHAINS; c++) *sink += _mm256_extract_epi32(acc[c], 0);
    return CHAINS * 32;
#elif defined(__ARM_FEATURE_DOTPROD)
    int32x4_t acc[CHAINS];
    int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(5);
    for (int c = 0; c < CHAINS; c++) acc[c] = vdupq_n_s32(c);
    for (int i = 0; i < STEPS; i++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) acc[c] = vdotq_s32(acc[c], a, b);
        __asm__ volatile("" : "+w"(a), "+w"(b));
    }
    for (int c = 0; c < CHAINS; c++) *sink += vaddvq_s32(acc[c]);
    return CHAINS * 16;
#else
    (void)sink;
    return 0;
#endif
}

int main(int argc, char **argv) {
    const int threads = argc > 1 ? atoi(argv[1]) : 1;
    int64_t *p, sink = 0;
    double bytes = 0, macs = 0;
    if (posix_memalign((void **)&p, HUGE, BYTES) != 0) return 1;
    madvise(p, BYTES, MADV_HUGEPAGE);
    memset(p, 1, BYTES);
    for (int pass = 0; pass < PASSES; pass++) {
        double start = now();
        sink += read_all(p, threads);
        const double rate = BYTES / (now() - start);
        bytes = rate > bytes ? rate : bytes;
    }
    for (int pass = 0; pass < 3; pass++) {
        double step = 0;
        const double start = now();
#pragma omp parallel num_threads(threads) reduction(+ : step, sink)
        {
            int32_t sum = 0;
            step += dots(&sum);
            sink += sum;
        }
        const double rate = step * STEPS / (now() - start);
        macs = rate > macs ? rate : macs;
    }
    printf("%.2f %.2f %lld\n", bytes / 1e9, macs / 1e9, (long long)(sink & 1));
    return 0;
}
