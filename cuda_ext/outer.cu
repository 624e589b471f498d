// The sparse map `sjlt-1` of per-sample weight gradients that are sums of few outer products:
//
//     out[b, ·] += vec(Σ_t left[b, t, ·] ⊗ right[b, t, ·]) · R      for one segment of outputs, t < T ≤ kTokens
//
// The gradient of a linear layer in factored form. Its elements are made in registers and added to the accumulators
// right away; they are never in device memory.
//
// A block of threads takes one sample, a stretch of rows i of the matrix (i, j), and a strip of up to 1024 columns j. A
// thread keeps 4 neighbouring columns of `right` in registers for all of its rows, and reads of `left` what all lanes of
// a warp need at once. So an element costs T multiplications and 8 bytes of shared memory, as in sjlt.cu.
//
// Elements of one chunk of 8192 coordinates go to different accumulators (see sjlt.cu), and rows come in the order of
// their positions: a barrier wherever the next chunk begins makes additions safe and their order fixed. Where the matrix
// is narrow, several rows are done at once (a step): together no wider than a strip, so that a step touches at most
// two chunks, and its elements are added chunk by chunk.
//
// Why T is small: from some T on a matrix product through device memory, read once more by sjlt.cu, takes less time
// than T multiplications per element outside of the tensor cores. README.md has the estimate.

constexpr int kThreads = 256, kStrip = 4 * kThreads;
constexpr int kStepsPerStage = 8;       // steps whose rows of `left` and bits are fetched together
constexpr int kRowsPerStage = 128;      // at most
constexpr int kCallsPerStep = 10;       // ≥ 1024 positions from anywhere, and a word more

struct OuterArguments {
    Destination to;  // columns = m
    const void* left;
    const void* right;
    int64 left_strides[3];   // elements between samples, tokens, rows
    int64 right_strides[3];  // elements between samples, tokens, columns
    int64 height;            // rows of the matrix
    int64 width;             // columns of the matrix
    int64 start;             // position of its first element in the gradient vector
    int64 rows_per_split;    // a multiple of kStepsPerStage · rows_per_step
    Generator generator;
    uint32 copy;             // which segment
    uint32 groups;           // K / m
    uint32 tile;             // accumulators per tile
    uint32 tokens;           // T
    uint32 strips;           // ⌈width / kStrip⌉
    uint32 rows_per_step;    // one, unless all columns are in one strip
};

template <int kTokens>
struct OuterShared {
    union {
        Words4 left[kRowsPerStage * kTokens / 4 + 1];  // float[row of the stage][token]
        uint32 scratch[kFoldWords];
    };
    Words4 signs[kStepsPerStage][kCallsPerStep];  // from the multiple of 128 at or before the step's first position on
    uint32 offsets[kStepsPerStage][2], steps[kStepsPerStage][2];  // of the chunk of the first position, and of the next one
    Accumulators<4> accumulators;
};

// Rows `row …` of the stage, and the bits of its steps. `position` is that of the strip's first column in row `row`.
template <typename In, int kTokens>
__device__ __forceinline__ void make_stage(OuterShared<kTokens>& shared, const OuterArguments& a, int64 row, int64 behind_row,
                                           int64 position, uint32 accumulators) {
    const int rows = kStepsPerStage * static_cast<int>(a.rows_per_step);
    float* const left = reinterpret_cast<float*>(shared.left);
    for (int i = threadIdx.x; i < rows * kTokens; i += kThreads) {
        const int own = i % rows, token = i / rows;
        float value = 0.0f;
        if (row + own < behind_row && token < static_cast<int>(a.tokens)) {
            value = load_element<In>(a.left, blockIdx.x * a.left_strides[0] + token * a.left_strides[1] +
                                                 (row + own) * a.left_strides[2]);
        }
        left[own * kTokens + token] = value;
    }
    const int64 stride = a.rows_per_step * a.width;
    for (int i = threadIdx.x; i < kStepsPerStage * kCallsPerStep; i += kThreads) {
        const int step = i / kCallsPerStep, call = i % kCallsPerStep;
        const uint64 first = static_cast<uint64>(position + step * stride) / 128;
        shared.signs[step][call] = philox(a.generator, Stream::sjlt_signs, first + call, a.copy);
    }
    if (threadIdx.x < 2 * kStepsPerStage) {
        const int step = threadIdx.x / 2, next = threadIdx.x % 2;
        const uint64 chunk = static_cast<uint64>(position + step * stride) / kChunk + next;
        const Words4 words = philox(a.generator, Stream::sjlt_places, chunk, a.copy);
        shared.offsets[step][next] = draw(words.w[0], accumulators);
        shared.steps[step][next] = kShortestStep + draw(words.w[1], kSteps);
    }
}

