// The device guard, with which torch's own code (dispatcher, autograd threads) switches devices
// and streams.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "pool.h"
#include "queues.h"
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
        return getNewStream(device, 0);
    }
    c10::Stream getNewStream(c10::Device device, int priority) const override {
        return stream(device, is_async() ? Device::instance().new_stream(device.index(), priority)
                                         : Streams::instance().make());
    }
    c10::Stream exchangeStream(c10::Stream wanted) const override {
        const c10::Stream previous = getStream(wanted.device());
        current_stream_slot(wanted.device_index()) = wanted.id();
        return previous;
    }
    bool queryStream(const c10::Stream& stream) const override {
        if (is_async()) {
            Device& device = Device::instance();
            return device.query(device.record(key(stream)));
        }
        return Streams::instance().done(stream.id(), Streams::instance().submitted(stream.id()));
    }
    void synchronizeStream(const c10::Stream& stream) const override {
        if (is_async()) {
            Device& device = Device::instance();
            device.host_wait(device.record(key(stream)), "synchronize a stream");
            return;
        }
        Streams::instance().run(stream.id(), Streams::instance().submitted(stream.id()));
    }
    void synchronizeDevice(c10::DeviceIndex) const override {
        if (is_async()) {
            Device::instance().synchronize("synchronize");
            return;
        }
        Streams::instance().run_all();
    }

    // Events of torch's own code, such as autograd's, between compute streams: these run behind the
    // host only on an asynchronous device.
    void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
                c10::EventFlag) const override {
        if (is_async()) {
            if (*event == nullptr) {
                *event = new MarkPtr;
            }
            mark(*event) = Device::instance().record(key(stream));
        }
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (event != nullptr) {
            Device::instance().wait(key(stream), mark(event));
        }
    }
    bool queryEvent(void* event) const override {
        return event == nullptr || Device::instance().query(mark(event));
    }
    void synchronizeEvent(void* event) const override {
        if (event != nullptr) {
            Device::instance().host_wait(mark(event), "synchronize an event");
        }
    }
    double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
        TORCH_CHECK(begin != nullptr && end != nullptr, "both events have to be recorded");
        return 1e3 * (mark(end)->time_s - mark(begin)->time_s);
    }
    void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
        delete static_cast<MarkPtr*>(event);
    }
    void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
        if (is_async()) {
            Pool::instance().use(data, key(stream));
        }
    }

  private:
    static StreamKey key(const c10::Stream& stream) {
        return stream_key(stream.device_index(), stream.id());
    }
    static MarkPtr& mark(void* event) { return *static_cast<MarkPtr*>(event); }
    static c10::Stream stream(c10::Device device, c10::StreamId id) {
        return c10::Stream(c10::Stream::UNSAFE, device, id);
    }
};

}  // namespace fake_musa
