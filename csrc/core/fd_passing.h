#pragma once

#include "core/unique_fd.h"
#include "core/wait.h"

namespace megatron_ext {

/// Passes one open file descriptor to another process over a connected unix socket (SCM_RIGHTS).
/// Each call moves exactly one byte and one descriptor, so it can be mixed with other messages on a
/// stream socket as long as sender and receiver agree on the order. Blocking and non-blocking
/// sockets behave the same. At most one thread may send and one thread may receive on a socket at a
/// time.

/// Sends a duplicate of `fd`; the caller keeps the original. Does not wait for the peer to receive
/// it. Throws TransportError if the peer is gone or its queue stays full until `deadline`.
void send_fd(int socket, int fd, Deadline deadline = kNever, InterruptCheck check = nullptr);

/// Receives a descriptor from send_fd(), close-on-exec. Throws TransportError if the peer closes
/// the connection, sends something else, or sends nothing before `deadline`; no descriptor is
/// leaked in any of these cases.
UniqueFd receive_fd(int socket, Deadline deadline = kNever, InterruptCheck check = nullptr);

}  // namespace megatron_ext
