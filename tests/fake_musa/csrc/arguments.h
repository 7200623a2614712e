// The arguments of a boxed operator.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string_view>

#include "runtime.h"

namespace fake_musa {

using Stack = torch::jit::Stack;

inline c10::ArrayRef<c10::IValue> arguments(const c10::OperatorHandle& op, const Stack& stack) {
    const size_t count = op.schema().arguments().size();
    return c10::ArrayRef<c10::IValue>(stack).slice(stack.size() - count, count);
}

// Indices may be on the CPU, as with every accelerator; the indexed tensor may not.
inline bool takes_cpu_indices(std::string_view name) {
    return name == "aten::index" || name == "aten::index_put_" ||
           name == "aten::_index_put_impl_" || name == "aten::_unsafe_index";
}

// Raises where a real device would: a kernel cannot read another device's memory. Tensors of zero
// dimensions are exempt, because torch passes them as scalars.
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

// Replaces every tensor of an argument or result by the result of `visit`.
template <typename Visit>
void replace_tensors(c10::IValue& value, Visit&& visit) {
    if (value.isTensor()) {
        value = visit(value.toTensor());
    } else if (value.isTensorList()) {
        c10::List<at::Tensor> replaced;
        for (const at::Tensor& tensor : value.toTensorVector()) {
            replaced.push_back(visit(tensor));
        }
        value = std::move(replaced);
    } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> replaced;
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
            replaced.push_back(tensor ? std::make_optional(visit(*tensor)) : std::nullopt);
        }
        value = std::move(replaced);
    }
}

}  // namespace fake_musa
