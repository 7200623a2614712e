#pragma once

#include <string>

#include "core/wait.h"

namespace megatron_ext {

/// Sends a text over a connected stream socket and returns the one that the peer sends in the same
/// way. `peer` is for error messages. Throws TransportError if the peer ends the connection, sends
/// something else or nothing until the deadline.
std::string exchange_texts(int socket, const std::string& peer, const std::string& text,
                           Deadline deadline, InterruptCheck check);

}  // namespace megatron_ext
