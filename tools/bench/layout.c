/* SPDX-License-Identifier: Apache-2.0
 *
 * Times y = W x for candidate weight layouts: which order of bytes suits every instruction set best?
 * int8 activations x with one scale; W in blocks of 32 along K, each with an f32 scale; q4 holds two values a byte
 * (low nibble k, high nibble k + 16 of its block), q8 one. Tiles of R rows x C bytes of K: 16x4, 8x8, 1x32.
 * 8x8 and 1x32 keep partial sums in lanes and add them at the end, which favours them: the engine, which promises
 * the same bytes on every instruction set, would have to add them in each block. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define K 1536
#define ROWS 1536
#define BLOCKS (K / 32)

static int8_t q[ROWS][K];
static float d[ROWS][BLOCKS];
static int8_t x[K] __attribute__((aligned(64)));
static int32_t sums[BLOCKS];
static uint8_t w[ROWS * K] __attribute__((aligned(64)));
static float scales[ROWS * BLOCKS] __attribute__((aligned(64)));
static float y[ROWS] __attribute__((aligned(64)));

#if defined(__x86_64__)
#include <immintrin.h>
#define TARGET_avx2 __attribute__((target("avx2,fma")))
#define TARGET_vnni __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma")))

TARGET_avx2 static inline __m256i dot_avx2(__m256i acc, __m256i wv, __m256i xv, int bits) {
    __m256i pairs = bits == 4 ? _mm256_maddubs_epi16(wv, xv)
                              : _mm256_maddubs_epi16(_mm256_abs_epi8(wv), _mm256_sign_epi8(xv, wv));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

/* lanes: int32 lanes one row takes; rows: of a tile. Each step of 32 bytes holds 8 / lanes rows. */
TARGET_avx2 static inline __attribute__((always_inline)) void tile_avx2(int rows, int chunk, int bits, const uint8_t *p, const float *s, float *out) {
    enum { MOST = 2 };
    const int regs = rows == 16 ? 2 : rows == 8 ? 2 : 1, steps = bits == 4 ? 16 / chunk : 32 / chunk;
    __m256 f[MOST] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int b = 0; b < BLOCKS; b++, s += rows) {
        __m256i a[MOST] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        if (rows == 1) {
            if (bits == 4) {
                __m128i v = _mm_loadu_si128((const __m128i *)p);
                __m256i u = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(v, 4), v), _mm256_set1_epi8(15));
                a[0] = dot_avx2(a[0], u, _mm256_load_si256((const __m256i *)(x + 32 * b)), 4);
            } else {
                __m256i v = _mm256_load_si256((const __m256i *)p);
                a[0] = dot_avx2(a[0], v, _mm256_load_si256((const __m256i *)(x + 32 * b)), 8);
            }
            p += 4 * bits;
        } else {
            for (int g = 0; g < steps; g++, p += 32 * regs) {
                for (int h = 0; h < (bits == 4 ? 2 : 1); h++) {
                    const int8_t *xp = x + 32 * b + 16 * h + chunk * g;
                    __m256i xv = chunk == 4 ? _mm256_set1_epi32(*(const int32_t *)xp) : _mm256_set1_epi64x(*(const int64_t *)xp);
                    for (int i = 0; i < regs; i++) {
                        __m256i v = _mm256_load_si256((const __m256i *)(p + 32 * i));
                        if (bits == 4) v = _mm256_and_si256(h ? _mm256_srli_epi16(v, 4) : v, _mm256_set1_epi8(15));
                        a[i] = dot_avx2(a[i], v, xv, bits);
                    }
                }
            }
        }
        for (int i = 0; i < regs; i++) {
            __m256 sv = rows == 16 ? _mm256_load_ps(s + 8 * i) : _mm256_set1_ps(*s);
            if (rows == 8)
                sv = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_load_ps(s + 4 * i)),
                                              _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
            __m256i v = a[i];
            if (bits == 4) /* the offset 8, once for a row */
                v = _mm256_sub_epi32(v, rows == 16  ? _mm256_set1_epi32(8 * sums[b])
                                        : rows == 8 ? _mm256_set1_epi64x((uint32_t)(8 * sums[b]))
                                                    : _mm256_setr_epi32(8 * sums[b], 0, 0, 0, 0, 0, 0, 0));
            f[i] = _mm256_fmadd_ps(sv, _mm256_cvtepi32_ps(v), f[i]);
        }
    }
    float lanes[16];
    _mm256_storeu_ps(lanes, f[0]);
    _mm256_storeu_ps(lanes + 8, f[1]);
    for (int r = 0; r < rows; r++) {
        out[r] = 0;
        for (int l = 0, n = rows == 1 ? 8 : 16 / rows; l < n; l++) out[r] += lanes[r * n + l];
    }
}

