// Panels: packed matrices, and the one matrix product that all of attention is made of, C[M, 64] += A[M, K] B[K, 64],
// with 24 registers of C.
//
// A *word* is 32 bits: one float32, or two bfloat16 that are neighbours along the summed dim, which is what
// VDPBF16PS multiplies and adds. A *panel* is 64 columns of B, stored word by word: [words][64].

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace {

using i64 = std::int64_t;
using word = std::uint32_t;
struct bf16 {
    std::uint16_t bits;
};

constexpr i64 PANEL = 64;
template <class T>
constexpr i64 PER_WORD = sizeof(word) / sizeof(T);

constexpr i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
constexpr i64 round_up(i64 a, i64 b) { return ceil_div(a, b) * b; }

// ---- elements ------------------------------------------------------------------------------------------------

inline void store(float* to, __m512 x, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, x); }
inline void store(bf16* to, __m512 x, __mmask16 mask) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(x));
}

inline __mmask16 first_lanes(i64 n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : __mmask16((1u << n) - 1); }

inline __m512i lane_offsets(i64 stride) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_mullo_epi32(lanes, _mm512_set1_epi32(int(stride)));
}

// 2^x for x up to 126, at least 2^-126 (of float32 2^-151); NaN stays NaN. The error is 1.6e-7, and 2.9e-6 for what is to
// be rounded to bfloat16: on [-1/2, 1/2] these are the polynomials of least relative error among those that are 1 at 0.
template <class T>
inline __m512 exp2(__m512 x) {
    constexpr bool half = PER_WORD<T> == 2;
    x = _mm512_max_ps(_mm512_set1_ps(half ? -126.0f : -151.0f), x);  // in this order NaN passes
    // Floats as large as 1.5 * 2^23 have no fraction: the sum is rounded, its last bits are the whole number.
    const __m512 magic = _mm512_set1_ps(0x1.8p23f), sum = _mm512_add_ps(x, magic), whole = _mm512_sub_ps(sum, magic);
    const __m512 f = _mm512_sub_ps(x, whole);
    auto polynomial = [f](float first, std::initializer_list<float> others) {
        __m512 y = _mm512_set1_ps(first);
        for (float c : others) y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
        return y;
    };
    if constexpr (half) {
        const __m512 y = polynomial(9.582853169e-3f, {5.590642504e-2f, 2.402409861e-1f, 6.931241934e-1f, 1.0f});
        // Faster than scalef, but the last bits of a NaN would get into its exponent: NaNs of bfloat16 have none.
        const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(sum), 23);
        return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), exponent));
    }
    return _mm512_scalef_ps(
        polynomial(1.326472725e-3f, {9.671512688e-3f, 5.550733744e-2f, 2.402224208e-1f, 6.931469776e-1f, 1.0f}), whole);
}

// A row of `count` elements; zeros where there is none.
template <class T>
void copy_row(const T* from, i64 count, T* to) {
    if (from)
        std::memcpy(to, from, count * sizeof(T));
    else
        std::memset(to, 0, count * sizeof(T));
}

// ---- packing -------------------------------------------------------------------------------------------------

// Rows as columns of a panel: to[w][n] = word w of row n, 0 for rows from `rows` on.
template <class T>
void pack_columns(const T* from, i64 stride, i64 rows, i64 words, word* to) {
    const __m512i offsets = lane_offsets(stride * i64(sizeof(T)));
    for (i64 n = 0; n < PANEL; n += 16) {
        const __mmask16 mask = first_lanes(rows - n);
        const char* base = reinterpret_cast<const char*>(from + n * stride);
        for (i64 w = 0; w < words; ++w) {
            const __m512i x = mask ? _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), mask, offsets, base + 4 * w, 1)
                                   : _mm512_setzero_si512();
            _mm512_storeu_si512(to + w * PANEL + n, x);
        }
    }
}

// 16 columns of row (pair) `w` as words; elements outside `rows` or `columns` are 0.
inline __m512i load_words(const float* from, i64 stride, i64 w, i64 rows, __mmask16 columns) {
    return w < rows ? _mm512_castps_si512(_mm512_maskz_loadu_ps(columns, from + w * stride)) : _mm512_setzero_si512();
}
inline __m512i interleave(__m256i even, __m256i odd) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}
inline __m512i load_words(const bf16* from, i64 stride, i64 w, i64 rows, __mmask16 columns) {
    const bf16* row = from + 2 * w * stride;
    const __m256i zero = _mm256_setzero_si256();
    return interleave(2 * w < rows ? _mm256_maskz_loadu_epi16(columns, row) : zero,
                      2 * w + 1 < rows ? _mm256_maskz_loadu_epi16(columns, row + stride) : zero);
}

