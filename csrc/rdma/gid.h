#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

namespace megatron_ext {

/// The address of an RDMA port: 16 bytes, written like an IPv6 address. On Ethernet (RoCE v2) it is
/// the source IP address of the packets; an IPv4 address has the form ::ffff:a.b.c.d.
struct Gid {
    std::array<std::uint8_t, 16> bytes{};

    /// Both ends of a queue pair need GIDs of the same kind.
    enum class Kind { kIpv4, kGlobal, kLinkLocal };

    bool is_zero() const noexcept;
    Kind kind() const noexcept;
    std::string text() const;

    bool operator==(const Gid& other) const { return bytes == other.bytes; }
};

/// The GID of an IPv4 or IPv6 address; std::nullopt if the text is neither.
std::optional<Gid> gid_of_address(const std::string& address);

}  // namespace megatron_ext
