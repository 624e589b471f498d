// The sparse map `sjlt-1`: out[b, ·] += block[b, ·] · R for one segment of outputs (reference.py defines R).
//
// One block of threads takes one sample and a stretch of whole chunks of 8192 coordinates. It keeps the accumulators of
// step 1 of the map (K ≥ 10240, a multiple of the segment's m outputs) in shared memory, adds chunk after chunk, and
// folds K into m at the end (step 2). Why this is fast and deterministic:
//
// * The K accumulators are at least as many as a chunk can span, so the 8192 coordinates of one chunk go to 8192
//   different accumulators: additions need neither atomics nor ownership, only a barrier between chunks.
// * A warp takes one of a chunk's 16 runs. Where that begins is the same for all of its lanes, and V addresses serve all
//   vectors of a lane.
// * Every gradient element is read once, 16 bytes per thread, the next chunk while the current one is added. What an
//   element costs beyond is one shared load and one shared store, 8 bytes of the 128 that a multiprocessor moves per
//   cycle, whatever k is. accumulators.cu keeps it free of bank conflicts.
//
// Where K exceeds what fits into shared memory the accumulators are cut into tiles, one block of threads each, which
// neither reads nor adds the runs of others: only runs on the edge of a tile are read twice.

constexpr int kThreads = 512;
constexpr int kChunksPerStage = 8;  // chunks whose bits are made together: one generator call per thread
constexpr int kCallsPerChunk = kChunk / 128;
constexpr int kSignWords = kChunk / 32;
constexpr int kPlaces = 2 * kChunksPerStage;  // those of the next stage are known before its gradients are read

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
static_assert(kThreads / 32 == kChunk / kRun, "a warp per run");
static_assert(kChunksPerStage * kSignWords == kFoldWords, "the fold takes the memory of the signs");

template <typename In>
struct SjltShared {
    Words4 signs[kChunksPerStage * kCallsPerChunk];
    uint64 places[kPlaces];  // of a chunk, at its number modulo kPlaces: its offset, and its step in the upper half
    Accumulators<16 / In::kBytes, kRun> accumulators;
};

template <typename In>
__device__ __forceinline__ void make_place(SjltShared<In>& shared, const SjltArguments& a, int64 first, int chunk,
                                           uint32 accumulators) {
    const Words4 words = philox(a.generator, Stream::sjlt_places, static_cast<uint64>(first + chunk), a.copy);
    const uint64 step = kShortestStep + draw(words.w[1], kSteps);
    shared.places[chunk % kPlaces] = step << 32 | draw(words.w[0], accumulators);
}

// Bits of chunks `stage … stage + 7`, thread t makes call t mod 64 of chunk ⌊t / 64⌋; and the places of the 8 behind them.
template <typename In>
__device__ __forceinline__ void make_bits(SjltShared<In>& shared, const SjltArguments& a, int64 first, int stage,
                                          uint32 accumulators) {
    const int t = threadIdx.x;
    const uint64 call = static_cast<uint64>(first + stage) * kCallsPerChunk + t;
    shared.signs[t] = philox(a.generator, Stream::sjlt_signs, call, a.copy);
    if (t < kChunksPerStage) make_place(shared, a, first, stage + kChunksPerStage + t, accumulators);
}

// Where a warp's run of a chunk begins in the accumulators of a tile, from the place of the chunk: below tile.size, and at or
// below −kRun if it does not reach the tile. The offset is below K and the rest below the span of a chunk, which is below K:
// together below 2K. A run at the end of the accumulators goes around to the first ones, so that behind the tile's end
// means before its begin.
__device__ __forceinline__ int begin_of_run(uint64 place, uint32 run, const Tile& tile) {
    uint32 start = static_cast<uint32>(place) + run * static_cast<uint32>(place >> 32);
    if (start >= tile.accumulators) start -= tile.accumulators;
    const int local = static_cast<int>(start - tile.first);
    return local < static_cast<int>(tile.size) ? local : local - static_cast<int>(tile.accumulators);
}

