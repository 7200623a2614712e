#pragma once

#include <string>

#include "core/wait.h"

namespace megatron_ext {

/// Sends a text of at most 64 KiB over a connected stream socket and returns the text of the peer,
/// which calls this too. `peer` is used only in error messages. Throws TransportError if the peer
/// closes the connection, sends nothing before the deadline, or sends a text that arrives damaged.
std::string exchange_texts(int socket, const std::string& peer, const std::string& text,
                           Deadline deadline, InterruptCheck check);

}  // namespace megatron_ext
