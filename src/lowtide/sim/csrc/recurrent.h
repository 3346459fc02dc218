// The fused cells that torch's LSTM and GRU call on every device but the CPU, which has no kernel for them: written out
// in the CPU's own order of operators, so that autograd and the tape see ordinary operators.
#pragma once

#include "common.h"

namespace lowtide_sim {

inline Tensor with_bias(const Tensor& gates, const std::optional<Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

inline std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const Tensor& cx,
    const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  auto gates = (with_bias(hidden_gates, hidden_bias) + with_bias(input_gates, input_bias)).unsafe_chunk(4, 1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  auto cy = forget * cx + in * cell;
  auto hy = out * cy.tanh();
  return {hy, cy, at::empty({0}, cx.options())};
}

inline std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const Tensor& hx,
    const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  auto in = with_bias(input_gates, input_bias).unsafe_chunk(3, 1);
  auto hidden = with_bias(hidden_gates, hidden_bias).unsafe_chunk(3, 1);
  auto reset = (hidden[0] + in[0]).sigmoid(), update = (hidden[1] + in[1]).sigmoid();
  auto fresh = (in[2] + hidden[2] * reset).tanh();
  return {(hx - fresh) * update + fresh, at::empty({0}, hx.options())};
}

} // namespace lowtide_sim