// Grid: x the samples, y the splits of the coordinates, z the tiles of the accumulators.
template <typename In>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce) sjlt(const __grid_constant__ SjltArguments a) {
    constexpr int kPerVector = 16 / In::kBytes, kVectors = kRun / 32 / kPerVector;
    constexpr int kApart = 32 * kPerVector;  // elements from one vector of a lane to the next
    SjltShared<In>& shared = *reinterpret_cast<SjltShared<In>*>(shared_memory());
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
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

    // Chunks are counted from the split's first one. Those from `whole` to `behind_whole` lie inside of the row: their
    // vectors are where they are expected, and need no look at the row's ends.
    const int chunks = static_cast<int>(behind - first);
    const int64 split = origin + (first - first_of_block) * kChunk;  // column of the split's first chunk
    const int whole = split < 0 ? 1 : 0;
    const int behind_whole = max(whole, static_cast<int>(min((a.columns - split) / kChunk, static_cast<int64>(chunks))));
    // Vector i of a thread, in the first chunk and in later ones, is where `vector` is, so many columns on.
    int64 column = split + warp * kRun + lane * kPerVector;
    const char* vector = row.address(column);

    // The signs of a vector are a byte, or half of one.
    const unsigned char* const bytes = reinterpret_cast<const unsigned char*>(shared.signs);
    const unsigned char* const signs = bytes + (warp * kRun + lane * kPerVector) / 8;
    const int bit = lane * kPerVector % 8;

    shared.accumulators.clear(kThreads);
    if (t < kChunksPerStage) make_place(shared, a, first, t, accumulators);
    __syncthreads();
    int begin = begin_of_run(shared.places[0], warp, tile);
    bool inside = whole == 0 && behind_whole > 0;  // whether a chunk is
    Words4 current[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) current[i] = begin > -kRun ? row.fetch(column + i * kApart) : Words4{0, 0, 0, 0};

    for (int stage = 0; stage < chunks; stage += kChunksPerStage) {
        make_bits(shared, a, first, stage, accumulators);
        __syncthreads();
        const int behind_stage = min(stage + kChunksPerStage, chunks);
#pragma unroll 1
        for (int chunk = stage; chunk < behind_stage; ++chunk) {
            const int local = begin;
            float values[kVectors][kPerVector];
            if (local > -kRun) {
                if (row.shift || !inside) {
#pragma unroll
                    for (int i = 0; i < kVectors; ++i) current[i] = row.complete(current[i], column + i * kApart);
                }
#pragma unroll
                for (int i = 0; i < kVectors; ++i) {
                    Words4 flipped = current[i];
                    In::flip(flipped, signs[((chunk - stage) * kChunk + i * kApart) / 8] >> bit);
#pragma unroll
                    for (int e = 0; e < kPerVector; ++e) values[i][e] = In::element(flipped, e);
                }
            }
            // The next chunk is on its way while this one is added.
            begin = begin_of_run(shared.places[(chunk + 1) % kPlaces], warp, tile);
            inside = static_cast<uint32>(chunk + 1 - whole) < static_cast<uint32>(behind_whole - whole);
            if (begin > -kRun) {
                if (inside) {
#pragma unroll
                    for (int i = 0; i < kVectors; ++i) current[i] = load_words(vector + (kChunk + i * kApart) * In::kBytes);
                } else if (chunk + 1 < chunks) {
#pragma unroll
                    for (int i = 0; i < kVectors; ++i) current[i] = row.fetch(column + kChunk + i * kApart);
                }
            }
            column += kChunk;
            vector += kChunk * In::kBytes;
            // The chunk before went to the same accumulators. Behind the last barrier of a stage its bits are not needed.
            __syncthreads();
            if (local > -kRun) add_run(shared.accumulators, values, local, lane);
            const int around = local - static_cast<int>(accumulators);
            if (around > -kRun) add_run(shared.accumulators, values, around, lane);
        }
    }
    __syncthreads();
    uint32* const scratch = reinterpret_cast<uint32*>(shared.signs);  // the bits of signs are not needed any more
    fold<kThreads>(shared.accumulators, scratch, a.to, a.generator, a.copy, row_index, tile);
}
