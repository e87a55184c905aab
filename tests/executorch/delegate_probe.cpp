// Linked into a delegate library for tests/executorch/delegate_plays.py: calls the backend as ExecuTorch does, with
// whatever a play likes, and stands between the delegate and the core, to see what is made and to have calls fail.
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/named_data_map.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <thread>

#include "core.h"
#include "load_error.h"

namespace {

using executorch::aten::ScalarType;
using executorch::runtime::BackendOption;
using executorch::runtime::DelegateHandle;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::FreeableBuffer;
using executorch::runtime::Result;
using executorch::runtime::TensorLayout;

// ----------------------------------------------------------------------------------------------- named data, as a map

struct Entry {
  std::string bytes;  // of what lies in no file
  const char* at = nullptr;
  size_t size = 0;
  ScalarType scalar_type = ScalarType::Byte;
  std::vector<int32_t> sizes;
  std::vector<uint8_t> dim_order;
};

class Data final : public executorch::runtime::NamedDataMap {
 public:
  explicit Data(const char* path) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    bytes_ = (size_t)lseek(file, 0, SEEK_END);
    start_ = mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
  }
  ~Data() override { munmap(start_, bytes_); }

  Result<const TensorLayout> get_tensor_layout(std::string_view key) const override {
    const Entry* found = find(key);
    if (!found || found->at == found->bytes.data()) return Error::NotFound;
    return TensorLayout::create({found->sizes.data(), found->sizes.size()},
                                {found->dim_order.data(), found->dim_order.size()}, found->scalar_type);
  }
  Result<FreeableBuffer> get_data(std::string_view key) const override {
    const Entry* found = find(key);
    if (!found) return Error::NotFound;
    held_++;
    auto give_back = [](void* context, void*, size_t) { (*static_cast<std::atomic<int64_t>*>(context))--; };
    return FreeableBuffer(found->at, found->size, give_back, &held_);
  }
  Error load_data_into(std::string_view, void*, size_t) const override { return Error::NotSupported; }
  Result<uint32_t> get_num_keys() const override { return (uint32_t)entries_.size(); }
  Result<const char*> get_key(uint32_t) const override { return Error::NotSupported; }

  Entry& add(const char* name) { return entries_[name]; }
  const char* at(int64_t offset) const { return static_cast<const char*>(start_) + offset; }
  int64_t held() const { return held_; }

 private:
  const Entry* find(std::string_view key) const {
    auto found = entries_.find(std::string(key));
    return found == entries_.end() ? nullptr : &found->second;
  }
  std::map<std::string, Entry> entries_;
  void* start_;
  size_t bytes_;
  mutable std::atomic<int64_t> held_{0};
};

// ------------------------------------------------------------------------------------------------ what the core is asked

// Python has the same.
struct Made {
  int64_t drivers, sessions;  // alive
  int64_t page_bytes, driver_poison, session_poison;
  int64_t host_cap_bytes, extra_host_bytes;
  int64_t device_index;
  int64_t extent_count;
  int64_t extents[2 * 16];
  void* driver;
  void* session;
};
Made made{};
std::set<void*> drivers, sessions;
penstock_executorch::Core real;
std::string refused;

// Runs that are inside the core, held there while a play asks for it.
struct Inside {
  std::mutex lock;
  std::condition_variable changed;
  bool holds = false;
  int count = 0;
} inside;

bool refuses(const char* name) {
  bool is = refused == name;
  if (is) refused.clear();
  return is;
}

// Of tests/native: its drivers can be made to fail.
void* (*wrap)(void*) = nullptr;

void* noted(void* driver) {
  if (driver) drivers.insert(driver = wrap(driver));
  made.driver = driver;
  made.drivers = (int64_t)drivers.size();
  return driver;
}

