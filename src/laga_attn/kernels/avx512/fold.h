// Gradients of one head's keys and values folded into those of the latents and of the weight, a block of keys at a time.
//
// With `up` = [dk_nope, dv] of the block: d_c_kv += up W, d_k_rope += dk_rope, dW += up^T c_kv. `up` is rounded to the
// input dtype like any matrix that meets another; sums are float32.

#pragma once

#include "problem.h"

namespace {

template <class T>
class Fold {
  public:
    Fold(const Problem& p, i64 most_rows, Arena& arena) : p(p), room(most_rows) {
        if (!p.rank) return;
        width = p.nope_width + p.v_width, width_room = round_up(width, 16), rank_room = round_up(p.rank, PANEL);
        up = arena.take<T>(room * width_room);
        latents = arena.take<T>(room * p.rank);
        weight_rows = arena.take<word>(rank_room * words_of(width));
        up_columns = arena.take<word>(width * words_of(room));
        latent_rows = arena.take<word>(rank_room * words_of(room));
        product = arena.take<float>(room * PANEL);
        d_weight = arena.take<float>(width * rank_room);
    }

    // The weight of one head, whose gradient starts at 0.
    void load(const T* weight, i64 stride) {
        const i64 words = words_of(width);
        pack_rows(weight, stride, width, p.rank, words, weight_rows, words);
        std::fill_n(d_weight, width * rank_room, 0.0f);
    }

    // A block of keys: gradients, dk without the softmax scale, and what the weight's gradient needs of the latents.
    // Latents of keys that no span holds may be anything: `seen` tells.
    void take(i64 rows, const float* dk, i64 dk_room, const float* dv, i64 dv_room, const T* from, i64 stride,
              const char* seen) {
        for (i64 r = 0; r < rows; ++r) {
            T* to = up + r * width_room;
            std::memset(to, 0, width_room * sizeof(T));
            round_row(dk + r * dk_room, p.nope_width, p.scale, to);
            round_row(dv + r * dv_room, p.v_width, 1.0f, to + p.nope_width);
            copy_row(seen[r] ? from + r * stride : nullptr, p.rank, latents + r * p.rank);
        }
    }

    // Adds the block's share to the gradient of its latents.
    void add_to_latents(i64 rows, const float* dk, i64 dk_room, float* d_latents, i64 stride) {
        const i64 words = words_of(width);
        for (i64 c = 0; c < p.rank; c += PANEL) {
            multiply<T, false>(rows, up, width_room, weight_rows + c * words, words, product, PANEL);
            for (i64 r = 0; r < rows; ++r)
                add_row(product + r * PANEL, std::min(PANEL, p.rank - c), 1.0f, d_latents + r * stride + c);
        }
        for (i64 r = 0; r < rows; ++r)
            add_row(dk + r * dk_room + p.nope_width, p.qk_width - p.nope_width, p.scale,
                    d_latents + r * stride + p.rank);
    }

    // Adds the block's share to the gradient of the weight.
    void add_to_weight(i64 rows) {
        transpose(up, width_room, rows, width, up_columns, words_of(room));
        pack_rows(latents, p.rank, rows, p.rank, words_of(rows), latent_rows, words_of(room));
        for (i64 c = 0; c < p.rank; c += PANEL)
            multiply<T, true>(width, up_columns, room, latent_rows + c * words_of(room), words_of(rows), d_weight + c,
                              rank_room);
    }

    // Adds the weight's gradient, of all blocks since `load`.
    void finish_weight(float* to, i64 stride) const {
        for (i64 r = 0; r < width; ++r) add_row(d_weight + r * rank_room, p.rank, 1.0f, to + r * stride);
    }

  private:
    const Problem& p;
    i64 room, width = 0, width_room = 0, rank_room = 0;
    T *up = nullptr, *latents = nullptr;  // [room, width_room], [room, rank]
    word* weight_rows = nullptr;          // summed over: [panel of rank][words of width][64]
    word* up_columns = nullptr;           // transposed: [width][words of room]
    word* latent_rows = nullptr;          // keys summed over: [panel of rank][words of room][64]
    float* product = nullptr;             // [room, 64]
    float* d_weight = nullptr;            // [width, rank_room]

    static i64 words_of(i64 rows) { return ceil_div(rows, PER_WORD<T>); }

    static void round_row(const float* from, i64 count, float scale, T* to) {
        for (i64 x = 0; x < count; x += 16) {
            const __mmask16 mask = first_lanes(count - x);
            store(to + x, _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, from + x), _mm512_set1_ps(scale)), mask);
        }
    }

    static void add_row(const float* from, i64 count, float scale, float* to) {
        for (i64 x = 0; x < count; x += 16) {
            const __mmask16 mask = first_lanes(count - x);
            const __m512 y = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, from + x), _mm512_set1_ps(scale));
            store(to + x, _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, to + x)), mask);
        }
    }
};

}  // namespace
