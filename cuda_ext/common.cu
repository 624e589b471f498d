// What every kernel needs: the generator, the input types, loads from rows of any alignment.

// ---- Philox4x32-10 (Salmon et al. 2011) with the counter layout of hf_trak/kernels/philox.py ----

enum class Stream : uint32 { rademacher = 1, normal = 2, sjlt_signs = 3, sjlt_places = 4, sjlt_folds = 5 };

// Arguments that all calls for one projection share.
struct Generator {
    uint64 seed;
    uint32 model_id;
};

// The four words at (position, block) of a stream. The ten round keys depend on the seed alone, so that the compiler
// keeps them out of the loops; a round is then two wide multiplications and two three-input xors.
__device__ __forceinline__ Words4 philox(const Generator& generator, Stream stream, uint64 position, uint32 block) {
    uint32 c0 = static_cast<uint32>(position), c1 = static_cast<uint32>(position >> 32);
    uint32 c2 = static_cast<uint32>(stream) << 24 | block, c3 = generator.model_id;
    uint32 k0 = static_cast<uint32>(generator.seed), k1 = static_cast<uint32>(generator.seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64 p0 = static_cast<uint64>(0xD2511F53u) * c0;
        const uint64 p1 = static_cast<uint64>(0xCD9E8D57u) * c2;
        c0 = static_cast<uint32>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32>(p1);
        c2 = static_cast<uint32>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {c0, c1, c2, c3};
}

// A number in {0, …, n − 1} out of a word.
__device__ __forceinline__ uint32 draw(uint32 word, uint32 n) {
    return static_cast<uint32>(static_cast<uint64>(word) * n >> 32);
}

// ---- Input types: element e of 16 loaded bytes as float. e is a compile-time constant wherever this is called. ----

struct Float32 {
    static constexpr int kBytes = 4;
    __device__ static __forceinline__ float element(const Words4& v, int e) { return float_of_bits(v.w[e]); }
    __device__ static __forceinline__ void clear(Words4& v, int e) { v.w[e] = 0; }
    // Element e changes its sign where bit e is 1.
    __device__ static __forceinline__ void flip(Words4& v, uint32 bits) {
#pragma unroll
        for (int e = 0; e < 4; ++e) v.w[e] ^= bits << (31 - e) & 0x80000000u;
    }
};

struct BFloat16 {
    static constexpr int kBytes = 2;
    __device__ static __forceinline__ float element(const Words4& v, int e) {
        return float_of_bits(e % 2 ? v.w[e / 2] & 0xFFFF0000u : v.w[e / 2] << 16);
    }
    __device__ static __forceinline__ void clear(Words4& v, int e) { v.w[e / 2] &= e % 2 ? 0x0000FFFFu : 0xFFFF0000u; }
    __device__ static __forceinline__ void flip(Words4& v, uint32 bits) {
        bits &= 0xFFu;
        // The product is two copies of the bits that do not overlap: bit 2i of one is at 15, bit 2i + 1 of the other at 31.
#pragma unroll
        for (int i = 0; i < 4; ++i) v.w[i] ^= bits * ((1u << (15 - 2 * i)) + (1u << (30 - 2 * i))) & 0x80008000u;
    }
};

struct Float16 {
    static constexpr int kBytes = 2;
    __device__ static __forceinline__ float element(const Words4& v, int e) {
        return float_of_half(v.w[e / 2] >> e % 2 * 16 & 0xFFFFu);
    }
    __device__ static __forceinline__ void clear(Words4& v, int e) { BFloat16::clear(v, e); }
    __device__ static __forceinline__ void flip(Words4& v, uint32 bits) { BFloat16::flip(v, bits); }
};

// Loads one element from any address.
template <typename In>
__device__ __forceinline__ float load_element(const void* memory, int64 index) {
    if constexpr (In::kBytes == 4) {
        return static_cast<const float*>(memory)[index];
    } else {
        return In::element({static_cast<const unsigned short*>(memory)[index], 0, 0, 0}, 0);
    }
}

// ---- Rows of any alignment ----

// 16 of the 32 bytes (first, second), from byte `bytes` on. Selects instead of indexing: registers have no index.
__device__ __forceinline__ Words4 join(const Words4& first, const Words4& second, uint32 bytes) {
    uint32 w[8] = {first.w[0], first.w[1], first.w[2], first.w[3], second.w[0], second.w[1], second.w[2], second.w[3]};
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = bytes & 8 ? w[i + 2] : w[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = bytes & 4 ? w[i + 1] : w[i];
    const uint32 bits = bytes % 4 * 8;
    return {funnel_right(w[0], w[1], bits), funnel_right(w[1], w[2], bits), funnel_right(w[2], w[3], bits),
            funnel_right(w[3], w[4], bits)};
}

// One row of the block. Vectors are the 16 bytes from column `column` on, for columns that differ by multiples of
// kPerVector, so that all of them lie equally far behind a multiple of 16 bytes: `shift`.
//
// A vector is read as the one or two aligned vectors that it lies in. An aligned vector that holds a byte of the row lies
// in the same allocation as that byte (allocations begin and end at multiples of 256 bytes), so reading the
// neighbours' bytes beside it is safe; they are discarded.
template <typename In>
struct Row {
    static constexpr int kPerVector = 16 / In::kBytes;

    const char* begin;
    int64 columns;
    uint32 shift;

    __device__ __forceinline__ Row(const void* block, int64 stride, int64 row, int64 n, int64 first_column)
        : begin(static_cast<const char*>(block) + row * stride * In::kBytes), columns(n) {
        shift = static_cast<uint32>(reinterpret_cast<uint64>(begin + first_column * In::kBytes)) & 15u;
    }

    // Address of the aligned vector that holds the vector's first byte, which may lie beside the row.
    __device__ __forceinline__ const char* address(int64 column) const { return begin + column * In::kBytes - shift; }

    // First half of a load, to be issued early: the aligned vector that holds the vector's first byte.
    __device__ __forceinline__ Words4 fetch(int64 column) const { return aligned(column, 0); }

    // Second half: the vector itself. Where the row is not aligned this takes the next aligned vector as well, which
    // the neighbouring thread has fetched, so that it comes from the L1 cache. Columns outside the row become 0.
    __device__ __forceinline__ Words4 complete(Words4 v, int64 column) const {
        if (shift) v = join(v, aligned(column, 16), shift);
        if (column < 0 || column + kPerVector > columns) {
#pragma unroll
            for (int e = 0; e < kPerVector; ++e) {
                if (column + e < 0 || column + e >= columns) In::clear(v, e);
            }
        }
        return v;
    }

  private:
    __device__ __forceinline__ Words4 aligned(int64 column, int offset) const {
        const int64 byte = column * In::kBytes - shift + offset;
        if (byte > -16 && byte < columns * In::kBytes) return load_words(begin + byte);
        return {0, 0, 0, 0};
    }
};

// ---- Destinations of results ----

// Sums of one part of the gradient: added to the output, or, where several parts are computed at once, kept in a slot
// of a workspace until `reduce` adds the slots in their order. No atomics: every run gives the same bits.
struct Destination {
    float* out;         // (rows, columns), rows `out_stride` elements apart
    float* partials;    // (slots, rows, columns), or null
    int64 out_stride;
    int64 rows;
    int64 columns;

    // Address of the sums of a row.
    __device__ __forceinline__ float* row(int64 slot, int64 row) const {
        return partials ? partials + (slot * rows + row) * columns : out + row * out_stride;
    }

    // True for slots, which nothing has been written to before: a sum replaces their content.
    __device__ __forceinline__ bool replaces(bool first) const { return partials && first; }

    __device__ __forceinline__ void put(int64 slot, int64 row_of_sum, int64 column, float value, bool first) const {
        float* const address = row(slot, row_of_sum) + column;
        *address = replaces(first) ? value : *address + value;
    }
};
