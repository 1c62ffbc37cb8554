// Backward: blocks of keys by panels of queries, weights recomputed from LSE.

#pragma once

#include "fold.h"
#include "keys.h"

namespace {

// Keys whose gradients are summed in place, a multiple of the six rows that are multiplied at a time, and panels of
// queries between two additions to them: as many as leave the block's sums in the second-level cache.
constexpr i64 KEY_ROWS = 144, QUERY_PANELS = 4;
static_assert(KEY_ROWS % PER_WORD<bf16> == 0, "rows of bfloat16 are packed in pairs");

template <class T>
struct Backward {
    static constexpr i64 KEY_WORDS = KEY_ROWS / PER_WORD<T>;
    const Problem& p;
    KeySource<T> source;
    Fold<T> fold;
    i64 panels, qk_words, v_words, qk_panels, v_panels, qk_room, v_room, row_words;
    word *q_columns, *dout_columns;  // queries as columns: [panel of queries][words of width][64]
    word *q_rows, *dout_rows;        // queries summed over: [panel of width][words of queries][64]
    float *lse, *delta;              // [queries], lse in base 2
    float* dq;                       // [panel of queries][qk_width][64]
    word* keys;                      // transposed: [qk_width][words of KEY_ROWS]
    float *dk, *dv;                  // [KEY_ROWS, room]
    float *scores, *dweights;        // [KEY_ROWS, 64]
    T *weights, *dscores;            // [KEY_ROWS, QUERY_PANELS * 64]
    word* dscores_rows;              // keys summed over: [panel of queries][words of KEY_ROWS][64]
    char* end;                       // of the scratch that is used

    Backward(const Problem& p, Arena arena) : p(p), source(p, KEY_ROWS, arena), fold(p, KEY_ROWS, arena) {
        panels = ceil_div(p.q_rows, PANEL);
        qk_words = p.qk_width / PER_WORD<T>, v_words = p.v_width / PER_WORD<T>;
        qk_panels = ceil_div(p.qk_width, PANEL), v_panels = ceil_div(p.v_width, PANEL);
        qk_room = qk_panels * PANEL, v_room = v_panels * PANEL;
        row_words = panels * PANEL / PER_WORD<T>;
        q_columns = arena.take<word>(panels * qk_words * PANEL);
        dout_columns = arena.take<word>(panels * v_words * PANEL);
        q_rows = arena.take<word>(qk_panels * row_words * PANEL);
        dout_rows = arena.take<word>(v_panels * row_words * PANEL);
        lse = arena.take<float>(panels * PANEL);
        delta = arena.take<float>(panels * PANEL);
        dq = arena.take<float>(panels * p.qk_width * PANEL);
        keys = arena.take<word>(p.qk_width * KEY_WORDS);
        dk = arena.take<float>(KEY_ROWS * qk_room);
        dv = arena.take<float>(KEY_ROWS * v_room);
        scores = arena.take<float>(KEY_ROWS * PANEL);
        dweights = arena.take<float>(KEY_ROWS * PANEL);
        weights = arena.take<T>(KEY_ROWS * QUERY_PANELS * PANEL);
        dscores = arena.take<T>(KEY_ROWS * QUERY_PANELS * PANEL);
        dscores_rows = arena.take<word>(QUERY_PANELS * KEY_WORDS * PANEL);
        end = arena.next;
    }

