#include "rdma/handshake.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "core/errors.h"

namespace megatron_ext {
namespace {

constexpr std::uint32_t kMaxTextBytes = 1 << 16;

/// Sleeps until the socket can be read (POLLIN) or written (POLLOUT).
void wait_for(int socket, short what, const std::string& peer, Deadline deadline,
              InterruptCheck check) {
    for (;;) {
        const auto now = Clock::now();
        if (now >= deadline) {
            throw TransportError(peer + " did not go on with connecting over RDMA in time");
        }
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(
            std::min<Clock::duration>(kInterruptPeriod, deadline - now));
        pollfd entry{socket, what, 0};
        if (::poll(&entry, 1, static_cast<int>(left.count())) > 0) {
            return;
        }
        if (check != nullptr) {
            check();
        }
    }
}

/// Calls `transfer(begin, num_bytes)`, which is send() or recv(), until all bytes are done.
template <typename Transfer>
void transfer_all(int socket, short what, std::size_t num_bytes, const std::string& peer,
                  Deadline deadline, InterruptCheck check, Transfer transfer) {
    for (std::size_t done = 0; done < num_bytes;) {
        wait_for(socket, what, peer, deadline, check);
        const ssize_t moved = transfer(done, num_bytes - done);
        const int error_number = errno;
        if (moved == 0 || (moved < 0 && error_number == ECONNRESET)) {
            throw TransportError(peer + " gave up connecting over RDMA; see what it logged");
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
                     [&](std::size_t done, std::size_t left) {
                         return ::recv(socket, to + done, left, MSG_DONTWAIT);
                     });
    };
    const auto length =
        static_cast<std::uint32_t>(std::min<std::size_t>(text.size(), kMaxTextBytes));
    std::string out(reinterpret_cast<const char*>(&length), sizeof(length));
    out.append(text, 0, length);
    transfer_all(socket, POLLOUT, out.size(), peer, deadline, check,
                 [&](std::size_t done, std::size_t left) {
                     return ::send(socket, out.data() + done, left, MSG_DONTWAIT | MSG_NOSIGNAL);
                 });
    std::uint32_t their_length = 0;
    receive(reinterpret_cast<char*>(&their_length), sizeof(their_length));
    if (their_length > kMaxTextBytes) {
        throw TransportError(peer + " sent something else than expected while connecting over "
                                    "RDMA; install the same megatron_ext for all ranks");
    }
    std::string theirs(their_length, '\0');
    receive(theirs.data(), theirs.size());
    return theirs;
}

}  // namespace megatron_ext
