// The sparse map `sjlt-1`: out[b, ·] += block[b, ·] · R for one segment of outputs (reference.py defines R).
//
// One block of threads takes one sample and a stretch of whole chunks of 8192 coordinates. It keeps the accumulators of
// step 1 of the map (K ≥ 10240, a multiple of the segment's m outputs) in shared memory, adds chunk after chunk, and
// folds K into m at the end (step 2). Why this is fast and deterministic:
//
// * The K accumulators are at least as many as a chunk can span, so the 8192 coordinates of one chunk go to 8192
//   different accumulators: additions need neither atomics nor ownership, only a barrier between chunks.
// * Every gradient element is read once, 16 bytes per thread, the next chunk while the current one is added. What an
//   element costs beyond is one shared load and one shared store, 8 bytes of the 128 that a multiprocessor moves per
//   cycle: about twice what device memory can deliver, whatever k is.
// * Accumulator p lives in slot (p mod V) · kRow + ⌊p / V⌋, V elements per 16-byte vector. Lane l of a warp holds elements
//   e = 0 … V − 1 of vector l; for a fixed e the lanes' accumulators are V apart and so have consecutive slots: no bank
//   conflicts, wherever the generator puts the run. kRow ≡ 32 / V (mod 32) keeps the fold, where consecutive lanes
//   take consecutive p, free of conflicts too.
//
// Where K exceeds what fits into shared memory the accumulators are cut into tiles, one block of threads each, which
// skips what belongs to the others. Runs are contiguous, so that still reads every element once (but for vectors on the
// edge of a tile).

constexpr int kThreads = 512;
constexpr int kChunk = 8192, kRun = 512, kShortestStep = 512, kSteps = 128;
constexpr int kTile = 12288;        // accumulators per block of threads: 48 KiB, for every GPU since Turing
constexpr int kChunksPerStage = 8;  // chunks whose bits are made together: one generator call per thread
constexpr int kCallsPerChunk = kChunk / 128;
constexpr int kSignWords = kChunk / 32;

struct SjltArguments {
    Destination to;  // columns = m
    const void* block;
    int64 stride;    // elements between the rows of the block
    int64 columns;   // n
    int64 start;     // position of the block's first column in the gradient vector
    int64 chunks_per_split;
    Generator generator;
    uint32 copy;     // which segment
    uint32 groups;   // K / m
    uint32 tile;     // accumulators per tile: a multiple of m, or, where m > kTile, a part of m
};

static_assert(kThreads == kChunksPerStage * kCallsPerChunk, "one call of the generator per thread and stage");

template <typename In>
struct SjltShared {
    static constexpr int kPerVector = 16 / In::kBytes;
    static constexpr int kRow = kTile / kPerVector + 32 / kPerVector;

    Words4 signs[kChunksPerStage * kCallsPerChunk];
    uint32 offsets[kChunksPerStage], steps[kChunksPerStage];
    float sums[kPerVector * kRow];

    __device__ static __forceinline__ int slot(uint32 place) {
        return static_cast<int>(place % kPerVector * kRow + place / kPerVector);
    }
};

// Group g of accumulators is rotated by ρ(g) when folded.
__device__ __forceinline__ uint32 rotation(const SjltArguments& a, uint32 group, uint32 outputs) {
    return group ? draw(philox(a.generator, Stream::sjlt_folds, group, a.copy).w[0], outputs) : 0;
}

// Bits of chunks `chunk … chunk + 7`: thread t makes call t mod 64 of chunk ⌊t / 64⌋.
template <typename In>
__device__ __forceinline__ void make_bits(SjltShared<In>& shared, const SjltArguments& a, int64 chunk, uint32 accumulators) {
    const int t = threadIdx.x;
    shared.signs[t] = philox(a.generator, Stream::sjlt_signs, static_cast<uint64>(chunk) * kCallsPerChunk + t, a.copy);
    if (t < kChunksPerStage) {
        const Words4 words = philox(a.generator, Stream::sjlt_places, static_cast<uint64>(chunk + t), a.copy);
        shared.offsets[t] = draw(words.w[0], accumulators);
        shared.steps[t] = kShortestStep + draw(words.w[1], kSteps);
    }
}

