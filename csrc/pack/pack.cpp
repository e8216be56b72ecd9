// The native packer: source layout <-> packed layout (docs/format.md) at memory speed. chord_runtime/format/packing.py
// is the reference; tests hold the two against each other.
//
// One step handles a row of low nibbles and the row of high nibbles packed beside it (n and n + 8, or a channel of gate
// and of up): 64 columns, 32 source bytes of each, are merged and permuted into the 64 consecutive bytes of a block
// that belong to them. Interleaves of 16-byte vectors are enough for it, so the code is GCC/Clang vector extensions:
// SSE2 on any x86-64, NEON on aarch64. In cache that runs at 15 GB/s, more than memory gives; the rest is traffic:
// rows are read from end to end and ahead, every output line is written whole and once, past the cache if it is large.

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

constexpr int64_t kBlockBytes = 2304, kCodeBytes = 2048;  // format/block.py
constexpr int64_t kBlockK = 64, kGroup = 32;
constexpr uint16_t kLowExp = 101 << 7, kHighExp = 97 << 7;         // LOW_EXP, HIGH_EXP in a BF16's exponent field
constexpr uint16_t kMinScale = (127 - 94) << 7, kMaxScale = (127 + 27) << 7;  // MIN_SCALE, MAX_SCALE as BF16 bits

typedef uint8_t V8 __attribute__((vector_size(16)));
typedef uint16_t V16 __attribute__((vector_size(16)));
typedef uint32_t V32 __attribute__((vector_size(16)));
typedef uint64_t V64 __attribute__((vector_size(16)));

template <class V>
inline V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class V>
inline void store(void* to, V value) {
    std::memcpy(to, &value, sizeof value);
}

// A 64-byte line. Streaming saves reading the line from memory first; `to` is then 64-byte aligned.
template <bool stream>
inline void store_line(uint8_t* to, const V8 line[4]) {
    for (int i = 0; i < 4; ++i) {
#if defined(__SSE2__)
        if (stream) {
            _mm_stream_si128((__m128i*)(to + 16 * i), (__m128i)line[i]);
            continue;
        }
#endif
        store(to + 16 * i, line[i]);
    }
}

#if defined(__clang__)
#define SHUFFLE(V, a, b, ...) (V) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(V, a, b, ...) (V) __builtin_shuffle(a, b, V{__VA_ARGS__})
#endif

