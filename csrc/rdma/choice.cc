#include "rdma/choice.h"

#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "rdma/errors.h"

namespace megatron_ext {
namespace {

/// One port's sources, and the score of the best one.
struct PortSources {
    int worth;
    std::vector<RdmaSource> sources;
};

bool is_of_container(const std::string& net_device) {
    constexpr std::array<const char*, 6> kPrefixes{"docker", "br-", "cni", "flannel", "veth",
                                                   "virbr"};
    return std::any_of(kPrefixes.begin(), kPrefixes.end(), [&](const char* prefix) {
        return net_device.rfind(prefix, 0) == 0;
    });
}

std::optional<Gid> gid_of_socket_address(const sockaddr* address) {
    Gid gid;
    if (address != nullptr && address->sa_family == AF_INET6) {
        std::memcpy(gid.bytes.data(),
                    &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, 16);
        return gid;
    }
    if (address != nullptr && address->sa_family == AF_INET) {
        gid.bytes[10] = gid.bytes[11] = 0xFF;
        std::memcpy(&gid.bytes[12], &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, 4);
        return gid;
    }
    return std::nullopt;
}

/// Returns whether the device has a network interface with this address, such as IP over
/// InfiniBand.
bool has_interface(const std::string& device, const Gid& address, const std::string& sysfs) {
    ifaddrs* first = nullptr;
    if (::getifaddrs(&first) != 0) {
        return false;
    }
    const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> list(first, ::freeifaddrs);
    for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
        const auto path = std::filesystem::path(sysfs) / "class/net" / entry->ifa_name /
                          "device/infiniband" / device;
        std::error_code ignored;
        if (gid_of_socket_address(entry->ifa_addr) == address &&
            std::filesystem::exists(path, ignored)) {
            return true;
        }
    }
    return false;
}

/// The score of a GID: a higher score is better, and 0 means that the GID is unusable.
int worth_of(const RdmaPort& port, const GidEntry& entry, const RdmaSettings& settings,
             const std::optional<Gid>& address, const std::string& device,
             const std::string& sysfs) {
    if (settings.gid_index) {
        return entry.index == *settings.gid_index ? 1 : 0;
    }
    if (port.link_layer != verbs::kEthernet) {
        const bool fits = !address || has_interface(device, *address, sysfs);
        return entry.index == 0 && fits ? 3 : 0;
    }
    if (entry.type != "RoCE v2") {
        return 0;
    }
    if (address) {
        return entry.gid == *address ? 3 : 0;
    }
    if (is_of_container(entry.net_device)) {
        return 0;
    }
    switch (entry.gid.kind()) {
        case Gid::Kind::kIpv4:
            return 3;
        case Gid::Kind::kGlobal:
            return 2;
        default:
            return 1;
    }
}

PortSources sources_of(const RdmaDevice& device, const RdmaPort& port, const RdmaSettings& settings,
                       const std::optional<Gid>& address, const std::string& sysfs) {
    std::vector<std::pair<int, RdmaSource>> sources_by_worth;
    for (const GidEntry& entry : port.gids) {
        const int worth = worth_of(port, entry, settings, address, device.name, sysfs);
        if (worth > 0) {
            sources_by_worth.emplace_back(
                worth, RdmaSource{device.name, port.number, port.link_layer, port.lid,
                                  port.active_mtu, port.max_message_bytes, entry.index, entry.gid});
        }
    }
    std::stable_sort(
        sources_by_worth.begin(), sources_by_worth.end(),
        [](const auto& left, const auto& right) { return left.first > right.first; });
    PortSources result{sources_by_worth.empty() ? 0 : sources_by_worth.front().first, {}};
    for (auto& [worth, source] : sources_by_worth) {
        result.sources.push_back(std::move(source));
    }
    return result;
}

bool is_allowed(const RdmaSettings& settings, const std::string& device, int port) {
    const auto names = [&](const RdmaSettings::DevicePort& entry) {
        return entry.device == device && (!entry.port || port == 0 || *entry.port == port);
    };
    return settings.devices.empty() ||
           std::any_of(settings.devices.begin(), settings.devices.end(), names);
}

/// Returns why a port has no source.
std::string reason_against(const RdmaPort& port, const RdmaSettings& settings,
                           const std::string& address) {
    if (settings.gid_index) {
        return "has no GID " + std::to_string(*settings.gid_index);
    }
    std::string gids;
    for (const GidEntry& entry : port.gids) {
        gids += (gids.empty() ? "" : ", ") + entry.gid.text() + " (" + entry.type +
                (entry.net_device.empty() ? "" : " on " + entry.net_device) + ")";
    }
    const std::string have = "; its GIDs are: " + (gids.empty() ? "none" : gids);
    if (!address.empty()) {
        return "does not have the address " + address + have;
    }
    return "has no RoCE v2 GID of a network between hosts" + have;
}

/// Collects the usable ports of the devices, and the reasons why the other ports are not usable.
struct Search {
    void look_at(const RdmaDevice& device) {
        if (!is_allowed(settings, device.name, 0)) {
            reject(device.name, "is not in MEGATRON_EXT_IB_HCA");
        } else if (!device.error.empty()) {
            reject(device.name, "cannot be used: " + device.error);
            remedy_of_device = device.remedy;
        }
        for (const RdmaPort& port : device.ports) {
            if (is_allowed(settings, device.name, port.number)) {
                look_at(device, port);
            }
        }
    }