// Rows summed over, in panels of columns: panel p, word w, column n = word of rows at column 64 p + n.
// `panel_words` words lie between panels; words of rows from `rows` on, up to `words`, are 0.
template <class T>
void pack_rows(const T* from, i64 stride, i64 rows, i64 width, i64 words, word* to, i64 panel_words) {
    for (i64 p = 0; p * PANEL < width; ++p)
        for (i64 w = 0; w < words; ++w)
            for (i64 n = 0; n < PANEL; n += 16) {
                const i64 column = p * PANEL + n;
                const __mmask16 mask = first_lanes(width - column);
                const __m512i x = mask ? load_words(from + column, stride, w, rows, mask) : _mm512_setzero_si512();
                _mm512_storeu_si512(to + (p * panel_words + w) * PANEL + n, x);
            }
}

// The transpose as rows of A: to[d][w] = word of rows at column d.
template <class T>
void transpose(const T* from, i64 stride, i64 rows, i64 width, word* to, i64 to_stride) {
    alignas(64) word column[16];
    for (i64 w = 0; w * PER_WORD<T> < rows; ++w)
        for (i64 d = 0; d < width; d += 16) {
            const __mmask16 mask = first_lanes(width - d);
            _mm512_store_si512(column, load_words(from + d, stride, w, rows, mask));
            for (i64 i = 0; i < std::min<i64>(16, width - d); ++i) to[(d + i) * to_stride + w] = column[i];
        }
}

// ---- the matrix product --------------------------------------------------------------------------------------

template <class T>
inline __m512 multiply_add(__m512 sum, __m512i a, __m512i b);
template <>
inline __m512 multiply_add<float>(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}
template <>
inline __m512 multiply_add<bf16>(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

template <class T, int M, bool ADD>
inline void multiply_rows(const char* a, i64 a_bytes, const word* b, i64 words, float* c, i64 c_stride) {
    __m512 sum[M][4];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            sum[m][j] = _mm512_setzero_ps();
            if (ADD) _mm_prefetch(reinterpret_cast<const char*>(c + m * c_stride + 16 * j), _MM_HINT_T0);
        }
    for (i64 w = 0; w < words; ++w, b += PANEL, a += 4) {
        __m512i column[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) column[j] = _mm512_loadu_si512(b + 16 * j);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            int x;
            std::memcpy(&x, a + m * a_bytes, 4);
            const __m512i row = _mm512_set1_epi32(x);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) sum[m][j] = multiply_add<T>(sum[m][j], row, column[j]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            float* to = c + m * c_stride + 16 * j;
            // Added last: what is small meets what is large once, not word by word.
            _mm512_storeu_ps(to, ADD ? _mm512_add_ps(_mm512_loadu_ps(to), sum[m][j]) : sum[m][j]);
        }
}

// C[rows, 64] = A B, or C += A B. A has rows of words, `a_stride` elements apart; B is a panel.
template <class T, bool ADD>
void multiply(i64 rows, const void* a, i64 a_stride, const word* b, i64 words, float* c, i64 c_stride) {
    const i64 a_bytes = a_stride * i64(sizeof(T));
    const char* row = static_cast<const char*>(a);
    i64 m = 0;
    for (; m + 6 <= rows; m += 6, row += 6 * a_bytes, c += 6 * c_stride)
        multiply_rows<T, 6, ADD>(row, a_bytes, b, words, c, c_stride);
    switch (rows - m) {
        case 5: multiply_rows<T, 5, ADD>(row, a_bytes, b, words, c, c_stride); break;
        case 4: multiply_rows<T, 4, ADD>(row, a_bytes, b, words, c, c_stride); break;
        case 3: multiply_rows<T, 3, ADD>(row, a_bytes, b, words, c, c_stride); break;
        case 2: multiply_rows<T, 2, ADD>(row, a_bytes, b, words, c, c_stride); break;
        case 1: multiply_rows<T, 1, ADD>(row, a_bytes, b, words, c, c_stride); break;
    }
}

}  // namespace
