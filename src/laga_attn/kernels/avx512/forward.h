// Forward: online softmax (https://arxiv.org/abs/2205.14135), blocks of queries by chunks of packed keys.

#pragma once

#include <cmath>
#include <limits>

#include "keys.h"

namespace {

// Queries that are scored together, those that meet values together, and keys that are packed at once and scored before
// maxima are updated. Rows are multiplied six at a time; otherwise these sizes hardly matter.
constexpr i64 QUERIES = 96, TILE = 24, KEYS = 512;
constexpr float INF = std::numeric_limits<float>::infinity();

template <class T>
struct Forward {
    const Problem& p;
    KeySource<T> source;
    i64 key_room, qk_words, v_panels, v_room;
    word *keys;              // of one chunk: [panel of keys][words of width][64]
    word *values;            // of one chunk: [panel of width][words of keys][64]
    float *scores, *out;     // [QUERIES, key_room], [q_rows, v_room]
    T* weights;              // [QUERIES, key_room]
    float *top, *total;      // [q_rows], base 2
    char* end;               // of the scratch that is used

    Forward(const Problem& p, Arena arena) : p(p), source(p, PANEL, arena) {
        key_room = std::min(KEYS, round_up(p.k_rows, PANEL));
        const i64 query_room = std::min(QUERIES, p.q_rows);
        qk_words = p.qk_width / PER_WORD<T>;
        v_panels = ceil_div(p.v_width, PANEL), v_room = v_panels * PANEL;
        keys = arena.take<word>(key_room * qk_words);
        values = arena.take<word>(key_room / PER_WORD<T> * v_room);
        scores = arena.take<float>(query_room * key_room);
        weights = arena.take<T>(query_room * key_room);
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
            for (i64 j = 0; j < s.k_len; j += KEYS) {
                const i64 n = std::min(KEYS, s.k_len - j), end = s.end_query(j + n - 1);
                pack(s.k0 + j, n);
                for (i64 r = s.first_query(j); r < end; r += QUERIES)
                    block(s, r, std::min(QUERIES, end - r), j, n, q + (s.q0 + r) * q_stride, q_stride);
            }
        }
    }

    // `n` keys of the call from `first` on, the last panel filled up with zeros.
    void pack(i64 first, i64 n) {
        for (i64 c = 0; c < n; c += PANEL) {
            const i64 count = std::min(PANEL, n - c);
            const Keys<T> rows = source.rows(first + c, count);
            pack_columns(rows.k, rows.k_stride, count, qk_words, keys + c * qk_words);
            pack_rows(rows.v, rows.v_stride, count, p.v_width, PANEL / PER_WORD<T>,
                      values + c / PER_WORD<T> * PANEL, key_room / PER_WORD<T>);
        }
    }

    // Queries r.. of the span by its keys j.., which are packed. Scores are computed for the queries that see any key of
    // a panel. Softmax and values take the keys, by sixteens, that any of TILE queries sees: scores between the two were
    // never written, and are masked.
    void block(const Span& s, i64 r, i64 rows, i64 j, i64 n, const T* queries, i64 q_stride) {
        for (i64 x = 0; x < n; x += PANEL) {
            const i64 from = std::max<i64>(s.first_query(j + x) - r, 0);
            const i64 to = std::min(s.end_query(j + std::min(x + PANEL, n) - 1) - r, rows);
            if (from < to)
                multiply<T, false>(to - from, queries + from * q_stride, q_stride, keys + x * qk_words, qk_words,
                                   scores + from * key_room + x, key_room);
        }
        for (i64 t = 0; t < rows; t += TILE) {
            const i64 count = std::min(TILE, rows - t);
            const i64 begin = std::max<i64>(s.first_key(r + t) - j, 0) / 16 * 16;
            const i64 end = round_up(std::min(s.end_key(r + t + count - 1) - j, n), 16);
            if (begin >= end) continue;
            for (i64 i = t; i < t + count; ++i)
                softmax(i, s.q0 + r + i, std::clamp<i64>(s.first_key(r + i) - j, begin, end),
                        std::clamp<i64>(std::min(s.end_key(r + i) - j, n), begin, end), begin, end);
            for (i64 x = 0; x < v_panels; ++x)
                multiply<T, true>(count, weights + t * key_room + begin, key_room,
                                  values + (x * key_room + begin) / PER_WORD<T> * PANEL, (end - begin) / PER_WORD<T>,
                                  out + (s.q0 + r + t) * v_room + x * PANEL, v_room);
        }
    }

    // Weights of row `i` in columns [from, to), of which those in [begin, end) are visible; others become 0. `from` and
    // `to` are multiples of 16.
    void softmax(i64 i, i64 query, i64 begin, i64 end, i64 from, i64 to) {
        const float* s = scores + i * key_room;
        T* w = weights + i * key_room;
        const __m512 factor = _mm512_set1_ps(p.scale * LOG2E);
        // Between these all is visible.
        const i64 full = std::min(round_up(begin, 16), to), full_end = std::max(full, end / 16 * 16);
        auto visible = [&](i64 x) { return __mmask16(first_lanes(end - x) & ~first_lanes(begin - x)); };

        __m512 even = _mm512_set1_ps(-INF), odd = even;  // two chains, neither of which waits for the other
        auto score = [&](i64 x) { return _mm512_mul_ps(_mm512_loadu_ps(s + x), factor); };
        auto compare = [&](i64 x, __mmask16 mask) { even = _mm512_mask_max_ps(even, mask, even, score(x)); };
        for (i64 x = from; x < full; x += 16) compare(x, visible(x));
        i64 rest = full;
        for (; rest + 32 <= full_end; rest += 32) {
            even = _mm512_max_ps(even, score(rest));
            odd = _mm512_max_ps(odd, score(rest + 16));
        }
        for (i64 x = rest; x < to; x += 16) compare(x, visible(x));
        const float before = top[query], now = std::max(before, _mm512_reduce_max_ps(_mm512_max_ps(even, odd)));

        const __m512 shift = _mm512_set1_ps(now == -INF ? 0.0f : now);
        __m512 sum = _mm512_setzero_ps();
        auto weigh = [&](i64 x, __mmask16 mask) {
            const __m512 y = _mm512_maskz_mov_ps(mask, exp2<T>(_mm512_fmsub_ps(_mm512_loadu_ps(s + x), factor, shift)));
            sum = _mm512_add_ps(sum, y);
            store(w + x, y, 0xffff);
        };
        for (i64 x = from; x < full; x += 16) weigh(x, visible(x));
        for (i64 x = full; x < full_end; x += 16) weigh(x, 0xffff);
        for (i64 x = full_end; x < to; x += 16) weigh(x, visible(x));

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
    const i64 bytes = scratch_bytes<Forward<T>>(p);
    in_parallel(p.batch * p.heads, p.threads, [&](i64 item, i64 thread) {
        const i64 b = item / p.heads, h = item % p.heads, g = h % p.kv_heads;
        Forward<T> f(p, Arena{p.scratch + thread * bytes});
        f.source.load(at<T>(k, b, g), k.row, at<T>(v, b, g), v.row);
        f.head(at<T>(q, b, h), q.row);
        f.finish(mutable_at<T>(out, b, h), out.row, lse + item * p.q_rows);
    });
}

}  // namespace
