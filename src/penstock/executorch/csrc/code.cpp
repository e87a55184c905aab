// Owns the loaded code, its inputs and outputs, and the tensors of captured passes. Knows torch, not ExecuTorch.
#include "code.h"

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>

#include "load_error.h"
#include "state_tensors.h"
#include "transfer_memory.h"

namespace penstock_executorch {
namespace {

at::Tensor wrapped(const TensorView& view) {
  return at::from_blob(view.data, view.sizes, view.strides,
                       at::TensorOptions().dtype(static_cast<c10::ScalarType>(view.scalar_type)));
}

at::Tensor pinned(const TensorView& like, const std::vector<int64_t>& strides, TransferMemory& transfers) {
  TensorView view{nullptr, like.scalar_type, like.sizes, strides};
  int64_t items = 1;
  for (int64_t size : like.sizes) items *= size;
  view.data = transfers.take(items * (int64_t)c10::elementSize(static_cast<c10::ScalarType>(like.scalar_type)));
  return wrapped(view);
}

// The package as a file, for as long as it takes to load it.
class PackageFile {
 public:
  PackageFile(const char* data, size_t bytes, const std::string& content_name) {
    const char* folder = std::getenv("TMPDIR");
    path_ = std::string(folder && *folder ? folder : "/tmp") + "/penstock-" + content_name + "-XXXXXX.pt2";
    int file = mkstemps(path_.data(), 4);
    if (file < 0) throw LoadError(Kind::host, "cannot create " + path_ + ": " + std::strerror(errno));
    while (bytes) {
      ssize_t written = write(file, data, bytes);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) {
        std::string reason = written < 0 ? std::strerror(errno) : "nothing was written";
        close(file);
        unlink(path_.c_str());
        throw LoadError(Kind::host, "cannot write the compiled code to " + path_ + ": " + reason);
      }
      data += written;
      bytes -= (size_t)written;
    }
    close(file);
  }
  ~PackageFile() { unlink(path_.c_str()); }
  PackageFile(const PackageFile&) = delete;
  PackageFile& operator=(const PackageFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace

std::string torch_minor() { return std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR); }

std::string cpu_capability() { return at::get_cpu_capability(); }

int32_t current_device_index() {
  if (!at::hasCUDA())
    throw LoadError(Kind::build, "the program was compiled for CUDA; torch " + torch_minor() + " sees no GPU here");
  return at::detail::getCUDAHooks().getCurrentDevice();
}

void* current_stream(const std::string& device, int32_t device_index) {
  if (device != "cuda") return nullptr;
  using Ask = int32_t (*)(int32_t, void**);
  // NOLOAD: only the torch that the process already runs on will do.
  static void* const library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  static const Ask ask =
      library ? reinterpret_cast<Ask>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  void* stream = nullptr;
  if (!ask || ask(device_index, &stream))
    throw LoadError(Kind::build, "torch gives no CUDA stream: is it built with CUDA?");
  return stream;
}

void give_back_cached_memory() {
  if (at::hasCUDA()) c10::getDeviceAllocator(at::kCUDA)->emptyCache();
}

struct CompiledCode::Parts {
  std::string method;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader;
  at::Device device{at::kCPU};
  // In pinned memory.
  std::vector<at::Tensor> given;
  // The first `states` of them are states.
  std::vector<at::Tensor> inputs;
  size_t states = 0;
  std::vector<at::Tensor> outputs;
  struct Pass {
    std::vector<at::Tensor> inputs, outputs;
  };
  std::map<int64_t, Pass> passes;

  // Something is on its way between pinned memory and the device.
  bool is_moving = false;

  void move(const at::Tensor& from, const at::Tensor& to) {
    is_moving = !device.is_cpu();
    to.copy_(from, /*non_blocking=*/true);
  }
  void await_moves() {
    if (!is_moving) return;
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.synchronizeStream(guard.getStream(device));
    is_moving = false;
  }

  int64_t ooms() const {
    return device.is_cpu() ? 0 : c10::getDeviceAllocator(at::kCUDA)->getDeviceStats(device.index()).num_ooms;
  }
  // When torch finds no memory for what it computes, compiled code also reports only a generic failure.
  template <typename Work>
  auto telling_ooms(Work&& work) const {
    const int64_t before = ooms();
    try {
      return work();
    } catch (const std::exception& error) {
      if (ooms() == before) throw;
      throw LoadError(Kind::activations, "method '" + method + "' ran out of device memory for its own buffers; set a "
                                         "budget with less, or free device memory (" + error.what() + ")");
    }
  }

