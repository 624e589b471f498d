/* The additions of the sparse map `sjlt-1` on a CPU: step 1 of `hf_trak/kernels/torch_sparse.py`.
 *
 * A region of the gradient vector is cut into chunks of 16 runs of 512 coordinates. Run a of chunk c is added, with one
 * sign per coordinate, to the accumulators from offsets[c] + a * steps[c] on. A sign is applied by flipping the sign bit
 * of a float, which rounds nothing. Every accumulator gets its numbers in the order of the coordinates, as the torch
 * operators add them: both give the same bits.
 *
 * One call adds a whole block for some of the samples. It allocates nothing and starts no threads. */
#include <stdint.h>
#include <string.h>

enum { RUN = 512, RUNS_PER_CHUNK = 16, CHUNK = RUN * RUNS_PER_CHUNK, WORD = 32 };

/* One machine code per width of vectors, of which the loader takes the best that the processor has. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EVERY_PROCESSOR
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE float flipped(float value, uint32_t word, int64_t bit) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits ^= (word << (WORD - 1 - bit)) & 0x80000000u;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Adds `length` coordinates of one run. `first` is the place of the first one in the region. */
INLINE void add(float *restrict sums, const float *restrict values, const uint32_t *restrict signs, int64_t first,
                int64_t length) {
    int64_t i = 0;
    for (; i < length && (first + i) % WORD; i++) sums[i] += flipped(values[i], signs[(first + i) / WORD], (first + i) % WORD);
    for (; i + WORD <= length; i += WORD) {
        uint32_t word = signs[(first + i) / WORD];
        for (int64_t bit = 0; bit < WORD; bit++) sums[i + bit] += flipped(values[i + bit], word, bit);
    }
    for (; i < length; i++) sums[i] += flipped(values[i], signs[(first + i) / WORD], (first + i) % WORD);
}

/* Adds columns of a block to the accumulators.
 *
 * sums:    (samples, ...), float32, `sums_stride` numbers from one sample to the next
 * block:   (samples, n), float32, `block_stride` numbers from one sample to the next, consecutive within a sample
 * first:   place of the first column in the region
 * signs:   one bit per coordinate of the region, 1 for a minus, the lowest bit of a word first
 * offsets, steps: of every chunk of the region */
FOR_EVERY_PROCESSOR
void sjlt_add(float *sums, int64_t sums_stride, const float *block, int64_t block_stride, int64_t samples, int64_t n,
              int64_t first, const uint32_t *signs, const int64_t *offsets, const int64_t *steps) {
    for (int64_t sample = 0; sample < samples; sample++) {
        float *row = sums + sample * sums_stride;
        const float *values = block + sample * block_stride;
        for (int64_t column = 0; column < n;) {
            int64_t place = first + column, chunk = place / CHUNK, inside = place % RUN;
            int64_t run = place % CHUNK / RUN, length = RUN - inside;
            float *target = row + offsets[chunk] + run * steps[chunk] + inside;
            if (length > n - column) length = n - column;
            if (length == RUN)
                add(target, values + column, signs, place, RUN); /* a constant length, for the compiler */
            else
                add(target, values + column, signs, place, length);
            column += length;
        }
    }
}