TARGET_vnni static inline __attribute__((always_inline)) void tile_vnni(int rows, int chunk, int bits, const uint8_t *p, const float *s, float *out) {
    const int steps = bits == 4 ? 16 / chunk : 32 / chunk;
    const __m512i pairs = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    __m512 f = _mm512_setzero_ps();
    __m256 f1 = _mm256_setzero_ps();
    for (int b = 0; b < BLOCKS; b++, s += rows) {
        const int offset = (bits == 4 ? 8 : 128) * sums[b];
        if (rows == 1) {
            __m256i u;
            if (bits == 4) {
                __m128i v = _mm_loadu_si128((const __m128i *)p);
                u = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(v, 4), v), _mm256_set1_epi8(15));
            } else {
                u = _mm256_xor_si256(_mm256_load_si256((const __m256i *)p), _mm256_set1_epi8(-128));
            }
            __m256i a = _mm256_setr_epi32(-offset, 0, 0, 0, 0, 0, 0, 0);
            a = _mm256_dpbusd_epi32(a, u, _mm256_load_si256((const __m256i *)(x + 32 * b)));
            f1 = _mm256_fmadd_ps(_mm256_set1_ps(*s), _mm256_cvtepi32_ps(a), f1);
            p += 4 * bits;
            continue;
        }
        __m512i a = rows == 16 ? _mm512_set1_epi32(-offset) : _mm512_maskz_set1_epi32(0x5555, -offset);
        for (int g = 0; g < steps; g++, p += 64) {
            __m512i v = _mm512_load_si512(p);
            for (int h = 0; h < (bits == 4 ? 2 : 1); h++) {
                const int8_t *xp = x + 32 * b + 16 * h + chunk * g;
                __m512i xv = chunk == 4 ? _mm512_set1_epi32(*(const int32_t *)xp) : _mm512_set1_epi64(*(const int64_t *)xp);
                __m512i u = bits == 4 ? _mm512_and_si512(h ? _mm512_srli_epi16(v, 4) : v, _mm512_set1_epi8(15))
                                      : _mm512_xor_si512(v, _mm512_set1_epi8(-128));
                a = _mm512_dpbusd_epi32(a, u, xv);
            }
        }
        __m512 sv = rows == 16 ? _mm512_load_ps(s)
                               : _mm512_permutexvar_ps(pairs, _mm512_castps256_ps512(_mm256_load_ps(s)));
        f = _mm512_fmadd_ps(sv, _mm512_cvtepi32_ps(a), f);
    }
    float lanes[16];
    if (rows == 1) _mm256_storeu_ps(lanes, f1);
    else _mm512_storeu_ps(lanes, f);
    for (int r = 0; r < rows; r++) {
        out[r] = 0;
        for (int l = 0, n = rows == 1 ? 8 : 16 / rows; l < n; l++) out[r] += lanes[r * n + l];
    }
}

#define GEMV(isa, rows, chunk, bits)                                                                              \
    TARGET_##isa static void gemv_##isa##_##rows##_##bits(void) {                                                 \
        for (int r = 0; r < ROWS; r += rows)                                                                      \
            tile_##isa(rows, chunk, bits, w + (long)r * K * bits / 8, scales + (long)r * BLOCKS, y + r);          \
    }
#define LAYOUTS(isa) GEMV(isa, 16, 4, 4) GEMV(isa, 8, 8, 4) GEMV(isa, 1, 32, 4) GEMV(isa, 16, 4, 8) GEMV(isa, 8, 8, 8) GEMV(isa, 1, 32, 8)
LAYOUTS(avx2)
LAYOUTS(vnni)

/* Put q and d into w and scales in the order of a layout. */
static void pack(int rows, int chunk, int bits) {
    memset(w, 0, sizeof w);
    for (int r = 0; r < ROWS; r++)
        for (int k = 0; k < K; k++) {
            int b = k / 32, in = k % 32, half = bits == 4 && in >= 16, at = half ? in - 16 : in, per = bits == 4 ? 16 : 32;
            int c = rows == 1 ? per : chunk;
            long byte = (long)(r / rows) * rows * K * bits / 8 + ((long)b * (per / c) + at / c) * rows * c + (r % rows) * c + at % c;
            w[byte] |= bits == 4 ? (uint8_t)((q[r][k] + 8) << (half ? 4 : 0)) : (uint8_t)q[r][k];
            scales[((long)(r / rows) * BLOCKS + b) * rows + r % rows] = d[r][b];
        }
}

