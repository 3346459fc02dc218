// The simulated accelerator: registrations with torch, and the module that Python imports.
//
// One translation unit: torch's headers take most of the time to compile, so the parts are headers, each of one concern:
//   state      clocks, streams, events, blocks              guard       devices, streams and events for torch
//   stacks     where in the program work was launched       generator   random numbers
//   races      happens-before                               hooks       the accelerator as a whole
//   pages      the host's own accesses of pinned memory     operator, call, cost    one launch
//   timeline   virtual time                                 shadow, shapes, fallback   CPU kernels, or only shapes
//   caching    a caching allocator's model                  operators, attention, recurrent   written by hand
//   memory     allocation and counters                      exit        a clean end of the process
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <ATen/autocast_mode.h>

#include "attention.h"
#include "exit.h"
#include "guard.h"
#include "operators.h"
#include "recurrent.h"

namespace py = pybind11;

namespace lowtide_sim {

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, device_memory())
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

auto boxed_fallback() {
  return torch::CppFunction::makeFromBoxedFunction<&fallback>();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(boxed_fallback());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// A copy resolves lazy conjugation and negation itself: torch would copy in order to resolve, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

#define LOWTIDE_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define LOWTIDE_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWTIDE_LOWER)
  AT_FORALL_FP32(LOWTIDE_FP32)
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<Tensor (*)(const Tensor&, Sizes)>(at::native::view));
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("record_stream", record_stream);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_fused_sdp_choice", choose_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  // Torch would make several kernels of these, where a device has one.
  for (const char* name :
       {"native_layer_norm", "native_group_norm", "convolution", "convolution_backward", "_stack", "_stack.out", "addr",
        "addr.out", "all.dims", "all.dims_out", "any.dims", "any.dims_out", "linalg__powsum", "mish_backward",
        "native_channel_shuffle", "silu_backward"}) {
    m.impl(name, boxed_fallback());
  }
}

// Every foreach operator is one kernel too; their list is torch's own.
void register_foreach() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::_foreach_", 0) == 0) {
      auto plain = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      library->impl(plain.c_str(), boxed_fallback());
    }
  }
}

// ---- what Python sees -------------------------------------------------------------------------------------------

void start(int count, size_t capacity, size_t rounding, bool caching, const std::map<std::string, double>& rates) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  TORCH_CHECK(s.devices.empty(), "sim: already started");
  auto& r = s.rates;
  r.half = rates.at("half");
  r.single = rates.at("single");
  r.memory = rates.at("memory");
  r.out = rates.at("out");
  r.in = rates.at("in");
  r.pageable = rates.at("pageable");
  r.link_latency = rates.at("link_latency");
  r.kernel = rates.at("kernel");
  r.launch = rates.at("launch");
  r.half_duplex = rates.at("half_duplex") != 0;
  r.shared_link = rates.at("shared_link") != 0;
  s.capacity = capacity;
  s.rounding = rounding;
  s.devices.resize((size_t)count);
  for (int i = 0; i < count; i++) {
    new_stream(i);
    if (caching) {
      s.devices[i].caching = new CachingModel;
    }
  }
}

void set_option(const std::string& name, bool value) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  std::map<std::string, bool*> options{
      {"compute", &s.compute}, {"checks", &s.checks},   {"poison", &s.poison},
      {"trace", &s.tracing},   {"stacks", &s.stacks},
  };
  *options.at(name) = value;
}

void set_link(const std::map<std::string, double>& given) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  std::map<std::string, double*> rates{{"out", &s.rates.out}, {"in", &s.rates.in}, {"latency", &s.rates.link_latency}};
  for (const auto& [name, value] : given) {
    *rates.at(name) = value;
  }
}

void reset() {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  for (auto& d : s.devices) {
    for (auto* stream : d.streams) {
      host_waits(stream);
    }
    reap(d);
  }
  s.host_time = s.host_busy = 0;
  s.epoch++;
  for (auto& d : s.devices) {
    d.compute = d.out = d.in = Engine{};
    for (auto* stream : d.streams) {
      stream->time = 0;
    }
  }
  s.shared_link = Engine{};
  s.races.clear();
  s.spans.clear();
  s.points.clear();
  s.operators.clear();
  s.launches = 0;
  labels().clear();
}

std::string agent_name(int agent) {
  if (agent <= 0) {
    return "host";
  }
  auto* stream = state().agents[agent];
  return "stream " + std::to_string(stream->id) + " of sim:" + std::to_string(stream->device);
}

py::list races() {
  std::vector<Race> found;
  {
    py::gil_scoped_release unlocked;
    std::lock_guard<std::mutex> lock(state().mutex);
    found = state().races;
  }
  auto access = [](const Access& a) { return py::make_tuple(a.operation, agent_name(a.agent), stacks().text(a.stack)); };
  py::list out;
  for (const auto& race : found) {
    out.append(py::make_tuple(race.kind, race.block, access(race.first), access(race.second)));
  }
  return out;
}

py::tuple memory(int index) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& d = state().devices.at(index);
  reap(d);
  size_t active = d.allocated + d.deferred_bytes;
  size_t reserved = d.caching ? d.caching->reserved : active;
  size_t peak_reserved = d.caching ? d.caching->peak_reserved : d.peak_active;
  return py::make_tuple(
      d.allocated, active, reserved, d.peak_allocated, d.peak_active, peak_reserved, state().capacity);
}

py::tuple engines(int index) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  auto& d = s.devices.at(index);
  auto* out = link(index, true);
  auto* in = link(index, false);
  return py::make_tuple(d.compute.busy, out->busy, in->busy, s.host_busy, out->bytes, in->bytes);
}

py::tuple trace() {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  py::list spans, points;
  for (const auto& span : s.spans) {
    spans.append(py::make_tuple(
        span.name, span.kind, span.device, span.stream, span.start, span.end, span.bytes, labels().name(span.label)));
  }
  for (const auto& point : s.points) {
    points.append(py::make_tuple(point.device, point.time, point.allocated, point.active));
  }
  return py::make_tuple(spans, points);
}

void spend(double seconds) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().host_time += seconds;
  state().host_busy += seconds;
}

} // namespace lowtide_sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace lowtide_sim;
  register_foreach();
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def("start", &start);
  m.def("set_option", &set_option);
  m.def("set_link", &set_link);
  m.def("reset", &reset, Unlocked());
  m.def("races", &races);
  m.def("memory", &memory);
  m.def("engines", &engines);
  m.def("trace", &trace);
  m.def("spend", &spend);
  m.def("now", [] { return state().host_time; });
  m.def("launches", [] { return state().launches; });
  m.def("operators", [] {
    std::lock_guard<std::mutex> lock(state().mutex);
    return state().operators;
  });
  m.def("reset_peaks", [](int index) { device_memory()->resetPeakStats((DeviceIndex)index); });
  m.def("generator", [](int index) { return default_generator((DeviceIndex)index); });
  m.def("current_device", [] { return (int)current_device; });
  m.def("set_device", [](int index) { current_device = (DeviceIndex)index; });
  m.def("enter_module", [](const std::string& name) { return labels().enter(name); });
  m.def("leave_module", [](int label) { labels().exchange(label); });
  m.def("close", [] {
    {
      py::gil_scoped_release unlocked;
      finish_backwards();
    }
    stacks().close();
  });
}
