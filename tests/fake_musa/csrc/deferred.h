// Operators on an asynchronous device: an operator returns its results at once, and its stream
// fills them later.
//
// Sizes, strides and types of results come from one run of the CPU's kernel on zeros, cached by the
// call's signature. So they are the CPU's, even where torch's meta kernels differ, and a wrong
// argument raises in the call itself.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mul.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arguments.h"
#include "generator.h"
#include "kernels.h"
#include "pool.h"
#include "signature.h"

namespace fake_musa {

// The form of a result, from the run on zeros.
struct Shaped {
    int same_as = -1;  // index of the argument that is returned; -1: a new tensor
    bool defined = true;
    std::vector<int64_t> sizes, strides;
    c10::ScalarType dtype = c10::ScalarType::Float;
};

struct Inferred {
    std::vector<std::vector<Shaped>> results;  // for lists: one for each element
    std::vector<bool> is_list;
    std::vector<std::pair<int, std::vector<int64_t>>> resized;  // arguments that the call resizes
};

// The device's part of a call: it reads its arguments when it runs, and writes its results at the
// end of its duration.
struct Later {
    explicit Later(const c10::OperatorHandle& called) : op(called) {}

    void compute() {
        const at::AutoDispatchBelowADInplaceOrView below;
        if (Costs::instance().any()) {
            hide_writes();
        }
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    }

    void publish() {
        const at::AutoDispatchBelowADInplaceOrView below;
        size_t next = 0;
        for (c10::IValue& value : stack) {
            replace_tensors(value, [&](const at::Tensor& result) {
                const at::Tensor& target = targets.at(next++);
                if (target.defined()) {
                    TORCH_CHECK(result.sizes() == target.sizes() &&
                                    result.dtype() == target.dtype(),
                                "its result is not what a run on zeros said");
                    target.copy_(result);
                }
                return result;
            });
        }
        for (const auto& [bytes, hidden] : copies) {
            bytes.copy_(hidden);
        }
    }

    c10::OperatorHandle op;
    Stack stack;                      // the arguments, then the results; all on the CPU
    std::vector<at::Tensor> targets;  // destinations of results; undefined: an argument
    std::vector<std::pair<at::Tensor, size_t>> written;  // arguments, and their indices

  private:
    // Substitutes copies for the arguments that the operator writes to.
    void hide_writes() {
        size_t number = 0, next = 0;
        for (c10::IValue& argument : stack) {
            replace_tensors(argument, [&](const at::Tensor& tensor) {
                const size_t mine = number++;
                if (next == written.size() || written[next].second != mine) {
                    return tensor;
                }
                at::Tensor hidden =
                    at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
                hidden.copy_(tensor);
                copies.emplace_back(written[next++].first, hidden);
                return hidden;
            });
        }
    }

    std::vector<std::pair<at::Tensor, at::Tensor>> copies;
};

// One call of an operator whose result shapes do not depend on the contents of its arguments.
class DeferredCall {
  public:
    DeferredCall(const c10::OperatorHandle& op, Stack& stack) : op_(op), stack_(stack) {
        first_ = stack.size() - op.schema().arguments().size();
        for (size_t i = first_; i < stack.size(); ++i) {
            const auto* const alias = op.schema().arguments()[i - first_].alias_info();
            const bool writes = alias != nullptr && alias->isWrite();
            if (stack[i].isDevice()) {
                device_ = stack[i].toDevice();
            }
            replace_tensors(stack[i], [&](const at::Tensor& tensor) {
                if (tensor.defined() && tensor.device().type() == kDeviceType) {
                    device_ = tensor.device();
                }
                if (writes) {
                    written_.push_back(tensors_.size());
                }
                tensors_.push_back(tensor);
                return tensor;
            });
        }
        if (!device_.has_index()) {
            device_ = current_device();
        }
    }

