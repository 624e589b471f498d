// Rounds of the rotation `hadamard-1` of rows of features (hf_trak/codes/reference.py defines it): a block of p = 2ⁿ
// columns of every row becomes H·D·x / √p, in place.
//
// H is n steps with distances 1, 2, 4, …, p/2 that replace pairs (a, b) by (a + b, a − b). Pairs of a step have nothing to
// do with each other, so that steps may be grouped in any way in which no number takes a later step before an earlier one:
// the bits are those of the torch code.
//
// A block of threads takes a tile of 2¹⁴ numbers through one pass over memory, each thread 32 of them in registers. Their
// indices in the tile differ in five bits, in whose steps a thread needs nobody else. There are three such layouts. Between
// two of them the numbers change hands in shared memory, once written and once read for up to five steps, where shuffles
// within a warp would move all of them in every step:
//
// * A: bits 0 … 4, a run of 32 neighbours. Their signs are one word.
// * B: bits 5 … 9.
// * C: bits 9 … 13. Neighbouring threads have neighbours, so that global memory is read and written in this layout.
//
// Where p ≤ 2¹⁴ a tile is one row or several, and one pass does all rounds. Where p is larger a tile is 2ʰ lines of 2¹⁴⁻ʰ
// neighbours of one row, and the lines are 2ᶠ columns apart: a pass does the steps of the bits f … f + h − 1 of a column,
// and, if those were the last of a round, the signs and the first 14 − h steps of the next round, which stay within lines
// (hf_trak/kernels/hadamard.py plans the passes). The first pass of all has h = 0.

constexpr int kHeldBits = 5, kHeld = 1 << kHeldBits;
constexpr int kTileBits = 14, kTile = 1 << kTileBits, kThreads = kTile / kHeld;
constexpr int kA = 0, kB = kHeldBits, kC = kTileBits - kHeldBits;  // layouts, by their lowest bits
constexpr int kBehindB = kB + kHeldBits;

struct HadamardArguments {
    float* rows;          // the first row's block
    const uint32* signs;  // (rounds, words): bit c % 32 of word c / 32 is the sign of column c
    int64 count;          // number of rows
    int64 stride;         // elements between them
    uint32 words;         // ⌈p / 32⌉; where p < 32, the p bits are repeated up to 32
    uint32 size_bits;     // n
    uint32 high_bits;     // h, at most 9: steps before the rounds, on the highest bits of a tile
    uint32 first_bit;     // f, at least 14 − h
    uint32 first_round;   // of the signs
    uint32 rounds;        // begun in this pass
    uint32 low_bits;      // steps of each of these rounds
    float scale;          // 1 / √p
};

// The numbers that a thread holds in a layout are those with the indices first_held + r · 2^kBit in the tile, r = 0 … 31.
template <int kBit>
__device__ __forceinline__ uint32 first_held(uint32 thread) {
    if constexpr (kBit == kC) return thread;
    return thread >> kBit << (kBit + kHeldBits) | (thread & ((1u << kBit) - 1));
}

__device__ __forceinline__ void do_step(float (&x)[kHeld], int s) {
#pragma unroll
    for (int r = 0; r < kHeld; ++r) {
        if (r >> s & 1) continue;
        const float a = x[r], b = x[r | 1 << s];
        x[r] = a + b;
        x[r | 1 << s] = a - b;
    }
}

// Steps of the bits `from` … `behind` − 1 of the index in the tile, as far as the layout has them, and from kFirst on.
template <int kBit, int kFirst = kBit>
__device__ __forceinline__ void do_steps(float (&x)[kHeld], int from, int behind) {
    constexpr int kFirstStep = kFirst - kBit;
    if (from <= kFirst && kBit + kHeldBits <= behind) {  // without branches, at which numbers change their registers
#pragma unroll
        for (int s = kFirstStep; s < kHeldBits; ++s) do_step(x, s);
    } else {
#pragma unroll
        for (int s = kFirstStep; s < kHeldBits; ++s) {
            if (from <= kBit + s && kBit + s < behind) do_step(x, s);
        }
    }
}