    void look_at(const RdmaDevice& device, const RdmaPort& port) {
        const std::string who = device.name + " port " + std::to_string(port.number);
        if (port.state != verbs::kPortActive) {
            reject(who, std::string("is ") + port.state_name());
            return;
        }
        PortSources port_sources = sources_of(device, port, settings, wanted, sysfs);
        if (port_sources.sources.empty()) {
            reject(who, reason_against(port, settings, address));
            has_other_addresses |= wanted && !settings.gid_index && !port.gids.empty();
        } else {
            usable.push_back(std::move(port_sources));
        }
    }

    void reject(const std::string& who, const std::string& why) {
        reasons += (reasons.empty() ? "" : "; ") + who + " " + why;
    }

    std::string remedy() const {
        if (!remedy_of_device.empty()) {
            return remedy_of_device;
        }
        return has_other_addresses
                   ? "set the addresses of RDMA ports with --node-ips; by default, the address on "
                     "the route to MASTER_ADDR is used"
                   : "give the port an address, and bring its link up (`rdma link`)";
    }

    const RdmaSettings& settings;
    const std::string& address;
    std::optional<Gid> wanted;  ///< of `address`, if there is one
    const std::string& sysfs;
    std::vector<PortSources> usable;
    std::string reasons;
    std::string remedy_of_device;
    bool has_other_addresses = false;  ///< a port is active, but not with `address`
};

}  // namespace

std::string RdmaSource::text() const {
    return device + " port " + std::to_string(port) + " GID " + std::to_string(gid_index) + " (" +
           gid.text() + ")";
}

std::vector<RdmaSource> choose_sources(const std::vector<RdmaDevice>& devices,
                                       const RdmaSettings& settings, const std::string& address,
                                       unsigned rail, const std::string& sysfs) {
    Search search{settings, address, {}, sysfs, {}, "", "", false};
    if (!address.empty() && !(search.wanted = gid_of_address(address))) {
        throw std::invalid_argument("the address of a node must be an IPv4 or IPv6 address, got '" +
                                    address + "'");
    }
    if (devices.empty()) {
        throw RdmaError("this host has no RDMA device",
                        "load the driver of the adapter, or use --pipeline-transport tcp");
    }
    for (const RdmaDevice& device : devices) {
        search.look_at(device);
    }
    std::vector<PortSources>& usable = search.usable;
    if (usable.empty()) {
        throw RdmaError("no RDMA port can be used: " + search.reasons, search.remedy());
    }
    std::stable_sort(usable.begin(), usable.end(), [](const auto& left, const auto& right) {
        return left.worth > right.worth;
    });
    const auto num_best = static_cast<std::size_t>(
        std::count_if(usable.begin(), usable.end(),
                      [&](const auto& port) { return port.worth == usable.front().worth; }));
    return usable[rail % num_best].sources;
}

}  // namespace megatron_ext
