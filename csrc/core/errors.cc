#include "core/errors.h"

#include <system_error>

namespace megatron_ext {

void throw_errno(const std::string& what, int error_number) {
    // std::system_category is thread-safe; strerror is not.
    throw TransportError(what + ": " + std::system_category().message(error_number) + " (errno " +
                         std::to_string(error_number) + ")");
}

}  // namespace megatron_ext