    // Rows in no span may hold anything: they are packed as 0.
    void load(const T* q, i64 q_stride, const T* dout, i64 dout_stride, const float* lse_in, const float* delta_in) {
        const std::vector<char> used = seen_rows(p, panels * PANEL, &Span::q0, &Span::q_len);
        for (i64 r = 0; r < panels * PANEL; ++r) {
            lse[r] = used[r] ? lse_in[r] * LOG2E : 0.0f;
            delta[r] = used[r] ? delta_in[r] : 0.0f;
        }
        std::vector<T> q_copy(PANEL * p.qk_width), dout_copy(PANEL * p.v_width);
        for (i64 panel = 0; panel < panels; ++panel) {
            const i64 r = panel * PANEL;
            for (i64 i = 0; i < PANEL; ++i) {
                copy_row(used[r + i] ? q + (r + i) * q_stride : nullptr, p.qk_width, &q_copy[i * p.qk_width]);
                copy_row(used[r + i] ? dout + (r + i) * dout_stride : nullptr, p.v_width, &dout_copy[i * p.v_width]);
            }
            const i64 words = PANEL / PER_WORD<T>;
            pack_columns(q_copy.data(), p.qk_width, PANEL, qk_words, q_columns + r * qk_words);
            pack_columns(dout_copy.data(), p.v_width, PANEL, v_words, dout_columns + r * v_words);
            pack_rows(q_copy.data(), p.qk_width, PANEL, p.qk_width, words, q_rows + panel * words * PANEL, row_words);
            pack_rows(dout_copy.data(), p.v_width, PANEL, p.v_width, words, dout_rows + panel * words * PANEL,
                      row_words);
        }
        std::fill_n(dq, panels * p.qk_width * PANEL, 0.0f);
    }

    // Gradients of the keys k0.. of the call, `rows` of them, into dk and dv; adds to dq. `source` is loaded.
    void key_block(i64 k0, i64 rows) {
        const Keys<T> block = source.rows(k0, rows);
        std::fill_n(dk, rows * qk_room, 0.0f);
        std::fill_n(dv, rows * v_room, 0.0f);
        for (i64 i = 0; i < p.span_count; ++i) {
            const Span s(p, i);
            const i64 begin = std::max(k0, s.k0), end = std::min(k0 + rows, s.k0 + s.k_len);
            if (begin >= end) continue;
            const i64 first = s.q0 + s.first_query(begin - s.k0), last = s.q0 + s.end_query(end - 1 - s.k0);
            if (first >= last) continue;
            const i64 row = begin - k0;
            transpose(block.k + row * block.k_stride, block.k_stride, end - begin, p.qk_width, keys, KEY_WORDS);
            const Block whole{block.at(row), keys, begin - s.k0, row, end - begin};
            for (i64 panel = first / PANEL, count; panel * PANEL < last; panel += count) {
                // As many panels at once as see all keys; one that does not, by the keys that it sees.
                const Block seen = seen_by(s, whole, panel);
                for (count = 1; seen.rows == whole.rows && count < QUERY_PANELS; ++count)
                    if (seen_by(s, whole, panel + count).rows < whole.rows) break;
                if (seen.rows > 0) block_by_panels(s, seen, panel, count);
            }
        }
    }

    // Keys of one span: rows, the same transposed, and where the first of them is in the span, and in dk and dv.
    struct Block {
        Keys<T> source;
        const word* columns;
        i64 key, row, rows;
    };

    // Those keys of a block that a panel of queries sees any of.
    Block seen_by(const Span& s, const Block& block, i64 panel) const {
        const i64 first = std::max<i64>(panel * PANEL - s.q0, 0);
        const i64 last = std::min((panel + 1) * PANEL - s.q0, s.q_len) - 1;
        const i64 from = std::max<i64>(s.first_key(first) - block.key, 0) / PER_WORD<T> * PER_WORD<T>;
        const i64 to = last < first ? 0 : std::min(s.end_key(last) - block.key, block.rows);
        return {block.source.at(from), block.columns + from / PER_WORD<T>, block.key + from, block.row + from,
                to - from};
    }

    void block_by_panels(const Span& s, const Block& block, i64 panel, i64 count) {
        const Keys<T>& seen = block.source;
        const i64 rows = block.rows;
        for (i64 x = 0; x < count; ++x) {
            const i64 r = (panel + x) * PANEL;
            multiply<T, false>(rows, seen.k, seen.k_stride, q_columns + r * qk_words, qk_words, scores, PANEL);
            multiply<T, false>(rows, seen.v, seen.v_stride, dout_columns + r * v_words, v_words, dweights, PANEL);
            for (i64 i = 0; i < rows; i += PER_WORD<T>) differentiate(s, block.key + i, i, rows, r, x);
            multiply<T, true>(p.qk_width, block.columns, KEY_ROWS, dscores_rows + x * KEY_WORDS * PANEL,
                              ceil_div(rows, PER_WORD<T>), dq + r * p.qk_width, PANEL);
        }
        const i64 words = count * PANEL / PER_WORD<T>, start = panel * PANEL / PER_WORD<T>;
        for (i64 x = 0; x < v_panels; ++x)
            multiply<T, true>(rows, weights, QUERY_PANELS * PANEL, dout_rows + (x * row_words + start) * PANEL, words,
                              dv + block.row * v_room + x * PANEL, v_room);
        for (i64 x = 0; x < qk_panels; ++x)
            multiply<T, true>(rows, dscores, QUERY_PANELS * PANEL, q_rows + (x * row_words + start) * PANEL, words,
                              dk + block.row * qk_room + x * PANEL, qk_room);
    }

