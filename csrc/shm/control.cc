#include "shm/control.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace megatron_ext {
namespace {

constexpr std::size_t kMaxPacketBytes = 4096;

/// Opens a descriptor that becomes readable when the peer's process has exited. Returns no
/// descriptor if the process is in another pid namespace, or if the kernel has no pidfd (before
/// Linux 5.3).
UniqueFd open_peer_process(int socket) {
    ucred credentials{};
    socklen_t size = sizeof(credentials);
    if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0 ||
        credentials.pid <= 0) {
        return UniqueFd();
    }
#ifdef SYS_pidfd_open
    return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, credentials.pid, 0)));
#else
    return UniqueFd();
#endif
}

}  // namespace

Control::Control(UniqueFd socket)
    : socket_(std::move(socket)),
      guard_(std::make_unique<ForkGuard>(socket_.get())),
      process_(open_peer_process(socket_.get())) {}

bool Control::process_ended() const noexcept {
    pollfd entry{process_.get(), POLLIN, 0};
    return process_ && ::poll(&entry, 1, 0) > 0;
}

PeerState Control::update() {
    // Check this before reading the socket: if the process has exited, its last notice is then
    // readable.
    const bool ended = process_ended();
    char packet[kMaxPacketBytes];
    while (state_ == PeerState::kOpen) {
        const ssize_t num_bytes = ::recv(socket_.get(), packet, sizeof(packet), MSG_DONTWAIT);
        const int error_number = errno;
        if (num_bytes > 0 && packet[0] == 'C') {
            state_ = PeerState::kClosed;
        } else if (num_bytes > 0 && packet[0] == 'A') {
            state_ = PeerState::kAborted;
            reason_.assign(packet + 1, static_cast<std::size_t>(num_bytes) - 1);
        } else if (num_bytes < 0 && (error_number == EAGAIN || error_number == EWOULDBLOCK)) {
            if (!ended) {
                return state_;
            }
            state_ = PeerState::kDied;
        } else if (num_bytes < 0 && (error_number == EINTR || error_number == ECONNRESET)) {
            continue;  // a reset is reported once, before the peer's notices and the end
        } else {
            state_ = PeerState::kDied;
        }
    }
    return state_;
}

void Control::say(char kind, const std::string& text) noexcept {
    char packet[kMaxPacketBytes];
    packet[0] = kind;
    const std::size_t num_bytes = 1 + text.copy(packet + 1, kMaxPacketBytes - 1);
    while (::send(socket_.get(), packet, num_bytes, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 &&
           errno == EINTR) {
    }
}

}  // namespace megatron_ext
