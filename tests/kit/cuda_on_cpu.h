// CUDA threads as fibers of one CPU thread: enough of CUDA C++ to run the kernels of cuda_ext/ without a GPU.
//
// Stands in for primitives.cu. Blocks run one after another. The threads of a block are switched at barriers and at
// matrix instructions, in an order drawn anew each round, so that a missing barrier shows as results that depend on the
// seed. Shared memory begins as NaN.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;
using std::max;
using std::min;

struct Index3 {
    uint32 x, y, z;
};
static Index3 threadIdx, blockIdx, gridDim;

struct alignas(16) Words4 {
    uint32 w[4];
};

namespace emulator {

enum class State { ready, at_barrier, at_instruction, done };

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    State state;
    // Arguments of the matrix instruction that it waits in.
    float* c;
    const uint32* a;
    uint32 b[2];
};

static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static size_t running;
static std::vector<uint64> shared;
static std::function<void()> body;
static void (*at_block_start)(std::mt19937&) = nullptr;

static void enter() {
    body();
    fibers[running].state = State::done;
    swapcontext(&fibers[running].context, &scheduler);
}

static void wait(State state) {
    fibers[running].state = state;
    swapcontext(&fibers[running].context, &scheduler);
}

// Returns 0, or 1 if some threads wait for others that never come.
static int run_block(size_t threads, std::mt19937& random) {
    for (size_t t = 0; t < threads; ++t) {
        Fiber& fiber = fibers[t];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        fiber.state = State::ready;
        makecontext(&fiber.context, enter, 0);
    }
    std::vector<size_t> order(threads);
    for (size_t t = 0; t < threads; ++t) order[t] = t;
    const size_t groups = (threads + 127) / 128;
    size_t favored = groups;  // none
    for (;;) {
        std::shuffle(order.begin(), order.end(), random);
        // Every other time one group of four warps goes on alone, until it waits for others.
        if (favored == groups && random() % 2) favored = random() % groups;
        bool progress = false;
        for (size_t t : order) {
            if (fibers[t].state != State::ready || favored < groups && t / 128 != favored) continue;
            progress = true;
            running = t;
            threadIdx = {static_cast<uint32>(t), 0, 0};
            swapcontext(&scheduler, &fibers[t].context);
        }
        if (progress) continue;
        if (favored < groups) {
            favored = groups;
            continue;
        }
        const auto waiting = std::count_if(fibers.begin(), fibers.begin() + threads,
                                           [](const Fiber& f) { return f.state == State::at_barrier; });
        const auto done = std::count_if(fibers.begin(), fibers.begin() + threads,
                                        [](const Fiber& f) { return f.state == State::done; });
        if (done == static_cast<long>(threads)) return 0;
        if (waiting + done != static_cast<long>(threads)) return 1;
        for (size_t t = 0; t < threads; ++t) {
            if (fibers[t].state == State::at_barrier) fibers[t].state = State::ready;
        }
    }
}

static int run(const uint32* grid, size_t threads, size_t shared_bytes, uint32 seed, std::function<void()> kernel) {
    body = std::move(kernel);
    std::mt19937 random(seed);
    if (fibers.size() < threads) fibers.resize(threads);
    for (Fiber& fiber : fibers) fiber.stack.resize(1 << 16);
    gridDim = {grid[0], grid[1], grid[2]};
    for (uint32 z = 0; z < grid[2]; ++z)
        for (uint32 y = 0; y < grid[1]; ++y)
            for (uint32 x = 0; x < grid[0]; ++x) {
                blockIdx = {x, y, z};
                shared.assign(shared_bytes / 8 + 129, ~0ull);
                if (at_block_start) at_block_start(random);
                if (run_block(threads, random)) return 1;
            }
    return 0;
}

}  // namespace emulator

static void __syncwarp() {}

static void __syncthreads() { emulator::wait(emulator::State::at_barrier); }

