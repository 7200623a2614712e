// Every other operator: copy the arguments to the CPU, compute there, copy the results back.
//
// Two things are done first, because torch's generic fallback is more forgiving than a device. It
// would quietly move CPU arguments along, and it would draw random numbers from the CPU's generator.
#pragma once

#include "generator.h"
#include "runtime.h"

#include <ATen/native/CPUFallback.h>

#include <optional>
#include <string_view>

namespace fake_musa {

using Stack = torch::jit::Stack;

inline c10::ArrayRef<c10::IValue> arguments(const c10::OperatorHandle& op, const Stack& stack) {
    const size_t count = op.schema().arguments().size();
    return c10::ArrayRef<c10::IValue>(stack).slice(stack.size() - count, count);
}

// Indices may live on the CPU, as for every accelerator; the indexed tensor may not.
inline bool takes_cpu_indices(std::string_view name) {
    return name == "aten::index" || name == "aten::index_put_" ||
           name == "aten::_index_put_impl_" || name == "aten::_unsafe_index";
}

// Raises where a real device would: a kernel cannot read another device's memory. Tensors without
// dimensions are let through, torch passes them as numbers.
inline void check_same_device(const c10::OperatorHandle& op, const Stack& stack) {
    const bool cpu_indices = takes_cpu_indices(op.schema().name());
    std::optional<c10::Device> expected;
    bool first = true;
    const auto check = [&](const at::Tensor& tensor) {
        const bool is_index = cpu_indices && !first && tensor.defined() && tensor.is_cpu();
        first = false;
        if (!tensor.defined() || tensor.dim() == 0 || is_index) {
            return;
        }
        if (!expected) {
            expected = tensor.device();
        }
        TORCH_CHECK(tensor.device() == *expected, "Expected all tensors to be on the same device, ",
                    "but found at least two devices, ", *expected, " and ", tensor.device(), "! (",
                    op.schema().name(), ")");
    };
    for (const c10::IValue& argument : arguments(op, stack)) {
        if (argument.isTensor()) {
            check(argument.toTensor());
        } else if (argument.isTensorList()) {
            for (const at::Tensor& tensor : argument.toTensorVector()) {
                check(tensor);
            }
        } else if (argument.isOptionalTensorList()) {
            for (const std::optional<at::Tensor>& tensor : argument.toOptionalTensorVector()) {
                check(tensor.value_or(at::Tensor()));
            }
        }
    }
}

// Removes an explicit generator from the arguments and returns the one to draw from.
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

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
    check_same_device(op, *stack);
    std::optional<BorrowCpuGenerator> random;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) {
        random.emplace(take_generator(op, *stack));
    }
    // A view that was copied through the CPU would no longer share its storage: an error.
    at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

}  // namespace fake_musa