// Elements of the low (high) halves of a and b, alternating.
inline V8 zip_low(V8 a, V8 b) { return SHUFFLE(V8, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
inline V8 zip_high(V8 a, V8 b) {
    return SHUFFLE(V8, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
inline V16 zip_low(V16 a, V16 b) { return SHUFFLE(V16, a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline V16 zip_high(V16 a, V16 b) { return SHUFFLE(V16, a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
inline V32 zip_low(V32 a, V32 b) { return SHUFFLE(V32, a, b, 0, 4, 1, 5); }
inline V32 zip_high(V32 a, V32 b) { return SHUFFLE(V32, a, b, 2, 6, 3, 7); }
inline V64 zip_low(V64 a, V64 b) { return SHUFFLE(V64, a, b, 0, 2); }
inline V64 zip_high(V64 a, V64 b) { return SHUFFLE(V64, a, b, 1, 3); }

// Two 16-byte matrices of 4 x 4 bytes, (4a + b) -> (4b + a) in each: two perfect shuffles.
inline void transpose_bytes(V8& x, V8& y) {
    for (int pass = 0; pass < 2; ++pass) {
        const V8 low = (V8)zip_low((V64)x, (V64)y), high = (V8)zip_high((V64)x, (V64)y);
        x = zip_low(low, high);
        y = zip_high(low, high);
    }
}

// Four vectors of four 4-byte elements: rows become columns.
inline void transpose_words(V8 m[4]) {
    const V32 a = zip_low((V32)m[0], (V32)m[1]), b = zip_high((V32)m[0], (V32)m[1]);
    const V32 c = zip_low((V32)m[2], (V32)m[3]), d = zip_high((V32)m[2], (V32)m[3]);
    m[0] = (V8)zip_low((V64)a, (V64)c);
    m[1] = (V8)zip_high((V64)a, (V64)c);
    m[2] = (V8)zip_low((V64)b, (V64)d);
    m[3] = (V8)zip_high((V64)b, (V64)d);
}

// 64 columns of a low and a high row (32 bytes each) -> 64 bytes of a block. Source byte 8t + 4g + q holds columns
// e = 0, 1; output byte is 16q + 4t + 2e + g. `zero` collects where a code is 0.
template <bool stream>
inline void pack_codes(const uint8_t* low, const uint8_t* high, uint8_t* out, V8& zero) {
    V8 m[4];  // one for each t
    for (int half = 0; half < 2; ++half) {
        const V8 a = load<V8>(low + 16 * half), b = load<V8>(high + 16 * half);
        const V8 a_even = a & 15, a_odd = a >> 4, b_even = b << 4, b_odd = b & 0xf0;
        zero |= (V8)(a_even == 0) | (V8)(a_odd == 0) | (V8)(b_even == 0) | (V8)(b_odd == 0);
        const V64 even = (V64)(a_even | b_even), odd = (V64)(a_odd | b_odd);
        m[2 * half] = (V8)zip_low(even, odd);  // bytes 8e + 4g + q of t = 2·half
        m[2 * half + 1] = (V8)zip_high(even, odd);
        transpose_bytes(m[2 * half], m[2 * half + 1]);  // 4q + 2e + g
    }
    transpose_words(m);  // m[q], bytes 4t + 2e + g
    store_line<stream>(out, m);
}

// The inverse: every step is its own.
inline void unpack_codes(const uint8_t* in, uint8_t* low, uint8_t* high) {
    V8 m[4];
    for (int q = 0; q < 4; ++q) m[q] = load<V8>(in + 16 * q);
    transpose_words(m);
    for (int half = 0; half < 2; ++half) {
        transpose_bytes(m[2 * half], m[2 * half + 1]);
        const V8 even = (V8)zip_low((V64)m[2 * half], (V64)m[2 * half + 1]);
        const V8 odd = (V8)zip_high((V64)m[2 * half], (V64)m[2 * half + 1]);
        store(low + 16 * half, (even & 15) | (odd << 4));
        store(high + 16 * half, (even >> 4) | (odd & 0xf0));
    }
}

// Eight scales times 2^exponent; `bad` collects where one is not 0 and out of range (NaN and infinity are).
inline V16 scale_up(V16 scale, uint16_t exponent, V16& bad) {
    const V16 size = scale & 0x7fff, set = (V16)(size != 0);
    bad |= set & (V16)((V16)(size - kMinScale) >= (uint16_t)(kMaxScale - kMinScale));
    return scale + (set & exponent);
}

inline uint16_t scale_down(uint16_t scale, uint16_t exponent) { return scale & 0x7fff ? scale - exponent : scale; }

bool any(const void* vector) {
    uint64_t half[2];
    std::memcpy(half, vector, sizeof half);
    return half[0] | half[1];
}

// Rows of a source weight, strides in bytes.
template <class Byte>
struct Rows {
    Byte* words;
    Byte* scale;
    int64_t words_stride, scale_stride;

    Rows from(int64_t row) const { return {words_of(row), scale_of(row), words_stride, scale_stride}; }
    Byte* words_of(int64_t row) const { return words + row * words_stride; }
    Byte* scale_of(int64_t row) const { return scale + row * scale_stride; }
};

constexpr int64_t kStep = 2 * kBlockBytes;  // from a block to the next along K
constexpr int64_t kAhead = 512, kLongRow = 2048;  // bytes: fetch so far ahead in a long row, in the next group else
constexpr int64_t kUnpackAhead = 4;         // blocks between what is fetched and what is used
constexpr int64_t kStreamBytes = 4 << 20;   // a packed weight that stays in no cache until it is read again
constexpr int64_t kPairs = 8;               // row pairs of a group: 16 packed rows, 64 bytes of scales a block

// Where the codes of a group start, in the first block of its strip; its scales follow kCodeBytes - 448·w later.
inline int64_t codes_of(int64_t group, int64_t blocks_k) {
    return (group / 8 * blocks_k * 2 + group / 4 % 2) * kBlockBytes + 512 * (group % 4);
}
inline int64_t scales_of(int64_t group, int64_t blocks_k) {
    return (group / 8 * blocks_k * 2 + group / 4 % 2) * kBlockBytes + kCodeBytes + 64 * (group % 4);
}

// Scales of a group's eight row pairs in `count` (1 to 4) blocks, each a line: pair r at byte 8r, in it the low and the
// high row of the first 32 columns, then of the second.
template <bool stream>
inline void pack_scales(Rows<const uint8_t> low, Rows<const uint8_t> high, int64_t from, int count, uint8_t* out,
                        V16& bad) {
    V64 pairs[kPairs][2];
    for (int r = 0; r < kPairs; ++r) {
        V16 a{}, b{};
        std::memcpy(&a, low.scale_of(r) + from, 4 * count);
        std::memcpy(&b, high.scale_of(r) + from, 4 * count);
        a = scale_up(a, kLowExp, bad);
        b = scale_up(b, kHighExp, bad);
        pairs[r][0] = (V64)zip_low(a, b);
        pairs[r][1] = (V64)zip_high(a, b);
    }
    for (int block = 0; block < count; ++block) {
        V8 line[4];
        for (int i = 0; i < 4; ++i) {
            const V64 a = pairs[2 * i][block / 2], b = pairs[2 * i + 1][block / 2];
            line[i] = (V8)(block % 2 ? zip_high(a, b) : zip_low(a, b));
        }
        store_line<stream>(out + kStep * block, line);
    }
}

struct Found {
    bool zero_code, bad_scale;
};

// `low` and `high` start at the rows of the first low and high nibbles, and go on `rows` rows a group.
template <bool stream>
Found pack(Rows<const uint8_t> low, Rows<const uint8_t> high, int64_t rows, int64_t n, int64_t k, uint8_t* out) {
    const int64_t blocks_k = k / kBlockK, ahead = k / 2 >= kLongRow ? kAhead : rows * low.words_stride;
    V8 zero{};
    V16 bad{};
    for (int64_t group = 0; group < n / 16; ++group) {
        const Rows<const uint8_t> a = low.from(group * rows), b = high.from(group * rows);
        uint8_t* codes = out + codes_of(group, blocks_k);
        for (int64_t r = 0; r < kPairs; ++r) {
            const uint8_t *from_a = a.words_of(r), *from_b = b.words_of(r);
            for (int64_t block = 0; block < blocks_k; ++block) {
                __builtin_prefetch(from_a + 32 * block + ahead);
                __builtin_prefetch(from_b + 32 * block + ahead);
                pack_codes<stream>(from_a + 32 * block, from_b + 32 * block, codes + kStep * block + 64 * r, zero);
            }
        }
        uint8_t* scales = out + scales_of(group, blocks_k);
        int64_t block = 0;
        for (; block + 4 <= blocks_k; block += 4) pack_scales<stream>(a, b, 4 * block, 4, scales + kStep * block, bad);
        if (block < blocks_k) pack_scales<stream>(a, b, 4 * block, blocks_k - block, scales + kStep * block, bad);
    }
#if defined(__SSE2__)
    if (stream) _mm_sfence();
#endif
    return {any(&zero), any(&bad)};
}

void unpack(const uint8_t* in, Rows<uint8_t> low, Rows<uint8_t> high, int64_t rows, int64_t n, int64_t k) {
    const int64_t blocks_k = k / kBlockK;
    for (int64_t group = 0; group < n / 16; ++group) {
        const Rows<uint8_t> a = low.from(group * rows), b = high.from(group * rows);
        const uint8_t *codes = in + codes_of(group, blocks_k), *scales = in + scales_of(group, blocks_k);
        for (int64_t block = 0; block < blocks_k; ++block, codes += kStep, scales += kStep) {
            __builtin_prefetch(scales + kUnpackAhead * kStep);
            for (int64_t r = 0; r < kPairs; ++r) {
                __builtin_prefetch(codes + kUnpackAhead * kStep + 64 * r);
                unpack_codes(codes + 64 * r, a.words_of(r) + 32 * block, b.words_of(r) + 32 * block);
                uint16_t pair[4];
                std::memcpy(pair, scales + 8 * r, sizeof pair);
                const uint16_t low_scale[2] = {scale_down(pair[0], kLowExp), scale_down(pair[2], kLowExp)};
                const uint16_t high_scale[2] = {scale_down(pair[1], kHighExp), scale_down(pair[3], kHighExp)};
                std::memcpy(a.scale_of(r) + 4 * block, low_scale, 4);
                std::memcpy(b.scale_of(r) + 4 * block, high_scale, 4);
            }
        }
    }
}

// Index of the first scale out of range in [rows, k/32], -1 if there is none.
int64_t first_bad(Rows<const uint8_t> from, int64_t rows, int64_t k) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t group = 0; group < k / kGroup; ++group) {
            uint16_t scale;
            std::memcpy(&scale, from.scale_of(row) + 2 * group, sizeof scale);
            scale &= 0x7fff;
            if (scale && (scale < kMinScale || scale >= kMaxScale)) return row * (k / kGroup) + group;
        }
    return -1;
}

template <class Byte>
Rows<Byte> rows_at(void* words, void* scale, int64_t words_stride, int64_t scale_stride) {
    return {(Byte*)words, (Byte*)scale, words_stride, scale_stride};
}

}  // namespace

// The interface of chord_runtime/format/native.py, which checks shapes. A source weight is `rows` rows of k/2 bytes of
// words and k/16 bytes of scales, strides in bytes. `up` is null, or a second weight: the first is then gate, and 8
// rows of each alternate in the packed one.

// Packs, sets `zero_code` if a code is 0, and returns the index of the first scale out of range, of [rows, k/32] scales
// of the first weight and then of the second; -1 if all are good.
extern "C" int64_t chord_pack(uint8_t* out, void* words, void* scale, void* up_words, void* up_scale, int64_t rows,
                              int64_t k, int64_t words_stride, int64_t scale_stride, int32_t* zero_code) {
    const auto first = rows_at<const uint8_t>(words, scale, words_stride, scale_stride);
    const auto second =
        up_words ? rows_at<const uint8_t>(up_words, up_scale, words_stride, scale_stride) : first.from(8);
    const int64_t n = up_words ? 2 * rows : rows, step = up_words ? 8 : 16;
    const bool stream = n * k / 4096 * kBlockBytes >= kStreamBytes && (uintptr_t)out % 64 == 0;
    const Found found = (stream ? pack<true> : pack<false>)(first, second, step, n, k, out);
    *zero_code = found.zero_code;
    if (!found.bad_scale) return -1;
    const int64_t bad = first_bad(first, rows, k);
    return bad >= 0 ? bad : rows * (k / kGroup) + first_bad(second, rows, k);
}

extern "C" void chord_unpack(const uint8_t* packed, void* words, void* scale, void* up_words, void* up_scale,
                             int64_t rows, int64_t k, int64_t words_stride, int64_t scale_stride) {
    const auto first = rows_at<uint8_t>(words, scale, words_stride, scale_stride);
    const auto second = up_words ? rows_at<uint8_t>(up_words, up_scale, words_stride, scale_stride) : first.from(8);
    unpack(packed, first, second, up_words ? 8 : 16, up_words ? 2 * rows : rows, k);
}
