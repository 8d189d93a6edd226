/* SPDX-License-Identifier: Apache-2.0
 *
 * The tables of this build and which of them this CPU can run. Compiled for the baseline: nothing here may use an
 * instruction that is still being asked about. */
#include <stddef.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "ops.h"

static int always(void) { return 1; }

static const cec_table scalar = {
    "scalar",
    always,
    &cec_scalar_linear,
    &cec_scalar_pointwise,
    &cec_scalar_attention,
    &cec_scalar_sampling,
    &cec_scalar_delta,
};

#if defined(__x86_64__)
static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

static int has_avx512vnni(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

/* Linux saves the big tile registers only for a process that asked for them; its threads inherit the answer. */
static int has_avx512amx(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    return has_avx512vnni() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

static const cec_table avx2 = {
    "avx2",
    has_avx2,
    &cec_avx2_linear,
    &cec_avx2_pointwise,
    &cec_avx2_attention,
    &cec_scalar_sampling,
    &cec_avx2_delta,
};
static const cec_table avx512vnni = {
    "avx512vnni",
    has_avx512vnni,
    &cec_avx512vnni_linear,
    &cec_avx512vnni_pointwise,
    &cec_avx512vnni_attention,
    &cec_scalar_sampling,
    &cec_avx512vnni_delta,
};
static const cec_table avx512amx = {
    "avx512amx",
    has_avx512amx,
    &cec_avx512amx_linear,
    &cec_avx512vnni_pointwise,
    &cec_avx512vnni_attention,
    &cec_scalar_sampling,
    &cec_avx512vnni_delta,
};
#elif defined(__aarch64__)
static int has_dotprod(void) { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }

static const cec_table neon_dotprod = {
    "neon_dotprod",
    has_dotprod,
    &cec_neon_dotprod_linear,
    &cec_neon_dotprod_pointwise,
    &cec_neon_dotprod_attention,
    &cec_scalar_sampling,
    &cec_neon_dotprod_delta,
};
#endif

const cec_table *const cec_tables[] = {
#if defined(__x86_64__)
    &avx512amx, &avx512vnni, &avx2,
#elif defined(__aarch64__)
    &neon_dotprod,
#endif
    &scalar, NULL};
