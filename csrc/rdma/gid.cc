#include "rdma/gid.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>

namespace megatron_ext {

bool Gid::is_zero() const noexcept {
    return std::all_of(bytes.begin(), bytes.end(), [](std::uint8_t byte) { return byte == 0; });
}

Gid::Kind Gid::kind() const noexcept {
    const bool starts_with_zeros =
        std::all_of(bytes.begin(), bytes.begin() + 10, [](std::uint8_t byte) { return byte == 0; });
    if (starts_with_zeros && bytes[10] == 0xFF && bytes[11] == 0xFF) {
        return Kind::kIpv4;
    }
    // fe80::/10
    return bytes[0] == 0xFE && (bytes[1] & 0xC0) == 0x80 ? Kind::kLinkLocal : Kind::kGlobal;
}

std::string Gid::text() const {
    char buffer[INET6_ADDRSTRLEN] = "";
    ::inet_ntop(AF_INET6, bytes.data(), buffer, sizeof(buffer));
    return buffer;
}

std::optional<Gid> gid_of_address(const std::string& address) {
    Gid gid;
    if (::inet_pton(AF_INET6, address.c_str(), gid.bytes.data()) == 1) {
        return gid;
    }
    in_addr ipv4{};
    if (::inet_pton(AF_INET, address.c_str(), &ipv4) == 1) {
        gid.bytes = {};
        gid.bytes[10] = gid.bytes[11] = 0xFF;
        std::memcpy(&gid.bytes[12], &ipv4, sizeof(ipv4));
        return gid;
    }
    return std::nullopt;
}

}  // namespace megatron_ext