    // Weights and dS of the key(s) of one word, by the panel of queries at row r of the call.
    void differentiate(const Span& s, i64 key, i64 i, i64 rows, i64 r, i64 x) {
        const __m512 factor = _mm512_set1_ps(p.scale * LOG2E);
        word* out = dscores_rows + (x * KEY_WORDS + i / PER_WORD<T>) * PANEL;
        i64 begin[2] = {0, 0}, end[2] = {0, 0};
        for (i64 e = 0; e < PER_WORD<T> && i + e < rows; ++e) {
            begin[e] = s.q0 + s.first_query(key + e) - r;
            end[e] = s.q0 + s.end_query(key + e) - r;
        }
        for (i64 c = 0; c < PANEL; c += 16) {
            const __m512 l = _mm512_loadu_ps(lse + r + c), d = _mm512_loadu_ps(delta + r + c);
            __m512 ds[2];
            for (i64 e = 0; e < PER_WORD<T>; ++e) {
                const __mmask16 mask = first_lanes(end[e] - c) & ~first_lanes(begin[e] - c);
                const i64 from = (i + e) * PANEL + c, to = (i + e) * QUERY_PANELS * PANEL + x * PANEL + c;
                const __m512 y = exp2<T>(_mm512_fmsub_ps(_mm512_loadu_ps(scores + from), factor, l));
                const __m512 w = _mm512_maskz_mov_ps(mask, y);
                ds[e] = _mm512_maskz_mul_ps(mask, y, _mm512_sub_ps(_mm512_loadu_ps(dweights + from), d));
                store(weights + to, w, 0xffff);
                store(dscores + to, ds[e], 0xffff);
            }
            _mm512_storeu_si512(out + c, words_of(ds));
        }
    }

    static __m512i words_of(const __m512* x) {
        if constexpr (PER_WORD<T> == 1) return _mm512_castps_si512(x[0]);
        return interleave((__m256i)_mm512_cvtneps_pbh(x[0]), (__m256i)_mm512_cvtneps_pbh(x[1]));
    }

    void finish_dq(T* to, i64 stride) {
        const __m512i offsets = lane_offsets(PANEL);
        const __m512 scale = _mm512_set1_ps(p.scale), zero = _mm512_setzero_ps();
        for (i64 r = 0; r < p.q_rows; ++r) {
            const float* from = dq + r / PANEL * PANEL * p.qk_width + r % PANEL;
            for (i64 x = 0; x < p.qk_width; x += 16) {
                const __mmask16 mask = first_lanes(p.qk_width - x);
                const __m512 y = _mm512_mask_i32gather_ps(zero, mask, offsets, from + x * PANEL, 4);
                store(to + r * stride + x, _mm512_mul_ps(y, scale), mask);
            }
        }
    }

    // Rows of dk or dv into the result; `add` sums over the heads that share a key/value head.
    template <class U>
    static void finish_rows(const float* from, i64 room, i64 rows, i64 width, float scale, bool add, U* to, i64 stride) {
        for (i64 r = 0; r < rows; ++r)
            for (i64 x = 0; x < width; x += 16) {
                const __mmask16 mask = first_lanes(width - x);
                __m512 y = _mm512_mul_ps(_mm512_loadu_ps(from + r * room + x), _mm512_set1_ps(scale));
                if constexpr (sizeof(U) == 4)
                    if (add) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, to + r * stride + x));
                store(to + r * stride + x, y, mask);
            }
    }
};

