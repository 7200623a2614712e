#pragma once

// Code shared by the tests that use the fake libibverbs. See fake_verbs/exports.cc for its faults.

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "check.h"

namespace megatron_ext::testing {

/// Selects the fake library for the whole program.
inline void use_fake_verbs() { ::setenv("MEGATRON_EXT_IBVERBS_LIB", FAKE_VERBS_PATH, 1); }

template <typename Function>
Function fake_function(const char* name) {
    void* const handle = ::dlopen(FAKE_VERBS_PATH, RTLD_NOW | RTLD_LOCAL);
    CHECK(handle != nullptr);
    return reinterpret_cast<Function>(::dlsym(handle, name));
}

/// Injects faults until the end of the scope.
class Faults {
  public:
    explicit Faults(const std::string& list) { set(list.c_str()); }
    Faults(const Faults&) = delete;
    Faults& operator=(const Faults&) = delete;
    ~Faults() { set(""); }

  private:
    static void set(const char* list) {
        fake_function<void (*)(const char*)>("fake_verbs_set_faults")(list);
    }
};

/// Number of live objects of the library.
inline int num_fake_objects() { return fake_function<int (*)()>("fake_verbs_objects")(); }

inline void send_async_event(int type) {
    fake_function<void (*)(int, int)>("fake_verbs_async_event")(type, 1);
}

/// The fake device's part of sysfs, in a directory that the destructor removes.
class FakeSysfs {
  public:
    FakeSysfs() {
        char name[] = "/tmp/megatron_ext-sysfs-XXXXXX";
        CHECK(::mkdtemp(name) != nullptr);
        root_ = name;
        const auto attrs = root_ / "class/infiniband/fake0/ports/1/gid_attrs";
        for (const char* folder : {"types", "ndevs"}) {
            std::filesystem::create_directories(attrs / folder);
        }
        for (const char* index : {"0", "1", "3", "4"}) {
            std::ofstream(attrs / "types" / index) << "RoCE v2\n";
            std::ofstream(attrs / "ndevs" / index) << (*index == '4' ? "docker0\n" : "eth0\n");
        }
    }
    FakeSysfs(const FakeSysfs&) = delete;
    FakeSysfs& operator=(const FakeSysfs&) = delete;
    ~FakeSysfs() { std::filesystem::remove_all(root_); }

    std::string path() const { return root_; }

  private:
    std::filesystem::path root_;
};

}  // namespace megatron_ext::testing