// Σ_t left[row, t] · right[t, ·] for a thread's 4 columns. `left` are the tokens of its row.
template <int kTokens>
__device__ __forceinline__ void multiply(float (&value)[4], const float* left, const float (&right)[kTokens][4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) value[e] = 0.0f;
    if constexpr (kTokens % 4 == 0) {
#pragma unroll
        for (int group = 0; group < kTokens / 4; ++group) {
            const Words4 factors = load_words(left + 4 * group);
#pragma unroll
            for (int token = 0; token < 4; ++token) {
#pragma unroll
                for (int e = 0; e < 4; ++e) value[e] += float_of_bits(factors.w[token]) * right[4 * group + token][e];
            }
        }
    } else {
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
#pragma unroll
            for (int e = 0; e < 4; ++e) value[e] += left[token] * right[token][e];
        }
    }
}

// Grid: x the samples, y the splits of the rows times the strips, z the tiles of the accumulators.
template <typename In, int kTokens>
__global__ void __launch_bounds__(kThreads, 2) outer(const __grid_constant__ OuterArguments a) {
    auto& shared = *reinterpret_cast<OuterShared<kTokens>*>(shared_memory());
    const uint32 accumulators = static_cast<uint32>(a.to.columns) * a.groups, tile_first = blockIdx.z * a.tile;
    const Tile tile = {tile_first, min(a.tile, accumulators - tile_first), accumulators};

    const int64 first_column = static_cast<int64>(blockIdx.y % a.strips) * kStrip;
    const int columns = static_cast<int>(min(a.width - first_column, static_cast<int64>(kStrip)));
    const int64 first_row = blockIdx.y / a.strips * a.rows_per_split, behind_row = min(first_row + a.rows_per_split, a.height);
    // Threads are rows of a step × vectors of four columns; those left over do nothing.
    const int vectors = (columns + 3) / 4;
    const int own_row = threadIdx.x / vectors, own_column = threadIdx.x % vectors * 4;
    const bool working = own_row < static_cast<int>(a.rows_per_step);
    const int own_place = own_row * static_cast<int>(a.width) + own_column;  // below 1024 where `working`
    const bool full = own_column + 4 <= columns;

    float right[kTokens][4];
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            right[token][e] = 0.0f;
            if (working && token < static_cast<int>(a.tokens) && own_column + e < columns) {
                right[token][e] = load_element<In>(a.right, blockIdx.x * a.right_strides[0] + token * a.right_strides[1] +
                                                                (first_column + own_column + e) * a.right_strides[2]);
            }
        }
    }
    shared.accumulators.clear(kThreads);

    const int64 rows_per_stage = static_cast<int64>(kStepsPerStage) * a.rows_per_step;
    int64 current = -1;  // the chunk that is being added
    for (int64 stage = first_row; stage < behind_row; stage += rows_per_stage) {
        const int64 position_of_stage = a.start + stage * a.width + first_column;
        __syncthreads();  // the rows and bits of the stage before are not needed any more
        make_stage<In, kTokens>(shared, a, stage, behind_row, position_of_stage, accumulators);
        __syncthreads();
#pragma unroll 1
        for (int step = 0; step < kStepsPerStage; ++step) {
            const int64 row = stage + step * static_cast<int64>(a.rows_per_step);
            if (row >= behind_row) break;
            const int rows = static_cast<int>(min(behind_row - row, static_cast<int64>(a.rows_per_step)));
            const uint64 position = a.start + row * a.width + first_column;
            const int64 chunk = static_cast<int64>(position / kChunk);
            const int begin = static_cast<int>(position % kChunk);
            const int chunks = (begin + (rows - 1) * static_cast<int>(a.width) + columns - 1) / kChunk + 1;  // one or two

            const bool active = working && own_row < rows;
            float value[4];
            if (active) {
                const float* const left = reinterpret_cast<const float*>(shared.left);
                multiply(value, left + (step * static_cast<int>(a.rows_per_step) + own_row) * kTokens, right);
                const int bit = static_cast<int>(position % 128) + own_place;
                const uint32* const signs = reinterpret_cast<const uint32*>(shared.signs[step]);
                uint32 bits = signs[bit / 32] >> bit % 32;
                if (bit % 32 > 28) bits |= signs[bit / 32 + 1] << (32 - bit % 32);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    value[e] = float_of_bits(bits_of_float(value[e]) ^ (bits << (31 - e) & 0x80000000u));
                }
            }
            for (int next = 0; next < chunks; ++next) {
                if (chunk + next != current) {
                    __syncthreads();
                    current = chunk + next;
                }
                const int within = begin + own_place - next * kChunk;  // of the vector's first element
                if (!active || within <= -4 || within >= kChunk) continue;
                const uint32 offset = shared.offsets[step][next], length = shared.steps[step][next];
                if (full && within >= 0 && within % kRun <= kRun - 4) {
                    add_vector(shared.accumulators, value, offset + within / kRun * length + within % kRun, tile);
                } else {  // at the end of a row of the matrix, of a run, or of a chunk
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int i = within + e;
                        if (own_column + e < columns && i >= 0 && i < kChunk) {
                            add_element(shared.accumulators, value[e], offset + i / kRun * length + i % kRun, tile);
                        }
                    }
                }
            }
        }
    }
    __syncthreads();
    fold<kThreads>(shared.accumulators, shared.scratch, a.to, a.generator, a.copy, blockIdx.x, tile);
}
