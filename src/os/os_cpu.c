/* SPDX-License-Identifier: Apache-2.0 */
/* os_cpu.c - which instructions this processor has and the kernel lets us use.
 *
 * A level is claimed only when CPUID names every extension that its kernels are compiled for and
 * XCR0 shows that the kernel saves the registers; AMX is also asked for with arch_prctl.
 * Thread: detection runs once (pthread_once); afterwards constant. */
#include <ctype.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "os/os.h"
#include "os/os_cgroup.h"

static os_cpu         cpu_;
static pthread_once_t cpu_once_ = PTHREAD_ONCE_INIT;

static const char *const isa_name_[] = { "portable", "avx2", "avx512", "amx" };

#if defined(__x86_64__)
#include <cpuid.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA  18

typedef struct cpuid_regs {
    unsigned a, b, c, d;
} cpuid_regs;

/* All zero for a leaf the processor does not have. */
static cpuid_regs cpuid(unsigned leaf, unsigned sub)
{
    cpuid_regs r = { 0 };

    __get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d);
    return r;
}

static uint64_t xcr0(void)
{
    uint32_t lo, hi;

    __asm__("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

/* The tile state is large, so Linux grants it per process and on request. */
static bool amx_permitted(void)
{
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

static bool bit(unsigned reg, int n)
{
    return (reg >> n) & 1u;
}

static void detect_model(os_cpu *cpu)
{
    char  brand[49] = { 0 };
    char *s         = brand;

    for (unsigned i = 0; i < 3; i++) {
        const cpuid_regs r = cpuid(0x80000002u + i, 0);

        memcpy(brand + 16 * i, &r, 16);
    }
    while (isspace((unsigned char)*s))
        s++;
    for (size_t n = strlen(s); n > 0 && isspace((unsigned char)s[n - 1]); n--)
        s[n - 1] = 0;
    memcpy(cpu->model, *s ? s : "x86-64", strlen(*s ? s : "x86-64") + 1);
}

static void detect_features(os_cpu *cpu)
{
    const cpuid_regs l1 = cpuid(1, 0), l7 = cpuid(7, 0), l71 = cpuid(7, 1);
    const uint64_t   saved    = bit(l1.c, 27) ? xcr0() : 0; /* OSXSAVE */
    const bool       ymm      = (saved & 0x6) == 0x6;
    const bool       zmm      = (saved & 0xe6) == 0xe6;
    const bool       tile     = (saved & 0x60000) == 0x60000;
    const bool       bmi2     = bit(l7.b, 8);
    const bool       amx_tile = tile && bit(l7.d, 24) && amx_permitted();

    cpu->fma      = ymm && bit(l1.c, 12);
    cpu->f16c     = ymm && bit(l1.c, 29);
    cpu->avx2     = ymm && bmi2 && bit(l1.c, 28) && bit(l7.b, 5);
    cpu->avx_vnni = cpu->avx2 && bit(l71.a, 4);
    cpu->avx512   = zmm && cpu->avx2 && bit(l7.b, 16) && bit(l7.b, 17) && bit(l7.b, 30) &&
                  bit(l7.b, 31); /* F DQ BW VL */
    cpu->avx512_vnni = cpu->avx512 && bit(l7.c, 11);
    cpu->avx512_bf16 = cpu->avx512 && bit(l71.a, 5);
    cpu->amx_bf16    = amx_tile && bit(l7.d, 22);
    cpu->amx_int8    = amx_tile && bit(l7.d, 25);
}

static void detect_isa(os_cpu *cpu)
{
    cpu->isa = OS_ISA_PORTABLE;
    if (!cpu->avx2 || !cpu->fma || !cpu->f16c)
        return;
    cpu->isa = OS_ISA_AVX2;
    if (!cpu->avx512)
        return;
    cpu->isa = OS_ISA_AVX512;
    if (cpu->avx512_vnni && cpu->avx512_bf16 && cpu->amx_int8 && cpu->amx_bf16)
        cpu->isa = OS_ISA_AMX;
}

static void detect_instructions(os_cpu *cpu)
{
    detect_model(cpu);
    detect_features(cpu);
    detect_isa(cpu);
}
#else
static void detect_instructions(os_cpu *cpu)
{
    memcpy(cpu->model, "unknown", sizeof("unknown"));
}
#endif

/* Processors in this process's affinity mask. */
static uint32_t affinity_cpus(void)
{
    unsigned long mask[1024] = { 0 }; /* 65,536 processors; the kernel refuses a mask too short */
    int           n          = 0;

    if (syscall(SYS_sched_getaffinity, 0, sizeof(mask), mask) <= 0)
        return 1;
    for (size_t i = 0; i < KVD_COUNTOF(mask); i++)
        n += __builtin_popcountl(mask[i]);
    return (uint32_t)n;
}

static uint32_t cache_bytes(int name, uint32_t otherwise)
{
    const long n = sysconf(name);

    return n > 0 && n <= UINT32_MAX ? (uint32_t)n : otherwise;
}

static void detect(void)
{
    const os_cgroup cg = os_cgroup_read("/proc/self/cgroup", "/sys/fs/cgroup");

    detect_instructions(&cpu_);
    cpu_.n_cpu     = (uint32_t)kvd_max_u64(1, kvd_min_u64(affinity_cpus(), cg.n_cpu));
    cpu_.l1d_bytes = cache_bytes(_SC_LEVEL1_DCACHE_SIZE, 32u << 10);
    cpu_.l2_bytes  = cache_bytes(_SC_LEVEL2_CACHE_SIZE, 512u << 10);
    cpu_.l3_bytes  = cache_bytes(_SC_LEVEL3_CACHE_SIZE, 4u << 20);
}

const os_cpu *os_cpu_get(void)
{
    pthread_once(&cpu_once_, detect);
    return &cpu_;
}

const char *os_isa_name(os_isa isa)
{
    kvd_assert((unsigned)isa < KVD_COUNTOF(isa_name_));
    return isa_name_[isa];
}

bool os_isa_parse(const char *name, os_isa *out)
{
    for (unsigned i = 0; i < KVD_COUNTOF(isa_name_); i++) {
        if (strcmp(name, isa_name_[i]) == 0) {
            *out = (os_isa)i;
            return true;
        }
    }
    return false;
}