static int compare_doubles(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static void fill(int bits) {
    srand(1);
    for (int k = 0; k < K; k++) x[k] = rand() % 255 - 127;
    for (int b = 0; b < BLOCKS; b++) {
        sums[b] = 0;
        for (int k = 0; k < 32; k++) sums[b] += x[32 * b + k];
    }
    for (int r = 0; r < ROWS; r++) {
        for (int k = 0; k < K; k++) q[r][k] = bits == 4 ? rand() % 16 - 8 : rand() % 255 - 127;
        for (int b = 0; b < BLOCKS; b++) d[r][b] = (rand() % 1000 + 1) * 1e-5f;
    }
}

/* Check a layout against plain loops, then print its speed: G multiply-adds a second, min, median, max of 9. */
static int measure(const char *isa, int rows, int chunk, int bits, void (*gemv)(void)) {
    double speed[9];
    pack(rows, chunk, bits);
    gemv();
    for (int r = 0; r < ROWS; r++) {
        double want = 0, size = 0;
        for (int k = 0; k < K; k++) want += (double)d[r][k / 32] * q[r][k] * x[k], size += fabs((double)d[r][k / 32] * q[r][k] * x[k]);
        if (fabs(want - y[r]) > 1e-5 * size) {
            fprintf(stderr, "%s %dx%d q%d: row %d is %g, expected %g\n", isa, rows, chunk, bits, r, y[r], want);
            return 1;
        }
    }
    for (int i = 0; i < 9; i++) {
        struct timespec a, z;
        clock_gettime(CLOCK_MONOTONIC, &a);
        for (int n = 0; n < 100; n++) gemv();
        clock_gettime(CLOCK_MONOTONIC, &z);
        speed[i] = 100.0 * ROWS * K / ((z.tv_sec - a.tv_sec) * 1e9 + (z.tv_nsec - a.tv_nsec));
    }
    qsort(speed, 9, sizeof *speed, compare_doubles);
    printf("| %s | q%d | %dx%d | %.1f / %.1f / %.1f |\n", isa, bits, rows, chunk, speed[0], speed[4], speed[8]);
    return 0;
}

#define MEASURE(isa, bits)                                                                                        \
    (measure(#isa, 16, 4, bits, gemv_##isa##_16_##bits) | measure(#isa, 8, 8, bits, gemv_##isa##_8_##bits) |      \
     measure(#isa, 1, 32, bits, gemv_##isa##_1_##bits))

int main(void) {
    int failed = 0;
    for (int bits = 4; bits <= 8; bits += 4) {
        fill(bits);
        if (__builtin_cpu_supports("avx2")) failed |= bits == 4 ? MEASURE(avx2, 4) : MEASURE(avx2, 8);
        if (__builtin_cpu_supports("avx512vnni")) failed |= bits == 4 ? MEASURE(vnni, 4) : MEASURE(vnni, 8);
    }
    return failed;
}
#endif

#if defined(__aarch64__)
/* Not run, only read: the inner loop over the blocks of one tile, between marks for llvm-mca. */
#include <arm_neon.h>

#define BEGIN(name) __asm__ volatile("// LLVM-MCA-BEGIN " #name ::: "memory")
#define END __asm__ volatile("// LLVM-MCA-END" ::: "memory")

static inline int8x16_t nibbles(uint8x16_t v, int high) {
    return vreinterpretq_s8_u8(high ? vshrq_n_u8(v, 4) : vandq_u8(v, vdupq_n_u8(15)));
}

/* 16 rows: each register of 16 bytes is 4 rows x 4 of K; xv holds 16 of K, one lane for each step. */
#define STEP_16(g, bits, xv)                                                                                      \
    for (int i = 0; i < 4; i++) {                                                                                 \
        uint8x16_t v = vld1q_u8(p + 64 * g + 16 * i);                                                             \
        if (bits == 4) {                                                                                          \
            a[i] = vdotq_laneq_s32(a[i], nibbles(v, 0), xv[0], g % 4);                                            \
            a[i] = vdotq_laneq_s32(a[i], nibbles(v, 1), xv[1], g % 4);                                            \
        } else {                                                                                                  \
            a[i] = vdotq_laneq_s32(a[i], vreinterpretq_s8_u8(v), xv[g / 4], g % 4);                               \
        }                                                                                                         \
    }

#define TILE_16(name, bits, more)                                                                                 \
    void name(const uint8_t *p, const float *s, float *out) {                                                     \
        float32x4_t f[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};                      \
        for (int b = 0; b < BLOCKS; b++, p += 64 * bits, s += 16) {                                               \
            BEGIN(name);                                                                                          \
            int8x16_t xv[2] = {vld1q_s8(x + 32 * b), vld1q_s8(x + 32 * b + 16)};                                  \
            int32x4_t a[4];                                                                                       \
            for (int i = 0; i < 4; i++) a[i] = vdupq_n_s32(bits == 4 ? -8 * sums[b] : 0);                         \
            STEP_16(0, bits, xv) STEP_16(1, bits, xv) STEP_16(2, bits, xv) STEP_16(3, bits, xv) more              \
            for (int i = 0; i < 4; i++) f[i] = vfmaq_f32(f[i], vld1q_f32(s + 4 * i), vcvtq_f32_s32(a[i]));        \
            END;                                                                                                  \
        }                                                                                                         \
        for (int i = 0; i < 4; i++) vst1q_f32(out + 4 * i, f[i]);                                                 \
    }
TILE_16(q4_16x4, 4, )
TILE_16(q8_16x4, 8, STEP_16(4, 8, xv) STEP_16(5, 8, xv) STEP_16(6, 8, xv) STEP_16(7, 8, xv))

/* 8 rows: each register is 2 rows x 8 of K, two int32 lanes a row; x is loaded doubled. */
static inline int8x16_t twice(const int8_t *at) {
    return vreinterpretq_s8_s64(vld1q_dup_s64((const int64_t *)at));
}

#define TILE_8(name, bits)                                                                                        \
    void name(const uint8_t *p, const float *s, float *out) {                                                     \
        float32x4_t f[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};                      \
        for (int b = 0; b < BLOCKS; b++, p += 32 * bits, s += 8) {                                                \
            BEGIN(name);                                                                                          \
            int32x4_t a[4];                                                                                       \
            for (int i = 0; i < 4; i++) a[i] = bits == 4 ? vdupq_n_s32(-4 * sums[b]) : vdupq_n_s32(0);            \
            for (int g = 0; g < bits / 2; g++)                                                                    \
                for (int i = 0; i < 4; i++) {                                                                     \
                    uint8x16_t v = vld1q_u8(p + 64 * g + 16 * i);                                                 \
                    int8x16_t low = bits == 4 ? nibbles(v, 0) : vreinterpretq_s8_u8(v);                           \
                    a[i] = vdotq_s32(a[i], low, twice(x + 32 * b + 8 * g));                                       \
                    if (bits == 4) a[i] = vdotq_s32(a[i], nibbles(v, 1), twice(x + 32 * b + 16 + 8 * g));         \
                }                                                                                                 \
            for (int i = 0; i < 2; i++) {                                                                         \
                float32x4_t sv = vld1q_f32(s + 4 * i);                                                            \
                f[2 * i] = vfmaq_f32(f[2 * i], vzip1q_f32(sv, sv), vcvtq_f32_s32(a[2 * i]));                      \
                f[2 * i + 1] = vfmaq_f32(f[2 * i + 1], vzip2q_f32(sv, sv), vcvtq_f32_s32(a[2 * i + 1]));          \
            }                                                                                                     \
            END;                                                                                                  \
        }                                                                                                         \
        for (int i = 0; i < 4; i++) vst1_f32(out + 2 * i, vpadd_f32(vget_low_f32(f[i]), vget_high_f32(f[i])));    \
    }
TILE_8(q4_8x8, 4)
TILE_8(q8_8x8, 8)

/* One row, as ggml keeps it: a block is one or two registers, four lanes a row. */
#define TILE_1(name, bits)                                                                                        \
    void name(const uint8_t *p, const float *s, float *out) {                                                     \
        float32x4_t f = vdupq_n_f32(0);                                                                           \
        for (int b = 0; b < BLOCKS; b++, p += 4 * bits, s++) {                                                    \
            BEGIN(name);                                                                                          \
            uint8x16_t v = vld1q_u8(p);                                                                           \
            int8x16_t low = bits == 4 ? nibbles(v, 0) : vreinterpretq_s8_u8(v);                                   \
            int8x16_t high = bits == 4 ? nibbles(v, 1) : vreinterpretq_s8_u8(vld1q_u8(p + 16));                   \
            int32x4_t a = vdupq_n_s32(bits == 4 ? -2 * sums[b] : 0);                                              \
            a = vdotq_s32(vdotq_s32(a, low, vld1q_s8(x + 32 * b)), high, vld1q_s8(x + 32 * b + 16));              \
            f = vfmaq_n_f32(f, vcvtq_f32_s32(a), *s);                                                             \
            END;                                                                                                  \
        }                                                                                                         \
        *out = vaddvq_f32(f);                                                                                     \
    }
TILE_1(q4_1x32, 4)
TILE_1(q8_1x32, 8)
#endif
