// Keys and values of one head: rows of two tensors, or rebuilt from latents a few rows at a time.
//
// A latent is [c_kv (rank), k_rope]. The head's weight has nope_width rows that make keys, and v_width that make values.
// What is rebuilt is rounded to the input dtype, as a matrix product that stores it would do.

#pragma once

#include "problem.h"

namespace {

template <class T>
struct Keys {
    const T *k, *v;
    i64 k_stride, v_stride;

    Keys at(i64 row) const { return {k + row * k_stride, v + row * v_stride, k_stride, v_stride}; }
};

template <class T>
class KeySource {
  public:
    KeySource(const Problem& p, i64 most_rows, Arena& arena) : p(p) {
        if (!p.rank) return;
        words = p.rank / PER_WORD<T>;
        v_weight = arena.take<word>(round_up(p.v_width, PANEL) * words);
        k_weight = arena.take<word>(round_up(p.nope_width, PANEL) * words);
        rebuilt = arena.take<T>(most_rows * (p.v_width + p.qk_width));
        product = arena.take<float>(most_rows * PANEL);
    }

    // Of one head: keys and values, or latents (heads have the same) and the weight.
    void load(const T* k_or_latents, i64 k_stride, const T* v_or_weight, i64 v_stride) {
        given = {k_or_latents, v_or_weight, k_stride, v_stride};
        if (!p.rank) return;
        pack_weight(v_or_weight, p.nope_width, k_weight);
        pack_weight(v_or_weight + p.nope_width * v_stride, p.v_width, v_weight);
    }

    // `count` rows from `first` on; valid until the next call.
    Keys<T> rows(i64 first, i64 count) {
        const T* k = given.k + first * given.k_stride;
        if (!p.rank) return {k, given.v + first * given.v_stride, given.k_stride, given.v_stride};
        const i64 width = p.v_width + p.qk_width;
        T *v_part = rebuilt, *k_part = rebuilt + p.v_width, *rope_part = k_part + p.nope_width;
        multiply_weight(k, count, v_weight, p.v_width, v_part, width);
        multiply_weight(k, count, k_weight, p.nope_width, k_part, width);
        for (i64 r = 0; r < count; ++r)
            std::memcpy(rope_part + r * width, k + r * given.k_stride + p.rank,
                        (p.qk_width - p.nope_width) * sizeof(T));
        return {k_part, v_part, width, width};
    }

  private:
    const Problem& p;
    i64 words = 0;
    Keys<T> given{};
    word *k_weight = nullptr, *v_weight = nullptr;  // [panel of columns][words of rank][64]
    T* rebuilt = nullptr;                           // [rows, v_width + qk_width]
    float* product = nullptr;                       // [rows, 64]

    void pack_weight(const T* from, i64 columns, word* to) {
        for (i64 c = 0; c < columns; c += PANEL)
            pack_columns(from + c * given.v_stride, given.v_stride, std::min(PANEL, columns - c), words, to + c * words);
    }

    void multiply_weight(const T* latents, i64 count, const word* weight, i64 columns, T* to, i64 stride) {
        for (i64 c = 0; c < columns; c += PANEL) {
            multiply<T, false>(count, latents, given.k_stride, weight + c * words, words, product, PANEL);
            for (i64 r = 0; r < count; ++r)
                for (i64 x = 0; x < PANEL; x += 16)
                    if (const __mmask16 mask = first_lanes(columns - c - x))
                        store(to + r * stride + c + x, _mm512_loadu_ps(product + r * PANEL + x), mask);
        }
    }
};

}  // namespace
