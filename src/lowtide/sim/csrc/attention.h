// Scaled dot-product attention as one fused kernel, with grouped keys, masks and dropout.
//
// Without dropout the CPU's flash kernel computes, so that results equal the CPU's bit for bit. With dropout the mask
// is drawn from a seed that forward takes from the generator and backward reads again, as accelerators do.
#pragma once

#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>

#include <cmath>

#include "fallback.h"

namespace lowtide_sim {

constexpr int64_t kMath = 0, kOverrideable = 4; // of at::SDPBackend

inline int64_t choose_attention(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const std::optional<Tensor>& mask,
    double,
    bool,
    std::optional<double>,
    bool) {
  bool shapes = q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && k.size(1) > 0 && q.size(1) % k.size(1) == 0 &&
      k.size(1) == v.size(1) && q.size(-1) == v.size(-1);
  bool learned_mask = mask && mask->defined() && mask->requires_grad();
  return shapes && !learned_mask && at::isFloatingType(q.scalar_type()) ? kOverrideable : kMath;
}

inline Tensor repeat_heads(const Tensor& t, int64_t heads) {
  return t.size(1) == heads ? t : t.repeat_interleave(heads / t.size(1), 1);
}

inline Tensor sum_heads(const Tensor& grad, int64_t heads) {
  if (grad.size(1) == heads) {
    return grad;
  }
  return grad.view({grad.size(0), heads, grad.size(1) / heads, grad.size(2), grad.size(3)}).sum(2);
}

// Attention with dropout, in single precision: what both directions need.
struct DroppedAttention {
  Tensor probabilities, keep;
  Tensor lse;
  double scale;

  DroppedAttention(const Tensor& q, const Tensor& k, const Tensor& mask, double p, bool causal, double by, int64_t seed)
      : scale(by) {
    Tensor scores = at::matmul(q.to(c10::kFloat), k.to(c10::kFloat).transpose(-2, -1)) * scale;
    if (causal) {
      auto below = at::ones({q.size(-2), k.size(-2)}, c10::kBool).tril();
      scores = scores.masked_fill(below.logical_not(), -INFINITY);
    }
    if (mask.defined()) {
      scores = mask.scalar_type() == c10::kBool ? scores.masked_fill(mask.logical_not(), -INFINITY) : scores + mask;
    }
    lse = scores.logsumexp(-1);
    probabilities = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0);
    auto generator = at::detail::createCPUGenerator((uint64_t)seed);
    keep = at::empty_like(probabilities).bernoulli_(1 - p, generator) / (1 - p);
  }
};

inline double scale_of(const Tensor& q, std::optional<double> scale) {
  return scale ? *scale : 1.0 / std::sqrt((double)q.size(-1));
}

using Attention = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;
using AttentionGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

inline Tensor shadow_or_none(Shadows& shadows, const Tensor& t) {
  return t.defined() && t.device().type() == kSim ? shadows.of(t) : t;
}

inline Attention attention(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const std::optional<Tensor>& bias,
    double p,
    bool causal,
    bool,
    std::optional<double> scale) {
  Call call("_scaled_dot_product_fused_attention_overrideable");
  for (const auto& t : {q, k, v}) {
    call.reads(t);
  }
  Tensor mask = bias.value_or(Tensor());
  if (mask.defined() && mask.device().type() == kSim) {
    call.reads(mask);
  }
  call.cost.half = q.element_size() <= 2;
  call.cost.operations = 4.0 * (double)q.numel() * (double)k.size(-2);
  call.before();
  auto options = q.options().dtype(c10::kLong);
  Tensor seed = p > 0 ? at::zeros({}, options) : at::empty({0}, options);
  Tensor out, lse;
  if (!state().compute) {
    out = at::empty({q.size(0), q.size(2), q.size(1), q.size(3)}, q.options()).transpose(1, 2);
    lse = at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(c10::kFloat)).transpose(1, 2);
    call.writes(out);
    call.writes(lse);
  } else {
    Shadows shadows(false);
    at::AutoDispatchBelowADInplaceOrView below;
    auto sq = shadows.of(q), sk = repeat_heads(shadows.of(k), q.size(1)), sv = repeat_heads(shadows.of(v), q.size(1));
    auto smask = shadow_or_none(shadows, mask);
    if (p > 0) {
      auto* generator = (SimGenerator*)default_generator(call.index()).unsafeGetGeneratorImpl();
      auto drawn = at::empty({}, at::kLong).random_(generator->inner);
      shadows.of(seed).copy_(drawn);
      DroppedAttention dropped(sq, sk, smask, p, causal, scale_of(q, scale), drawn.item<int64_t>());
      out = at::matmul(dropped.probabilities * dropped.keep, sv.to(c10::kFloat)).to(q.scalar_type());
      lse = dropped.lse;
    } else {
      std::optional<Tensor> given = smask.defined() ? std::optional<Tensor>(smask) : std::nullopt;
      std::tie(out, lse) = at::_scaled_dot_product_flash_attention_for_cpu(sq, sk, sv, 0.0, causal, given, scale);
    }
    out = shadows.original(out, call);
    lse = shadows.original(lse, call);
  }
  call.launch();
  auto nothing = at::empty({0}, options);
  return {out, lse, Tensor(), Tensor(), q.sym_size(2), k.sym_size(2), seed, nothing, Tensor()};
}