    void submit() {
        const c10::DeviceGuard guard(device_);
        const Inferred& inferred = infer();
        for (const auto& [number, sizes] : inferred.resized) {
            kernels::resize_(tensors_[number], sizes, std::nullopt);
        }
        std::vector<c10::IValue> returned;
        std::vector<at::Tensor> targets;
        for (size_t i = 0; i < inferred.results.size(); ++i) {
            c10::List<at::Tensor> made;
            for (const Shaped& shaped : inferred.results[i]) {
                made.push_back(make(shaped));
                if (shaped.same_as < 0 && shaped.defined) {
                    bytes_ += static_cast<int64_t>(made.get(made.size() - 1).nbytes());
                    targets.push_back(raw_alias(made.get(made.size() - 1)));
                } else {
                    targets.emplace_back();
                }
            }
            returned.push_back(inferred.is_list[i] ? c10::IValue(made) : c10::IValue(made.get(0)));
        }
        auto later = std::make_shared<Later>(op_);
        later->stack = replaced([](const at::Tensor& tensor) { return for_later(tensor); });
        later->targets = std::move(targets);
        for (const size_t number : written_) {
            if (tensors_[number].defined()) {
                later->written.emplace_back(raw_alias(tensors_[number]), number);
            }
        }
        Task task;
        task.name = op_.schema().name();
        task.lasts_us = cost_us();
        task.run = [later] { later->compute(); };
        task.publish = [later] { later->publish(); };
        Device::instance().submit(current_stream_key(device_.index()), std::move(task));
        stack_.erase(stack_.begin() + static_cast<int64_t>(first_), stack_.end());
        std::move(returned.begin(), returned.end(), std::back_inserter(stack_));
    }

  private:
    // A CPU tensor on the same bytes for the deferred run, whoever owns them by then.
    static at::Tensor for_later(const at::Tensor& tensor) {
        if (!tensor.defined()) {
            return tensor;
        }
        at::Tensor later = tensor.is_cpu() ? tensor.detach().clone() : raw_alias(tensor);
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
            later.unsafeGetTensorImpl()->set_wrapped_number(true);
        }
        return later;
    }

    template <typename Replace>
    Stack replaced(Replace&& replace) const {
        Stack copy(stack_.begin() + static_cast<int64_t>(first_), stack_.end());
        for (c10::IValue& argument : copy) {
            if (argument.isDevice()) {
                argument = c10::Device(c10::kCPU);
            } else {
                replace_tensors(argument, replace);
            }
        }
        return copy;
    }

    const Inferred& infer() {
        static std::mutex mutex;
        static auto* const known = new std::unordered_map<std::string, Inferred>;
        const Signature signature(op_, stack_);
        if (signature.known()) {
            const std::lock_guard<std::mutex> lock(mutex);
            const auto found = known->find(signature.text());
            if (found != known->end()) {
                return found->second;
            }
        }
        Inferred inferred = run_on_zeros();
        const std::lock_guard<std::mutex> lock(mutex);
        if (signature.known()) {
            return known->emplace(signature.text(), std::move(inferred)).first->second;
        }
        own_ = std::move(inferred);
        return own_;
    }

