// The sparse map `sjlt-1` of per-sample weight gradients that are sums of few outer products:
//
//     out[b, ·] += vec(Σ_t left[b, t, ·] ⊗ right[b, t, ·]) · R      for one segment of outputs, t < T ≤ kTokens
//
// The gradient of a linear layer in factored form. Its elements are made in registers and added to the accumulators
// right away; they are never in device memory.
//
// A block of threads takes one sample, a stretch of rows i of the matrix (i, j), and a strip of up to 2048 columns j. A
// thread keeps 8 neighbouring columns of `right` in registers for all of its rows, and reads of `left` what all lanes of
// a warp need at once. So an element costs T multiplications and 8 bytes of shared memory, as in sjlt.cu.
//
// Elements of one chunk of 8192 coordinates go to different accumulators (see sjlt.cu), and rows come in the order of
// their positions: a barrier wherever the next chunk begins makes additions safe and their order fixed. Where the matrix
// is narrow, several rows are done at once (a step): together no wider than a strip, so that a step touches at most
// two chunks, and its elements are added chunk by chunk.
//
// Why T is small: from some T on a matrix product through device memory, read once more by sjlt.cu, takes less time
// than T multiplications per element outside of the tensor cores. README.md has the estimate.

constexpr int kThreads = 256, kColumns = 8, kStrip = kThreads * kColumns;
constexpr int kStepsPerStage = 8;   // steps whose rows of `left` and bits are fetched together
constexpr int kRowsPerStage = 128;  // at most
constexpr int kCallsPerStep = kStrip / 128 + 2;  // as many positions from anywhere, and a word more

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
    Words4 places[kStepsPerStage];  // of the step's first position: mod kChunk, mod 128, and its chunk from the first one on
    Words4 chunks[kStepsPerStage];  // offset and step of the chunk of the first position, and of the next one
    Accumulators<kColumns> accumulators;
};

// Rows `row …` of the stage, and the bits of its steps. `position` is that of the strip's first column in row `row`.
template <typename In, int kTokens>
__device__ __forceinline__ void make_stage(OuterShared<kTokens>& shared, const OuterArguments& a, int64 row, int64 behind_row,
                                           uint64 position, uint64 first_chunk, uint32 accumulators) {
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
    const uint64 stride = a.rows_per_step * static_cast<uint64>(a.width);
    for (int i = threadIdx.x; i < kStepsPerStage * kCallsPerStep; i += kThreads) {
        const int step = i / kCallsPerStep, call = i % kCallsPerStep;
        shared.signs[step][call] = philox(a.generator, Stream::sjlt_signs, (position + step * stride) / 128 + call, a.copy);
    }
    if (threadIdx.x < 2 * kStepsPerStage) {
        const int step = threadIdx.x / 2, next = threadIdx.x % 2;
        const uint64 own = position + step * stride;
        const Words4 words = philox(a.generator, Stream::sjlt_places, own / kChunk + next, a.copy);
        shared.chunks[step].w[2 * next] = draw(words.w[0], accumulators);
        shared.chunks[step].w[2 * next + 1] = kShortestStep + draw(words.w[1], kSteps);
        if (next == 0) {
            shared.places[step] = {static_cast<uint32>(own % kChunk), static_cast<uint32>(own % 128),
                                   static_cast<uint32>(own / kChunk - first_chunk), 0};
        }
    }
}

// Σ_t left[row, t] · right[t, ·] for a thread's columns. `left` are the tokens of its row.
template <int kTokens>
__device__ __forceinline__ void multiply(float (&value)[kColumns], const float* left, const float (&right)[kTokens][kColumns]) {
    constexpr int kAtOnce = kTokens % 4 ? 1 : 4;
#pragma unroll
    for (int e = 0; e < kColumns; ++e) value[e] = 0.0f;
#pragma unroll
    for (int group = 0; group < kTokens; group += kAtOnce) {
        float factors[kAtOnce];
        if constexpr (kAtOnce == 4) {
            const Words4 words = load_words(left + group);
#pragma unroll
            for (int i = 0; i < 4; ++i) factors[i] = float_of_bits(words.w[i]);
        } else {
            factors[0] = left[group];
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
            for (int e = 0; e < kColumns; ++e) value[e] += factors[i] * right[group + i][e];
        }
    }
}

