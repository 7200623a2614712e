// Random numbers: every device has its own generator, separate from the CPU's, as on real hardware.
//
// A plugin that forgets to seed or to save the device's generator must get wrong numbers here too,
// so the device does not share the CPU's default generator. The sequence is the CPU's (Mersenne
// Twister), so equal seeds give equal numbers on both.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include <mutex>
#include <vector>

#include "runtime.h"

namespace fake_musa {

// A CPU generator, with its state, labelled with the device.
struct DeviceGenerator final : at::CPUGeneratorImpl {
    explicit DeviceGenerator(c10::DeviceIndex index) {
        device_ = c10::Device(kDeviceType, index);
        key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
    }
};

inline at::Generator& default_generator(c10::DeviceIndex index) {
    static std::vector<at::Generator> generators = [] {
        std::vector<at::Generator> made;
        for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
            made.push_back(at::make_generator<DeviceGenerator>(i));
        }
        return made;
    }();
    return generators.at(static_cast<size_t>(index < 0 ? current_device_slot() : index));
}

// During its lifetime the CPU's default generator continues the sequence of `source`. The emulated
// kernels are the CPU's and draw from that generator, often without taking one as an argument.
class BorrowCpuGenerator {
  public:
    explicit BorrowCpuGenerator(at::Generator source)
        : lock_(mutex()),
          source_(std::move(source)),
          cpu_(at::detail::getDefaultCPUGenerator()),
          cpu_state_(cpu_.get_state()) {
        cpu_.set_state(source_.get_state());
    }
    ~BorrowCpuGenerator() {
        source_.set_state(cpu_.get_state());
        cpu_.set_state(cpu_state_);
    }
    BorrowCpuGenerator(const BorrowCpuGenerator&) = delete;
    BorrowCpuGenerator& operator=(const BorrowCpuGenerator&) = delete;

  private:
    static std::recursive_mutex& mutex() {
        static std::recursive_mutex instance;
        return instance;
    }

    std::lock_guard<std::recursive_mutex> lock_;
    at::Generator source_;
    at::Generator cpu_;
    at::Tensor cpu_state_;
};

}  // namespace fake_musa
