#include "rdma/devices.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "rdma/errors.h"
#include "rdma/handle.h"

namespace megatron_ext {
namespace {

namespace fs = std::filesystem;

/// The library's list of devices, which stay valid as long as this object exists.
class DeviceList {
  public:
    explicit DeviceList(const verbs::Library& library) : library_(library) {
        int count = 0;
        list_ = library.get_device_list(&count);
        const int error_number = errno;
        if (list_ == nullptr && error_number != ENOSYS) {
            throw RdmaError("RDMA devices cannot be listed: " +
                                std::generic_category().message(error_number),
                            "check that /sys is mounted");
        }
        count_ = list_ == nullptr ? 0 : static_cast<std::size_t>(count);  // ENOSYS: no kernel part
    }
    DeviceList(const DeviceList&) = delete;
    DeviceList& operator=(const DeviceList&) = delete;
    ~DeviceList() {
        if (list_ != nullptr) {
            library_.free_device_list(list_);
        }
    }

    verbs::Device** begin() const { return list_; }
    verbs::Device** end() const { return list_ + count_; }

  private:
    const verbs::Library& library_;
    verbs::Device** list_;
    std::size_t count_;
};

OpenedDevice open(const verbs::Library& library, verbs::Device* device) {
    verbs::Context* const context = library.open_device(device);
    const int error_number = errno;
    if (context == nullptr) {
        throw RdmaError(std::string("the RDMA device ") + library.get_device_name(device) +
                            " cannot be opened: " + std::generic_category().message(error_number),
                        "give this user, or this container (--device=/dev/infiniband), access to "
                        "/dev/infiniband/uverbs*");
    }
    return {context, Destroy(library.close_device)};
}

/// The first line of a sysfs file; empty if it is unreadable, as for unused GIDs.
std::string read_line(const fs::path& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

std::vector<GidEntry> list_gids(const verbs::Library& library, verbs::Context* context,
                                std::uint8_t port, int table_length, const fs::path& folder) {
    std::vector<GidEntry> entries;
    for (int index = 0; index < table_length; ++index) {
        verbs::Gid raw{};
        if (library.query_gid(context, port, index, &raw) != 0) {
            continue;
        }
        GidEntry entry{index, {}, "", ""};
        std::copy(std::begin(raw.raw), std::end(raw.raw), entry.gid.bytes.begin());
        if (!entry.gid.is_zero()) {
            entry.type = read_line(folder / "gid_attrs" / "types" / std::to_string(index));
            entry.net_device = read_line(folder / "gid_attrs" / "ndevs" / std::to_string(index));
            entries.push_back(std::move(entry));
        }
    }
    return entries;
}

/// A device's port numbers, which are the names of its port directories.
std::vector<std::uint8_t> port_numbers(const fs::path& folder) {
    std::vector<std::uint8_t> numbers;
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(folder, ignored)) {
        const int number = std::atoi(entry.path().filename().c_str());
        if (number > 0 && number < 256) {
            numbers.push_back(static_cast<std::uint8_t>(number));
        }
    }
    std::sort(numbers.begin(), numbers.end());
    return numbers;
}

std::vector<RdmaPort> list_ports(const verbs::Library& library, verbs::Context* context,
                                 const fs::path& folder) {
    std::vector<RdmaPort> ports;
    for (const std::uint8_t number : port_numbers(folder)) {
        verbs::PortAttr attr{};
        const int error_number = library.query_port(context, number, &attr);
        if (error_number != 0) {
            throw RdmaError("port " + std::to_string(number) + " cannot be queried: " +
                                std::generic_category().message(error_number),
                            "see the kernel's log (dmesg)");
        }
        const fs::path port_folder = folder / std::to_string(number);
        ports.push_back(
            {number, attr.state, attr.link_layer, attr.lid, attr.active_mtu, attr.max_message_bytes,
             list_gids(library, context, number, attr.gid_table_length, port_folder)});
    }
    return ports;
}

}  // namespace

const char* RdmaPort::state_name() const noexcept {
    switch (state) {
        case verbs::kPortDown:
            return "down";
        case verbs::kPortInit:
            return "initialising";
        case verbs::kPortArmed:
            return "armed";
        case verbs::kPortActive:
            return "active";
        default:
            return "in an unknown state";
    }
}

const char* RdmaPort::link_layer_name() const noexcept {
    return link_layer == verbs::kEthernet ? "Ethernet" : "InfiniBand";
}

std::vector<RdmaDevice> list_devices(const std::string& sysfs) {
    const verbs::Library& library = verbs::load_library();
    std::vector<RdmaDevice> devices;
    for (verbs::Device* device : DeviceList(library)) {
        RdmaDevice entry;
        entry.name = library.get_device_name(device);
        try {
            const OpenedDevice opened = open(library, device);
            const fs::path folder = fs::path(sysfs) / "class/infiniband" / entry.name / "ports";
            entry.ports = list_ports(library, opened.get(), folder);
        } catch (const RdmaError& error) {
            entry.error = error.finding();
            entry.remedy = error.remedy();
        }
        devices.push_back(std::move(entry));
    }
    // mlx5_2 sorts before mlx5_10
    std::sort(devices.begin(), devices.end(), [](const RdmaDevice& left, const RdmaDevice& right) {
        return std::pair(left.name.size(), left.name) < std::pair(right.name.size(), right.name);
    });
    return devices;
}

OpenedDevice open_device(const std::string& name) {
    const verbs::Library& library = verbs::load_library();
    for (verbs::Device* device : DeviceList(library)) {
        if (library.get_device_name(device) == name) {
            return open(library, device);
        }
    }
    throw RdmaError("there is no RDMA device " + name, "list them with `rdma link`");
}

}  // namespace megatron_ext
