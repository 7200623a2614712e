// How this process emulates: at once, as ever, or by queues that run behind the host.
//
// FAKE_MUSA_ASYNC=1 chooses queues. FAKE_MUSA_COST says how long things take there, as in
// "kernel_us=20,copy_us=50,jitter_us=100,seed=3". Both are read at the first use of the device, so
// a process that was forked before that has its own.
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

// What a task takes besides the time that the host's processor needs for it.
struct Costs {
    double kernel_us = 0;      // each kernel, and besides
    double flops_per_us = 0;   // of matrix products; 0: they cost nothing
    double bytes_per_us = 0;   // of what a kernel reads and writes; 0: nothing
    double copy_us = 0;        // each copy, and besides
    double copied_per_us = 0;  // bytes; 0: nothing
    double message_us = 0;     // each operation of a communicator, once all its ranks are there
    double jitter_us = 0;      // mean of what a random part of all of them takes longer
    int64_t seed = 0;

    // Whether anything takes time, so that when it reads and when it writes makes a difference.
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
                                         : nullptr;
    }
};

// Hardware queues of a device, which all its streams share. A driver has eight unless it is told.
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

// How long nothing may move in any rank before that is an error.
inline double stuck_s() {
    static const double value = [] {
        const char* const text = std::getenv("FAKE_MUSA_STUCK_S");
        return text == nullptr ? 10.0 : std::atof(text);
    }();
    return value;
}

}  // namespace fake_musa
