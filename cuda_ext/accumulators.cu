// The accumulators of the sparse map `sjlt-1` in shared memory (reference.py defines the map): step 1 of it adds to them,
// step 2 folds them into a segment's m outputs.
//
// Accumulator p lives in slot (p mod V) · kRow + ⌊p / V⌋. A lane adds vectors of V neighbours; for a fixed element e of
// its vector the lanes of a warp have accumulators V apart and so consecutive slots: no bank conflicts, wherever the
// generator puts the run. kRow ≡ 32 / V (mod 32) keeps the fold, where consecutive lanes take consecutive p, free of
// conflicts too.

constexpr int kChunk = 8192, kRun = 512, kShortestStep = 512, kSteps = 128;
constexpr int kTile = 12288;  // accumulators per block of threads: 48 KiB, for every GPU since Turing
constexpr int kFoldWords = 2048;

// Blocks of threads that fit into a multiprocessor's shared memory, about 61 KiB each: it has 64 KiB on Turing, 96 on
// Volta, 100 on GeForce and workstation GPUs since, 164 and more on those of data centres.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 800 || __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kBlocksAtOnce = 1;
#else
constexpr int kBlocksAtOnce = 2;
#endif

// A margin is that many more accumulators in front of the first and behind the last one. Their sums mean nothing, but a
// run that reaches out of a tile can be added as a whole.
template <int kPerVector, int kMargin = 0>
struct Accumulators {
    static constexpr int kRow = (kTile + 2 * kMargin) / kPerVector + 32 / kPerVector;
    static_assert(kMargin % 16 == 0);

    float sums[kPerVector * kRow];

    // `place` is at least −kMargin.
    __device__ __forceinline__ float& at(int place) {
        const uint32 slot = place + kMargin;
        return sums[slot % kPerVector * kRow + slot / kPerVector];
    }

    __device__ __forceinline__ void clear(int threads) {
        for (int i = threadIdx.x; i < kPerVector * kRow; i += threads) sums[i] = 0.0f;
    }
};

// The accumulators of a block of threads, out of K: `size` of them from `first` on.
struct Tile {
    uint32 first, size, accumulators;
};

template <int kPerVector>
__device__ __forceinline__ void add_element(Accumulators<kPerVector>& to, float value, uint32 place, const Tile& tile) {
    if (place >= tile.accumulators) place -= tile.accumulators;
    const uint32 local = place - tile.first;  // before the tile this wraps, to something larger than any tile
    if (local < tile.size) to.at(local) += value;
}

// Elements of one run: element e goes to accumulator `place` + e, going around at K. `place` is below 2K.
template <int kPerVector>
__device__ __forceinline__ void add_vector(Accumulators<kPerVector>& to, const float (&value)[kPerVector], uint32 place,
                                           const Tile& tile) {
    constexpr int kRow = Accumulators<kPerVector>::kRow;
    if (place >= tile.accumulators) place -= tile.accumulators;
    const uint32 local = place - tile.first;
    if (local <= tile.size - kPerVector) {
        // Element e has the slot e rows further, and back by V rows and on by one once the residue wraps.
        const uint32 residue = local % kPerVector;
        float* const before = &to.at(local);
        float* const behind = before + 1 - kPerVector * kRow;
        float sum[kPerVector];
#pragma unroll
        for (int e = 0; e < kPerVector; ++e) sum[e] = (residue < kPerVector - e ? before : behind)[e * kRow] + value[e];
#pragma unroll
        for (int e = 0; e < kPerVector; ++e) (residue < kPerVector - e ? before : behind)[e * kRow] = sum[e];
    } else if (local < tile.size || local >= 1u - kPerVector || place + kPerVector > tile.accumulators) {
        // On the edge of the tile (the last elements of it, or fewer than V before it), or going around at K.
#pragma unroll 1
        for (int e = 0; e < kPerVector; ++e) {
            float chosen = value[0];
#pragma unroll
            for (int other = 1; other < kPerVector; ++other) chosen = other == e ? value[other] : chosen;
            add_element(to, chosen, place + e, tile);
        }
    }
}

