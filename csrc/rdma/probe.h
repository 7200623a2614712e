#pragma once

#include <string>
#include <vector>

namespace megatron_ext {

/// What one step of the probe found. `remedy` is empty where nothing is wrong.
struct RdmaFinding {
    std::string step;  ///< library, devices, port, memory, queue pair
    bool is_good;
    std::string text;
    std::string remedy;
};

/// Tries what a link over RDMA needs, step by step, up to a queue pair that is connected to itself;
/// the last finding is the first that is not good, if any. `address` as in choose_sources(). Throws
/// only std::invalid_argument, for wrong settings.
std::vector<RdmaFinding> probe_rdma(const std::string& address, const std::string& sysfs = "/sys");

}  // namespace megatron_ext
