// Forward: online softmax (https://arxiv.org/abs/2205.14135), blocks of queries by chunks of packed keys.

#pragma once

#include <cmath>
#include <limits>

#include "keys.h"

namespace {

// Queries that are scored together, keys between two updates of their maxima, and keys that are packed at once.
constexpr i64 QUERIES = 96, KEYS = 512, PACKED_KEYS = 2048;
constexpr float INF = std::numeric_limits<float>::infinity();

template <class T>
struct Forward {
    const Problem& p;
    KeySource<T> source;
    i64 qk_words, v_panels, v_room;
    word *keys, *values;     // one chunk, packed
    float *scores, *out;     // [QUERIES, KEYS], [q_rows, v_room]
    T* weights;              // [QUERIES, KEYS]
    float *top, *total;      // [q_rows], base 2
    char* end;               // of the scratch that is used

    Forward(const Problem& p, Arena arena) : p(p), source(p, PANEL, arena) {
        const i64 packed = std::min(PACKED_KEYS, round_up(p.k_rows, PANEL));
        qk_words = p.qk_width / PER_WORD<T>;
        v_panels = ceil_div(p.v_width, PANEL), v_room = v_panels * PANEL;
        keys = arena.take<word>(packed * qk_words);
        values = arena.take<word>(packed / PER_WORD<T> * v_room);
        scores = arena.take<float>(QUERIES * KEYS);
        weights = arena.take<T>(QUERIES * KEYS);
        out = arena.take<float>(p.q_rows * v_room);
        top = arena.take<float>(p.q_rows);
        total = arena.take<float>(p.q_rows);
        end = arena.next;
    }

    // One head; `source` is loaded.
    void head(const T* q, i64 q_stride) {
        std::fill_n(out, p.q_rows * v_room, 0.0f);
        std::fill_n(top, p.q_rows, -INF);
        std::fill_n(total, p.q_rows, 0.0f);
        for (i64 i = 0; i < p.span_count; ++i) {
            const Span s(p, i);
            for (i64 j = 0; j < s.k_len; j += PACKED_KEYS) {
                const i64 n = std::min(PACKED_KEYS, s.k_len - j), value_words = round_up(n, PANEL) / PER_WORD<T>;
                for (i64 c = 0; c < n; c += PANEL) {
                    const i64 count = std::min(PANEL, n - c);
                    const Keys<T> rows = source.rows(s.k0 + j + c, count);
                    pack_columns(rows.k, rows.k_stride, count, qk_words, keys + c * qk_words);
                    pack_rows(rows.v, rows.v_stride, count, p.v_width, PANEL / PER_WORD<T>,
                              values + c / PER_WORD<T> * PANEL, value_words);
                }
                for (i64 r = s.first_query(j); r < s.end_query(j + n - 1); r += QUERIES)
                    rows_by_chunk(s, r, std::min(QUERIES, s.end_query(j + n - 1) - r), j, n, q, q_stride);
            }
        }
    }

    // Queries r.. of the span by its keys j.. that are packed.
    void rows_by_chunk(const Span& s, i64 r, i64 rows, i64 j, i64 n, const T* q, i64 q_stride) {
        const i64 begin = std::max(s.first_key(r) - j, i64(0)) / PANEL * PANEL;
        const i64 end = std::min(s.end_key(r + rows - 1) - j, n);
        const i64 value_words = round_up(n, PANEL) / PER_WORD<T>;
        const T* queries = q + (s.q0 + r) * q_stride;
        float* o = out + (s.q0 + r) * v_room;
        for (i64 c = begin; c < end; c += KEYS) {
            const i64 width = round_up(std::min(KEYS, end - c), PANEL);
            for (i64 x = 0; x < width; x += PANEL)
                multiply<T, false>(rows, queries, q_stride, keys + (c + x) * qk_words, qk_words, scores + x, KEYS);
            for (i64 i = 0; i < rows; ++i)
                softmax(i, s.q0 + r + i, std::clamp<i64>(s.first_key(r + i) - j - c, 0, width),
                        std::clamp<i64>(std::min(s.end_key(r + i) - j, n) - c, 0, width), width);
            for (i64 x = 0; x < v_panels; ++x)
                multiply<T, true>(rows, weights, KEYS, values + (x * value_words + c / PER_WORD<T>) * PANEL,
                                  width / PER_WORD<T>, o + x * PANEL, v_room);
        }
    }