    Inferred run_on_zeros() const {
        const at::AutoDispatchBelowADInplaceOrView below;
        std::vector<at::Tensor> zeros;
        Stack trial = replaced([&](const at::Tensor& tensor) {
            zeros.push_back(!tensor.defined() || tensor.is_cpu() ? tensor
                                                                 : zeros_like_on_host(tensor));
            return zeros.back();
        });
        op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &trial);
        Inferred inferred;
        for (size_t i = 0; i < zeros.size(); ++i) {
            if (zeros[i].defined() && zeros[i].sizes() != tensors_[i].sizes()) {
                inferred.resized.emplace_back(static_cast<int>(i), zeros[i].sizes().vec());
            }
        }
        for (c10::IValue& value : trial) {
            TORCH_CHECK_NOT_IMPLEMENTED(value.isTensor() || value.isTensorList(),
                                        op_.schema().name(), " returns no tensor");
            std::vector<Shaped> shaped;
            const bool is_list = value.isTensorList();
            replace_tensors(value, [&](const at::Tensor& result) {
                shaped.push_back(shape_of(result, zeros));
                return result;
            });
            inferred.results.push_back(std::move(shaped));
            inferred.is_list.push_back(is_list);
        }
        return inferred;
    }

    static Shaped shape_of(const at::Tensor& result, const std::vector<at::Tensor>& zeros) {
        Shaped shaped;
        shaped.defined = result.defined();
        if (!result.defined()) {
            return shaped;
        }
        for (size_t i = 0; i < zeros.size(); ++i) {
            if (result.is_same(zeros[i])) {
                shaped.same_as = static_cast<int>(i);
                return shaped;
            }
        }
        shaped.sizes = result.sizes().vec();
        shaped.strides = result.strides().vec();
        shaped.dtype = result.scalar_type();
        return shaped;
    }

    at::Tensor make(const Shaped& shaped) const {
        if (!shaped.defined) {
            return {};
        }
        if (shaped.same_as >= 0) {
            return tensors_[static_cast<size_t>(shaped.same_as)];
        }
        return kernels::empty_strided(shaped.sizes, shaped.strides, shaped.dtype, std::nullopt,
                                      device_, std::nullopt);
    }

    double cost_us() const {
        const Costs& costs = Costs::instance();
        double us = costs.kernel_us;
        if (costs.bytes_per_us > 0) {
            int64_t bytes = bytes_;
            for (const at::Tensor& tensor : tensors_) {
                bytes += tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
            }
            us += static_cast<double>(bytes) / costs.bytes_per_us;
        }
        if (costs.flops_per_us > 0) {
            us += flops() / costs.flops_per_us;
        }
        return us;
    }

    // FLOPs of matrix products, whose last two tensors are the factors.
    double flops() const {
        const std::string& name = op_.schema().name();
        const bool multiplies = name == "aten::mm" || name == "aten::bmm" ||
                                name == "aten::addmm" || name == "aten::baddbmm";
        if (!multiplies) {
            return 0;
        }
        const size_t last = name == "aten::mm" || name == "aten::bmm" ? 1 : 2;
        const at::Tensor& left = tensors_[last - 1];
        const at::Tensor& right = tensors_[last];
        return 2.0 * static_cast<double>(left.numel()) * static_cast<double>(right.size(-1));
    }

    const c10::OperatorHandle& op_;
    Stack& stack_;
    size_t first_ = 0;
    c10::Device device_ = current_device();
    std::vector<at::Tensor> tensors_;  // of all arguments, in their order
    std::vector<size_t> written_;      // indices of those that the operator writes to
    Inferred own_;
    int64_t bytes_ = 0;
};

// Whether the host needs the contents of the arguments to return the results, and so has to wait
// for them, as with a real device.
inline bool needs_contents(const c10::OperatorHandle& op, const Stack& stack) {
    const std::string_view name = op.schema().name();
    if (takes_cpu_indices(name)) {
        // torch turns one value under a mask into a `masked_fill`; a value from Python is on the
        // host with CUDA.
        const auto given = arguments(op, stack);
        if (given.size() > 3 && given[2].toTensor().numel() == 1 && !given[3].toBool()) {
            return false;
        }
        for (const auto& index : arguments(op, stack)[1].toOptionalTensorVector()) {
            if (index && index->defined() &&
                (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) {
                return true;
            }
        }
        return false;
    }
    return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output) ||
           name == "aten::bincount" || op.schema().returns().empty();
}

// Fills with random numbers: drawn in the call, because the generator's state is on the host on a
// real device too, and stored in the order of the stream.
inline bool is_random_fill(const c10::OperatorHandle& op) {
    const std::string_view name = op.schema().name();
    return name == "aten::normal_" || name == "aten::uniform_" || name == "aten::random_" ||
           name == "aten::exponential_" || name == "aten::randperm" || name == "aten::cauchy_" ||
           name == "aten::log_normal_" || name == "aten::geometric_" ||
           (name == "aten::bernoulli_" && op.schema().overload_name() == "float");
}

inline void fill_at_random(const c10::OperatorHandle& op, Stack& stack) {
    const size_t first = stack.size() - op.schema().arguments().size();
    at::Tensor target;
    for (size_t i = first; i < stack.size(); ++i) {
        replace_tensors(stack[i], [&](const at::Tensor& tensor) {
            target = tensor;
            return tensor;
        });
    }
    at::Tensor drawn = zeros_like_on_host(target);
    for (size_t i = first; i < stack.size(); ++i) {
        replace_tensors(stack[i], [&](const at::Tensor&) { return drawn; });
    }
    {
        const at::AutoDispatchBelowADInplaceOrView below;
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    }
    stack.resize(first);
    kernels::store_later(drawn, target, op.schema().name());
    stack.emplace_back(target);
}

}  // namespace fake_musa
