// The dense map `rademacher-1` on tensor cores: out[b, j] += Σ_i block[b, i] · R[i, j] with R[i, j] = ±1.
//
// A block of threads computes kColumns outputs j for kSamples samples b over one split of the positions i. The matrix
// instruction is m16n8k16 with the signs as its A operand (m = outputs, k = positions) and the gradients as its B
// operand (n = samples): a sign fragment, once in registers, is used for all samples of its warp.
//
// Who generates what. A call of the generator at position i gives the signs of 128 consecutive outputs, bit j mod 32 of
// word j / 32. Per tile of 64 positions two groups of 128 outputs need 128 calls: one thread each of four warps, the
// other four at the next tile. Bits, not signs, go through shared memory, 4 KiB for two tiles, as words[j / 32][i].
//
// From bits to fragments. Let g = lane / 4 and t = lane mod 4. PTX gives a lane, of a 16 × 16 fragment of A, rows g and
// g + 8 at columns {2t, 2t + 1} (registers a0, a1) and {2t + 8, 2t + 9} (a2, a3), and of B column g at the same k
// (b0, b1). The order of positions within a product is free as long as A and B agree. Here lane t takes, of every 32
// positions, the eight from 8t on: step s ∈ {0, 1} of the two k16 steps has positions 8t + 4s + {0, 1} in its columns
// {2t, 2t + 1} and 8t + 4s + {2, 3} in {2t + 8, 2t + 9}. So one 16-byte load gives a lane both steps' B registers of a
// sample, and two 16-byte loads the words of its eight positions for 32 outputs. These 32 outputs are two fragments:
//
//     fragment   row g       row g + 8
//     first      bit g       bit g + 8
//     second     bit g + 16  bit g + 24
//
// A register holds the same output at two positions u and v. pick_bytes joins the lower halves of their words to
// (u.low, v.low), and after a left shift by 7 − g the bits g + 8 of both are at 15 and 31, the sign bits of two 16-bit
// floats; eight further up are bits g. The second fragment comes from the upper halves in the same way. With the
// exponent of 1.0 or-ed in, that is ten operations for eight signs.
//
// Precision. Products with ±1 are exact. Tensor cores cut sums off instead of rounding them, which pulls a long chain of
// additions towards zero by about 2⁻²⁴ a step; so chains are short (kTilesPerChain) and their ends are added in rounded
// float32 arithmetic. float32 input is split into two bfloat16 terms, x = high + low up to 2⁻¹⁷ |x|, which share the
// sign fragments.

constexpr int kThreads = 256, kWarpsAlongOutputs = 4, kWarpsAlongSamples = 2;
constexpr int kColumns = 256;    // outputs per block of threads
constexpr int kPositions = 64;   // positions per tile
constexpr int kOutputsPerWarp = kColumns / kWarpsAlongOutputs;
constexpr int kFragments = kOutputsPerWarp / 16;
constexpr int kTileRow = kPositions * 2;  // bytes of a sample's 16-bit elements in a tile

struct DenseArguments {
    Destination to;
    const void* block;
    int64 stride;
    int64 columns;             // n
    int64 start;
    int64 positions_per_split; // a multiple of kPositions
    Generator generator;
};

// What goes into the matrix instruction, for an input type and a number of terms.
template <typename In, int kTerms>
struct Operand {
    static constexpr uint32 kOnes = 0x3F803F80u;  // two bfloat16 1.0
    static constexpr int kTilesPerChain = 16;     // of two products each: 128 additions
    __device__ static __forceinline__ void mma(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
        mma_bfloat16(c, a, b0, b1);
    }
    // Four float32 elements as two words of each term.
    __device__ static __forceinline__ void split(const Words4& v, uint32 (&terms)[kTerms][2]) {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            float low = float_of_bits(v.w[2 * pair]), high = float_of_bits(v.w[2 * pair + 1]);
#pragma unroll
            for (int term = 0; term < kTerms; ++term) {
                const uint32 word = pack_bfloat16(low, high);
                terms[term][pair] = word;
                low -= float_of_bits(word << 16);
                high -= float_of_bits(word & 0xFFFF0000u);
            }
        }
    }
};

