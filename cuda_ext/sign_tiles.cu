// What the two kernels of the dense ±1 map on tensor cores share: tiles of signs and of gradients in shared memory.
//
// Both compute out[b, j] += Σ_i block[b, i] · R[i, j], R[i, j] = ±1, with the signs as the A operand of the matrix
// instructions (m = outputs j, k = positions i) and the gradients as their B operand (n = samples b): a fragment of
// signs, once in registers, is used for all samples of a block of threads. A block computes kColumns outputs for
// kSamples samples over one split of the positions, a tile of kPositions at a time.
//
// Who generates what. A call of the generator at position i gives the signs of 128 consecutive outputs, bit j mod 32 of
// word j / 32. A tile and two groups of 128 outputs need 128 calls: one thread each of four warps, the other four at the
// next tile. Bits, not signs, go through shared memory, 4 KiB for two tiles, as words[j / 32][slot of i].
//
// From bits to fragments. Let g = lane / 4 and t = lane mod 4. A lane holds, of a fragment of 16 × 16 of A, rows g and
// g + 8 at columns {2t, 2t + 1} (registers a0, a1) and {2t + 8, 2t + 9} (a2, a3). 32 outputs are two fragments:
//
//     fragment   row g       row g + 8
//     lower      bit g       bit g + 8
//     upper      bit g + 16  bit g + 24
//
// A register holds the same output at two positions u and v. pick_bytes joins the lower halves of their words to
// (u.low, v.low), and after a left shift by 7 − g the bits g + 8 of both are at 15 and 31, the sign bits of two 16-bit
// floats; eight further up are bits g. The upper fragment comes from the upper halves in the same way. With the
// exponent of 1.0 or-ed in, that is ten operations for eight signs.
//
// Precision. Products with ±1 are exact. Tensor cores cut sums off instead of rounding them, which pulls a long chain of
// additions towards zero by about 2⁻²⁴ a step; so chains are short (kTilesPerChain) and their ends are added in rounded
// float32 arithmetic. float32 input is split into two bfloat16 terms, x = high + low up to 2⁻¹⁷ |x|, which share the
// fragments of signs.

constexpr int kThreads = 256;
constexpr int kColumns = 256;    // outputs per block of threads
constexpr int kPositions = 64;   // positions per tile
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

// What goes into the matrix instructions, for an input type and a number of terms.
template <typename In, int kTerms>
struct Operand {
    static constexpr uint32 kOnes = 0x3F803F80u;  // two bfloat16 1.0
    static constexpr int kTilesPerChain = kTerms == 2 ? 16 : 128;  // of eight or four products: 128 or 512 additions
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
};

template <>
struct Operand<Float16, 1> {
    static constexpr uint32 kOnes = 0x3C003C00u;  // two float16 1.0
    static constexpr int kTilesPerChain = 128;
};

// The sign bits of a word of two 16-bit floats, in a register: the compiler makes a constant anew for every use, which is
// eight instructions per step. What it cannot know is that splits are multiples of kPositions.
__device__ __forceinline__ uint32 sign_mask(const DenseArguments& a) {
    return 0x80008000u | static_cast<uint32>(a.positions_per_split % kPositions);
}

// The fragment of 16 outputs and 16 positions out of the words of a lane's four positions, in the order of its columns:
// the lower or the upper 16 of the words' 32 outputs. `mask` is that of `sign_mask`.
template <typename In, int kTerms>
__device__ __forceinline__ void make_signs(uint32 (&signs)[4], const uint32* words, int upper, int g, uint32 mask) {
    constexpr uint32 kOnes = Operand<In, kTerms>::kOnes;
    const uint32 selector = upper ? 0x7632u : 0x5410u;
    const uint32 first = pick_bytes(words[0], words[1], selector) << (7 - g);
    const uint32 second = pick_bytes(words[2], words[3], selector) << (7 - g);
    signs[0] = (first << 8 & mask) | kOnes;
    signs[1] = (first & mask) | kOnes;
    signs[2] = (second << 8 & mask) | kOnes;
    signs[3] = (second & mask) | kOnes;
}

// One half of a tile's gradients on their way from global to shared memory: the first half of its samples is fetched
// before the first half of its positions is multiplied and stored after it, then the second. Fetching all at once would
// take more registers than there are beside the sums. `Layout` says where a tile's elements lie.
//
// A thread has one vector of 16 bytes of every kRowsAtOnce-th sample. As that number of rows is a multiple of 16 bytes, its
// vectors lie equally far behind a multiple of 16, and it needs one address (see Row for what is read beside them). Samples
// behind the batch are whatever is left in registers: their sums are never read.
template <typename In, int kTerms, int kSamples, typename Layout>
struct Stager {
    static constexpr int kPerVector = 16 / In::kBytes, kVectorsPerRow = kPositions / kPerVector;
    static constexpr int kRowsAtOnce = kThreads / kVectorsPerRow;
    static constexpr int kVectors = (kSamples + 2 * kRowsAtOnce - 1) / (2 * kRowsAtOnce);  // per thread and half
    static_assert(kRowsAtOnce * In::kBytes % 16 == 0 && kRowsAtOnce % 8 == 0);