static inline unsigned char* shared_memory() {
    auto* begin = reinterpret_cast<unsigned char*>(emulator::shared.data());
    return begin + (1024 - reinterpret_cast<uintptr_t>(begin) % 1024) % 1024;
}

static inline int thread_read_anew() { return static_cast<int>(threadIdx.x); }

static inline Words4 load_words(const void* address) {
    if (reinterpret_cast<uintptr_t>(address) % 16) __builtin_trap();
    return *static_cast<const Words4*>(address);
}

static inline void store_words(void* address, const Words4& v) {
    if (reinterpret_cast<uintptr_t>(address) % 16) __builtin_trap();
    *static_cast<Words4*>(address) = v;
}

static inline float float_of_bits(uint32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline uint32 bits_of_float(float value) {
    uint32 bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

static inline float float_of_half(uint32 bits) {
    const uint32 exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float value;
    if (exponent == 31) {
        value = mantissa ? NAN : INFINITY;
    } else {
        value = exponent ? std::ldexp(1024.0f + mantissa, static_cast<int>(exponent) - 25) : std::ldexp(1.0f * mantissa, -24);
    }
    return bits & 0x8000 ? -value : value;
}

static inline uint32 pick_bytes(uint32 low, uint32 high, uint32 selector) {
    const uint64 bytes = static_cast<uint64>(high) << 32 | low;
    uint32 result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<uint32>(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return result;
}

static inline uint32 funnel_right(uint32 low, uint32 high, uint32 shift) {
    return static_cast<uint32>((static_cast<uint64>(high) << 32 | low) >> shift);
}

static inline uint32 bfloat16_of(float value) {
    const uint32 bits = bits_of_float(value);
    if (value != value) return 0x7FFF;
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16;
}

static inline uint32 pack_bfloat16(float low, float high) { return bfloat16_of(high) << 16 | bfloat16_of(low); }

static inline float cospif(float x) { return static_cast<float>(std::cos(M_PI * static_cast<double>(x))); }
static inline float sinpif(float x) { return static_cast<float>(std::sin(M_PI * static_cast<double>(x))); }

// mma.m16n8k16 as the PTX ISA lays its fragments out: the last of a warp's lanes to arrive computes for all.
template <typename Value>
static void mma(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, Value value) {
    using namespace emulator;
    Fiber& own = fibers[running];
    own.c = c;
    own.a = a;
    own.b[0] = b0;
    own.b[1] = b1;
    Fiber* const warp = &fibers[running / 32 * 32];
    bool last = true;
    for (int lane = 0; lane < 32; ++lane) last &= warp + lane == &own || warp[lane].state == State::at_instruction;
    if (!last) {
        wait(State::at_instruction);
        return;
    }
    static float A[16][16], B[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int r = 0; r < 4; ++r)
            for (int half = 0; half < 2; ++half)
                A[g + r % 2 * 8][2 * t + half + r / 2 * 8] = value(warp[lane].a[r] >> 16 * half & 0xFFFF);
        for (int r = 0; r < 2; ++r)
            for (int half = 0; half < 2; ++half) B[2 * t + half + r * 8][g] = value(warp[lane].b[r] >> 16 * half & 0xFFFF);
    }
    for (int lane = 0; lane < 32; ++lane) {
        for (int r = 0; r < 4; ++r) {
            const int row = lane / 4 + r / 2 * 8, column = lane % 4 * 2 + r % 2;
            double sum = warp[lane].c[r];
            for (int k = 0; k < 16; ++k) sum += static_cast<double>(A[row][k]) * B[k][column];
            warp[lane].c[r] = static_cast<float>(sum);
        }
        warp[lane].state = State::ready;
    }
}

static void mma_bfloat16(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    mma(c, a, b0, b1, [](uint32 bits) { return float_of_bits(bits << 16); });
}

static void mma_float16(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) { mma(c, a, b0, b1, float_of_half); }
