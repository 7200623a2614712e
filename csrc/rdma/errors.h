#pragma once

#include <string>

#include "core/errors.h"

namespace megatron_ext {

/// Why RDMA cannot be used, or not any more, and what to do about it: where there is no remedy the
/// text says so by an empty one.
class RdmaError : public TransportError {
  public:
    RdmaError(const std::string& what, const std::string& remedy)
        : TransportError(remedy.empty() ? what : what + "; " + remedy),
          finding_(what),
          remedy_(remedy) {}

    const std::string& finding() const noexcept { return finding_; }
    const std::string& remedy() const noexcept { return remedy_; }

  private:
    std::string finding_;
    std::string remedy_;
};

}  // namespace megatron_ext
