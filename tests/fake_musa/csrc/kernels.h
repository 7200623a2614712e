// The operators that cannot be emulated by copying to the CPU and back: making tensors, moving
// bytes between devices, and the views, which must share storage.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>

#include "runtime.h"
#include "streams.h"

namespace fake_musa {

// The bytes of a device tensor as a CPU tensor. The result keeps the storage alive: a transfer may
// still be under way when the device tensor is freed or swapped for another.
inline at::Tensor cpu_alias(const at::Tensor& tensor) {
    if (tensor.device().type() != kDeviceType) {
        return tensor;
    }
    return at::from_blob(
        tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
        [storage = tensor.storage()](void*) {}, tensor.options().device(at::kCPU));
}

namespace kernels {

inline c10::Device target(std::optional<c10::Device> device) {
    const c10::Device wanted = device.value_or(current_device());
    return wanted.has_index() ? wanted : current_device();
}

inline void check_options(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
    TORCH_CHECK(layout.value_or(c10::kStrided) == c10::kStrided, "MUSA: only strided tensors");
    TORCH_CHECK(!pin_memory.value_or(false), "only dense CPU tensors can be pinned");
}

inline at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                        std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                        std::optional<bool> pin_memory,
                        std::optional<c10::MemoryFormat> memory_format) {
    check_options(layout, pin_memory);
    const c10::DeviceGuard guard(target(device));
    return at::detail::empty_generic(size, &allocator(),
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), memory_format);
}

inline at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                                std::optional<c10::ScalarType> dtype,
                                std::optional<c10::Layout> layout,
                                std::optional<c10::Device> device, std::optional<bool> pin_memory) {
    check_options(layout, pin_memory);
    const c10::DeviceGuard guard(target(device));
    return at::detail::empty_strided_generic(size, stride, &allocator(),
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
    const c10::Device device = self.device().type() == kDeviceType ? self.device() : dst.device();
    const c10::StreamId stream = current_stream_slot(device.index());
    const bool converts = self.dtype() != dst.dtype() || self.sizes() != dst.sizes();
    if (non_blocking && stream != 0 && !converts && self.numel() != 0) {
        Streams::instance().copy_later(stream, self, dst);
        return dst;
    }
    catch_up(device.index());
    cpu_alias(dst).copy_(cpu_alias(self), non_blocking);
    return dst;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
    dst.resize_(self.sizes());
    return copy_from(self, dst, /*non_blocking=*/false);
}

inline at::Scalar local_scalar_dense(const at::Tensor& self) {
    return at::_local_scalar_dense(cpu_alias(self));
}

// The CPU's resize_ takes new memory from the storage's own allocator, which is ours.
inline const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size,
                                 std::optional<c10::MemoryFormat> memory_format) {
    const c10::DeviceGuard guard(self.device());
    return at::native::resize_(self, size, memory_format);
}

inline void record_stream(at::Tensor& self, c10::Stream stream) {
    Streams::instance().keep(stream.id(), self.storage());
}

}  // namespace kernels
}  // namespace fake_musa
