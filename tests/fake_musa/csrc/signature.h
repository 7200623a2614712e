// The signature of a call: the properties that determine sizes, strides and types of its results.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstring>
#include <string>

#include "arguments.h"

namespace fake_musa {

// A cache key of the properties that result sizes can depend on. It omits the values of floats, or
// each optimizer step would be a new key, unless the call fills an empty tensor (`arange`).
class Signature {
  public:
    Signature(const c10::OperatorHandle& op, const Stack& stack) {
        add(reinterpret_cast<int64_t>(&op.schema()));
        for (const c10::IValue& argument : arguments(op, stack)) {
            exact_ = exact_ || (argument.isTensor() && argument.toTensor().defined() &&
                                argument.toTensor().numel() == 0);
        }
        for (const c10::IValue& argument : arguments(op, stack)) {
            add(argument);
        }
    }

    const std::string& text() const { return text_; }
    bool known() const { return known_; }

  private:
    void add(int64_t number) {
        text_.append(reinterpret_cast<const char*>(&number), sizeof number);
    }
    void add(const at::Tensor& tensor) {
        if (!tensor.defined()) {
            add(-7);
            return;
        }
        add(static_cast<int64_t>(tensor.scalar_type()) << 8 |
            static_cast<int64_t>(tensor.is_cpu()) << 1 |
            static_cast<int64_t>(tensor.unsafeGetTensorImpl()->is_wrapped_number()));
        add(tensor.dim());
        for (const int64_t size : tensor.sizes()) {
            add(size);
        }
        for (const int64_t stride : tensor.strides()) {
            add(stride);
        }
    }
    void add(const c10::IValue& value) {
        if (value.isTensor()) {
            add(value.toTensor());
        } else if (value.isTensorList()) {
            add(static_cast<int64_t>(value.toTensorList().size()));
            for (const at::Tensor& tensor : value.toTensorVector()) {
                add(tensor);
            }
        } else if (value.isOptionalTensorList()) {
            const auto tensors = value.toOptionalTensorVector();
            add(static_cast<int64_t>(tensors.size()));
            for (const auto& tensor : tensors) {
                add(tensor.value_or(at::Tensor()));
            }
        } else if (value.isNone() || value.isDevice() || value.isGenerator()) {
            add(-1);
        } else if (value.isInt()) {
            add(value.toInt());
        } else if (value.isBool()) {
            add(value.toBool() ? -3 : -4);
        } else if (value.isDouble()) {
            int64_t bits = -5;
            if (exact_) {
                const double number = value.toDouble();
                std::memcpy(&bits, &number, sizeof bits);
            }
            add(bits);
        } else if (value.isIntList()) {
            const auto numbers = value.toIntVector();
            add(static_cast<int64_t>(numbers.size()));
            for (const int64_t number : numbers) {
                add(number);
            }
        } else if (value.isBoolList()) {
            for (const bool flag : value.toBoolList()) {
                add(flag ? -3 : -4);
            }
        } else if (value.isString()) {
            text_ += value.toStringRef();
        } else if (value.isDoubleList()) {
            for (const double number : value.toDoubleVector()) {
                int64_t bits = 0;
                std::memcpy(&bits, &number, sizeof bits);
                add(bits);
            }
        } else {
            known_ = false;
        }
    }

    std::string text_;
    bool exact_ = false, known_ = true;
};

}  // namespace fake_musa