inline std::tuple<Tensor, Tensor, Tensor> dropped_gradients(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const DroppedAttention& forward) {
  auto g = grad.to(c10::kFloat), fv = v.to(c10::kFloat);
  auto weights = forward.probabilities * forward.keep;
  auto grad_v = at::matmul(weights.transpose(-2, -1), g);
  auto grad_p = at::matmul(g, fv.transpose(-2, -1)) * forward.keep;
  auto rows = (grad_p * forward.probabilities).sum(-1, true);
  auto grad_scores = forward.probabilities * (grad_p - rows) * forward.scale;
  auto grad_q = at::matmul(grad_scores, k.to(c10::kFloat));
  auto grad_k = at::matmul(grad_scores.transpose(-2, -1), q.to(c10::kFloat));
  return {grad_q.to(q.scalar_type()), grad_k.to(q.scalar_type()), grad_v.to(q.scalar_type())};
}

inline AttentionGradients attention_backward(
    const Tensor& grad,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& bias,
    std::array<bool, 4>,
    const Tensor& out,
    const Tensor& lse,
    const Tensor&,
    const Tensor&,
    int64_t,
    int64_t,
    double p,
    bool causal,
    const Tensor& seed,
    const Tensor&,
    std::optional<double> scale) {
  Call call("_scaled_dot_product_fused_attention_overrideable_backward");
  for (const auto& t : {grad, q, k, v, out, lse, bias, seed}) {
    if (t.defined() && t.device().type() == kSim) {
      call.reads(t);
    }
  }
  call.cost.half = q.element_size() <= 2;
  call.cost.operations = 10.0 * (double)q.numel() * (double)k.size(-2);
  call.before();
  Tensor grad_q, grad_k, grad_v;
  if (!state().compute) {
    auto like = [&](const Tensor& t) {
      auto made = at::empty({t.size(0), t.size(2), t.size(1), t.size(3)}, t.options()).transpose(1, 2);
      call.writes(made);
      return made;
    };
    grad_q = like(q);
    grad_k = like(k);
    grad_v = like(v);
  } else {
    Shadows shadows(false);
    at::AutoDispatchBelowADInplaceOrView below;
    auto sq = shadows.of(q), sk = repeat_heads(shadows.of(k), q.size(1)), sv = repeat_heads(shadows.of(v), q.size(1));
    auto smask = shadow_or_none(shadows, bias);
    if (p > 0) {
      DroppedAttention forward(sq, sk, smask, p, causal, scale_of(q, scale), shadows.of(seed).item<int64_t>());
      std::tie(grad_q, grad_k, grad_v) = dropped_gradients(shadows.of(grad), sq, sk, sv, forward);
    } else {
      std::optional<Tensor> given = smask.defined() ? std::optional<Tensor>(smask) : std::nullopt;
      std::tie(grad_q, grad_k, grad_v) = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          shadows.of(grad), sq, sk, sv, shadows.of(out), shadows.of(lse), 0.0, causal, given, scale);
    }
    grad_q = shadows.original(grad_q, call);
    grad_k = shadows.original(sum_heads(grad_k, k.size(1)), call);
    grad_v = shadows.original(sum_heads(grad_v, k.size(1)), call);
  }
  call.launch();
  return {grad_q, grad_k, grad_v, Tensor()};
}

} // namespace lowtide_sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &lowtide_sim::choose_attention)
} // namespace at::native
