#pragma once

#include <string>

#include "core/wait.h"

namespace megatron_ext {

/// Sends a text over a connected stream socket and returns the one that the peer sends in the same
/// way; at most 64 KiB. `peer` is for error messages. Throws TransportError if the peer ends the
/// connection, sends nothing until the deadline, or if what it sent was damaged on its way.
std::string exchange_texts(int socket, const std::string& peer, const std::string& text,
                           Deadline deadline, InterruptCheck check);

}  // namespace megatron_ext
