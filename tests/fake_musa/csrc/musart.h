// The emulated runtime library, libmusart.so: only the functions that share memory between
// processes.
//
// Memory is an anonymous memfd; another process of the same user opens it through the descriptor
// in the handle. FAKE_MUSA_NO_IPC emulates a driver without this feature, as in some containers.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "queues.h"
#include "runtime.h"

namespace fake_musa {

enum Code : int {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNoDevice = 100,
    kInvalidContext = 201,
    kMapFailed = 205,
    kNotSupported = 801,
};

// The contents of a handle, 64 opaque bytes to its user.
struct IpcHandle {
    int32_t pid, file;
    uint64_t size;
    char reserved[48];
};
static_assert(sizeof(IpcHandle) == 64);

// Memory allocated by this process (with its descriptor) or opened from another one (-1).
class SharedMemory {
  public:
    static SharedMemory& instance() {
        static SharedMemory memory;
        return memory;
    }

    int allocate(void** address, size_t size) {
        const int file = memfd_create("fake_musa_memory", MFD_CLOEXEC);
        if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) {
            close(file);
            return kOutOfMemory;
        }
        const int code = map(file, size, file, address);
        if (code == kSuccess) {
            std::memset(*address, 0xff, size);  // poison, as in Allocator
        } else {
            close(file);
        }
        return code;
    }

    int export_(void* address, IpcHandle* handle) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = blocks_.find(address);
        if (std::getenv("FAKE_MUSA_NO_IPC") != nullptr) {
            return kNotSupported;
        }
        if (found == blocks_.end() || found->second.file < 0) {
            return kInvalidValue;
        }
        *handle = {getpid(), found->second.file, found->second.size, {}};
        return kSuccess;
    }

    int open_(const IpcHandle& handle, void** address) {
        if (handle.pid == getpid()) {
            return kInvalidContext;  // a process may not open its own memory
        }
        const std::string path =
            "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.file);
        const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
        if (file < 0) {
            return kMapFailed;
        }
        const int code = map(file, handle.size, -1, address);
        close(file);
        return code;
    }

    int release(void* address, bool own) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = blocks_.find(address);
        if (found == blocks_.end() || (found->second.file >= 0) != own) {
            return kInvalidValue;
        }
        munmap(address, found->second.size);
        if (own) {
            close(found->second.file);
        }
        blocks_.erase(found);
        return kSuccess;
    }

  private:
    struct Block {
        size_t size;
        int file;
    };

    int map(int file, size_t size, int kept, void** address) {
        void* const data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (data == MAP_FAILED) {
            return kOutOfMemory;
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        blocks_[data] = {size, kept};
        *address = data;
        return kSuccess;
    }

    std::mutex mutex_;
    std::map<void*, Block> blocks_;
};

// Waits for the whole device before memory is unmapped, as a driver does.
inline void wait_before_unmapping(const char* what) {
    if (is_async()) {
        Device::instance().synchronize(what);
    }
}

}  // namespace fake_musa

extern "C" {

int musaMalloc(void** address, size_t size) {
    return fake_musa::SharedMemory::instance().allocate(address, size);
}
int musaFree(void* address) {
    fake_musa::wait_before_unmapping("musaFree");
    return fake_musa::SharedMemory::instance().release(address, true);
}
int musaIpcGetMemHandle(fake_musa::IpcHandle* handle, void* address) {
    return fake_musa::SharedMemory::instance().export_(address, handle);
}
int musaIpcOpenMemHandle(void** address, fake_musa::IpcHandle handle, unsigned flags) {
    return flags == 1 ? fake_musa::SharedMemory::instance().open_(handle, address)
                      : fake_musa::kInvalidValue;
}
int musaIpcCloseMemHandle(void* address) {
    fake_musa::wait_before_unmapping("musaIpcCloseMemHandle");
    return fake_musa::SharedMemory::instance().release(address, false);
}
int musaDeviceGetPCIBusId(char* name, int size, int device) {
    const int length = std::snprintf(name, static_cast<size_t>(size), "0000:%02x:00.0", device + 1);
    return length < size ? fake_musa::kSuccess : fake_musa::kInvalidValue;
}
int musaDeviceGetByPCIBusId(int* device, const char* name) {
    unsigned bus = 0;
    if (std::sscanf(name, "0000:%02x:00.0", &bus) != 1 || bus == 0 ||
        static_cast<int>(bus) > fake_musa::device_count()) {
        return fake_musa::kNoDevice;
    }
    *device = static_cast<int>(bus) - 1;
    return fake_musa::kSuccess;
}
int musaGetLastError() { return fake_musa::kSuccess; }
const char* musaGetErrorString(int code) {
    switch (code) {
        case fake_musa::kOutOfMemory: return "out of memory";
        case fake_musa::kNoDevice: return "no such device";
        case fake_musa::kInvalidContext: return "invalid device context";
        case fake_musa::kMapFailed: return "mapping of buffer object failed";
        case fake_musa::kNotSupported: return "operation not supported";
        default: return "invalid argument";
    }
}

}  // extern "C"
