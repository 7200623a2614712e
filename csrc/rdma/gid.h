#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

namespace megatron_ext {

/// The address of an RDMA port: 16 bytes written like an IPv6 address. On Ethernet (RoCE v2) it is
/// the IP address from which packets are sent, an IPv4 one in the form ::ffff:a.b.c.d.
struct Gid {
    std::array<std::uint8_t, 16> bytes{};

    /// Which GIDs reach each other: both ends of a queue pair must be of one kind.
    enum class Kind { kIpv4, kGlobal, kLinkLocal };

    bool is_zero() const noexcept;
    Kind kind() const noexcept;
    std::string text() const;

    bool operator==(const Gid& other) const { return bytes == other.bytes; }
};

/// The GID of an IPv4 or IPv6 address; nothing if the text is neither.
std::optional<Gid> gid_of_address(const std::string& address);

}  // namespace megatron_ext
