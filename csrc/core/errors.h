#pragma once

#include <stdexcept>
#include <string>

namespace megatron_ext {

/// A failure of the machine, the operating system or a peer process, which can occur at run time
/// even if the caller does nothing wrong. The Python module translates it into
/// `megatron_ext.errors.TransportError`. Wrong arguments throw `std::invalid_argument` (ValueError)
/// instead.
class TransportError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

/// Throws TransportError("<what>: <text of error_number> (errno N)"). Pass `errno` saved right
/// after the failed call: building `what` may change it.
[[noreturn]] void throw_errno(const std::string& what, int error_number);

}  // namespace megatron_ext
