#include "rdma/handshake.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include "core/errors.h"
#include "core/piece.h"

namespace megatron_ext {
namespace {

constexpr std::uint64_t kMaxTextBytes = 1 << 16;

/// The header of a text, with a separate checksum: a damaged length would stall the receiver.
struct Head {
    std::uint64_t num_bytes;
    std::uint64_t checksum;      ///< of the text
    std::uint64_t own_checksum;  ///< of the fields above
};

Head head_of(const std::string& text) {
    Head head{text.size(), checksum(text.data(), text.size()), 0};
    head.own_checksum = checksum(&head, offsetof(Head, own_checksum));
    return head;
}

void require_intact(bool intact, const std::string& peer) {
    if (!intact) {
        throw TransportError("the RDMA handshake of " + peer +
                             " is damaged; check the network between the hosts, and install the "
                             "same megatron_ext on both");
    }
}

/// Sleeps until the socket is readable (POLLIN) or writable (POLLOUT). Throws TransportError at the
/// deadline.
void wait_for(int socket, short what, const std::string& peer, Deadline deadline,
              InterruptCheck check) {
    for (;;) {
        const auto now = Clock::now();
        if (now >= deadline) {
            throw TransportError(peer + " did not continue the RDMA handshake in time");
        }
        const auto remaining = std::chrono::ceil<std::chrono::milliseconds>(
            std::min<Clock::duration>(kInterruptPeriod, deadline - now));
        pollfd entry{socket, what, 0};
        if (::poll(&entry, 1, static_cast<int>(remaining.count())) > 0) {
            return;
        }
        if (check != nullptr) {
            check();
        }
    }
}

/// Calls `transfer(begin, num_bytes)`, a send() or recv(), until all bytes are transferred.
template <typename Transfer>
void transfer_all(int socket, short what, std::size_t num_bytes, const std::string& peer,
                  Deadline deadline, InterruptCheck check, Transfer transfer) {
    for (std::size_t done = 0; done < num_bytes;) {
        wait_for(socket, what, peer, deadline, check);
        const ssize_t moved = transfer(done, num_bytes - done);
        const int error_number = errno;
        if (moved == 0 || (moved < 0 && error_number == ECONNRESET)) {
            throw TransportError(peer + " gave up connecting over RDMA; see its log");
        }
        if (moved > 0) {
            done += static_cast<std::size_t>(moved);
        } else if (error_number != EAGAIN && error_number != EINTR) {
            throw_errno("cannot connect to " + peer + " over RDMA", error_number);
        }
    }
}

}  // namespace

std::string exchange_texts(int socket, const std::string& peer, const std::string& text,
                           Deadline deadline, InterruptCheck check) {
    const auto receive = [&](char* to, std::size_t num_bytes) {
        transfer_all(socket, POLLIN, num_bytes, peer, deadline, check,
                     [&](std::size_t done, std::size_t remaining) {
                         return ::recv(socket, to + done, remaining, MSG_DONTWAIT);
                     });
    };
    const Head own_head = head_of(text);
    std::string out(reinterpret_cast<const char*>(&own_head), sizeof(own_head));
    out += text;
    transfer_all(socket, POLLOUT, out.size(), peer, deadline, check,
                 [&](std::size_t done, std::size_t remaining) {
                     return ::send(socket, out.data() + done, remaining,
                                   MSG_DONTWAIT | MSG_NOSIGNAL);
                 });
    Head head{};
    receive(reinterpret_cast<char*>(&head), sizeof(head));
    require_intact(head.own_checksum == checksum(&head, offsetof(Head, own_checksum)) &&
                       head.num_bytes <= kMaxTextBytes,
                   peer);
    std::string theirs(static_cast<std::size_t>(head.num_bytes), '\0');
    receive(theirs.data(), theirs.size());
    require_intact(head.checksum == checksum(theirs.data(), theirs.size()), peer);
    return theirs;
}

}  // namespace megatron_ext