// One pass over the keys of a call: gradients of `q` of head `h`; `sink(k0, rows)` takes those of each block of keys.
template <class T, class Sink>
void over_keys(Backward<T>& f, const Rows& dout, const float* delta, const Rows& q, const float* lse, const Rows& dq,
               i64 b, i64 h, Sink sink) {
    const Problem& p = f.p;
    const i64 statistics = (b * p.heads + h) * p.q_rows;
    f.load(at<T>(q, b, h), q.row, at<T>(dout, b, h), dout.row, lse + statistics, delta + statistics);
    for (i64 k0 = 0; k0 < p.k_rows; k0 += KEY_ROWS) {
        const i64 rows = std::min(KEY_ROWS, p.k_rows - k0);
        f.key_block(k0, rows);
        sink(k0, rows);
    }
    f.finish_dq(mutable_at<T>(dq, b, h), dq.row);
}

template <class T, class U>  // U: of dk and dv
void backward(const Problem& p, const Rows& dout, const float* delta, const Rows& q, const Rows& k, const Rows& v,
              const float* lse, const Rows& dq, const Rows& dk, const Rows& dv) {
    const i64 bytes = scratch_bytes<Backward<T>>(p);
    in_parallel(p.batch * p.kv_heads, p.threads, [&](i64 item, i64 thread) {
        const i64 b = item / p.kv_heads, g = item % p.kv_heads;
        Backward<T> f(p, Arena{p.scratch + thread * bytes});
        f.source.load(at<T>(k, b, g), k.row, at<T>(v, b, g), v.row);
        for (i64 h = g; h < p.heads; h += p.kv_heads)
            over_keys(f, dout, delta, q, lse, dq, b, h, [&](i64 k0, i64 rows) {
                f.finish_rows(f.dk, f.qk_room, rows, p.qk_width, p.scale, h > g, mutable_at<U>(dk, b, g) + k0 * dk.row,
                              dk.row);
                f.finish_rows(f.dv, f.v_room, rows, p.v_width, 1.0f, h > g, mutable_at<U>(dv, b, g) + k0 * dv.row,
                              dv.row);
            });
    });
}

// Adds to `d_latents` and `d_weight`, float32; one without data is left out.
template <class T>
void backward_from_latent(const Problem& p, const Rows& dout, const float* delta, const Rows& q, const Rows& latents,
                          const Rows& weight, const float* lse, const Rows& dq, const Rows& d_latents,
                          const Rows& d_weight) {
    const i64 bytes = scratch_bytes<Backward<T>>(p), blocks = ceil_div(p.k_rows, KEY_ROWS);
    const std::vector<char> seen = seen_rows(p, p.k_rows, &Span::k0, &Span::k_len);
    Turns at_block(p.batch * blocks), at_head(p.heads);
    in_parallel(p.batch * p.heads, p.threads, [&](i64 item, i64 thread) {
        const i64 b = item / p.heads, h = item % p.heads;
        const T *latent = at<T>(latents, b, 0), *own_weight = at<T>(weight, 0, h);
        Backward<T> f(p, Arena{p.scratch + thread * bytes});
        f.source.load(latent, latents.row, own_weight, weight.row);
        f.fold.load(own_weight, weight.row);
        over_keys(f, dout, delta, q, lse, dq, b, h, [&](i64 k0, i64 rows) {
            f.fold.take(rows, f.dk, f.qk_room, f.dv, f.v_room, latent + k0 * latents.row, latents.row, &seen[k0]);
            if (d_weight.data) f.fold.add_to_weight(rows);
            if (!d_latents.data) return;
            const i64 block = b * blocks + k0 / KEY_ROWS;
            at_block.wait(block, h);
            f.fold.add_to_latents(rows, f.dk, f.qk_room, mutable_at<float>(d_latents, b, 0) + k0 * d_latents.row,
                                  d_latents.row);
            at_block.pass(block);
        });
        if (!d_weight.data) return;
        at_head.wait(h, b);
        f.fold.finish_weight(mutable_at<float>(d_weight, 0, h), d_weight.row);
        at_head.pass(h);
    });
}

}  // namespace
