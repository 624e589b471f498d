// The dense map `rademacher-1` on tensor cores by `mma.sync` (compute capability 8.0 and later): see sign_tiles.cu.
//
// The matrix instruction is m16n8k16. Its B fragment gives a lane column g at positions {2t, 2t + 1} (register b0) and
// {2t + 8, 2t + 9} (b1). The order of positions within a product is free as long as A and B agree. Here lane t takes, of
// every 32 positions, the eight from 8t on: step s ∈ {0, 1} of the two k16 steps has positions 8t + 4s + {0, 1} in its
// columns {2t, 2t + 1} and 8t + 4s + {2, 3} in {2t + 8, 2t + 9}. So one 16-byte load gives a lane both steps' B registers
// of a sample, and two 16-byte loads the words of its eight positions for 32 outputs.

constexpr int kWarpsAlongOutputs = 4, kWarpsAlongSamples = 2;
constexpr int kOutputsPerWarp = kColumns / kWarpsAlongOutputs;
constexpr int kFragments = kOutputsPerWarp / 16;

struct SyncLayout {
    // Byte of 16-byte chunk c of a sample's tile. A quarter of a warp reads four chunks of two neighbouring samples;
    // exchanging the halves of every other row gives them the 32 banks once each.
    __device__ static __forceinline__ int offset(int sample, int chunk) {
        return sample * kTileRow + (chunk ^ (sample & 1) << 2) * 16;
    }
    // Place of position i's words in a tile.
    __device__ static __forceinline__ int slot(int i) { return i; }
};

template <int kTerms, int kSamples>
struct RademacherShared {
    uint32 words[2][kColumns / 32][kPositions];
    unsigned char samples[2][kTerms][kSamples * kTileRow];
};

template <typename In>
__device__ __forceinline__ void mma(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    mma_bfloat16(c, a, b0, b1);
}

template <>
__device__ __forceinline__ void mma<Float16>(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    mma_float16(c, a, b0, b1);
}

// The products of 32 positions, one half of a tile. `words` are those of the warp's outputs.
template <typename In, int kTerms, int kSamples>
__device__ __forceinline__ void multiply(float (&sums)[kFragments][kSamples / kWarpsAlongSamples / 8][4],
                                         const uint32 (*words)[kPositions], const unsigned char (&tile)[kTerms][kSamples * kTileRow],
                                         int first_sample, int half, uint32 mask) {
    constexpr int kBlocks = kSamples / kWarpsAlongSamples / 8;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
        Words4 samples[kBlocks];
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            samples[block] = load_words(tile[term] + SyncLayout::offset(first_sample + block * 8 + g, half * 4 + t));
        }
#pragma unroll
        for (int pair = 0; pair < kFragments / 2; ++pair) {
            const uint32* own = words[pair] + half * 32 + 8 * t;
            const Words4 of_step[2] = {load_words(own), load_words(own + 4)};
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                const uint32* w = of_step[step].w;
#pragma unroll
                for (int upper = 0; upper < 2; ++upper) {
                    uint32 signs[4];
                    make_signs<In, kTerms>(signs, w, upper, g, mask);
#pragma unroll
                    for (int block = 0; block < kBlocks; ++block) {
                        mma<In>(sums[2 * pair + upper][block], signs, samples[block].w[2 * step], samples[block].w[2 * step + 1]);
                    }
                }
            }
        }
    }
}

