// Attention for CPUs with AVX-512, forward and backward, in float32 and bfloat16.
//
// One work item is one head of one batch entry; threads take items in turn and share nothing but sums over heads, which
// they add to in the order of the heads, so results do not depend on their number. Scores, sums and gradients stay in
// float32; weights and dS are rounded to the input dtype before they meet another matrix, as in FlashAttention-2
// (https://arxiv.org/abs/2307.08691). Keys and values are packed, and rebuilt where latents are given, a few rows at a
// time, so that those of a whole head exist nowhere.

#include "backward.h"
#include "forward.h"

#pragma GCC visibility push(default)
extern "C" {

i64 laga_forward_scratch(const Problem* p, bool half) {
    return half ? scratch_bytes<Forward<bf16>>(*p) : scratch_bytes<Forward<float>>(*p);
}

i64 laga_backward_scratch(const Problem* p, bool half) {
    return half ? scratch_bytes<Backward<bf16>>(*p) : scratch_bytes<Backward<float>>(*p);
}

void laga_forward(const Problem* p, bool half, const Rows* q, const Rows* k, const Rows* v, const Rows* out,
                  float* lse) {
    (half ? forward<bf16> : forward<float>)(*p, *q, *k, *v, *out, lse);
}

// `wide`: dk and dv are float32.
void laga_backward(const Problem* p, bool half, bool wide, const Rows* dout, const float* delta, const Rows* q,
                   const Rows* k, const Rows* v, const float* lse, const Rows* dq, const Rows* dk, const Rows* dv) {
    auto run = !half ? backward<float, float> : wide ? backward<bf16, float> : backward<bf16, bf16>;
    run(*p, *dout, delta, *q, *k, *v, lse, *dq, *dk, *dv);
}

// Adds to d_latents and d_weight, which are float32; one without data is left out.
void laga_backward_from_latent(const Problem* p, bool half, const Rows* dout, const float* delta, const Rows* q,
                               const Rows* latents, const Rows* weight, const float* lse, const Rows* dq,
                               const Rows* d_latents, const Rows* d_weight) {
    auto run = half ? backward_from_latent<bf16> : backward_from_latent<float>;
    run(*p, *dout, delta, *q, *latents, *weight, lse, *dq, *d_latents, *d_weight);
}

}  // extern "C"
#pragma GCC visibility pop
