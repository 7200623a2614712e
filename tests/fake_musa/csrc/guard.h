// The device guard: how torch's own code (dispatcher, autograd threads) switches devices and
// streams.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "runtime.h"

namespace fake_musa {

class Guard final : public c10::impl::DeviceGuardImplInterface {
  public:
    c10::DeviceType type() const override { return kDeviceType; }

    c10::Device exchangeDevice(c10::Device device) const override {
        const c10::Device previous = current_device();
        set_current_device(device.index());
        return previous;
    }
    c10::Device getDevice() const override { return current_device(); }
    void setDevice(c10::Device device) const override { set_current_device(device.index()); }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        current_device_slot() = device.index();
    }
    c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

    // One stream, always idle. Events are no-ops for the same reason.
    c10::Stream getStream(c10::Device device) const override { return default_stream(device); }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return default_stream(device);
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return default_stream(device);
    }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return default_stream(device);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        return default_stream(stream.device());
    }
    bool queryStream(const c10::Stream&) const override { return true; }
    void synchronizeStream(const c10::Stream&) const override {}
    void synchronizeDevice(c10::DeviceIndex) const override {}

    void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    void synchronizeEvent(void*) const override {}

  private:
    static c10::Stream default_stream(c10::Device device) {
        return c10::Stream(c10::Stream::DEFAULT, device);
    }
};

}  // namespace fake_musa