  // The device to make current while it is used: a GPU with its number. The CPU needs none.
  std::optional<at::Device> guarded() const { return device.is_cpu() ? std::nullopt : std::optional(device); }
};

CompiledCode::CompiledCode(const char* package, size_t package_bytes, const std::string& content_name,
                           const std::string& method, const std::string& device, int32_t device_index)
    : parts_(std::make_unique<Parts>()) {
  PackageFile file(package, package_bytes, content_name);
  parts_->method = method;
  if (device == "cuda") parts_->device = at::Device(at::kCUDA, (c10::DeviceIndex)device_index);
  try {
    parts_->loader = std::make_unique<torch::inductor::AOTIModelPackageLoader>(
        file.path(), method, /*run_single_threaded=*/true, /*num_runners=*/1,
        device == "cuda" ? (c10::DeviceIndex)device_index : (c10::DeviceIndex)-1);
  } catch (const std::exception& error) {
    throw LoadError(Kind::package, "the compiled code of method '" + method + "' cannot be loaded: " + error.what());
  }
}

CompiledCode::~CompiledCode() = default;

void CompiledCode::take_states(const StateTensors& tensors, const std::vector<int64_t>& numbers) {
  parts_->states = numbers.size();
  for (int64_t number : numbers) parts_->inputs.push_back(tensors.each[(size_t)number]);
}

void CompiledCode::take_inputs(const std::vector<TensorView>& views, const std::vector<std::vector<int64_t>>& strides,
                               TransferMemory& transfers) {
  at::NoGradGuard no_grad;
  c10::OptionalDeviceGuard on(parts_->guarded());
  for (size_t i = 0; i < views.size(); ++i) {
    parts_->given.push_back(pinned(views[i], strides[i], transfers));
    parts_->given.back().copy_(wrapped(views[i]));
  }
}

void CompiledCode::move_inputs() {
  at::NoGradGuard no_grad;
  c10::OptionalDeviceGuard on(parts_->guarded());
  for (const at::Tensor& from : parts_->given) {
    parts_->inputs.push_back(from);
    if (parts_->device.is_cpu()) continue;
    at::Tensor& to = parts_->inputs.back();
    to = parts_->telling_ooms(
        [&] { return at::empty_strided(from.sizes(), from.strides(), from.options().device(parts_->device)); });
    parts_->move(from, to);
  }
}

void CompiledCode::run(void* stream) {
  at::NoGradGuard no_grad;
  c10::OptionalDeviceGuard on(parts_->guarded());
  parts_->outputs = parts_->telling_ooms([&] { return parts_->loader->run(parts_->inputs, stream); });
}

void CompiledCode::make_pass(int64_t number) {
  c10::OptionalDeviceGuard on(parts_->guarded());
  std::vector<at::Tensor> inputs = parts_->inputs;
  // States keep their addresses.
  for (size_t i = parts_->states; i < inputs.size(); ++i)
    inputs[i] = parts_->telling_ooms(
        [&] { return at::empty_strided(inputs[i].sizes(), inputs[i].strides(), inputs[i].options()); });
  parts_->passes[number].inputs = std::move(inputs);
}

void CompiledCode::run_pass(int64_t number, void* stream) {
  at::NoGradGuard no_grad;
  c10::OptionalDeviceGuard on(parts_->guarded());
  Parts::Pass& pass = parts_->passes.at(number);
  std::vector<at::Tensor> inputs = pass.inputs;  // run() takes them
  pass.outputs = parts_->telling_ooms([&] { return parts_->loader->run(inputs, stream); });
}

void CompiledCode::fill_pass(int64_t number) {
  at::NoGradGuard no_grad;
  c10::OptionalDeviceGuard on(parts_->guarded());
  const Parts::Pass& pass = parts_->passes.at(number);
  for (size_t i = 0; i < parts_->given.size(); ++i) parts_->move(parts_->given[i], pass.inputs[parts_->states + i]);
}

void CompiledCode::show_pass(int64_t number) { parts_->outputs = parts_->passes.at(number).outputs; }

void CompiledCode::drop_pass(int64_t number) { parts_->passes.erase(number); }

size_t CompiledCode::output_count() const { return parts_->outputs.size(); }

std::vector<int64_t> CompiledCode::output_sizes(size_t index) const { return parts_->outputs[index].sizes().vec(); }

int64_t CompiledCode::output_scalar_type(size_t index) const {
  return static_cast<int64_t>(parts_->outputs[index].scalar_type());
}

void CompiledCode::copy_outputs(const std::vector<TensorView>& to, TransferMemory& transfers) {
  at::NoGradGuard no_grad;
  c10::OptionalDeviceGuard on(parts_->guarded());
  std::vector<at::Tensor> arrived;
  for (size_t i = 0; i < to.size(); ++i) {
    arrived.push_back(pinned(to[i], to[i].strides, transfers));
    parts_->move(parts_->outputs[i], arrived.back());
  }
  parts_->await_moves();
  for (size_t i = 0; i < to.size(); ++i)
    std::copy_n(static_cast<const char*>(arrived[i].const_data_ptr()), arrived[i].nbytes(), static_cast<char*>(to[i].data));
}

void CompiledCode::forget() {
  // Wait, because the next run writes into the same memory. Wait twice, because drivers also report the failure of
  // earlier work here without having waited. An error of a lost device is no news: the run has failed.
  try {
    parts_->await_moves();
  } catch (const std::exception&) {
    try {
      parts_->await_moves();
    } catch (const std::exception&) {
      parts_->is_moving = false;
    }
  }
  parts_->given.clear();
  parts_->inputs.clear();
  parts_->outputs.clear();
}

}  // namespace penstock_executorch