    // Weights of one row, of whose scores those in [begin, end) are visible; others become 0.
    void softmax(i64 i, i64 query, i64 begin, i64 end, i64 width) {
        const float* s = scores + i * KEYS;
        T* w = weights + i * KEYS;
        const float factor = p.scale * LOG2E;
        const __m512 f = _mm512_set1_ps(factor);
        const i64 first = begin / 16 * 16;
        auto visible = [&](i64 x) { return __mmask16(first_lanes(end - x) & ~first_lanes(begin - x)); };
        __m512 largest = _mm512_set1_ps(-INF);
        for (i64 x = first; x < end; x += 16) {
            const __mmask16 mask = visible(x);
            largest = _mm512_mask_max_ps(largest, mask, largest, _mm512_mul_ps(_mm512_loadu_ps(s + x), f));
        }
        const float before = top[query], now = std::max(before, _mm512_reduce_max_ps(largest));
        const __m512 shift = _mm512_set1_ps(now == -INF ? 0.0f : now);
        __m512 sum = _mm512_setzero_ps();
        for (i64 x = 0; x < width; x += 16) {
            const __mmask16 mask = x < first || x >= end ? 0 : visible(x);
            __m512 y = _mm512_setzero_ps();
            if (mask) y = _mm512_maskz_mov_ps(mask, exp2(_mm512_fmsub_ps(_mm512_loadu_ps(s + x), f, shift)));
            sum = _mm512_add_ps(sum, y);
            store(w + x, y, 0xffff);
        }
        const float keep = before == now ? 1.0f : std::exp2(before - now);
        if (keep != 1.0f) {
            float* o = out + query * v_room;
            for (i64 x = 0; x < v_room; x += 16)
                _mm512_storeu_ps(o + x, _mm512_mul_ps(_mm512_loadu_ps(o + x), _mm512_set1_ps(keep)));
        }
        total[query] = total[query] * keep + _mm512_reduce_add_ps(sum);
        top[query] = now;
    }

    void finish(T* to, i64 stride, float* lse) {
        for (i64 r = 0; r < p.q_rows; ++r) {
            const bool seen = total[r] != 0.0f;
            const __m512 factor = _mm512_set1_ps(seen ? 1.0f / total[r] : 0.0f);
            for (i64 x = 0; x < p.v_width; x += 16)
                store(to + r * stride + x, _mm512_mul_ps(_mm512_loadu_ps(out + r * v_room + x), factor),
                      first_lanes(p.v_width - x));
            lse[r] = seen ? (top[r] + std::log2(total[r])) * LN2 : -INF;
        }
    }
};

template <class T>
void forward(const Problem& p, const Rows& q, const Rows& k, const Rows& v, const Rows& out, float* lse) {
    const i64 bytes = Forward<T>(p, Arena{nullptr}).end - static_cast<char*>(nullptr);
    in_parallel(p.batch * p.heads, p.threads, [&](i64 item, i64 thread) {
        const i64 b = item / p.heads, h = item % p.heads, g = h % p.kv_heads;
        Forward<T> f(p, Arena{p.scratch + thread * bytes});
        f.source.load(at<T>(k, b, g), k.row, at<T>(v, b, g), v.row);
        f.head(at<T>(q, b, h), q.row);
        f.finish(mutable_at<T>(out, b, h), out.row, lse + item * p.q_rows);
    });
}

}  // namespace