// Step 1 for one vector: elements `within … within + V − 1` of a chunk, never across a run, since V divides 512.
template <typename In>
__device__ __forceinline__ void add_vector(SjltShared<In>& shared, const Words4& v, int chunk, int within, uint32 accumulators,
                                           uint32 tile_first, uint32 tile_size) {
    constexpr int kPerVector = SjltShared<In>::kPerVector, kRow = SjltShared<In>::kRow;
    const uint32* signs = reinterpret_cast<const uint32*>(shared.signs) + chunk * kSignWords;
    const uint32 bits = signs[within / 32] >> within % 32;
    float value[kPerVector];
#pragma unroll
    for (int e = 0; e < kPerVector; ++e) {
        value[e] = float_of_bits(bits_of_float(In::element(v, e)) ^ (bits << (31 - e) & 0x80000000u));
    }
    // The offset is below K and the rest below the span of a chunk, which is below K: one subtraction goes around.
    uint32 place = shared.offsets[chunk] + within / kRun * shared.steps[chunk] + within % kRun;
    if (place >= accumulators) place -= accumulators;
    const uint32 local = place - tile_first;  // before the tile this wraps, to something larger than any tile
    if (local <= tile_size - kPerVector) {
        // Element e has slot(local + e): e rows further, and back by V rows and on by one once the residue wraps.
        const uint32 residue = local % kPerVector;
        float* const before = shared.sums + SjltShared<In>::slot(local);
        float* const behind = before + 1 - kPerVector * kRow;
        float sum[kPerVector];
#pragma unroll
        for (int e = 0; e < kPerVector; ++e) sum[e] = (residue + e < kPerVector ? before : behind)[e * kRow] + value[e];
#pragma unroll
        for (int e = 0; e < kPerVector; ++e) (residue + e < kPerVector ? before : behind)[e * kRow] = sum[e];
    } else if (local < tile_size || local >= 1u - kPerVector || place + kPerVector > accumulators) {
        // On the edge of the tile (the last elements of it, or fewer than V before it), or going around at K.
#pragma unroll 1
        for (int e = 0; e < kPerVector; ++e) {
            uint32 own = place + e;
            if (own >= accumulators) own -= accumulators;
            own -= tile_first;
            float chosen = value[0];
#pragma unroll
            for (int other = 1; other < kPerVector; ++other) chosen = other == e ? value[other] : chosen;
            if (own < tile_size) shared.sums[SjltShared<In>::slot(own)] += chosen;
        }
    }
}

