// Operators that need kernels of their own: creation of tensors, copies between devices, and views,
// which must share storage.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_dropout_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "generator.h"
#include "pool.h"
#include "queues.h"
#include "runtime.h"
#include "streams.h"

namespace fake_musa {

// A CPU tensor on the bytes of a device tensor. It keeps the storage alive: a transfer may still be
// in progress when the device tensor is freed or replaced.
inline at::Tensor cpu_alias(const at::Tensor& tensor) {
    if (tensor.device().type() != kDeviceType) {
        return tensor;
    }
    return at::from_blob(
        tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
        [storage = tensor.storage()](void*) {}, tensor.options().device(at::kCPU));
}

// The same without a reference to the storage: a device's use of memory does not keep it alive.
inline at::Tensor raw_alias(const at::Tensor& tensor) {
    return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
                         tensor.options().device(at::kCPU).requires_grad(false));
}

inline int64_t span(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
    int64_t last = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
        if (sizes[i] == 0) {
            return 0;
        }
        last += (sizes[i] - 1) * strides[i];
    }
    return last + 1;
}

inline at::Tensor zeros_like_on_host(const at::Tensor& tensor) {
    const auto options = tensor.options().device(c10::kCPU).requires_grad(false);
    at::Tensor memory = at::empty({span(tensor.sizes(), tensor.strides())}, options);
    if (memory.numel() != 0) {
        std::memset(memory.mutable_data_ptr(), 0, memory.nbytes());
    }
    at::Tensor shaped = at::native::as_strided_tensorimpl(memory, tensor.sizes(), tensor.strides());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        shaped.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return shaped;
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

// Enqueues a copy on a stream. Device tensors are borrowed. Host tensors are kept alive, except in
// memory that somebody else has pinned: the copy fails if that is freed before it runs.
inline void copy_later(const char* name, const at::Tensor& source, const at::Tensor& target,
                       c10::DeviceIndex device) {
    struct End {
        at::Tensor bytes;
        std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> owner;
    };
    const auto end = [](const at::Tensor& tensor) -> End {
        if (tensor.device().type() == kDeviceType) {
            return {raw_alias(tensor), std::nullopt};
        }
        if (PinnedMemory::instance().is_registered(tensor.mutable_data_ptr())) {
            return {raw_alias(tensor), tensor.storage().getWeakStorageImpl()};
        }
        return {tensor.detach(), std::nullopt};
    };
    const Costs& costs = Costs::instance();
    Task task;
    task.kind = Kind::kCopy;
    task.name = name;
    task.lasts_us = costs.copy_us;
    if (costs.copied_per_us > 0) {
        task.lasts_us += static_cast<double>(target.nbytes()) / costs.copied_per_us;
    }
    struct Copy {
        End from, to;
        at::Tensor read;
    };
    const auto copy = std::make_shared<Copy>(Copy{end(source), end(target), {}});
    const auto check = [](const End& side) {
        TORCH_CHECK(!side.owner || !side.owner->expired(),
                    "the memory of a copy was freed before it was done");
    };
    task.run = [copy, check] {
        const at::AutoDispatchBelowADInplaceOrView below;
        check(copy->from);
        copy->read = Costs::instance().any() ? copy->from.bytes.clone() : copy->from.bytes;
    };
    task.publish = [copy, check] {
        const at::AutoDispatchBelowADInplaceOrView below;
        check(copy->to);
        copy->to.bytes.copy_(copy->read);
    };
    Device::instance().submit(current_stream_key(device), std::move(task));
}

// Enqueues the store of a host tensor, to which only the caller has a reference, into a tensor.
inline void store_later(const at::Tensor& drawn, const at::Tensor& target,
                        const std::string& name) {
    copy_later(name.c_str(), drawn, target, target.device().index());
}

// Copies like the driver: the host waits for the stream of a blocking copy, and of a copy to
// pageable host memory. From pageable memory the driver reads the bytes at once.
inline void copy_in_turn(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
    const bool from_device = self.device().type() == kDeviceType;
    const bool to_device = dst.device().type() == kDeviceType;
    const c10::DeviceIndex device = (from_device ? self : dst).device().index();
    const auto pinned = [](const at::Tensor& tensor) {
        return PinnedMemory::instance().holds(tensor.mutable_data_ptr());
    };
    Device& musa = Device::instance();
    if (from_device && to_device) {
        const StreamKey other = current_stream_key(dst.device().index());
        if (self.device() != dst.device()) {  // after the earlier work of both devices
            musa.wait(current_stream_key(device), musa.record(other));
        }
        copy_later("a copy on the device", self, dst, device);
        if (self.device() != dst.device()) {
            musa.wait(other, musa.record(current_stream_key(device)));
        }
        return;
    }
    const bool as_it_is = from_device || !non_blocking || pinned(self);
    copy_later(from_device ? "a copy to the host" : "a copy from the host",
               as_it_is ? self : self.detach().clone(), dst, device);
    if (!non_blocking || (from_device && !pinned(dst))) {
        musa.host_wait(musa.record(current_stream_key(device)),
                       from_device ? "copy to the host" : "blocking copy to the device");
    }
}

inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
    if (is_async()) {
        copy_in_turn(self, dst, non_blocking);
        return dst;
    }
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
    if (is_async()) {
        Device& musa = Device::instance();
        musa.host_wait(musa.record(current_stream_key(self.device().index())), "item");
    }
    return at::_local_scalar_dense(cpu_alias(self));
}

