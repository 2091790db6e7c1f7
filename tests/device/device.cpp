// The backend: streams and events, what torch asks of a device, and its operators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <atomic>
#include <chrono>
#include <optional>

#include "memory.h"

namespace toy {

using at::Device;
using at::IntArrayRef;
using at::Stream;
using at::Tensor;
using c10::DeviceIndex;
using c10::SymIntArrayRef;

// ---- Streams and events

struct Event {
  Clock clock;
  int num_queries = 0;
  double milliseconds = 0;
};

static double milliseconds_now() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

static StreamNumber number_of(const Stream& stream) { return number_of(stream.device_index(), stream.id()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return TOY; }
  DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  Device getDevice() const override { return Device(TOY, current_device); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < NUM_DEVICES, "toy: there is no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }

  Stream getStream(Device device) const override { return stream(device, current_stream[index(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<int64_t> next{NUM_DEVICES};
    return stream(device, next++);
  }
  Stream exchangeStream(Stream stream_) const override {
    Stream before = getStream(stream_.device());
    current_stream[stream_.device_index()] = stream_.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override { synchronize_stream(number_of(stream)); }
  void synchronizeDevice(DeviceIndex) const override { synchronize_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
    device_allocator->recordStream(memory, stream);
  }

  void record(void** event, const Stream& stream, DeviceIndex device, c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "toy: an event of device ", (int)device,
                " is recorded on a stream of device ", (int)stream.device_index());
    Lock lock;
    if (!*event) *event = new Event;
    *(Event*)*event = Event{end_section(number_of(stream)), 0, milliseconds_now()};
  }
  void block(void* event, const Stream& stream) const override {
    Lock lock;
    if (event) clock_of(number_of(stream)).join(((Event*)event)->clock);
  }
  // Twice an event has not passed yet: nobody may rely on it.
  bool queryEvent(void* event) const override {
    Lock lock;
    if (event && ((Event*)event)->num_queries++ < 2) return false;
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    Lock lock;
    if (event) let_host_know(((Event*)event)->clock);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete (Event*)event; }
  double elapsedTime(void* begin, void* end, DeviceIndex) const override {
    return ((Event*)end)->milliseconds - ((Event*)begin)->milliseconds;
  }

 private:
  static int index(Device device) { return device.index() < 0 ? current_device : device.index(); }
  static Stream stream(Device device, int64_t id) { return Stream(Stream::UNSAFE, Device(TOY, index(device)), id); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- What torch asks of the device. Random numbers are those of the CPU.

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(Device(TOY, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice(Device(TOY, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void* address) const override { return is_page_locked(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return host_allocator; }
  Device getDeviceFromPtr(void* address) const override {
    return Device(TOY, ((char*)address - device_memory) / ADDRESSES_PER_DEVICE);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::DeviceGuard guard(storage.device());
    c10::DataPtr memory = device_allocator->allocate(nbytes);
    size_t kept = std::min(nbytes, storage.nbytes());
    if (kept) device_allocator->copy_data(memory.get(), storage.data_ptr().get(), kept);
    auto* inner = storage.unsafeGetStorageImpl();
    inner->set_data_ptr(std::move(memory));
    inner->set_nbytes(nbytes);
  }
};

// ---- Copies

static Tensor as_readable(const Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  char* memory = tensor.numel() ? readable(tensor.const_data_ptr()) : readable_memory;
  return at::from_blob(memory, tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

static size_t extent_nbytes(const Tensor& tensor) {
  if (!tensor.numel()) return 0;
  int64_t last = 0;
  for (int dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return (last + 1) * tensor.itemsize();
}

static void note_access(const Tensor& tensor, StreamNumber stream, bool writes) {
  note_access(tensor.const_data_ptr(), extent_nbytes(tensor), stream, writes);
}

static void order_both_ways(StreamNumber one, StreamNumber other) {
  Clock first = end_section(one), second = end_section(other);
  clock_of(one).join(second);
  clock_of(other).join(first);
}

// A copy within the host's reach: see `LateCopy`.
static void copy_between(const Tensor& source, const Tensor& target, bool non_blocking) {
  bool goes_down = target.is_cpu();
  const Tensor &host = goes_down ? target : source, &device = goes_down ? source : target;
  StreamNumber stream = current_number(device.device().index());
  bool is_plain = host.is_contiguous() && device.scalar_type() == host.scalar_type() && host.numel();
  if (non_blocking) {
    finish_late_copies([&](const LateCopy& copy) {
      return overlap(copy.host, host) && copy.time <= clock_of(stream).at(copy.stream);
    });
    for (auto& copy : late_copies) {
      if (overlap(copy.host, host) && (copy.goes_down || goes_down)) {
        report("host memory of a copy that is under way is used by another: " + here() + " || " + copy.what);
      }
    }
    if (is_plain) {
      auto remember = [&](Tensor values) {
        late_copies.push_back({stream, clock_of(stream).at(stream), values, host, goes_down, here()});
      };
      if (goes_down) {
        remember(as_readable(device).contiguous().clone());
        memset(host.data_ptr(), FRESH, host.nbytes());
      } else {
        remember(host.clone());
        as_readable(device).copy_(host);
      }
      return;
    }
  }
  if (goes_down || !non_blocking) synchronize_stream(stream);
  as_readable(target).copy_(as_readable(source));
}

static Tensor copy_from(const Tensor& given, const Tensor& target, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  Operator op("copy_");
  Lock lock;
  Tensor source = given.expand(target.sizes());
  bool is_between = source.is_cpu() || target.is_cpu();
  if (!is_between && source.device() != target.device()) {  // as CUDA does: on the source's stream
    order_both_ways(current_number(source.device().index()), current_number(target.device().index()));
  }
  if (source.is_privateuseone()) note_access(source, current_number(source.device().index()), false);
  if (target.is_privateuseone()) note_access(target, current_number(target.device().index()), true);
  if (is_between && !Operator::is_inner()) {
    copy_between(source, target, non_blocking);
  } else {  // a kernel that reads its arguments or writes its results
    as_readable(target).copy_(as_readable(source));
  }
  return target;
}

static Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  c10::OptionalDeviceGuard guard;
  if (target.is_privateuseone()) guard.reset_device(target.device());
  at::native::resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

static at::Scalar local_scalar_dense(const Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView below;
  Operator op("item");
  Lock lock;
  StreamNumber stream = current_number(tensor.device().index());
  note_access(tensor, stream, false);
  synchronize_stream(stream);
  return as_readable(tensor).item();
}

// ---- Operators

static std::map<std::string, int64_t> launches;  // kernels, by operator

// Computes on the CPU. Copies of arguments and results note what the kernel reads and writes.
static void launch(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  std::string name = handle.schema().operator_name().name.substr(strlen("aten::"));
  Operator op(name);
  if (!Operator::is_inner()) {
    Lock lock;
    launches[name]++;
  }
  at::native::cpu_fallback(handle, stack);
}

static Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(TOY, current_device)));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, device_allocator, keys, c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(TOY, current_device)));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, device_allocator, keys, c10::dtype_or_default(dtype));
}

static Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride,
                         std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

static Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

static Tensor view(const Tensor& self, SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

static Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  dim = at::maybe_wrap_dim(dim, self.dim(), true);
  auto sizes = self.sizes().vec(), strides = self.strides().vec();
  sizes.push_back(size);
  strides.push_back(self.dim() ? strides[dim] : 1);
  if (self.dim()) {
    sizes[dim] = (self.size(dim) - size) / step + 1;
    strides[dim] *= step;
  }
  return self.as_strided(sizes, strides);
}

static const Tensor& resize_(const Tensor& self, SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

static Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
static Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
static Tensor& set_part(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

static void record_stream(Tensor& self, Stream stream) {
  device_allocator->recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view", view);
  library.impl("unfold", unfold);
  library.impl("resize_", resize_);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_part);
  library.impl("record_stream", record_stream);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace toy

PYBIND11_MODULE(toy_device, module) {
  using namespace toy;
  map_memory();
  c10::SetAllocator(TOY, device_allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  module.def("take_reports", [] { Lock lock; return std::exchange(reports, {}); });
  module.def("take_launches", [] { Lock lock; return std::exchange(launches, {}); });
}
