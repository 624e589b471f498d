/* Sums of products of rows of codes with targets on a CPU, for `hf_trak/scores/coded_products.py`.
 *
 * A byte holds 8/b levels u of b bits, the first in its lowest bits. The bytes of a row are taken in pieces. Levels of a
 * piece stand in the order in which they come out of the bytes: first those in the lowest bits of all bytes, then the
 * next. The integers of the targets stand in the same order, each as q = 4096 high + low with |high|, |low| <= 2048.
 *
 * A sum of the products of one piece is at most 2048 * 255 * 2048 < 2^31. What is added up in 64 bits is exact, so that
 * every processor and every division of the rows gives the same bits. One call starts no threads. */
#include <stdint.h>
#include <string.h>

enum {
    COLUMNS = 2048, /* of a piece */
    ROWS = 4,       /* that share what is read of a target */
    TARGETS = 32,   /* that stay in the cache while rows pass */
};

#define INLINE static inline __attribute__((always_inline))

INLINE void unpack(int16_t *restrict levels, const uint8_t *restrict row, int64_t bytes, int bits) {
    for (int place = 0; place < 8; place += bits)
        for (int64_t i = 0; i < bytes; i++) *levels++ = row[i] >> place & ((1 << bits) - 1);
}

/* Multiplies four rows with one target: the sums of the high parts, then those of the low parts. Sums in variables of
 * their own, so that the compiler takes the instructions for pairs of 16-bit products. */
INLINE void multiply(int32_t *restrict sums, const int16_t *restrict levels, const int16_t *restrict high,
                     const int16_t *restrict low, int64_t columns) {
    const int16_t *a = levels, *b = a + COLUMNS, *c = b + COLUMNS, *d = c + COLUMNS;
    int32_t a_high = 0, b_high = 0, c_high = 0, d_high = 0, a_low = 0, b_low = 0, c_low = 0, d_low = 0;
    for (int64_t j = 0; j < columns; j++) {
        a_high += a[j] * high[j], b_high += b[j] * high[j], c_high += c[j] * high[j], d_high += d[j] * high[j];
        a_low += a[j] * low[j], b_low += b[j] * low[j], c_low += c[j] * low[j], d_low += d[j] * low[j];
    }
    int32_t found[2 * ROWS] = {a_high, b_high, c_high, d_high, a_low, b_low, c_low, d_low};
    memcpy(sums, found, sizeof found);
}

INLINE void add(int64_t *totals, int64_t m, const uint8_t *rows, int64_t stride, int64_t n, int64_t bytes, int bits,
                const int16_t *targets) {
    const int64_t most = COLUMNS * bits / 8;
    for (int64_t start = 0; start < bytes; start += most) {
        const int64_t size = bytes - start < most ? bytes - start : most, columns = size * 8 / bits;
        for (int64_t first = 0; first < m; first += TARGETS) {
            const int64_t last = m - first < TARGETS ? m : first + TARGETS;
            for (int64_t row = 0; row < n; row += ROWS) {
                const int64_t count = n - row < ROWS ? n - row : ROWS;
                int16_t levels[ROWS * COLUMNS]; /* where rows are missing the last one is repeated */
                for (int64_t r = 0; r < ROWS; r++)
                    unpack(levels + r * COLUMNS, rows + (row + (r < count ? r : count - 1)) * stride + start, size, bits);
                for (int64_t t = first; t < last; t++) {
                    const int16_t *high = targets + 2 * columns * t;
                    int32_t sums[2 * ROWS];
                    multiply(sums, levels, high, high + columns, columns);
                    for (int64_t r = 0; r < count; r++)
                        totals[(row + r) * m + t] += 4096 * (int64_t)sums[r] + sums[ROWS + r];
                }
            }
        }
        targets += 2 * columns * m;
    }
}

#define ADD(name)                                                                                                      \
    static void name(int64_t *totals, int64_t m, const uint8_t *rows, int64_t stride, int64_t n, int64_t bytes,        \
                     int bits, const int16_t *targets) {                                                               \
        add(totals, m, rows, stride, n, bytes, bits, targets);                                                         \
    }

ADD(add_anywhere)
#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx512bw,avx512vl,avx512vnni"))) ADD(add_avx512vnni)
__attribute__((target("avx2"))) ADD(add_avx2)
#endif

/* Adds the products of rows and targets to totals.
 *
 * totals:  (n, m)
 * rows:    (n, bytes), `stride` bytes from one row to the next
 * bits:    b
 * targets: of every piece (m, 2, columns), high and low; 0 for levels after the last column */
void codes_add(int64_t *totals, int64_t m, const uint8_t *rows, int64_t stride, int64_t n, int64_t bytes, int64_t bits,
               const int16_t *targets) {
    void (*chosen)(int64_t *, int64_t, const uint8_t *, int64_t, int64_t, int64_t, int, const int16_t *) = add_anywhere;
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl"))
        chosen = add_avx512vnni;
    else if (__builtin_cpu_supports("avx2"))
        chosen = add_avx2;
#endif
    chosen(totals, m, rows, stride, n, bytes, (int)bits, targets);
}