    const char* address;  // of the aligned vector that holds the first byte of the first sample's vector
    int64 left;           // elements of the row from the vector on
    int64 step;           // bytes to the next sample
    uint32 shift;         // bytes from `address` to the vector
    int samples;          // how many there are
    int place;            // of the first sample's vector in a tile
    Words4 held[kVectors];

    __device__ __forceinline__ Stager(const DenseArguments& a, int64 first_sample, int64 position)
        : step(kRowsAtOnce * a.stride * In::kBytes) {
        const int vector = threadIdx.x % kVectorsPerRow, sample = threadIdx.x / kVectorsPerRow;
        const int64 column = position + vector * kPerVector;
        address = static_cast<const char*>(a.block) + ((first_sample + sample) * a.stride + column) * In::kBytes;
        shift = static_cast<uint32>(reinterpret_cast<uint64>(address)) & 15u;
        address -= shift;
        left = a.columns - column;
        const int behind = static_cast<int>(min(static_cast<int64>(kSamples), a.to.rows - first_sample));
        samples = behind > sample ? (behind - sample + kRowsAtOnce - 1) / kRowsAtOnce : 0;
        place = In::kBytes == 2 ? Layout::offset(sample, vector) : Layout::offset(sample, vector / 2) + vector % 2 * 8;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) held[i] = {0, 0, 0, 0};
    }

    __device__ __forceinline__ void fetch(int half) {
        if (left > 0) {
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                const int sample = half * kVectors + i;
                if (sample < samples) held[i] = load_words(address + sample * step);
            }
        }
        __syncwarp();  // matrix instructions follow, for whole warps
    }

    // `unsigned char (&to)[kTerms][…]`: one tile of 16-bit elements per term. What it has behind the row becomes 0.
    __device__ __forceinline__ void store(int half, unsigned char (&to)[kTerms][kSamples * kTileRow]) {
        if (shift || left < kPerVector) complete(half);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const int sample = half * kVectors + i;
            if (kSamples < kRowsAtOnce && threadIdx.x / kVectorsPerRow >= kSamples || sample * kRowsAtOnce >= kSamples) continue;
            if constexpr (In::kBytes == 2) {
                store_words(to[0] + place + sample * kRowsAtOnce * kTileRow, held[i]);
            } else {
                uint32 terms[kTerms][2];
                Operand<In, kTerms>::split(held[i], terms);
#pragma unroll
                for (int term = 0; term < kTerms; ++term) {
                    *reinterpret_cast<uint64*>(to[term] + place + sample * kRowsAtOnce * kTileRow) =
                        static_cast<uint64>(terms[term][1]) << 32 | terms[term][0];
                }
            }
        }
    }

    __device__ __forceinline__ void next_tile() {
        address += kPositions * In::kBytes;
        left -= kPositions;
    }

  private:
    // From the aligned vectors that were fetched to those that were meant, which reach into the next ones in memory. Those
    // are in the L1 cache, but for the last thread of a row, and are asked for all at once.
    __device__ __forceinline__ void complete(int half) {
        if (shift) {
            const bool more = left * In::kBytes > 16 - static_cast<int>(shift);
            Words4 following[kVectors];
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                following[i] = {0, 0, 0, 0};
                const int sample = half * kVectors + i;
                if (more && sample < samples) following[i] = load_words(address + sample * step + 16);
            }
#pragma unroll
            for (int i = 0; i < kVectors; ++i) held[i] = join(held[i], following[i], shift);
        }
        if (left < kPerVector) {
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
#pragma unroll
                for (int e = 0; e < kPerVector; ++e) {
                    if (e >= left) In::clear(held[i], e);
                }
            }
        }
    }
};

// Bits of a tile: the calls at its 64 positions for two groups of 128 outputs. Warps 0 … 3 make those of even tiles,
// warps 4 … 7 those of odd ones; four warps are one per scheduler.
template <typename Layout>
__device__ __forceinline__ void make_words(uint32 (&words)[kColumns / 32][kPositions], const DenseArguments& a, int tile,
                                           uint64 position, uint32 column) {
    if (static_cast<int>(threadIdx.x / 128) != (tile & 1)) return;
    const int i = threadIdx.x % kPositions, group = threadIdx.x / kPositions % 2;
    const uint32 block = column / 128 + group;
    if (block * 128 >= a.to.columns) return;  // outputs beyond k: their sums are never read, and there is no such block
    const Words4 call = philox(a.generator, Stream::rademacher, position + i, block);
#pragma unroll
    for (int word = 0; word < 4; ++word) words[group * 4 + word][Layout::slot(i)] = call.w[word];
}