// ---- The tile in shared memory ----
//
// A place is read and written by the one thread that holds it in a layout, and then, behind a barrier, by the one that
// holds it in the next. In run number R the vector of four numbers v is at v xor (R mod 8): so neither the runs of
// neighbouring threads in layout A nor neighbours in B and C collide in the banks.

// Layout A: calls `use` with the number of the first of four neighbours, and their place.
template <typename Use>
__device__ __forceinline__ void visit_vectors(uint32 thread, Use use) {
    float* const tile = reinterpret_cast<float*>(shared_memory());
    const uint32 first = thread * kHeld | thread % 8 * 4;
#pragma unroll
    for (int r = 0; r < kHeld; r += 4) use(r, tile + (first ^ r));
}

// Layouts B and C: calls `use` with every number's r and place.
template <int kBit, typename Use>
__device__ __forceinline__ void visit_places(uint32 thread, Use use) {
    float* const tile = reinterpret_cast<float*>(shared_memory());
    const uint32 first = first_held<kBit>(thread);
    if constexpr (kBit == kB) {  // R mod 8 is r mod 8
#pragma unroll
        for (int low = 0; low < 8; ++low) {
            float* const place = tile + (first ^ low * 4);
#pragma unroll
            for (int r = low; r < kHeld; r += 8) use(r, place + (r << kBit));
        }
    } else {
        static_assert(kBit >= kHeldBits + 3, "R mod 8 does not depend on r");
        float* const place = tile + (first ^ first / kHeld % 8 * 4);
#pragma unroll
        for (int r = 0; r < kHeld; ++r) use(r, place + (r << kBit));
    }
}

template <int kBit>
__device__ __forceinline__ void put(const float (&x)[kHeld], uint32 thread) {
    if constexpr (kBit == kA) {
        visit_vectors(thread, [&](int r, float* place) {
            const Words4 four = {bits_of_float(x[r]), bits_of_float(x[r + 1]), bits_of_float(x[r + 2]), bits_of_float(x[r + 3])};
            store_words(place, four);
        });
    } else {
        visit_places<kBit>(thread, [&](int r, float* place) { *place = x[r]; });
    }
}

template <int kBit>
__device__ __forceinline__ void get(float (&x)[kHeld], uint32 thread) {
    if constexpr (kBit == kA) {
        visit_vectors(thread, [&](int r, const float* place) {
            const Words4 four = load_words(place);
#pragma unroll
            for (int e = 0; e < 4; ++e) x[r + e] = float_of_bits(four.w[e]);
        });
    } else {
        visit_places<kBit>(thread, [&](int r, const float* place) { x[r] = *place; });
    }
}

// ---- The tile in global memory ----

struct Lines {
    float* begin;
    uint32 apart;      // elements between lines; from the first to the last number there are fewer than 2³²
    uint32 line_bits;  // of 2^line_bits neighbours each
    uint32 numbers;    // fewer than a tile has where there are no more rows
    uint32 column;     // of the first one in the block

    __device__ __forceinline__ explicit Lines(const HadamardArguments& a) {
        const int64 tile = blockIdx.x;
        if (a.size_bits <= kTileBits) {
            const uint32 rows_bits = kTileBits - a.size_bits;
            const int64 row = tile << rows_bits;
            begin = a.rows + row * a.stride;
            apart = static_cast<uint32>(a.stride);
            line_bits = a.size_bits;
            numbers = static_cast<uint32>(min(a.count - row, int64(1) << rows_bits)) << a.size_bits;
            column = 0;
        } else {
            const uint32 tiles_bits = a.size_bits - kTileBits;
            const uint32 in_row = static_cast<uint32>(tile) & ((1u << tiles_bits) - 1);
            line_bits = kTileBits - a.high_bits;
            // Tiles side by side fill the columns between two lines; behind them come those of the next 2ʰ lines.
            const uint32 beside_bits = a.first_bit - line_bits;
            column = (in_row & ((1u << beside_bits) - 1)) << line_bits;
            column |= in_row >> beside_bits << (a.first_bit + a.high_bits);
            begin = a.rows + (tile >> tiles_bits) * a.stride + column;
            apart = 1u << a.first_bit;
            numbers = kTile;
        }
    }

