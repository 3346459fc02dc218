// What the fallback must know of an operator, read once from its schema.
#pragma once

#include "cost.h"

namespace lowtide_sim {

// Statistics that CPU kernels keep in the input's own 16-bit format and every accelerator in 32 bits.
struct Statistics {
  std::vector<size_t> results; // of the forward operator
  std::vector<size_t> arguments; // of the backward operator
  size_t input = 0, weight = 0;
};

struct Operator {
  std::string name; // without "aten::" and the overload: `add` and `add.out` are one kernel
  std::vector<char> writes; // by argument
  std::vector<char> only_written; // out= arguments
  Kind kind = Kind::kElementwise;
  bool waits = false; // the host needs a value or a shape from the device
  bool takes_host_tensors = false; // indices may lie on the host
  bool random = false;
  bool in_place = false; // returns nothing but arguments that it has written
  Statistics statistics;
};

inline Kind kind_of(const std::string& name) {
  static const std::unordered_map<std::string, Kind> known{
      {"mm", Kind::kMm},           {"bmm", Kind::kBmm},
      {"addmm", Kind::kAddmm},     {"baddbmm", Kind::kBaddbmm},
      {"_scaled_mm", Kind::kMm},   {"convolution", Kind::kConvolution},
      {"embedding", Kind::kLookup}, {"index_select", Kind::kLookup},
      {"gather", Kind::kLookup},   {"index", Kind::kLookup},
      {"convolution_backward", Kind::kConvolutionBackward},
  };
  auto found = known.find(name);
  return found == known.end() ? Kind::kElementwise : found->second;
}

inline Statistics statistics_of(const std::string& name) {
  static const std::unordered_map<std::string, Statistics> known{
      {"native_layer_norm", {{1, 2}, {}, 0, 2}},
      {"native_layer_norm_backward", {{}, {3, 4}, 1, 5}},
      {"native_batch_norm", {{1, 2}, {}, 0, 1}},
      {"native_batch_norm_backward", {{}, {5, 6}, 1, 2}},
  };
  auto found = known.find(name);
  return found == known.end() ? Statistics{} : found->second;
}

inline Operator* read_schema(const c10::OperatorHandle& handle) {
  const auto& schema = handle.schema();
  auto* op = new Operator;
  std::string plain = schema.name();
  if (plain.rfind("aten::", 0) == 0) {
    plain = plain.substr(6);
  }
  op->name = plain;
  bool writes_any = false;
  for (const auto& argument : schema.arguments()) {
    bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    op->writes.push_back(writes);
    op->only_written.push_back(writes && argument.is_out());
    writes_any |= writes;
  }
  bool all_alias = true;
  for (const auto& result : schema.returns()) {
    auto kind = result.type()->kind();
    op->waits |= kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
    all_alias &= result.alias_info() && result.alias_info()->isWrite();
  }
  op->in_place = writes_any && all_alias;
  op->waits |= handle.hasTag(at::Tag::dynamic_output_shape);
  op->random = handle.hasTag(at::Tag::nondeterministic_seeded);
  op->takes_host_tensors = plain.find("index") != std::string::npos || plain.rfind("_fused_", 0) == 0;
  op->kind = kind_of(plain);
  op->statistics = statistics_of(plain);
  return op;
}

inline const Operator& describe(const c10::OperatorHandle& handle) {
  static auto* known = new std::unordered_map<const void*, Operator*>;
  static std::mutex mutex;
  const void* key = &handle.schema();
  std::lock_guard<std::mutex> lock(mutex);
  auto found = known->find(key);
  if (found == known->end()) {
    found = known->emplace(key, read_schema(handle)).first;
  }
  return *found->second;
}

} // namespace lowtide_sim
