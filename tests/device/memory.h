// Memory of the devices, page-locked memory of the host, and copies between them that have not arrived yet.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <sys/mman.h>
#include <unistd.h>
#include <list>
#include <set>
#include <tuple>

#include "clocks.h"

namespace toy {

constexpr auto TOY = c10::DeviceType::PrivateUse1;
constexpr int NUM_DEVICES = 2;
constexpr size_t ADDRESSES_PER_DEVICE = 6ull << 30;
constexpr size_t ALL_ADDRESSES = NUM_DEVICES * ADDRESSES_PER_DEVICE;
constexpr size_t MEMORY_PER_DEVICE = 2ull << 30;
constexpr int FRESH = 0xFF;  // bytes that are NaN in every floating-point dtype

// Both maps show the same pages. A host that follows an address of the device faults; kernels go through `readable`.
inline char* device_memory;
inline char* readable_memory;

inline void map_memory() {
  int file = memfd_create("toy", 0);
  TORCH_CHECK(file >= 0 && !ftruncate(file, ALL_ADDRESSES), "toy: no memory");
  auto map = [&](int access) {
    void* memory = mmap(nullptr, ALL_ADDRESSES, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(memory != MAP_FAILED, "toy: no addresses");
    return (char*)memory;
  };
  device_memory = map(PROT_NONE);
  readable_memory = map(PROT_READ | PROT_WRITE);
}

inline char* readable(const void* address) { return readable_memory + ((const char*)address - device_memory); }

inline thread_local int current_device = 0;
inline thread_local int64_t current_stream[NUM_DEVICES] = {0, 0};  // 0 is the default stream of each device

// Stream 0 is one for each device, others have ids of their own.
inline StreamNumber number_of(int device, int64_t stream) { return stream == 0 ? device : stream; }
inline StreamNumber current_number(int device) { return number_of(device, current_stream[device]); }

struct Block {
  char* memory;
  size_t nbytes;
  int device;
  StreamNumber stream;           // that it was allocated on, and that may use it again as soon as it is freed
  std::set<StreamNumber> users;  // that `record_stream` has named
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    Lock lock;
    int device = current_device;
    if (!nbytes) return {nullptr, nullptr, [](void*) {}, c10::Device(TOY, device)};
    size_t rounded = (nbytes + 511) / 512 * 512;
    StreamNumber stream = current_number(device);
    report_early_frees(stream);
    if (used_[device] + rounded > MEMORY_PER_DEVICE) {
      C10_THROW_ERROR(OutOfMemoryError, "toy: out of memory, asked for " + std::to_string(nbytes) + " bytes");
    }
    char* memory = reuse(device, stream, rounded);
    blocks_[memory] = Block{memory, rounded, device, stream, {}};
    used_[device] += rounded;
    peak_[device] = std::max(peak_[device], used_[device]);
    return {memory, memory, &DeviceMemory::free_block, c10::Device(TOY, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &DeviceMemory::free_block; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    memcpy(readable(to), readable(from), nbytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    Lock lock;
    auto block = blocks_.find((char*)memory.get());
    if (block != blocks_.end()) block->second.users.insert(number_of(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock;
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes[0], &stats.reserved_bytes[0]}) {
      bytes->current = used_[device];
      bytes->peak = peak_[device];
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock;
    peak_[device] = used_[device];
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock;
    return {MEMORY_PER_DEVICE - used_[device], MEMORY_PER_DEVICE};
  }

 private:
  static void free_block(void* memory);

  char* reuse(int device, StreamNumber stream, size_t nbytes) {
    auto& free = free_[{device, stream, nbytes}];
    if (!free.empty()) {
      char* memory = free.back();
      free.pop_back();
      return memory;
    }
    TORCH_CHECK(reached_[device] + nbytes <= ADDRESSES_PER_DEVICE, "toy: no further addresses");
    char* memory = device_memory + device * ADDRESSES_PER_DEVICE + reached_[device];
    reached_[device] += nbytes;
    memset(readable(memory), FRESH, nbytes);
    return memory;
  }

  // A freed block belongs to the next work of its stream. Others must be done with it by then, or be recorded.
  void report_early_frees(StreamNumber stream) {
    const Clock& clock = clock_of(stream);
    for (auto& use : freed_[stream]) {
      if (use.is_unordered_before(stream, clock)) report("freed early: " + use.what);
    }
    freed_[stream].clear();
  }

  std::map<char*, Block> blocks_;
  std::map<std::tuple<int, StreamNumber, size_t>, std::vector<char*>> free_;
  std::map<StreamNumber, std::vector<Access>> freed_;  // uses of freed blocks by other streams than their own
  size_t used_[NUM_DEVICES] = {}, peak_[NUM_DEVICES] = {}, reached_[NUM_DEVICES] = {};
};

inline auto* const device_allocator = new DeviceMemory;  // it outlives all tensors

inline void DeviceMemory::free_block(void* memory) {
  Lock lock;
  auto& self = *device_allocator;
  Block block = self.blocks_.at((char*)memory);
  self.blocks_.erase((char*)memory);
  self.used_[block.device] -= block.nbytes;
  uintptr_t begin = (uintptr_t)memory, end = begin + block.nbytes;
  auto note = [&](const Access& use) {
    bool is_own = use.stream < 0 || use.stream == block.stream || block.users.count(use.stream);
    if (!is_own) {
      self.freed_[block.stream].push_back({use.stream, use.time, use.what + " || freed near: " + here()});
    }
  };
  for (auto range = history.lower_bound(begin); range != history.end() && range->first < end; ++range) {
    note(range->second.write);
    for (auto& [stream, read] : range->second.reads) note(read);
  }
  memset(readable(memory), FRESH, block.nbytes);
  // The allocator would use a recorded block again once its users are done: here never.
  if (block.users.empty()) self.free_[{block.device, block.stream, block.nbytes}].push_back(block.memory);
}

inline std::map<char*, size_t> page_locked;  // by first address

class PageLockedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* memory;
    TORCH_CHECK(!posix_memalign(&memory, 4096, std::max<size_t>(nbytes, 1)), "toy: no host memory");
    Lock lock;
    forget_history(memory, nbytes);
    page_locked[(char*)memory] = std::max<size_t>(nbytes, 1);
    memset(memory, FRESH, nbytes);
    return {memory, memory, &PageLockedMemory::free_memory, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PageLockedMemory::free_memory; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }

 private:
  static void free_memory(void* memory) {
    Lock lock;
    page_locked.erase((char*)memory);
    free(memory);
  }
};

inline auto* const host_allocator = new PageLockedMemory;

inline bool is_page_locked(const void* address) {
  Lock lock;
  auto next = page_locked.upper_bound((char*)address);
  if (next == page_locked.begin()) return false;
  auto [start, nbytes] = *std::prev(next);
  return (char*)address < start + nbytes;
}

// A non-blocking copy that the host does not know to be done. One to the host has not arrived: until then its target
// is NaN. One to the device has arrived for kernels behind it, and must find its source unchanged until the host knows.
struct LateCopy {
  StreamNumber stream;
  uint64_t time;
  at::Tensor values, host;  // both on the host
  bool goes_down;
  std::string what;

  void finish() {
    if (goes_down) {
      host.copy_(values);
    } else if (memcmp(host.const_data_ptr(), values.const_data_ptr(), values.nbytes())) {
      report("the source of a copy to the device was written before the copy was known to be done: " + what);
    }
  }
};

inline std::list<LateCopy> late_copies;

inline bool overlap(const at::Tensor& one, const at::Tensor& other) {
  const char *a = (const char*)one.const_data_ptr(), *b = (const char*)other.const_data_ptr();
  return a < b + other.nbytes() && b < a + one.nbytes();
}

template <typename Condition>
void finish_late_copies(Condition condition) {
  at::AutoDispatchBelowADInplaceOrView guard;
  for (auto copy = late_copies.begin(); copy != late_copies.end();) {
    if (!condition(*copy)) {
      ++copy;
      continue;
    }
    copy->finish();
    copy = late_copies.erase(copy);
  }
}

// Lets the host know all that a clock knows.
inline void let_host_know(const Clock& clock) {
  Lock lock;
  host_clock.join(clock);
  finish_late_copies([](const LateCopy& copy) { return copy.time <= host_clock.at(copy.stream); });
}

inline void synchronize_stream(StreamNumber stream) {
  Lock lock;
  let_host_know(end_section(stream));
}

inline void synchronize_all() {
  Lock lock;
  for (auto& [stream, clock] : std::map<StreamNumber, Clock>(stream_clocks)) synchronize_stream(stream);
}

}  // namespace toy
