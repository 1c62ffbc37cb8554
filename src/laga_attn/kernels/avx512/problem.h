// What Python passes in, and how the work is shared among threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include "panels.h"

namespace {

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

extern "C" {
struct Rows {  // [batch, rows, heads, width], strides in elements, the width's is 1
    void* data;
    i64 batch, row, head;
};
struct Problem {
    i64 batch, q_rows, k_rows, heads, kv_heads, qk_width, v_width;
    i64 rank, nope_width;  // of latents from which keys and values are rebuilt; 0 where these are given
    i64 span_count;
    const i64* spans;  // q_start, q_len, k_start, k_len, causal, window (-1: none)
    float scale;
    i64 threads;
    char* scratch;  // laga_*_scratch() bytes for each thread, aligned to 64
};
}

struct Span {
    i64 q0, q_len, k0, k_len, offset, window;
    bool causal;

    Span(const Problem& p, i64 i) {
        const i64* s = p.spans + 6 * i;
        q0 = s[0], q_len = s[1], k0 = s[2], k_len = s[3], causal = s[4] != 0;
        offset = k_len - q_len, window = s[5] < 0 ? k_len + q_len : s[5];
    }
    // Keys of the span that its query i sees, and queries that see its key j: [first, end).
    i64 first_key(i64 i) const { return causal ? std::max<i64>(0, i + offset - window + 1) : 0; }
    i64 end_key(i64 i) const { return causal ? std::clamp<i64>(i + offset + 1, 0, k_len) : k_len; }
    i64 first_query(i64 j) const { return causal ? std::clamp<i64>(j - offset, 0, q_len) : 0; }
    i64 end_query(i64 j) const { return causal ? std::clamp<i64>(j - offset + window, 0, q_len) : q_len; }
};

// Which rows a span holds; others may be anything.
inline std::vector<char> seen_rows(const Problem& p, i64 rows, i64 Span::*first, i64 Span::*length) {
    std::vector<char> seen(rows, 0);
    for (i64 i = 0; i < p.span_count; ++i) {
        const Span s(p, i);
        std::fill_n(seen.begin() + s.*first, s.*length, 1);
    }
    return seen;
}

template <class T>
const T* at(const Rows& x, i64 batch, i64 head) {
    return static_cast<const T*>(x.data) + batch * x.batch + head * x.head;
}
template <class T>
T* mutable_at(const Rows& x, i64 batch, i64 head) {
    return static_cast<T*>(x.data) + batch * x.batch + head * x.head;
}

// Hands out pieces of scratch. With scratch at nullptr, `next` then says how much is needed.
struct Arena {
    char* next;
    template <class U>
    U* take(i64 count) {
        char* piece = next;
        next += round_up(count * i64(sizeof(U)), 64);
        return reinterpret_cast<U*>(piece);
    }
};

// Scratch of one thread that works on `Pass`, of which there is none yet.
template <class Pass>
i64 scratch_bytes(const Problem& p) {
    const Arena none{nullptr};
    return Pass(p, none).end - none.next;
}

template <class Body>
void in_parallel(i64 items, i64 threads, Body body) {
    std::atomic<i64> next{0};
    auto work = [&](i64 thread) {
        for (i64 item; (item = next.fetch_add(1)) < items;) body(item, thread);
    };
    std::vector<std::thread> others;
    try {
        for (i64 t = 1; t < std::min(threads, items); ++t) others.emplace_back(work, t);
    } catch (const std::system_error&) {
        // The system gives no more threads: those that run do all the work.
    }
    work(0);
    for (auto& t : others) t.join();
}

// Lets work items into a place one after the other, in their order, so that sums there do not depend on who is faster.
// An item may wait for those that were handed out before it: they are running, and wait for none after them.
class Turns {
  public:
    explicit Turns(i64 places) : next(places) {}
    void wait(i64 place, i64 turn) const {
        while (next[place].load(std::memory_order_acquire) != turn) std::this_thread::yield();
    }
    void pass(i64 place) { next[place].fetch_add(1, std::memory_order_release); }

  private:
    std::vector<std::atomic<i64>> next;
};

}  // namespace
