"""What our C++ sources need from torch. The sources cannot be in this folder, so the names they use are.

The native core finds functions by name when it is loaded (csrc/abi/torch_abi.cpp) and refuses where one is missing. The
ExecuTorch delegate is built against torch's headers (executorch/csrc/code.cpp). tests/torch_private compares these
lists with the sources, and with the torch that is installed.
"""

from __future__ import annotations

_CORE_CPU = (
    "create_tensor_from_blob new_tensor_handle delete_tensor_object device_type_cpu device_type_cuda "
    "dtype_bfloat16 dtype_float16 dtype_int32 dtype_int64 dtype_element_size "
    "get_data_ptr get_dim get_sizes get_strides get_storage_offset get_dtype "
    "get_device_index empty_strided _reinterpret_tensor copy_ zero_ cpu_mm_out cpu_addmm_out call_dispatcher"
)
CORE_CPU_FUNCTIONS = tuple(f"aoti_torch_{name}" for name in _CORE_CPU.split())
# Only where libtorch_cuda is loaded.
CUDA_FUNCTIONS = (
    "aoti_torch_get_current_cuda_stream",
    "aoti_torch_cuda_mm_out",
    "aoti_torch_cuda_addmm_out",
    "aoti_torch_cuda_index_Tensor",
)

DELEGATE_HEADERS = (
    "ATen/Context.h",
    "ATen/Version.h",
    "ATen/core/Tensor.h",
    "ATen/core/grad_mode.h",
    "ATen/cuda/CUDAGraph.h",
    "ATen/detail/CUDAHooksInterface.h",
    "ATen/ops/empty.h",
    "ATen/ops/empty_strided.h",
    "ATen/ops/from_blob.h",
    "c10/core/CachingDeviceAllocator.h",
    "c10/core/Device.h",
    "c10/core/DeviceGuard.h",
    "c10/core/Event.h",
    "c10/core/StreamGuard.h",
    "c10/core/impl/VirtualGuardImpl.h",
    "c10/cuda/CUDACachingAllocator.h",
    "torch/csrc/inductor/aoti_package/model_package_loader.h",
    "torch/version.h",
)
# Names outside torch's public C++ interface: header -> words that it must contain.
DELEGATE_NAMES = {
    "torch/csrc/inductor/aoti_package/model_package_loader.h": (
        "AOTIModelPackageLoader",
        "run_single_threaded",
        "num_runners",
        "device_index",
        "stream_handle",
    ),
    "ATen/detail/CUDAHooksInterface.h": ("getCUDAHooks", "AcceleratorHooksInterface", "deviceSynchronize"),
    "ATen/detail/AcceleratorHooksInterface.h": ("getCurrentDevice",),
    "ATen/Version.h": ("get_cpu_capability",),
    "c10/core/CachingDeviceAllocator.h": ("getDeviceAllocator", "emptyCache", "getDeviceStats", "num_ooms"),
}
