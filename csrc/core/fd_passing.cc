#include "core/fd_passing.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string>
#include <vector>

#include "core/errors.h"

namespace megatron_ext {
namespace {

constexpr char kMarker = 'F';
// More than one descriptor is a protocol error, but all must be received in order to close them.
constexpr std::size_t kMaxDescriptors = 16;

int to_poll_timeout_ms(Deadline end) {
    if (end == kNever) {
        return -1;
    }
    const auto remaining = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
    const auto bounded = std::clamp<std::chrono::milliseconds::rep>(remaining.count(), 0, INT_MAX);
    return static_cast<int>(bounded);
}

/// Sleeps until `socket` has one of `events` (or an error, which the next system call on it
/// reports).
void wait_for_socket(int socket, short events, Deadline deadline, InterruptCheck check,
                     const char* what) {
    const Deadline start = Clock::now();
    for (;;) {
        pollfd entry{socket, events, 0};
        const int ready = ::poll(&entry, 1, to_poll_timeout_ms(end_of_sleep(deadline, check)));
        const int error_number = errno;
        if (ready > 0) {
            return;
        }
        if (ready < 0 && error_number != EINTR) {
            throw_errno(std::string(what) + ": waiting failed", error_number);
        }
        if (check != nullptr) {
            check();
        }
        if (Clock::now() >= deadline) {
            const std::chrono::duration<double> waited = Clock::now() - start;
            throw TransportError(std::string(what) + ": the peer did not answer within " +
                                 std::to_string(waited.count()) + " s");
        }
    }
}

std::vector<UniqueFd> take_descriptors(msghdr* message) {
    std::vector<UniqueFd> received;
    received.reserve(kMaxDescriptors);
    for (cmsghdr* header = CMSG_FIRSTHDR(message); header != nullptr;
         header = CMSG_NXTHDR(message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (std::size_t i = 0; i < count; ++i) {
            int fd = -1;
            std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
            received.emplace_back(fd);
        }
    }
    return received;
}

}  // namespace

void send_fd(int socket, int fd, Deadline deadline, InterruptCheck check) {
    const char* const what = "cannot send a file descriptor";
    char marker = kMarker;
    iovec payload{&marker, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &payload;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));

    // MSG_NOSIGNAL: sending to a peer that is gone then returns an error instead of raising
    // SIGPIPE, which would end the process.
    while (::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
        const int error_number = errno;
        if (error_number == EAGAIN || error_number == EWOULDBLOCK) {
            wait_for_socket(socket, POLLOUT, deadline, check, what);
        } else if (error_number != EINTR) {
            throw_errno(what, error_number);
        }
    }
}

UniqueFd receive_fd(int socket, Deadline deadline, InterruptCheck check) {
    const char* const what = "cannot receive a file descriptor";
    char marker = 0;
    iovec payload{&marker, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
    msghdr message{};
    ssize_t num_bytes = -1;
    while (num_bytes < 0) {
        message = {};
        message.msg_iov = &payload;
        message.msg_iovlen = 1;
        message.msg_control = control;
        message.msg_controllen = sizeof(control);
        num_bytes = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        const int error_number = errno;
        if (num_bytes >= 0 || error_number == EINTR) {
            continue;
        }
        if (error_number != EAGAIN && error_number != EWOULDBLOCK) {
            throw_errno(what, error_number);
        }
        wait_for_socket(socket, POLLIN, deadline, check, what);
    }
    std::vector<UniqueFd> received = take_descriptors(&message);
    if (num_bytes == 0) {
        throw TransportError(std::string(what) + ": the peer closed the connection");
    }
    if (marker != kMarker || received.size() != 1 || (message.msg_flags & MSG_CTRUNC) != 0) {
        throw TransportError(std::string(what) + ": the peer sent byte " +
                             std::to_string(static_cast<unsigned char>(marker)) + " with " +
                             std::to_string(received.size()) +
                             " descriptors where byte 70 with one descriptor was expected");
    }
    return std::move(received.front());
}

}  // namespace megatron_ext
