// The mode of the emulation: synchronous (the default), or asynchronous with queues that run behind
// the host.
//
// FAKE_MUSA_ASYNC=1 selects the queues. FAKE_MUSA_COST sets the durations there, as in
// "kernel_us=20,copy_us=50,jitter_us=100,seed=3". Both are read at the first use of the device, so
// a process forked before that has its own settings.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>

namespace fake_musa {

inline bool is_async() {
    static const bool on = [] {
        const char* const text = std::getenv("FAKE_MUSA_ASYNC");
        return text != nullptr && std::string(text) == "1";
    }();
    return on;
}

// The emulated duration of a task, in addition to its CPU time.
struct Costs {
    double kernel_us = 0;      // launch of each kernel, plus:
    double flops_per_us = 0;   // throughput of matrix products; 0: infinite
    double bytes_per_us = 0;   // bandwidth of a kernel's reads and writes; 0: infinite
    double copy_us = 0;        // launch of each copy, plus:
    double copied_per_us = 0;  // bytes of a copy per us; 0: infinite
    double message_us = 0;     // each operation of a communicator, once all its ranks have joined
    double jitter_us = 0;      // mean random delay of a task; one task in eight gets it
    double lag_us = 0;         // how late a queue's thread may be without its device being late
    double shared = 0;         // 1: kernels share the device, see processor.h; 0: each has its own
    double fills = 1;          // 0: below the highest priority, only what is waited for runs
    int64_t seed = 0;

    // Whether any task has a duration, so that its read and write times differ.
    bool any() const { return kernel_us + flops_per_us + bytes_per_us + copy_us + jitter_us > 0; }

    static const Costs& instance() {
        static const Costs costs = parse(std::getenv("FAKE_MUSA_COST"));
        return costs;
    }

  private:
    static Costs parse(const char* text) {
        Costs costs;
        std::istringstream parts(text == nullptr ? "" : text);
        for (std::string part; std::getline(parts, part, ',');) {
            const size_t equals = part.find('=');
            const std::string name = part.substr(0, equals);
            double* const field = costs.field(name);
            if (equals == std::string::npos || (field == nullptr && name != "seed")) {
                throw std::invalid_argument("FAKE_MUSA_COST has no " + part);
            }
            const double value = std::stod(part.substr(equals + 1));
            if (field != nullptr) {
                *field = value;
            } else {
                costs.seed = static_cast<int64_t>(value);
            }
        }
        return costs;
    }

    double* field(const std::string& name) {
        return name == "kernel_us"       ? &kernel_us
               : name == "flops_per_us"  ? &flops_per_us
               : name == "bytes_per_us"  ? &bytes_per_us
               : name == "copy_us"       ? &copy_us
               : name == "copied_per_us" ? &copied_per_us
               : name == "message_us"    ? &message_us
               : name == "jitter_us"     ? &jitter_us
               : name == "lag_us"        ? &lag_us
               : name == "shared"        ? &shared
               : name == "fills"         ? &fills
                                         : nullptr;
    }
};

// Number of hardware queues of a device, which all its streams share. A driver's default is eight.
inline int num_hardware_queues() {
    static const int count = [] {
        for (const char* name : {"MUSA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_CONNECTIONS"}) {
            if (const char* const text = std::getenv(name)) {
                return std::clamp(std::atoi(text), 1, 32);
            }
        }
        return 8;
    }();
    return count;
}

// How long all ranks may make no progress before that is an error, in seconds.
inline double stuck_s() {
    static const double value = [] {
        const char* const text = std::getenv("FAKE_MUSA_STUCK_S");
        return text == nullptr ? 10.0 : std::atof(text);
    }();
    return value;
}

}  // namespace fake_musa
