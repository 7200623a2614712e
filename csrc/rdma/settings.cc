#include "rdma/settings.h"

#include <charconv>
#include <cstdlib>
#include <sstream>
#include <stdexcept>

namespace megatron_ext {
namespace {

std::string variable(const char* name) {
    const char* const value = std::getenv(name);
    return value == nullptr ? "" : value;
}

int to_int(const char* name, const std::string& text, int least, int most) {
    int value = 0;
    const char* const end = text.data() + text.size();
    const auto result = std::from_chars(text.data(), end, value);
    if (result.ec != std::errc() || result.ptr != end || value < least || value > most) {
        throw std::invalid_argument(std::string(name) + " must be a number from " +
                                    std::to_string(least) + " to " + std::to_string(most) +
                                    ", got '" + text + "'");
    }
    return value;
}

std::uint8_t read_byte(const char* name, std::uint8_t otherwise, int least, int most) {
    const std::string text = variable(name);
    return text.empty() ? otherwise : static_cast<std::uint8_t>(to_int(name, text, least, most));
}

std::vector<RdmaSettings::DevicePort> read_devices(const char* name) {
    std::vector<RdmaSettings::DevicePort> devices;
    std::istringstream list(variable(name));
    for (std::string item; std::getline(list >> std::ws, item, ',');) {
        const std::size_t colon = item.find(':');
        RdmaSettings::DevicePort entry{item.substr(0, colon), std::nullopt};
        if (entry.device.empty()) {
            throw std::invalid_argument(std::string(name) +
                                        " must be devices and ports like mlx5_0:1,mlx5_1, got '" +
                                        variable(name) + "'");
        }
        if (colon != std::string::npos) {
            entry.port = to_int(name, item.substr(colon + 1), 1, 255);
        }
        devices.push_back(std::move(entry));
    }
    return devices;
}

}  // namespace

RdmaSettings RdmaSettings::from_environment() {
    RdmaSettings settings;
    settings.devices = read_devices("MEGATRON_EXT_IB_HCA");
    constexpr const char* kGidIndex = "MEGATRON_EXT_IB_GID_INDEX";
    if (const std::string text = variable(kGidIndex); !text.empty()) {
        settings.gid_index = to_int(kGidIndex, text, 0, 255);
    }
    settings.traffic_class = read_byte("MEGATRON_EXT_IB_TC", settings.traffic_class, 0, 255);
    settings.service_level = read_byte("MEGATRON_EXT_IB_SL", settings.service_level, 0, 15);
    settings.timeout = read_byte("MEGATRON_EXT_IB_TIMEOUT", settings.timeout, 1, 31);
    settings.retry_count = read_byte("MEGATRON_EXT_IB_RETRY", settings.retry_count, 0, 6);
    return settings;
}

}  // namespace megatron_ext