// Grid: x the samples, y the splits of the rows times the strips, z the tiles of the accumulators.
template <typename In, int kTokens>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce) outer(const __grid_constant__ OuterArguments a) {
    auto& shared = *reinterpret_cast<OuterShared<kTokens>*>(shared_memory());
    const uint32 accumulators = static_cast<uint32>(a.to.columns) * a.groups, tile_first = blockIdx.z * a.tile;
    const Tile tile = {tile_first, min(a.tile, accumulators - tile_first), accumulators};

    const int64 first_column = static_cast<int64>(blockIdx.y % a.strips) * kStrip;
    const int columns = static_cast<int>(min(a.width - first_column, static_cast<int64>(kStrip)));
    const int64 first_row = blockIdx.y / a.strips * a.rows_per_split, behind_row = min(first_row + a.rows_per_split, a.height);
    // Threads are rows of a step × vectors of columns; those left over do nothing.
    const int vectors = (columns + kColumns - 1) / kColumns;
    const int own_row = threadIdx.x / vectors, own_column = threadIdx.x % vectors * kColumns;
    const bool working = own_row < static_cast<int>(a.rows_per_step);
    const int own_place = (a.rows_per_step > 1 ? own_row * static_cast<int>(a.width) : 0) + own_column;
    const bool full = own_column + kColumns <= columns;
    // Positions from a step's first to its last. Of rows behind the last one there are zeros, which may be added.
    const int span = (a.rows_per_step > 1 ? static_cast<int>(a.rows_per_step - 1) * static_cast<int>(a.width) : 0) + columns;

    float right[kTokens][kColumns];
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
#pragma unroll
        for (int e = 0; e < kColumns; ++e) {
            right[token][e] = 0.0f;
            if (working && token < static_cast<int>(a.tokens) && own_column + e < columns) {
                right[token][e] = load_element<In>(a.right, blockIdx.x * a.right_strides[0] + token * a.right_strides[1] +
                                                                (first_column + own_column + e) * a.right_strides[2]);
            }
        }
    }
    shared.accumulators.clear(kThreads);

    // Adds those of a thread's elements that lie in a chunk, where the first has the place `within`.
    const auto add = [&](const float(&value)[kColumns], int within, uint32 offset, uint32 length) {
        if (full && within >= 0 && within < kChunk && within % kRun <= kRun - kColumns) {
            add_vector(shared.accumulators, value, offset + within / kRun * length + within % kRun, tile);
        } else if (within > -kColumns && within < kChunk) {  // at the end of a row of the matrix, of a run, or of a chunk
#pragma unroll 1
            for (int e = 0; e < kColumns; ++e) {
                float chosen = value[0];
#pragma unroll
                for (int other = 1; other < kColumns; ++other) chosen = other == e ? value[other] : chosen;
                const int i = within + e;
                if (own_column + e < columns && i >= 0 && i < kChunk) {
                    add_element(shared.accumulators, chosen, offset + i / kRun * length + i % kRun, tile);
                }
            }
        }
    };

    const int rows_per_stage = kStepsPerStage * static_cast<int>(a.rows_per_step);
    uint64 position = a.start + first_row * static_cast<uint64>(a.width) + first_column;
    const uint64 first_chunk = position / kChunk;
    uint32 current = 0;  // the chunk that is being added, counted from there
    for (int64 stage = first_row; stage < behind_row; stage += rows_per_stage, position += rows_per_stage * static_cast<uint64>(a.width)) {
        __syncthreads();  // the rows and bits of the stage before are not needed any more
        make_stage<In, kTokens>(shared, a, stage, behind_row, position, first_chunk, accumulators);
        __syncthreads();
        const int rows = static_cast<int>(min(behind_row - stage, static_cast<int64>(rows_per_stage)));
        const float* left = reinterpret_cast<const float*>(shared.left) + own_row * kTokens;
#pragma unroll 1
        for (int step = 0, row = 0; row < rows; ++step, row += a.rows_per_step, left += a.rows_per_step * kTokens) {
            const Words4 place = load_words(&shared.places[step]), chunks = load_words(&shared.chunks[step]);
            const int begin = static_cast<int>(place.w[0]);
            if (place.w[2] != current) {
                __syncthreads();
                current = place.w[2];
            }
            float value[kColumns];
            if (working) {
                multiply(value, left, right);
                const uint32 bit = place.w[1] + own_place;
                const uint32* const words = reinterpret_cast<const uint32*>(shared.signs[step]) + bit / 32;
                const uint32 bits = funnel_right(words[0], words[1], bit % 32);
#pragma unroll
                for (int e = 0; e < kColumns; ++e) {
                    value[e] = float_of_bits(bits_of_float(value[e]) ^ (bits << (31 - e) & 0x80000000u));
                }
                add(value, begin + own_place, chunks.w[0], chunks.w[1]);
            }
            if (begin + span > kChunk) {  // the rest of the step is in the next chunk
                __syncthreads();
                ++current;
                if (working) add(value, begin + own_place - kChunk, chunks.w[2], chunks.w[3]);
            }
        }
    }
    __syncthreads();
    fold<kThreads>(shared.accumulators, shared.scratch, a.to, a.generator, a.copy, blockIdx.x, tile);
}