template <>
struct Operand<BFloat16, 1> {
    static constexpr uint32 kOnes = 0x3F803F80u;
    static constexpr int kTilesPerChain = 128;
    __device__ static __forceinline__ void mma(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
        mma_bfloat16(c, a, b0, b1);
    }
};

template <>
struct Operand<Float16, 1> {
    static constexpr uint32 kOnes = 0x3C003C00u;  // two float16 1.0
    static constexpr int kTilesPerChain = 128;
    __device__ static __forceinline__ void mma(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
        mma_float16(c, a, b0, b1);
    }
};

template <int kTerms, int kSamples>
struct RademacherShared {
    uint32 words[2][kColumns / 32][kPositions];
    unsigned char samples[2][kTerms][kSamples * kTileRow];

    // Byte of 16-byte chunk c of a sample's tile. A quarter of a warp reads four chunks of two neighbouring samples;
    // exchanging the halves of every other row gives them the 32 banks once each.
    __device__ static __forceinline__ int offset(int sample, int chunk) {
        return sample * kTileRow + (chunk ^ (sample & 1) << 2) * 16;
    }
};

// One half of a tile's gradients on their way from global to shared memory: the first half of its samples is fetched
// before the first half of its positions is multiplied and stored after it, then the second. Fetching all at once would
// take more registers than there are beside the sums.
template <typename In, int kTerms, int kSamples>
struct Stager {
    static constexpr int kPerVector = 16 / In::kBytes, kVectorsPerRow = kPositions / kPerVector;
    static constexpr int kRowsAtOnce = kThreads / kVectorsPerRow;
    static constexpr int kVectors = (kSamples + 2 * kRowsAtOnce - 1) / (2 * kRowsAtOnce);  // per thread and half

    Words4 held[kVectors];

    __device__ __forceinline__ void fetch(const DenseArguments& a, int64 first_sample, int64 position, int half) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const int sample = sample_of(half * kVectors + i);
            held[i] = {0, 0, 0, 0};
            if (sample < kSamples && first_sample + sample < a.to.rows) {
                held[i] = row(a, first_sample + sample).fetch(position + vector() * kPerVector);
            }
        }
    }

    // `unsigned char (&to)[kTerms][…]`: one tile of 16-bit elements per term.
    __device__ __forceinline__ void store(const DenseArguments& a, int64 first_sample, int64 position, int half,
                                          unsigned char (&to)[kTerms][kSamples * kTileRow]) const {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const int sample = sample_of(half * kVectors + i);
            if (sample >= kSamples) continue;
            Words4 v = held[i];
            if (first_sample + sample < a.to.rows) {
                v = row(a, first_sample + sample).complete(v, position + vector() * kPerVector);
            }
            if constexpr (In::kBytes == 2) {
                store_words(to[0] + RademacherShared<kTerms, kSamples>::offset(sample, vector()), v);
            } else {
                uint32 terms[kTerms][2];
                Operand<In, kTerms>::split(v, terms);
#pragma unroll
                for (int term = 0; term < kTerms; ++term) {
                    const int offset = RademacherShared<kTerms, kSamples>::offset(sample, vector() / 2) + vector() % 2 * 8;
                    *reinterpret_cast<uint64*>(to[term] + offset) = static_cast<uint64>(terms[term][1]) << 32 | terms[term][0];
                }
            }
        }
    }

  private:
    __device__ static __forceinline__ int vector() { return threadIdx.x % kVectorsPerRow; }
    __device__ static __forceinline__ int sample_of(int i) { return i * kRowsAtOnce + threadIdx.x / kVectorsPerRow; }
    __device__ static __forceinline__ Row<In> row(const DenseArguments& a, int64 sample) {
        return Row<In>(a.block, a.stride, sample, a.columns, 0);
    }
};

