#pragma once

#include <string>
#include <vector>

namespace megatron_ext {

/// The result of one step of the probe. `remedy` is empty if the step succeeded.
struct RdmaFinding {
    std::string step;  ///< library, devices, port, memory, queue pair
    bool is_good;
    std::string text;
    std::string remedy;
};

/// Tries every step of opening an RDMA link, up to a queue pair connected to itself. Stops at the
/// first failure, which is then the last finding. For `address`, see choose_sources(). Throws only
/// std::invalid_argument, for invalid settings.
std::vector<RdmaFinding> probe_rdma(const std::string& address, const std::string& sysfs = "/sys");

}  // namespace megatron_ext
