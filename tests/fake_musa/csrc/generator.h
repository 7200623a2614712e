// Random numbers: every device has its own generator, separate from the CPU's, as on real hardware.
//
// A plugin that forgets to seed or to save the device's generator must get wrong numbers here too,
// therefore the CPU's default generator is not simply shared. The sequence itself is the CPU's
// (Mersenne Twister), so that equal seeds give equal numbers on both.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <vector>

#include "runtime.h"
#include "streams.h"

namespace fake_musa {

// The state of a CPU generator under the device's name.
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

// For its lifetime the CPU's default generator continues the sequence of `source`. The emulated
// kernels are the CPU's, and they draw from that generator (often without taking one as argument).
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

// What torch's device-independent code asks of an accelerator.
struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return device_count() > 0; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return device_count() > 0; }
    void init() const override {}

    c10::DeviceIndex deviceCount() const override { return device_count(); }
    c10::DeviceIndex getCurrentDevice() const override { return current_device_slot(); }
    void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
        const c10::DeviceIndex previous = current_device_slot();
        set_current_device(index);
        return previous;
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
        return index < 0 ? current_device_slot() : exchangeDevice(index);
    }

    const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
        return default_generator(index);
    }
    at::Generator getNewGenerator(c10::DeviceIndex index) const override {
        return at::make_generator<DeviceGenerator>(index < 0 ? current_device_slot() : index);
    }

    // All memory is the host's, so nothing differs for what was pinned but the answer.
    c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
    bool isPinnedPtr(const void* pointer) const override {
        return PinnedMemory::instance().holds(pointer);
    }
    c10::Device getDeviceFromPtr(void*) const override { return current_device(); }

    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
        at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), nbytes);
    }
};

}  // namespace fake_musa