// Grid: x the groups of kColumns outputs (neighbours share their gradients in the L2 cache), y the splits of the
// positions, z the groups of kSamples samples.
template <typename In, int kTerms, int kSamples>
__global__ void __launch_bounds__(kThreads, 1) rademacher(const __grid_constant__ DenseArguments a) {
    constexpr int kBlocks = kSamples / kWarpsAlongSamples / 8;
    auto& shared = *reinterpret_cast<RademacherShared<kTerms, kSamples>*>(shared_memory());
    const int warp = threadIdx.x / 32;
    const int warp_output = warp % kWarpsAlongOutputs * kOutputsPerWarp;
    const int warp_sample = warp / kWarpsAlongOutputs * (kSamples / kWarpsAlongSamples);
    const uint32 first_output = blockIdx.x * kColumns;
    const int64 first_sample = static_cast<int64>(blockIdx.z) * kSamples;
    const int64 first = blockIdx.y * a.positions_per_split;
    const int64 behind = min(first + a.positions_per_split, a.columns);
    const int tiles = static_cast<int>((behind - first + kPositions - 1) / kPositions);

    float sums[kFragments][kBlocks][4];
    const auto clear = [&] {
#pragma unroll
        for (int m = 0; m < kFragments; ++m)
#pragma unroll
            for (int n = 0; n < kBlocks; ++n)
#pragma unroll
                for (int r = 0; r < 4; ++r) sums[m][n][r] = 0.0f;
    };
    clear();

    // Two buffers: tile T + 1 is fetched and generated while tile T is multiplied, and stored into the buffer of tile
    // T − 1, which every warp has left before the barrier between T − 1 and T. A tile never reaches into the next split,
    // since splits are multiples of it, and what it has behind the block is 0.
    Stager<In, kTerms, kSamples, SyncLayout> stager(a, first_sample, first);
    const uint32 mask = sign_mask(a);
    make_words<SyncLayout>(shared.words[0], a, 0, a.start + first, first_output);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        stager.fetch(half);
        stager.store(half, shared.samples[0]);
    }
    __syncthreads();
    bool first_chain = true;
    for (int tile = 0; tile < tiles; ++tile) {
        const int64 position = first + static_cast<int64>(tile + 1) * kPositions;
        const int buffer = tile & 1;
        const bool more = tile + 1 < tiles;
        stager.next_tile();
        if (more) make_words<SyncLayout>(shared.words[buffer ^ 1], a, tile + 1, a.start + position, first_output);
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            if (more) stager.fetch(half);
            multiply<In, kTerms, kSamples>(sums, shared.words[buffer] + warp_output / 32, shared.samples[buffer], warp_sample,
                                           half, mask);
            if (more) stager.store(half, shared.samples[buffer ^ 1]);
        }
        __syncthreads();
        if (!more || (tile + 1) % Operand<In, kTerms>::kTilesPerChain == 0) {
            // The end of a chain. Register r of a fragment is output g + 8 · (r / 2) and sample 2t + r mod 2.
            const int thread = thread_read_anew(), g = thread % 32 / 4, t = thread % 4;
            const int64 output = first_output + thread / 32 % kWarpsAlongOutputs * kOutputsPerWarp + g;
            const int64 sample =
                first_sample + thread / 32 / kWarpsAlongOutputs * (kSamples / kWarpsAlongSamples) + 2 * t;
            const int outputs = static_cast<int>(min(a.to.columns - output, static_cast<int64>(kColumns)));
            const bool replaces = a.to.replaces(first_chain);
#pragma unroll
            for (int n = 0; n < kBlocks; ++n) {
                // What 16 sums are added to is loaded before the first of them is stored, so as to wait once.
                float before[2][2 * kFragments];
#pragma unroll
                for (int store = 0; store < 2; ++store) {
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd) {
                        float* const row = a.to.row(blockIdx.y, sample + n * 8 + odd) + output;
                        const int valid = sample + n * 8 + odd < a.to.rows ? outputs : 0;
#pragma unroll
                        for (int i = 0; i < 2 * kFragments; ++i) {
                            if (!store) before[odd][i] = !replaces && 8 * i < valid ? row[8 * i] : 0.0f;
                            if (store && 8 * i < valid) row[8 * i] = before[odd][i] + sums[i / 2][n][i % 2 * 2 + odd];
                        }
                    }
                }
            }
            first_chain = false;
            clear();
        }
    }
}