void stand_between() {
  auto& core = const_cast<penstock_executorch::Core&>(penstock_executorch::core());
  if (real.failure) return;
  real = core;
  core.soft_create = [](size_t page_bytes, size_t capacity_bytes, int32_t poison) {
    made.page_bytes = (int64_t)page_bytes;
    made.driver_poison = poison;
    return noted(real.soft_create(page_bytes, capacity_bytes, poison));
  };
  // There is no GPU: what would be one is a soft driver.
  core.cuda_create = [](int32_t) { return refuses("cuda_create") ? nullptr : noted(real.soft_create(4096, 0, 0)); };
  core.driver_destroy = [](void* driver) {
    if (!drivers.erase(driver)) std::abort();
    made.drivers = (int64_t)drivers.size();
    real.driver_destroy(driver);
  };
  core.session_allocate_host = [](void* session, int64_t bytes) {
    return refuses("session_allocate_host") ? nullptr : real.session_allocate_host(session, bytes);
  };
  core.session_summary = [](void* session, const PenstockSummary* asked) {
    return refuses("session_summary") ? nullptr : real.session_summary(session, asked);
  };
  core.driver_granularity = [](void* driver, int64_t* bytes) {
    if (refuses("driver_granularity")) return 1;
    if (refuses("memory")) throw std::bad_alloc();
    if (refuses("error")) throw std::runtime_error("a test asked for this failure");
    int32_t status = real.driver_granularity(driver, bytes);
    if (refuses("other pages")) *bytes *= 2;
    return status;
  };
  core.load_torch = [] { return refuses("load_torch") ? 1 : real.load_torch(); };
  core.open = [](void* driver, const PenstockOpenRequest* asked) {
    made.host_cap_bytes = asked->host_cap_bytes;
    made.extra_host_bytes = asked->extra_host_bytes;
    made.device_index = asked->device_index;
    made.session_poison = asked->poison;
    made.extent_count = std::min<int64_t>(asked->extent_count, 16);
    std::copy_n(asked->extents, 2 * made.extent_count, made.extents);
    void* session = refuses("open") ? nullptr : real.open(driver, asked);
    if (session) sessions.insert(session);
    made.session = session;
    made.sessions = (int64_t)sessions.size();
    return session;
  };
  core.session_destroy = [](void* session) {
    if (!sessions.erase(session)) std::abort();
    made.sessions = (int64_t)sessions.size();
    real.session_destroy(session);
  };
  core.session_install = [](void* session, const int64_t* numbers, int64_t count) {
    return refuses("session_install") ? 1 : real.session_install(session, numbers, count);
  };
  core.session_begin = [](void* session, int64_t method, void* stream) {
    {
      std::unique_lock<std::mutex> hold(inside.lock);
      inside.count++;
      inside.changed.notify_all();
      inside.changed.wait(hold, [] { return !inside.holds; });
      inside.count--;
    }
    return refuses("session_begin") ? 1 : real.session_begin(session, method, stream);
  };
  core.session_end = [](void* session) {
    int32_t status = real.session_end(session);
    return refuses("session_end") ? 1 : status;
  };
}

// --------------------------------------------------------------------------------------------------- values of a call

// As in csrc/module_api.cpp; the sizes of outputs come back through it.
struct Value {
  int32_t kind, scalar_type;
  int64_t rank;
  int64_t* sizes;
  const int64_t* strides;
  void* data;
  int64_t integer;
  double number;
};

int32_t execute(void* handle, Value* values, int64_t count) {
  std::vector<executorch::extension::TensorPtr> tensors;
  std::vector<EValue> made_values;
  std::vector<EValue*> arguments;
  for (int64_t i = 0; i < count; ++i) {
    Value& value = values[i];
    if (value.kind != 1) {
      made_values.emplace_back(value.integer);
      continue;
    }
    tensors.push_back(executorch::extension::make_tensor_ptr(
        {value.sizes, value.sizes + value.rank}, value.data, {}, {value.strides, value.strides + value.rank},
        static_cast<ScalarType>(value.scalar_type)));
    made_values.emplace_back(*tensors.back());
  }
  for (EValue& value : made_values) arguments.push_back(&value);
  executorch::runtime::BackendExecutionContext context;
  auto* backend = executorch::runtime::get_backend_class("PenstockBackend");
  Error error = backend->execute(context, handle, {arguments.data(), arguments.size()});
  for (int64_t i = 0; i < count; ++i)
    if (made_values[(size_t)i].isTensor()) {
      auto sizes = made_values[(size_t)i].toTensor().sizes();
      std::copy(sizes.begin(), sizes.end(), values[i].sizes);
    }
  return (int32_t)error;
}

}  // namespace