    // Of a number, from `begin`. Where two indices have no bit in common the offset of their sum is that of their offsets.
    __device__ __forceinline__ uint32 offset(uint32 index) const {
        return (index >> line_bits) * apart + (index & ((1u << line_bits) - 1));
    }

    // Calls `use` with r and the address of each number that a thread holds in a layout.
    template <int kBit, typename Use>
    __device__ __forceinline__ void visit(uint32 thread, Use use) const {
        const uint32 first = first_held<kBit>(thread);
        const int held = first < numbers ? ((numbers - first - 1) >> kBit) + 1 : 0;
        uint32 of_bit[kHeldBits];
#pragma unroll
        for (int s = 0; s < kHeldBits; ++s) of_bit[s] = offset(1u << (kBit + s));
        const uint32 place_of_first = offset(first);
#pragma unroll
        for (int r = 0; r < kHeld; ++r) {
            uint32 place = place_of_first;
#pragma unroll
            for (int s = kHeldBits - 1; s >= 0; --s) {
                if (r >> s & 1) place += of_bit[s];
            }
            if (r < held) use(r, begin + place);
        }
    }
};

// Signs of the run that a thread has in layout A: where they are for round 0.
__device__ __forceinline__ const uint32* signs_of_run(const HadamardArguments& a, const Lines& lines) {
    const uint32 index = threadIdx.x * kHeld;
    if (a.size_bits > kTileBits) return a.signs + (lines.column + lines.offset(index)) / 32;
    return a.signs + (index & ((1u << a.size_bits) - 1)) / 32;
}

// Grid: x the tiles.
extern "C" __global__ void __launch_bounds__(kThreads, 2) hadamard(const __grid_constant__ HadamardArguments a) {
    const Lines lines(a);
    const int high = kTileBits - a.high_bits;

    float x[kHeld];
#pragma unroll
    for (int r = 0; r < kHeld; ++r) x[r] = 0.0f;
    const auto take = [&](int r, const float* address) { x[r] = *address; };
    if (high < kC) {
        lines.visit<kB>(threadIdx.x, take);
        do_steps<kB>(x, high, kBehindB);
        put<kB>(x, threadIdx.x);
        __syncthreads();
        get<kC>(x, threadIdx.x);
        do_steps<kC, kBehindB>(x, high, kTileBits);
    } else {
        lines.visit<kC>(threadIdx.x, take);
        do_steps<kC>(x, high, kTileBits);
    }

    const uint32 behind = a.first_round + a.rounds;
    const uint32* const of_run = signs_of_run(a, lines);
#pragma unroll 1
    for (uint32 round = a.first_round; round < behind; ++round) {
        const uint32 thread = thread_read_anew();  // there are no registers for the places of all rounds
        const uint32 signs = of_run[static_cast<int64>(round) * a.words];
        put<kC>(x, thread);
        __syncthreads();
        get<kA>(x, thread);
        // The product is rounded before it is added to anything: no compiler makes one instruction of both where an
        // exclusive or is between them.
#pragma unroll
        for (int r = 0; r < kHeld; ++r) {
            x[r] = float_of_bits(bits_of_float(x[r] * a.scale) ^ (signs << (31 - r) & 0x80000000u));
        }
        do_steps<kA>(x, 0, a.low_bits);
        put<kA>(x, thread);
        __syncthreads();
        get<kB>(x, thread);
        do_steps<kB>(x, 0, a.low_bits);
        put<kB>(x, thread);
        __syncthreads();
        get<kC>(x, thread);
        do_steps<kC, kBehindB>(x, 0, a.low_bits);
    }
    Lines(a).visit<kC>(thread_read_anew(), [&](int r, float* address) { *address = x[r]; });
}