// Bits of a tile: the calls at its 64 positions for two groups of 128 outputs. Warps 0 … 3 make those of even tiles,
// warps 4 … 7 those of odd ones; four warps are one per scheduler.
__device__ __forceinline__ void make_words(uint32 (&words)[kColumns / 32][kPositions], const DenseArguments& a, int tile,
                                           uint64 position, uint32 column) {
    if (static_cast<int>(threadIdx.x / 128) != (tile & 1)) return;
    const int i = threadIdx.x % kPositions, group = threadIdx.x / kPositions % 2;
    const uint32 block = column / 128 + group;
    if (block * 128 >= a.to.columns) return;  // outputs beyond k: their sums are never read, and there is no such block
    const Words4 call = philox(a.generator, Stream::rademacher, position + i, block);
#pragma unroll
    for (int word = 0; word < 4; ++word) words[group * 4 + word][i] = call.w[word];
}

// The products of 32 positions, one half of a tile. `words` are those of the warp's outputs.
template <typename In, int kTerms, int kSamples>
__device__ __forceinline__ void multiply(float (&sums)[kFragments][kSamples / kWarpsAlongSamples / 8][4],
                                         const uint32 (*words)[kPositions], const unsigned char (&tile)[kTerms][kSamples * kTileRow],
                                         int first_sample, int half) {
    using Shared = RademacherShared<kTerms, kSamples>;
    constexpr int kBlocks = kSamples / kWarpsAlongSamples / 8;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
        Words4 samples[kBlocks];
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            samples[block] = load_words(tile[term] + Shared::offset(first_sample + block * 8 + g, half * 4 + t));
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
                    const uint32 selector = upper ? 0x7632u : 0x5410u;
                    const uint32 first = pick_bytes(w[0], w[1], selector) << (7 - g);
                    const uint32 second = pick_bytes(w[2], w[3], selector) << (7 - g);
                    constexpr uint32 kSigns = 0x80008000u, kOnes = Operand<In, kTerms>::kOnes;
                    const uint32 signs[4] = {(first << 8 & kSigns) | kOnes, (first & kSigns) | kOnes,
                                             (second << 8 & kSigns) | kOnes, (second & kSigns) | kOnes};
#pragma unroll
                    for (int block = 0; block < kBlocks; ++block) {
                        Operand<In, kTerms>::mma(sums[2 * pair + upper][block], signs, samples[block].w[2 * step],
                                                 samples[block].w[2 * step + 1]);
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
    Stager<In, kTerms, kSamples> stager;
    make_words(shared.words[0], a, 0, a.start + first, first_output);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        stager.fetch(a, first_sample, first, half);
        stager.store(a, first_sample, first, half, shared.samples[0]);
    }
    __syncthreads();
    bool first_chain = true;
    for (int tile = 0; tile < tiles; ++tile) {
        const int64 position = first + static_cast<int64>(tile + 1) * kPositions;
        const int buffer = tile & 1;
        const bool more = tile + 1 < tiles;
        if (more) make_words(shared.words[buffer ^ 1], a, tile + 1, a.start + position, first_output);
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            if (more) stager.fetch(a, first_sample, position, half);
            multiply<In, kTerms, kSamples>(sums, shared.words[buffer] + warp_output / 32, shared.samples[buffer], warp_sample,
                                           half);
            if (more) stager.store(a, first_sample, position, half, shared.samples[buffer ^ 1]);
        }
        __syncthreads();
        if (!more || (tile + 1) % Operand<In, kTerms>::kTilesPerChain == 0) {
            // The end of a chain. Register r of a fragment is output g + 8 · (r / 2) and sample 2t + r mod 2.
            const int thread = thread_read_anew(), g = thread % 32 / 4, t = thread % 4;
            const int64 output_of_lane = first_output + thread / 32 % kWarpsAlongOutputs * kOutputsPerWarp + g;
            const int64 sample_of_lane =
                first_sample + thread / 32 / kWarpsAlongOutputs * (kSamples / kWarpsAlongSamples) + 2 * t;
#pragma unroll
            for (int m = 0; m < kFragments; ++m) {
#pragma unroll
                for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        const int64 output = output_of_lane + m * 16 + r / 2 * 8;
                        const int64 sample = sample_of_lane + n * 8 + r % 2;
                        if (output < a.to.columns && sample < a.to.rows) {
                            a.to.put(blockIdx.y, sample, output, sums[m][n][r], first_chain);
                        }
                    }
                }
            }
            first_chain = false;
            clear();
        }
    }
}