// Step 2: groups of m accumulators, each rotated by an amount of its own, added up.
template <typename In>
__device__ __forceinline__ void fold(SjltShared<In>& shared, const SjltArguments& a, int64 row, uint32 outputs, uint32 tile_first,
                                     uint32 tile_size) {
    const uint32 t = threadIdx.x;
    if (outputs > kTile) {  // one group, not rotated, of which this tile is a part
        for (uint32 i = t; i < tile_size; i += kThreads) {
            a.to.put(blockIdx.y, row, tile_first + i, shared.sums[SjltShared<In>::slot(i)], true);
        }
        return;
    }
    const int64 slot = static_cast<int64>(blockIdx.y) * gridDim.z + blockIdx.z;
    const uint32 first_group = tile_first / outputs, groups = tile_size / outputs;
    // The bits of signs are not needed any more: their memory takes the rotations, unless m < 6 makes these too many.
    constexpr uint32 kTable = sizeof(shared.signs) / sizeof(uint32);
    uint32* const table = reinterpret_cast<uint32*>(shared.signs);
    const bool tabulated = groups <= kTable;
    if (tabulated) {
        for (uint32 g = t; g < groups; g += kThreads) table[g] = rotation(a, first_group + g, outputs);
    }
    __syncthreads();
    // Threads are lanes × slices: a lane per output (or several outputs per lane), a slice per part of the groups.
    const uint32 lanes = outputs < kThreads ? outputs : kThreads, slices = kThreads / lanes;
    const uint32 lane = t % lanes, slice = t / lanes;
    float sum = 0.0f;
    for (uint32 output = lane; slice < slices && output < outputs; output += lanes) {
        sum = 0.0f;
        for (uint32 g = slice; g < groups; g += slices) {
            const uint32 turn = tabulated ? table[g] : rotation(a, first_group + g, outputs);
            const uint32 index = output >= turn ? output - turn : output + outputs - turn;
            sum += shared.sums[SjltShared<In>::slot(g * outputs + index)];
        }
        if (slices == 1) a.to.put(slot, row, output, sum, true);
    }
    if (slices == 1) return;
    __syncthreads();
    float* const of_slices = reinterpret_cast<float*>(shared.signs);
    if (slice < slices) of_slices[t] = sum;
    __syncthreads();
    if (slice == 0) {
        for (uint32 other = 1; other < slices; ++other) sum += of_slices[other * lanes + lane];
        a.to.put(slot, row, lane, sum, true);
    }
}

// Grid: x the samples, y the splits of the coordinates, z the tiles of the accumulators.
template <typename In>
__global__ void __launch_bounds__(kThreads, 2) sjlt(const __grid_constant__ SjltArguments a) {
    constexpr int kPerVector = 16 / In::kBytes, kVectors = kChunk / kThreads / kPerVector;
    SjltShared<In>& shared = *reinterpret_cast<SjltShared<In>*>(shared_memory());
    const int t = threadIdx.x;
    const int64 row_index = blockIdx.x;
    const uint32 outputs = static_cast<uint32>(a.to.columns), accumulators = outputs * a.groups;
    const uint32 tile_first = blockIdx.z * a.tile;
    const uint32 tile_size = min(a.tile, accumulators - tile_first);

    // Chunks are numbered in the gradient vector. The block's first one begins at column −(start mod 8192).
    const int64 first_of_block = a.start / kChunk, behind_block = (a.start + (a.columns - 1)) / kChunk + 1;
    const int64 first = first_of_block + blockIdx.y * a.chunks_per_split;
    const int64 behind = min(first + a.chunks_per_split, behind_block);
    const int64 origin = -(a.start % kChunk);
    const Row<In> row(a.block, a.stride, row_index, a.columns, origin);

    for (int i = t; i < kPerVector * SjltShared<In>::kRow; i += kThreads) shared.sums[i] = 0.0f;

    Words4 current[kVectors], next[kVectors];
    int64 column = origin + (first - first_of_block) * kChunk + t * kPerVector;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) current[i] = row.fetch(column + i * kThreads * kPerVector);

    for (int64 stage = first; stage < behind; stage += kChunksPerStage) {
        make_bits(shared, a, stage, accumulators);
        __syncthreads();
        const int chunks = static_cast<int>(min(behind - stage, static_cast<int64>(kChunksPerStage)));
        for (int chunk = 0; chunk < chunks; ++chunk, column += kChunk) {
            if (stage + chunk + 1 < behind) {
#pragma unroll
                for (int i = 0; i < kVectors; ++i) next[i] = row.fetch(column + kChunk + i * kThreads * kPerVector);
            }
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                const int within = (i * kThreads + t) * kPerVector;
                const Words4 v = row.complete(current[i], column + i * kThreads * kPerVector);
                add_vector(shared, v, chunk, within, accumulators, tile_first, tile_size);
            }
#pragma unroll
            for (int i = 0; i < kVectors; ++i) current[i] = next[i];
            __syncthreads();  // the next chunk goes to the same accumulators, the next stage to the same bits
        }
    }
    fold(shared, a, row_index, outputs, tile_first, tile_size);
}
