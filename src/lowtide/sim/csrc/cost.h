// What a kernel costs: bytes it must move and operations it must do, from its arguments and results alone, so that a
// run that computes and one that does not give the same time.
//
// Law: each tensor argument is read once and each result written once; an expanded dimension is read once; what is
// looked up by index is read as far as it is returned. Operations are counted for matrix products, attention and
// convolutions; everything else is bound by bytes.
#pragma once

#include "timeline.h"

namespace lowtide_sim {

enum class Kind { kElementwise, kMm, kAddmm, kBmm, kBaddbmm, kConvolution, kConvolutionBackward, kLookup };

struct Cost {
  double bytes = 0, operations = 0;
  bool half = false;
};

inline double moved_bytes(const Tensor& t) {
  double elements = 1;
  for (int64_t i = 0; i < t.dim(); i++) {
    elements *= t.stride(i) == 0 && t.size(i) > 1 ? 1.0 : (double)t.size(i);
  }
  return elements * (double)t.element_size();
}

inline double seconds_of(const Cost& cost) {
  const auto& r = state().rates;
  return std::max({r.kernel, cost.bytes / r.memory, cost.operations / (cost.half ? r.half : r.single)});
}

// Twice the multiplications: rows of the result times columns of it times the length of the sums.
inline double matrix_operations(Kind kind, const torch::jit::Stack& stack, size_t base) {
  auto tensor = [&](size_t i) -> const Tensor& { return stack[base + i].toTensor(); };
  switch (kind) {
    case Kind::kMm:
    case Kind::kBmm:
      return 2.0 * (double)tensor(0).numel() * (double)tensor(1).size(-1);
    case Kind::kAddmm:
    case Kind::kBaddbmm:
      return 2.0 * (double)tensor(1).numel() * (double)tensor(2).size(-1);
    case Kind::kConvolution: { // input, weight: a sum over weight[0] for every position of the result, see `launch`
      const auto& weight = tensor(1);
      return 2.0 * (double)weight.numel() / (double)std::max<int64_t>(weight.size(0), 1);
    }
    case Kind::kConvolutionBackward: { // gradient, input, weight: two products as large as forward's
      const auto& weight = tensor(2);
      return 4.0 * (double)tensor(0).numel() * (double)weight.numel() / (double)std::max<int64_t>(weight.size(0), 1);
    }
    default:
      return 0;
  }
}

} // namespace lowtide_sim
