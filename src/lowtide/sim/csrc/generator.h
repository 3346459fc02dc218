// Random numbers of the device: each generator wraps a CPU one, so that the same seed draws what the CPU would draw.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include "state.h"

namespace lowtide_sim {

struct SimGenerator final : c10::GeneratorImpl {
  at::Generator inner;

  explicit SimGenerator(DeviceIndex index)
      : GeneratorImpl(Device(kSim, index), DispatchKeySet(DispatchKey::PrivateUse1)), inner(at::detail::createCPUGenerator()) {}

  static c10::DeviceType device_type() {
    return kSim;
  }
  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "sim: generators have no offset");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "sim: generators have no offset");
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& wanted) override {
    inner.unsafeGetGeneratorImpl()->set_state(wanted);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  SimGenerator* clone_impl() const override {
    auto* made = new SimGenerator(device_.index());
    made->inner = inner.clone();
    return made;
  }
};

inline at::Generator& default_generator(DeviceIndex index) {
  static auto* made = [] {
    auto* all = new std::vector<at::Generator>;
    for (size_t i = 0; i < state().devices.size(); i++) {
      all->push_back(at::make_generator<SimGenerator>((DeviceIndex)i));
      all->back().set_current_seed(c10::default_rng_seed_val);
    }
    return all;
  }();
  return made->at(index < 0 ? current_device : index);
}

// Lends a generator's state to the CPU's default one for as long as a CPU kernel draws from it.
class Lent {
 public:
  explicit Lent(SimGenerator* generator) : generator_(generator) {
    if (generator_) {
      default_ = at::detail::getDefaultCPUGenerator();
      kept_ = default_.get_state();
      default_.set_state(generator_->inner.get_state());
    }
  }
  ~Lent() {
    if (generator_) {
      generator_->inner.set_state(default_.get_state());
      default_.set_state(kept_);
    }
  }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

 private:
  SimGenerator* generator_;
  at::Generator default_;
  Tensor kept_;
};

} // namespace lowtide_sim
