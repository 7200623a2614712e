#pragma once

#include <string>

#include "core/errors.h"

namespace megatron_ext {

/// RDMA is unavailable or has failed. The text contains the reason, and a remedy if one is known.
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
