// The dense map `rademacher-1` on Hopper's tensor cores, by `wgmma` (compute capability 9.0 only): see sign_tiles.cu.
//
// Two warpgroups of four warps, each for 128 of the block's outputs: as two products of 64 × kSamples per step of 16
// positions, with signs from registers and gradients from shared memory. Warp w of a warpgroup has rows 16 w … 16 w + 15 of
// a product and takes outputs 32 w … 32 w + 15 into the first, 32 w + 16 … 32 w + 31 into the second: both are word w of a
// generator's call. The words of the four positions of a lane lie side by side, so that a step is one 16-byte load of words,
// twenty operations and, per term, two products.
//
// What overlaps. Products are asynchronous, and a step is a group of them: while one step is multiplied, the signs of the
// next are made in other registers. Either warpgroup also has the other's products to wait behind, so the tensor cores
// starve only if both are late. A multiprocessor multiplies a tile of 128 samples in 1024 cycles per term. In that time a
// scheduler can issue 1024 instructions; its two warps need about 570 in 16 bits and 960 of 2048 in float32, counted in the
// machine code for aligned rows. That is why gradients come through registers: bulk copies by the tensor memory
// accelerator would save some hundred instructions where there is room, but need rows at multiples of 16 bytes and 16-bit
// elements.
//
// Gradients have two buffers. The first half of tile T + 1 is stored in the middle of tile T, the second at its end, into
// the buffer of tile T − 1. In the middle of T each warp has waited for all products of T − 1, and a barrier makes sure
// that all warps have.
//
// Sums of a chain end in shared memory (`rounded`), each thread's in a place of its own.

template <typename In>
struct Format {
    using Type = BFloat16;
};

template <>
struct Format<Float16> {
    using Type = Float16;
};

struct AsyncLayout {
    // Byte of 16-byte chunk c of a sample's tile, in the 128-byte pattern of `wgmma_operand`.
    __device__ static __forceinline__ int offset(int sample, int chunk) { return sample * kTileRow + (chunk ^ sample & 7) * 16; }
    // Place of position i's words in a tile: lane t's positions 2t, 2t + 1, 2t + 8, 2t + 9 of a step are neighbours.
    __device__ static __forceinline__ int slot(int i) { return i & ~15 | (i & 6) << 1 | i >> 2 & 2 | i & 1; }
};

template <int kTerms, int kSamples>
struct WgmmaShared {
    unsigned char samples[2][kTerms][kSamples * kTileRow];  // at multiples of 1024
    uint32 words[2][kColumns / 32][kPositions];
    Words4 rounded[kSamples / 4][kThreads];
};

// Grid as in rademacher.cu. Smaller tiles leave room for two blocks on a multiprocessor, and have less to hide waits behind.
template <typename In, int kTerms, int kSamples>
__global__ void __launch_bounds__(kThreads, kSamples == 128 ? 1 : 2) rademacher_wgmma(const __grid_constant__ DenseArguments a) {
    constexpr int kSums = kSamples / 2;  // of a thread, of either product
    auto& shared = *reinterpret_cast<WgmmaShared<kTerms, kSamples>*>(shared_memory());
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint32 first_output = blockIdx.x * kColumns;
    const int64 first_sample = static_cast<int64>(blockIdx.z) * kSamples;
    const int64 first = blockIdx.y * a.positions_per_split;
    const int64 behind = min(first + a.positions_per_split, a.columns);
    const int tiles = static_cast<int>((behind - first + kPositions - 1) / kPositions);

    float sums[2][kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[0][i] = sums[1][i] = 0.0f;
    uint32 signs[2][2][4];  // of even and odd steps, of either product
    const uint32 mask = sign_mask(a);
    const uint64 operands = wgmma_operand(shared.samples[0][0]);

    Stager<In, kTerms, kSamples, AsyncLayout> stager(a, first_sample, first);
    make_words<AsyncLayout>(shared.words[0], a, 0, a.start + first, first_output);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        stager.fetch(half);
        stager.store(half, shared.samples[0]);
    }
    fence_shared_for_wgmma();
    __syncthreads();

    for (int tile = 0; tile < tiles;) {
        const bool first_chain = tile == 0;
        const int behind_chain = min(tile + Operand<In, kTerms>::kTilesPerChain, tiles);
        bool fresh = true;
        for (; tile < behind_chain; ++tile) {
            const int buffer = tile & 1;
            const bool more = tile + 1 < tiles;
            stager.next_tile();
            if (more) {
                const int64 position = first + static_cast<int64>(tile + 1) * kPositions;
                make_words<AsyncLayout>(shared.words[buffer ^ 1], a, tile + 1, a.start + position, first_output);
            }
            const uint32* const words = shared.words[buffer][warp] + 4 * t;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (more) stager.fetch(half);
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    const int step = 2 * half + odd;
                    wgmma_wait<1>();  // the step before the last is done with its registers
                    const Words4 of_step = load_words(words + 16 * step);
#pragma unroll
                    for (int product = 0; product < 2; ++product) {
                        make_signs<In, kTerms>(signs[odd][product], of_step.w, product, g, mask);
                    }
                    wgmma_fence();
#pragma unroll
                    for (int term = 0; term < kTerms; ++term) {
                        const int tiles_before = buffer * kTerms + term;
                        const uint64 operand = wgmma_operand_at(operands, tiles_before * kSamples * kTileRow + step * 32);
#pragma unroll
                        for (int product = 0; product < 2; ++product) {
                            wgmma(typename Format<In>::Type(), sums[product], signs[odd][product], operand, fresh && term == 0);
                        }
                    }
                    wgmma_commit();
                    fresh = false;
                }
                if (half == 0) __syncthreads();
                if (more) stager.store(half, shared.samples[buffer ^ 1]);
            }
            fence_shared_for_wgmma();
            __syncthreads();
        }

        wgmma_wait_for(sums[0], sums[1]);
#pragma unroll
        for (int product = 0; product < 2; ++product) {
#pragma unroll
            for (int n = 0; n < kSums / 4; ++n) {
                Words4& place = shared.rounded[product * (kSums / 4) + n][threadIdx.x];
                Words4 total = first_chain ? Words4{0, 0, 0, 0} : place;
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    total.w[r] = bits_of_float(float_of_bits(total.w[r]) + sums[product][4 * n + r]);
                }
                place = total;
            }
        }
    }

    const int64 output = first_output + warp * 32 + g, sample = first_sample + 2 * t;
    const int outputs = static_cast<int>(min(a.to.columns - output, static_cast<int64>(kColumns)));
    const bool replaces = a.to.replaces(true);
#pragma unroll 1
    for (int n = 0; n < kSums / 4; ++n) {
        const Words4 totals[2] = {shared.rounded[n][threadIdx.x], shared.rounded[kSums / 4 + n][threadIdx.x]};
        float before[2][4];
#pragma unroll
        for (int store = 0; store < 2; ++store) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                float* const row = a.to.row(blockIdx.y, sample + n * 8 + odd) + output;
                const int valid = sample + n * 8 + odd < a.to.rows ? outputs : 0;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (!store) before[odd][i] = !replaces && 8 * i < valid ? row[8 * i] : 0.0f;
                    if (store && 8 * i < valid) row[8 * i] = before[odd][i] + float_of_bits(totals[i / 2].w[i % 2 * 2 + odd]);
                }
            }
        }
    }
}
