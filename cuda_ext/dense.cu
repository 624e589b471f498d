// The dense maps in float32 arithmetic, without tensor cores: `normal-1` everywhere, whose entries do not fit into 16
// bits, and `rademacher-1` on GPUs before Ampere, whose tensor cores know no bfloat16.
//
// A block of threads computes kColumns outputs for kSamples samples over one split of the positions, tile by tile: it
// generates kPositions × kColumns entries of R into shared memory, uses them for all of its samples, and drops them.
// A thread keeps 4 outputs × kSamples / 8 samples in registers. Per position it reads 16 bytes of entries (a warp's are
// consecutive) and kSamples / 8 gradients (the same for a whole warp).

constexpr int kThreads = 256, kColumns = 128, kPositions = 32, kTilesPerChain = 128;

struct DenseArguments {
    Destination to;
    const void* block;
    int64 stride;
    int64 columns;
    int64 start;
    int64 positions_per_split;  // a multiple of kPositions
    Generator generator;
};

template <int kSamples>
struct DenseShared {
    Words4 entries[kPositions][kColumns / 4];
    Words4 bits[kPositions];
    float samples[kPositions][kSamples + 4];  // padded: a warp writes a column
};

// Tiles begin at multiples of four in the gradient vector (`position` is one), since a call covers four positions.
struct Normal {
    static constexpr int kAlignment = 4;

    // A thread keeps to one output and takes the calls at every second group of four positions.
    template <int kSamples>
    __device__ static __forceinline__ void make_entries(DenseShared<kSamples>& shared, const DenseArguments& a, uint64 position,
                                                        uint32 column) {
        float* const entries = reinterpret_cast<float*>(shared.entries);
        const int own = threadIdx.x % kColumns;
        const bool wanted = column + own < a.to.columns;  // the entries of other columns are never read
#pragma unroll 1
        for (int group = threadIdx.x / kColumns; wanted && group < kPositions / 4; group += kThreads / kColumns) {
            const Words4 call = philox(a.generator, Stream::normal, position / 4 + group, column + own);
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                // 24 bits are exact in float32; u lies in (0, 1]. cospif and sinpif take 2v without a product by π.
                const float u = static_cast<float>((call.w[2 * pair] >> 8) + 1) * 0x1p-24f;
                const float turn = static_cast<float>(call.w[2 * pair + 1] >> 8) * 0x1p-23f;
                const float radius = sqrtf(-2.0f * logf(u));
                entries[(4 * group + 2 * pair) * kColumns + own] = radius * cospif(turn);
                entries[(4 * group + 2 * pair + 1) * kColumns + own] = radius * sinpif(turn);
            }
        }
        __syncthreads();
    }
};

struct Rademacher {
    static constexpr int kAlignment = 1;

    // One call per position; then every thread expands bits of its output.
    template <int kSamples>
    __device__ static __forceinline__ void make_entries(DenseShared<kSamples>& shared, const DenseArguments& a, uint64 position,
                                                        uint32 column) {
        if (threadIdx.x < kPositions) {
            shared.bits[threadIdx.x] = philox(a.generator, Stream::rademacher, position + threadIdx.x, column / 128);
        }
        __syncthreads();
        float* const entries = reinterpret_cast<float*>(shared.entries);
        const uint32* const bits = reinterpret_cast<const uint32*>(shared.bits);
        const int own = threadIdx.x % kColumns;
#pragma unroll 4
        for (int i = threadIdx.x / kColumns; i < kPositions; i += kThreads / kColumns) {
            entries[i * kColumns + own] = float_of_bits((bits[i * 4 + own / 32] << (31 - own % 32) & 0x80000000u) | 0x3F800000u);
        }
        __syncthreads();
    }
};

static_assert(kColumns == 128, "a block of threads takes the outputs of one call of the Rademacher generator");

// Grid: as in rademacher.cu.
template <typename In, typename Map, int kSamples>
__global__ void __launch_bounds__(kThreads, 2) dense(const __grid_constant__ DenseArguments a) {
    constexpr int kSamplesPerThread = kSamples / 8;
    auto& shared = *reinterpret_cast<DenseShared<kSamples>*>(shared_memory());
    const int thread_sample = threadIdx.x / 32 * kSamplesPerThread;
    const uint32 first_output = blockIdx.x * kColumns;
    const int64 first_sample = static_cast<int64>(blockIdx.z) * kSamples;
    // Columns are counted from the multiple of kAlignment at or before the block's first one.
    const int lead = static_cast<int>(a.start % Map::kAlignment);
    const int64 first = blockIdx.y * a.positions_per_split;
    const int64 behind = min(first + a.positions_per_split, a.columns + lead);

    float sums[kSamplesPerThread][4] = {};
    int64 tiles = 0;
    bool first_chain = true;
    for (int64 position = first; position < behind; position += kPositions) {
        // Transposed on the way: a warp reads 32 columns of a sample.
        for (int sample = threadIdx.x / 32; sample < kSamples; sample += kThreads / 32) {
            const int64 column = position - lead + threadIdx.x % 32;
            float value = 0.0f;
            if (first_sample + sample < a.to.rows && column >= 0 && column < a.columns) {
                value = load_element<In>(a.block, (first_sample + sample) * a.stride + column);
            }
            shared.samples[threadIdx.x % 32][sample] = value;
        }
        Map::make_entries(shared, a, a.start - lead + position, first_output);
#pragma unroll 2
        for (int i = 0; i < kPositions; ++i) {
            const Words4 entries = shared.entries[i][threadIdx.x % 32];
#pragma unroll
            for (int s = 0; s < kSamplesPerThread; ++s) {
                const float sample = shared.samples[i][thread_sample + s];
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[s][e] += sample * float_of_bits(entries.w[e]);
            }
        }
        __syncthreads();
        // Chains of limited length: rounding errors grow with the square root of it.
        if (++tiles % kTilesPerChain == 0 || position + kPositions >= behind) {
            const int thread = thread_read_anew();
            const int64 output_of_thread = first_output + thread % 32 * 4;
            const int64 sample_of_thread = first_sample + thread / 32 * kSamplesPerThread;
#pragma unroll
            for (int s = 0; s < kSamplesPerThread; ++s) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int64 output = output_of_thread + e, sample = sample_of_thread + s;
                    if (output < a.to.columns && sample < a.to.rows) {
                        a.to.put(blockIdx.y, sample, output, sums[s][e], first_chain);
                    }
                    sums[s][e] = 0.0f;
                }
            }
            first_chain = false;
        }
    }
}
