// What CUDA offers beyond plain C++: types of fixed width, 16-byte loads, conversions, matrix instructions.
//
// Every program is this file, common.cu, other parts that its kernel needs, and the kernel's file; no file includes another,
// and none includes a header, because a machine with a driver and NVRTC need not have any. Whatever is not plain C++ stays
// here and in wgmma.cu, so that a test can put its own versions of these in front of the others and run the kernels on a CPU.

using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

struct alignas(16) Words4 {
    uint32 w[4];
};

// At a multiple of 1024 bytes.
__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(1024) uint4 dynamic_shared_memory[];
    return reinterpret_cast<unsigned char*>(dynamic_shared_memory);
}

// threadIdx.x, read anew: what is computed from it is not kept in registers from before a loop to behind it.
__device__ __forceinline__ int thread_read_anew() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// Global loads and shared accesses of 16 bytes; the address is a multiple of 16.
__device__ __forceinline__ Words4 load_words(const void* address) {
    const uint4 v = *static_cast<const uint4*>(address);
    return {v.x, v.y, v.z, v.w};
}

__device__ __forceinline__ void store_words(void* address, const Words4& v) {
    *static_cast<uint4*>(address) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
}

__device__ __forceinline__ float float_of_bits(uint32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32 bits_of_float(float value) { return __float_as_uint(value); }

__device__ __forceinline__ float float_of_half(uint32 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
    return value;
}

// Bytes of (low, high), numbered 0 … 7 from the least significant of `low`, picked by the four nibbles of `selector`.
__device__ __forceinline__ uint32 pick_bytes(uint32 low, uint32 high, uint32 selector) {
    return __byte_perm(low, high, selector);
}

// (high : low) >> shift, for shift < 32.
__device__ __forceinline__ uint32 funnel_right(uint32 low, uint32 high, uint32 shift) {
    return __funnelshift_r(low, high, shift);
}

// Two bf16 in one word, rounded to nearest even; `low` in the lower half.
__device__ __forceinline__ uint32 pack_bfloat16(float low, float high) {
    uint32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// c += a · b on 16 × 16, 16 × 8 and 16 × 8 fragments spread over a warp (PTX ISA, mma.m16n8k16).
__device__ __forceinline__ void mma_bfloat16(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_float16(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
