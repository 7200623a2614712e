// The fallback of all other operators: the CPU's kernel runs on the device's bytes, and its results
// are copied back.
//
// torch's own CPU fallback is more forgiving than a device: it silently accepts CPU arguments, and
// it draws random numbers from the CPU's generator. It also copies each argument, which changes
// strides and so the order of sums. Here the results are bitwise those of the CPU.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <optional>
#include <vector>

#include "arguments.h"
#include "deferred.h"
#include "generator.h"
#include "kernels.h"
#include "runtime.h"

namespace fake_musa {

// Removes an explicit generator from the arguments; returns it, or the device's default one.
inline at::Generator take_generator(const c10::OperatorHandle& op, Stack& stack) {
    const size_t count = op.schema().arguments().size();
    for (size_t i = stack.size() - count; i < stack.size(); ++i) {
        if (stack[i].isGenerator()) {
            at::Generator generator = stack[i].toGenerator();
            TORCH_CHECK(generator.device().type() == kDeviceType,
                        "Expected a 'musa' device type for generator but found '",
                        generator.device().type(), "'");
            stack[i] = c10::IValue();
            return generator;
        }
    }
    return default_generator(-1);
}

// The CPU arguments of one call, and the device tensors that they represent.
class CpuCall {
  public:
    CpuCall(const c10::OperatorHandle& op, Stack& stack) : op_(op), stack_(stack) {
        const auto& schema = op.schema().arguments();
        const size_t first = stack.size() - schema.size();
        for (size_t i = 0; i < schema.size(); ++i) {
            c10::IValue& argument = stack[first + i];
            if (argument.isDevice()) {
                device_ = argument.toDevice();
                argument = c10::Device(c10::kCPU);
                continue;
            }
            const auto* alias = schema[i].alias_info();
            const bool written = alias != nullptr && alias->isWrite();
            replace_tensors(argument, [&](const at::Tensor& t) { return to_cpu(t, written); });
        }
    }

    void run() {
        if (is_async()) {
            Device::instance().host_wait(
                Device::instance().record(current_stream_key(device_.index())),
                op_.schema().name().c_str());
        } else {
            catch_up(device_.index());
        }
        op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
        for (const Alias& alias : aliases_) {
            if (alias.cpu.sizes() != alias.device.sizes()) {
                kernels::copy_from_and_resize(alias.cpu, alias.device);
            }
        }
        const size_t first = stack_.size() - op_.schema().returns().size();
        for (size_t i = first; i < stack_.size(); ++i) {
            replace_tensors(stack_[i], [&](const at::Tensor& t) { return to_device(t); });
        }
    }

  private:
    struct Alias {
        at::Tensor device;
        at::Tensor cpu;
    };

    // An alias of the same bytes: kernels see the tensor's true strides and write to its memory.
    // Only an empty output tensor has no bytes to share yet.
    at::Tensor to_cpu(const at::Tensor& tensor, bool written) {
        if (!tensor.defined() || tensor.device().type() != kDeviceType) {
            return tensor;
        }
        device_ = tensor.device();
        const bool to_fill = written && tensor.numel() == 0;
        at::Tensor cpu = to_fill ? at::empty(tensor.sizes(), tensor.options().device(c10::kCPU))
                                 : cpu_alias(tensor);
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
            cpu.unsafeGetTensorImpl()->set_wrapped_number(true);
        }
        aliases_.push_back({tensor, cpu});
        return cpu;
    }

    // In-place operators return their argument, the others a new tensor.
    at::Tensor to_device(const at::Tensor& tensor) const {
        for (const Alias& alias : aliases_) {
            if (tensor.is_same(alias.cpu)) {
                return alias.device;
            }
        }
        if (!tensor.defined() || !is_async()) {
            return tensor.defined() ? tensor.to(device_) : tensor;
        }
        // The host has waited for the result, so the copy back needs no wait either.
        const at::Tensor made =
            kernels::empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(),
                                   std::nullopt, device_, std::nullopt);
        kernels::store_later(tensor, made, op_.schema().name());
        return made;
    }

    const c10::OperatorHandle& op_;
    Stack& stack_;
    c10::Device device_ = current_device();
    std::vector<Alias> aliases_;
};

// Raises for views: a view computed on the CPU would not share the device tensor's storage.
inline void check_no_view(const c10::OperatorHandle& op) {
    for (const c10::Argument& result : op.schema().returns()) {
        const auto* alias = result.alias_info();
        TORCH_CHECK_NOT_IMPLEMENTED(alias == nullptr || alias->isWrite(), op.schema().name(),
                                    " is a view, which the emulated MUSA device does not have");
    }
}

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
    check_no_view(op);
    check_same_device(op, *stack);
    std::optional<BorrowCpuGenerator> random;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) {
        random.emplace(take_generator(op, *stack));
    }
    if (is_async() && random && is_random_fill(op)) {
        fill_at_random(op, *stack);
    } else if (is_async() && !random && !needs_contents(op, *stack)) {
        DeferredCall(op, *stack).submit();
    } else {
        CpuCall(op, *stack).run();
    }
}

}  // namespace fake_musa