// A run of a chunk, added by a warp: lane l has the elements (32 i + l) V … + V − 1 of it, which go to the accumulators from
// `local` on, in the tile or its margins. Vectors of a lane are 32 slots apart, so that V addresses serve all of them.
template <int kPerVector, int kMargin, int kVectors>
__device__ __forceinline__ void add_run(Accumulators<kPerVector, kMargin>& to, const float (&values)[kVectors][kPerVector],
                                        int local, int lane) {
    constexpr int kRow = Accumulators<kPerVector, kMargin>::kRow;
    const uint32 residue = static_cast<uint32>(local) % kPerVector;
    float* const before = &to.at(local + lane * kPerVector);
    float* const behind = before + 1 - kPerVector * kRow;
    float* place[kPerVector];
#pragma unroll
    for (int e = 0; e < kPerVector; ++e) place[e] = (residue < kPerVector - e ? before : behind) + e * kRow;
    constexpr int kAtOnce = 2;  // vectors, for which there are registers
#pragma unroll
    for (int first = 0; first < kVectors; first += kAtOnce) {
        float sums[kAtOnce][kPerVector];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
            for (int e = 0; e < kPerVector; ++e) sums[i][e] = place[e][32 * (first + i)] + values[first + i][e];
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
            for (int e = 0; e < kPerVector; ++e) place[e][32 * (first + i)] = sums[i][e];
        }
    }
}

// ρ(g), by which group g of accumulators is rotated when it is folded.
__device__ __forceinline__ uint32 rotation(const Generator& generator, uint32 copy, uint32 group, uint32 outputs) {
    return group ? draw(philox(generator, Stream::sjlt_folds, group, copy).w[0], outputs) : 0;
}

// Step 2: groups of m accumulators, each rotated by an amount of its own, added up and put into slot blockIdx.y of the
// destination; where tiles of groups share the outputs (z numbers tiles), into slot blockIdx.y · tiles + blockIdx.z.
// `scratch` has kFoldWords words; everything in it is lost.
template <int kThreads, int kPerVector, int kMargin>
__device__ __forceinline__ void fold(Accumulators<kPerVector, kMargin>& from, uint32* scratch, const Destination& to,
                                     const Generator& generator, uint32 copy, int64 row, const Tile& tile) {
    static_assert(kThreads <= kFoldWords, "a word of scratch per thread");
    const uint32 t = threadIdx.x, outputs = static_cast<uint32>(to.columns);
    if (outputs > kTile) {  // one group, not rotated, of which this tile is a part
        for (uint32 i = t; i < tile.size; i += kThreads) to.put(blockIdx.y, row, tile.first + i, from.at(i), true);
        return;
    }
    const int64 slot = static_cast<int64>(blockIdx.y) * gridDim.z + blockIdx.z;
    const uint32 first_group = tile.first / outputs, groups = tile.size / outputs;
    const bool tabulated = groups <= kFoldWords;  // m ≥ 5
    if (tabulated) {
        for (uint32 g = t; g < groups; g += kThreads) scratch[g] = rotation(generator, copy, first_group + g, outputs);
    }
    __syncthreads();
    // Threads are lanes × slices: a lane per output (or several outputs per lane), a slice per part of the groups.
    const uint32 lanes = outputs < kThreads ? outputs : kThreads, slices = kThreads / lanes;
    const uint32 lane = t % lanes, slice = t / lanes;
    float sum = 0.0f;
    for (uint32 output = lane; slice < slices && output < outputs; output += lanes) {
        sum = 0.0f;
        for (uint32 g = slice; g < groups; g += slices) {
            const uint32 turn = tabulated ? scratch[g] : rotation(generator, copy, first_group + g, outputs);
            const uint32 index = output >= turn ? output - turn : output + outputs - turn;
            sum += from.at(g * outputs + index);
        }
        if (slices == 1) to.put(slot, row, output, sum, true);
    }
    if (slices == 1) return;
    __syncthreads();
    float* const of_slices = reinterpret_cast<float*>(scratch);
    if (slice < slices) of_slices[t] = sum;
    __syncthreads();
    if (slice == 0) {
        for (uint32 other = 1; other < slices; ++other) sum += of_slices[other * lanes + lane];
        to.put(slot, row, lane, sum, true);
    }
}
