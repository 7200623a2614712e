#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <memory>

namespace megatron_ext {

/// Destroys an object of libibverbs, except in a forked child, whose copy refers to the parent's
/// object.
template <typename T>
class Destroy {
  public:
    explicit Destroy(int (*function)(T*)) noexcept : function_(function) {}

    void operator()(T* object) const {
        if (::getpid() == process_) {
            function_(object);
        }
    }

  private:
    int (*function_)(T*);
    pid_t process_ = ::getpid();
};

template <typename T>
using RdmaHandle = std::unique_ptr<T, Destroy<T>>;

}  // namespace megatron_ext
