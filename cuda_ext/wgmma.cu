// Hopper's warpgroup instructions. As primitives.cu, this is not plain C++ and has a stand-in for tests on a CPU.
//
// They are asynchronous: what an instruction reads and writes, registers and shared memory, is its own from its issue until
// the group it was committed to has been waited for.

// Before the first instruction, and after other code wrote to registers that the next ones read.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// What was issued since the last commit is a group.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending groups, the latest ones, are not done.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Waits for all of them, before their sums are read.
template <int kSums>
__device__ __forceinline__ void wgmma_wait_for(float (&first)[kSums], float (&second)[kSums]) {
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(first[i]), "+f"(second[i])::"memory");
}

// Makes what this thread has written to shared memory visible to the instructions of all warpgroups, behind a barrier.
__device__ __forceinline__ void fence_shared_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The descriptor of a B operand in shared memory whose columns (samples) are rows of 128 bytes, one after the other, chunks
// of 16 bytes exchanged in the 128-byte pattern: chunk c of row s lies at c ^ s % 8. The address is a multiple of
// 1024. (PTX ISA, matrix descriptor: bits 0 … 13 the address / 16, 16 … 29 a leading offset
// that this pattern does not use, 32 … 45 the offset between groups of eight rows / 16, 62 and 63 the pattern.)
__device__ __forceinline__ uint64 wgmma_operand(const unsigned char* tile) {
    constexpr uint64 kPattern = 1ull << 62 | 1024ull / 16 << 32 | 1ull << 16;
    return kPattern | (static_cast<uint32>(__cvta_generic_to_shared(tile)) & 0x3FFFFu) >> 4;
}

// The same so many bytes further on.
__device__ __forceinline__ uint64 wgmma_operand_at(uint64 operand, int bytes) { return operand + bytes / 16; }

// sums = a · b, added to what they are unless `fresh`: 64 × kSamples, of fragments spread over four warps. A lane of warp w
// holds of row 16 w + lane / 4 + 8 (r / 2 mod 2) and column 8 (r / 4) + 2 (lane mod 4) + r mod 2 the sum r; its four
// registers of a are those of mma.m16n8k16 for the warp's 16 rows (PTX ISA, wgmma.mma_async.m64nNk16).
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_32                                                                                                 \
    NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
            "%28, %29, %30, %31"
#define NAMES_64                                                                                                     \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
             "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_32(i) SUMS_8(i), SUMS_8(i + 8), SUMS_8(i + 16), SUMS_8(i + 24)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 32)

#define DEFINE_WGMMA(Format, type, samples, count, a, b, flag)                                                           \
    __device__ __forceinline__ void wgmma(Format, float (&sums)[count], const uint32 (&signs)[4], uint64 operand, bool fresh) { \
        asm volatile("{\n.reg .pred kept;\nsetp.eq.b32 kept, " flag ", 0;\n"                                              \
                     "wgmma.mma_async.sync.aligned.m64n" samples "k16.f32." type "." type " {" NAMES_##count "}, {" a "}, " \
                     b ", kept, 1, 1, 0;\n}\n"                                                                          \
                     : SUMS_##count(0)                                                                                  \
                     : "r"(signs[0]), "r"(signs[1]), "r"(signs[2]), "r"(signs[3]), "l"(operand), "r"(fresh ? 1 : 0)      \
                     : "memory");                                                                                       \
    }

#define DEFINE_WGMMA_OF(Format, type)                                                \
    DEFINE_WGMMA(Format, type, "16", 8, "%8, %9, %10, %11", "%12", "%13")            \
    DEFINE_WGMMA(Format, type, "64", 32, "%32, %33, %34, %35", "%36", "%37")         \
    DEFINE_WGMMA(Format, type, "128", 64, "%64, %65, %66, %67", "%68", "%69")

DEFINE_WGMMA_OF(BFloat16, "bf16")
DEFINE_WGMMA_OF(Float16, "f16")
