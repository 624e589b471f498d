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
//   cycle: about twice what device memory can deliver, whatever k is. accumulators.cu keeps it free of bank conflicts.
//
// Where K exceeds what fits into shared memory the accumulators are cut into tiles, one block of threads each, which
// skips what belongs to the others. Runs are contiguous, so that still reads every element once (but for vectors on the
// edge of a tile).

constexpr int kThreads = 512;
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
static_assert(kChunksPerStage * kSignWords == kFoldWords, "the fold takes the memory of the signs");

template <typename In>
struct SjltShared {
    Words4 signs[kChunksPerStage * kCallsPerChunk];
    uint64 places[kChunksPerStage];  // of a chunk: its offset, and its step in the upper half
    Accumulators<16 / In::kBytes> accumulators;
};

// Bits of chunks `chunk … chunk + 7`: thread t makes call t mod 64 of chunk ⌊t / 64⌋.
template <typename In>
__device__ __forceinline__ void make_bits(SjltShared<In>& shared, const SjltArguments& a, int64 chunk, uint32 accumulators) {
    const int t = threadIdx.x;
    shared.signs[t] = philox(a.generator, Stream::sjlt_signs, static_cast<uint64>(chunk) * kCallsPerChunk + t, a.copy);
    if (t < kChunksPerStage) {
        const Words4 words = philox(a.generator, Stream::sjlt_places, static_cast<uint64>(chunk + t), a.copy);
        shared.places[t] = static_cast<uint64>(kShortestStep + draw(words.w[1], kSteps)) << 32 | draw(words.w[0], accumulators);
    }
}

// Grid: x the samples, y the splits of the coordinates, z the tiles of the accumulators.
template <typename In>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce) sjlt(const __grid_constant__ SjltArguments a) {
    constexpr int kPerVector = 16 / In::kBytes, kVectors = kChunk / kThreads / kPerVector;
    constexpr int kApart = kThreads * kPerVector;  // elements from one vector of a thread to the next: a multiple of kRun
    SjltShared<In>& shared = *reinterpret_cast<SjltShared<In>*>(shared_memory());
    const int t = threadIdx.x;
    const int64 row_index = blockIdx.x;
    const uint32 outputs = static_cast<uint32>(a.to.columns), accumulators = outputs * a.groups;
    const uint32 tile_first = blockIdx.z * a.tile;
    const Tile tile = {tile_first, min(a.tile, accumulators - tile_first), accumulators};

    // Chunks are numbered in the gradient vector. The block's first one begins at column −(start mod 8192).
    const int64 first_of_block = a.start / kChunk, behind_block = (a.start + (a.columns - 1)) / kChunk + 1;
    const int64 first = first_of_block + blockIdx.y * a.chunks_per_split;
    const int64 behind = min(first + a.chunks_per_split, behind_block);
    const int64 origin = -(a.start % kChunk);
    const Row<In> row(a.block, a.stride, row_index, a.columns, origin);

    shared.accumulators.clear(kThreads);

    // Chunks are counted from the split's first one. Those from `whole` to `behind_whole` lie inside of the row: their
    // vectors are where they are expected, and need no look at the row's ends.
    const int chunks = static_cast<int>(behind - first);
    const int64 split = origin + (first - first_of_block) * kChunk;  // column of the split's first chunk
    const int whole = split < 0 ? 1 : 0, behind_whole = static_cast<int>(min((a.columns - split) / kChunk, static_cast<int64>(chunks)));
    // Vector i of a thread, in the first chunk and in later ones, is where `vector` is, so many columns on.
    int64 column = split + t * kPerVector;
    const char* vector = row.address(column);

    // What does not change from chunk to chunk: a vector's run, where it is in it, and its bits.
    const uint32* const signs = reinterpret_cast<const uint32*>(shared.signs) + t * kPerVector / 32;
    const int bit = t * kPerVector % 32;

    Words4 current[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) current[i] = row.fetch(column + i * kApart);

    for (int stage = 0; stage < chunks; stage += kChunksPerStage) {
        make_bits(shared, a, first + stage, accumulators);
        __syncthreads();
        const int behind_stage = min(stage + kChunksPerStage, chunks);
#pragma unroll 1
        for (int chunk = stage; chunk < behind_stage; ++chunk) {
            if (row.shift || chunk < whole || chunk >= behind_whole) {
#pragma unroll
                for (int i = 0; i < kVectors; ++i) current[i] = row.complete(current[i], column + i * kApart);
            }
            float values[kVectors][kPerVector];
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                In::flip(current[i], signs[(chunk - stage) * kSignWords + i * kApart / 32] >> bit);
#pragma unroll
                for (int e = 0; e < kPerVector; ++e) values[i][e] = In::element(current[i], e);
            }
            // The next chunk is on its way while this one is added.
            if (chunk + 1 >= whole && chunk + 1 < behind_whole) {
#pragma unroll
                for (int i = 0; i < kVectors; ++i) current[i] = load_words(vector + (kChunk + i * kApart) * In::kBytes);
            } else if (chunk + 1 < chunks) {
#pragma unroll
                for (int i = 0; i < kVectors; ++i) current[i] = row.fetch(column + kChunk + i * kApart);
            }
            const uint64 place = shared.places[chunk - stage];
            const uint32 offset = static_cast<uint32>(place), step = static_cast<uint32>(place >> 32);
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                // The offset is below K and the rest below the span of a chunk, which is below K: together below 2K.
                // Never across a run, since V divides 512.
                const uint32 run = t * kPerVector / kRun + i * kApart / kRun, within = t * kPerVector % kRun;
                add_vector(shared.accumulators, values[i], offset + run * step + within, tile);
            }
            column += kChunk;
            vector += kChunk * In::kBytes;
            __syncthreads();  // the next chunk goes to the same accumulators, the next stage to the same bits
        }
    }
    uint32* const scratch = reinterpret_cast<uint32*>(shared.signs);  // the bits of signs are not needed any more
    fold<kThreads>(shared.accumulators, scratch, a.to, a.generator, a.copy, row_index, tile);
}
