// The device guard: how torch's own code (dispatcher, autograd threads) switches devices and
// streams.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "runtime.h"
#include "streams.h"

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

    c10::Stream getStream(c10::Device device) const override {
        return stream(device, current_stream_slot(device.index()));
    }
    c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return stream(device, Streams::instance().make());
    }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return stream(device, Streams::instance().make());
    }
    c10::Stream exchangeStream(c10::Stream wanted) const override {
        const c10::Stream previous = getStream(wanted.device());
        current_stream_slot(wanted.device_index()) = wanted.id();
        return previous;
    }
    bool queryStream(const c10::Stream& stream) const override {
        return Streams::instance().done(stream.id(), Streams::instance().submitted(stream.id()));
    }
    void synchronizeStream(const c10::Stream& stream) const override {
        Streams::instance().run(stream.id(), Streams::instance().submitted(stream.id()));
    }
    void synchronizeDevice(c10::DeviceIndex) const override { Streams::instance().run_all(); }

    // Events between streams of torch's own code: autograd's, which compute and so are never late.
    void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    void synchronizeEvent(void*) const override {}

  private:
    static c10::Stream stream(c10::Device device, c10::StreamId id) {
        return c10::Stream(c10::Stream::UNSAFE, device, id);
    }
};

}  // namespace fake_musa