extern "C" {


// Python has the same: 0: int, 1: bool, 2: text.
struct ProbeOption {
  const char* key;
  int32_t kind;
  int32_t number;
  const char* text;
};

void* probe_data(const char* path) { return new Data(path); }
void probe_data_close(void* data) { delete static_cast<Data*>(data); }
int64_t probe_data_held(void* data) { return static_cast<Data*>(data)->held(); }
void probe_data_add(void* handle, const char* name, int32_t scalar_type, int64_t rank, const int64_t* sizes,
                    const int64_t* dim_order, int64_t offset, int64_t bytes) {
  auto& data = *static_cast<Data*>(handle);
  Entry& entry = data.add(name);
  entry.at = data.at(offset);
  entry.size = (size_t)bytes;
  entry.scalar_type = static_cast<ScalarType>(scalar_type);
  entry.sizes.assign(sizes, sizes + rank);
  entry.dim_order.assign(dim_order, dim_order + rank);
}
void probe_data_add_bytes(void* handle, const char* name, const char* bytes, int64_t count) {
  Entry& entry = static_cast<Data*>(handle)->add(name);
  entry.bytes.assign(bytes, (size_t)count);
  entry.at = entry.bytes.data();
  entry.size = (size_t)count;
}

// `freed`: whether the delegate_ref was given back.
int32_t probe_init(void* data, const char* delegate_ref, int64_t delegate_ref_bytes, const ProbeOption* given, int64_t count,
                   void** out, int32_t* freed) {
  stand_between();
  std::vector<BackendOption> options;
  for (int64_t i = 0; i < count; ++i) {
    BackendOption option;
    std::strncpy(option.key, given[i].key, sizeof option.key - 1);
    std::array<char, executorch::runtime::kMaxOptionValueLength> text{};
    if (given[i].text) std::strncpy(text.data(), given[i].text, text.size() - 1);
    if (given[i].kind == 0) option.value = given[i].number;
    if (given[i].kind == 1) option.value = given[i].number != 0;
    if (given[i].kind == 2) option.value = text;
    options.push_back(option);
  }
  executorch::runtime::BackendInitContext context(nullptr, nullptr, nullptr, static_cast<Data*>(data),
                                                  {options.data(), options.size()});
  FreeableBuffer processed(
      delegate_ref, (size_t)delegate_ref_bytes, [](void* context, void*, size_t) { *static_cast<int32_t*>(context) = 1; }, freed);
  auto* backend = executorch::runtime::get_backend_class("PenstockBackend");
  auto result = backend->init(context, &processed, {});
  *freed = processed.data() == nullptr;
  if (result.ok()) *out = *result;
  int32_t seen = *freed;
  processed.Free();
  *freed = seen;
  return (int32_t)result.error();
}
int32_t probe_execute(void* handle, Value* values, int64_t count) { return execute(handle, values, count); }
void probe_destroy(void* handle) {
  executorch::runtime::get_backend_class("PenstockBackend")->destroy(static_cast<DelegateHandle*>(handle));
}

void probe_made(Made* out) { *out = made; }
// The next call of this name gives an error.
void probe_refuse(const char* name) { refused = name; }
void probe_wrap_drivers(void* (*function)(void*)) { wrap = function; }
// Two runs, the second of which comes while the first is inside the core. How many got in there: 1, or -1 for an error.
int32_t probe_two_at_once(void* first, Value* first_values, int64_t first_count, void* second, Value* second_values,
                          int64_t second_count) {
  std::atomic<int> id{0}, errors{0};
  std::atomic<bool> done{false};
  inside.holds = true;
  std::thread one([&] { errors += execute(first, first_values, first_count) != 0; });
  {
    std::unique_lock<std::mutex> hold(inside.lock);
    inside.changed.wait(hold, [] { return inside.count == 1; });
  }
  std::thread two([&] {
    id = (int)syscall(SYS_gettid);
    errors += execute(second, second_values, second_count) != 0;
    done = true;
  });
  // Asleep in a lock, or through: what it could do it has done. Several times over, for it may sleep on its way.
  for (int asleep = 0; asleep < 16 && !done;) {
    std::this_thread::yield();
    if (!id) continue;
    std::ifstream file("/proc/self/task/" + std::to_string(id) + "/syscall");
    std::string call;
    asleep = file >> call && call == std::to_string(SYS_futex) ? asleep + 1 : 0;
  }
  int most = 0;
  {
    std::lock_guard<std::mutex> hold(inside.lock);
    most = inside.count;
    inside.holds = false;
    inside.changed.notify_all();
  }
  one.join();
  two.join();
  return errors ? -1 : most;
}

}  // extern "C"
