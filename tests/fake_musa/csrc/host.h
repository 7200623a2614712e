// Access to the interpreter without its headers: releases the GIL while the host waits, and reports
// the waits of the host to Python.
#pragma once

#include <dlfcn.h>

#include <atomic>

namespace fake_musa {

// Releases the GIL during its lifetime, if this thread holds it.
class ReleaseGil {
  public:
    ReleaseGil() {
        static const auto holds = find<int (*)()>("PyGILState_Check");
        static const auto initialized = find<int (*)()>("Py_IsInitialized");
        static const auto save = find<void* (*)()>("PyEval_SaveThread");
        if (holds != nullptr && initialized() != 0 && holds() != 0) {
            state_ = save();
        }
    }
    ~ReleaseGil() {
        static const auto restore = find<void (*)(void*)>("PyEval_RestoreThread");
        if (state_ != nullptr) {
            restore(state_);
        }
    }
    ReleaseGil(const ReleaseGil&) = delete;
    ReleaseGil& operator=(const ReleaseGil&) = delete;

  private:
    template <typename Function>
    static Function find(const char* name) {
        return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
    }

    void* state_ = nullptr;
};

using HostWaitCallback = void (*)(const char* what);

inline std::atomic<HostWaitCallback>& host_wait_callback() {
    static std::atomic<HostWaitCallback> callback{nullptr};
    return callback;
}

// A host thread calls this, without locks held, before it waits for the device.
inline void tell_host_wait(const char* what) {
    if (const HostWaitCallback callback = host_wait_callback()) {
        callback(what);
    }
}

}  // namespace fake_musa

extern "C" inline __attribute__((used)) void fake_musa_on_host_wait(
    fake_musa::HostWaitCallback callback) {
    fake_musa::host_wait_callback() = callback;
}
