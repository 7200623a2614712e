#pragma once

// Two processes, each with its own endpoint, that are linked over a wire; used by the tests of
// links.

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "check.h"
#include "core/endpoint.h"
#include "shm/shm_link.h"
#include "tcp/tcp_link.h"

namespace megatron_ext::testing {

// For waits that must succeed; ctest ends a test that hangs.
inline constexpr Deadline kForEver = kNever;

enum class Wire { kShm, kTcp };
inline constexpr Wire kWires[] = {Wire::kShm, Wire::kTcp};

inline std::pair<UniqueFd, UniqueFd> connected_sockets(Wire wire) {
    if (wire == Wire::kShm) {
        int fds[2];
        CHECK(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) == 0);
        return {UniqueFd(fds[0]), UniqueFd(fds[1])};
    }
    UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const name = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof(address);
    CHECK(::bind(listener.get(), name, size) == 0 && ::listen(listener.get(), 1) == 0);
    CHECK(::getsockname(listener.get(), name, &size) == 0);
    UniqueFd calling(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK(::connect(calling.get(), name, size) == 0);
    UniqueFd answering(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    CHECK(answering.get() >= 0);
    return {std::move(calling), std::move(answering)};
}

inline void link(Endpoint& endpoint, int peer, Wire wire, UniqueFd socket) {
    if (wire == Wire::kShm) {
        auto made = std::make_shared<ShmLink>(endpoint.context(peer), std::move(socket));
        made->accept(kForEver, nullptr);
        endpoint.add(peer, made);
    } else {
        endpoint.add(peer, std::make_shared<TcpLink>(endpoint.context(peer), std::move(socket), 5));
    }
}

/// Runs `other` as rank 1 in a child and `own` as rank 0 here, linked. Returns the child's status.
inline int run_both(Wire wire, ArenaSize size, const std::function<void(Endpoint&)>& own,
                    const std::function<void(Endpoint&)>& other, bool checksums = true) {
    auto [left, right] = connected_sockets(wire);
    const auto run = [&](int rank, UniqueFd socket, const std::function<void(Endpoint&)>& body) {
        Endpoint endpoint(rank, size, checksums);
        link(endpoint, 1 - rank, wire, std::move(socket));
        body(endpoint);
    };
    const pid_t child = fork_child([&, &mine = left, &theirs = right] {
        mine.reset();
        run(1, std::move(theirs), other);
    });
    right.reset();
    run(0, std::move(left), own);
    return join_child(child);
}

/// Bytes that sender and receiver can both generate.
inline std::shared_ptr<std::vector<unsigned char>> content(std::uint64_t tag,
                                                           std::size_t num_bytes) {
    auto bytes = std::make_shared<std::vector<unsigned char>>(num_bytes);
    std::mt19937_64 random(tag);
    for (unsigned char& byte : *bytes) {
        byte = static_cast<unsigned char>(random());
    }
    return bytes;
}

inline void send(Endpoint& endpoint, int peer, std::uint64_t tag, std::size_t num_bytes) {
    MessageInfo info;
    info.tag = tag;
    info.num_bytes = num_bytes;
    const auto bytes = content(tag, num_bytes);
    endpoint.send(peer, info, bytes->data(), bytes);
}

/// Sends zeros, for receivers that ignore the content.
inline void send_zeros(Endpoint& endpoint, int peer, std::uint64_t tag, std::size_t num_bytes) {
    MessageInfo info;
    info.tag = tag;
    info.num_bytes = num_bytes;
    const auto bytes = std::make_shared<std::vector<unsigned char>>(num_bytes);
    endpoint.send(peer, info, bytes->data(), bytes);
}

inline void check_content(const std::optional<Message>& message) {
    CHECK(message.has_value());
    const auto num_bytes = static_cast<std::size_t>(message->info.num_bytes);
    const auto expected = content(message->info.tag, num_bytes);
    CHECK(num_bytes == 0 || std::memcmp(message->bytes.get(), expected->data(), num_bytes) == 0);
}

inline PeerReport report(Endpoint& endpoint) { return endpoint.peers().at(0); }

struct Stop : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline void stop_waiting() { throw Stop("stopped by the interrupt check"); }

/// A signal between two processes, independent of the links.
struct Signal {
    Signal() { CHECK(::pipe(fds) == 0); }
    ~Signal() {
        ::close(fds[0]);
        ::close(fds[1]);
    }
    void give() const { CHECK(::write(fds[1], "s", 1) == 1); }
    void await() const {
        char byte = 0;
        CHECK(::read(fds[0], &byte, 1) == 1);
    }
    int fds[2];
};

}  // namespace megatron_ext::testing
