// The hooks through which torch's device-independent code queries an accelerator.
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CPUAllocator.h>

#include "generator.h"
#include "kernels.h"
#include "runtime.h"
#include "streams.h"

namespace fake_musa {

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

    // All memory is the host's, so pinned memory differs only in its label.
    c10::Allocator* getPinnedMemoryAllocator() const override {
        static PinnedAllocator pinned;
        return is_async() ? &pinned : c10::GetCPUAllocator();
    }
    bool isPinnedPtr(const void* pointer) const override {
        return PinnedMemory::instance().holds(pointer);
    }
    c10::Device getDeviceFromPtr(void*) const override { return current_device(); }

    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
        if (is_async()) {
            kernels::resize_bytes(storage.unsafeGetStorageImpl(), nbytes);
            return;
        }
        at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), nbytes);
    }
};

}  // namespace fake_musa