// Gives a storage new memory; its contents move there in the order of the stream.
inline void resize_bytes(c10::StorageImpl* storage, size_t nbytes) {
    const c10::DeviceGuard guard(storage->device());
    c10::DataPtr memory = allocator().allocate(nbytes);
    if (const size_t kept = std::min(nbytes, storage->nbytes()); kept != 0) {
        Task task;
        task.kind = Kind::kCopy;
        task.name = "a copy to more memory";
        task.run = [to = memory.get(), from = storage->mutable_data(), kept] {
            std::memcpy(to, from, kept);
        };
        Device::instance().submit(current_stream_key(storage->device().index()), std::move(task));
    }
    storage->set_data_ptr_noswap(std::move(memory));
    storage->set_nbytes(nbytes);
}

// The CPU's resize_ takes new memory from the storage's own allocator, which is the device's.
inline const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size,
                                 std::optional<c10::MemoryFormat> memory_format) {
    const c10::DeviceGuard guard(self.device());
    if (!is_async()) {
        return at::native::resize_(self, size, memory_format);
    }
    c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
    at::native::resize_impl_cpu_(impl, size, std::nullopt, /*resize_storage=*/false);
    if (memory_format.has_value()) {
        impl->empty_tensor_restride(*memory_format);
    }
    const size_t needed = at::detail::computeStorageNbytes(
        self.sizes(), self.strides(), self.dtype().itemsize(), self.storage_offset());
    if (needed > self.storage().nbytes()) {
        resize_bytes(self.storage().unsafeGetStorageImpl(), needed);
    }
    return self;
}

inline void record_stream(at::Tensor& self, c10::Stream stream) {
    if (is_async()) {
        Pool::instance().use(self.storage().data_ptr(),
                             stream_key(stream.device_index(), stream.id()));
    } else {
        Streams::instance().keep(stream.id(), self.storage());
    }
}

// The CPU's dropout: it draws random numbers in the call and applies them in the stream's order.
inline std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                         std::optional<bool> train) {
    const c10::DeviceGuard guard(input.device());
    const BorrowCpuGenerator random(default_generator(input.device().index()));
    if (!is_async()) {
        catch_up(input.device().index());
        auto [output, mask] = at::native::native_dropout_cpu(cpu_alias(input), p, train);
        return {output.to(input.device()), mask.to(input.device())};
    }
    const at::Tensor zeros = zeros_like_on_host(input);
    const at::Tensor drawn = std::get<1>(at::native::native_dropout_cpu(zeros, p, train));
    const at::Tensor mask = empty_strided(drawn.sizes(), drawn.strides(), drawn.scalar_type(),
                                          std::nullopt, input.device(), std::nullopt);
    store_later(drawn, mask, "aten::native_dropout");
    if (!train.value_or(true)) {
        return {input.clone(), mask};
    }
    return {input.mul(mask).mul_(p == 1 ? 0.0 : 1.0 / (1.0 - p)), mask};
}

}  // namespace kernels
}  // namespace fake_musa
