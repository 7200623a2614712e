#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "rdma/choice.h"
#include "rdma/devices.h"
#include "rdma/handle.h"
#include "rdma/library.h"
#include "rdma/settings.h"

namespace megatron_ext {

/// Where a queue pair sends to.
struct RdmaTarget {
    std::uint32_t qp_number;
    std::uint32_t first_psn;
    Gid gid;
    std::uint16_t lid;
    int mtu;
};

/// Memory that a device reads and writes by itself, until the end of this object.
using RegisteredMemory = RdmaHandle<verbs::MemoryRegion>;

/// A reliable connection to one other process, made from one device, with a completion queue and a
/// completion channel of its own. It knows nothing of messages. Not synchronised.
///
/// Life: made, begin(), connect(), then writes; begin() again after a connect() that failed.
class QueuePair {
  public:
    /// Most requests that may be under way at once. Nothing here counts them: who posts does.
    struct Depth {
        std::uint32_t sends;
        std::uint32_t receives;
    };

    /// Throws RdmaError if the device has no such queue pair.
    QueuePair(const std::string& device, Depth depth);

    /// Throws RdmaError; for want of lockable memory the text names the bytes and the limit.
    RegisteredMemory register_memory(void* address, std::size_t num_bytes);

    /// Makes it receive nothing yet, but ready to: `depth.receives` requests are posted. To be done
    /// before the peer is told of this queue pair, or it may write too early.
    void begin(const RdmaSource& source);

    /// Connects to the peer. Throws RdmaError, naming both ends, if the device refuses.
    void connect(const RdmaTarget& target, const RdmaSettings& settings);

    /// A write into the memory of the peer; `id` comes back when it is complete, if `signaled`.
    /// With `immediate` the peer is told, at the cost of one of its receive requests.
    void post_write(std::uint64_t id, const verbs::MemoryPiece& from, std::uint64_t remote_address,
                    std::uint32_t rkey, std::optional<std::uint32_t> immediate, bool signaled);

    void post_receive();

    /// The next completion, if there is one. Throws RdmaError for one that is an error, or if the
    /// device or the port has failed; `what` says what was done for the text.
    std::optional<verbs::WorkCompletion> poll(const std::string& what);

    /// Makes fd() readable at the next completion. To be followed by poll() until there is nothing,
    /// since one may have come before.
    void arm();

    /// Readable when there may be something to poll: completions since arm(), or news of the port.
    int fd() const noexcept { return channel_->fd; }
    int async_fd() const noexcept { return context_->async_fd; }

    std::uint32_t number() const noexcept { return queue_pair_->number; }
    std::uint32_t first_psn() const noexcept { return first_psn_; }

    /// Both ends, for texts.
    std::string text() const;

  private:
    void modify(verbs::QpAttr& attr, int mask, const std::string& to_what);
    void look_at_events();
    [[noreturn]] void throw_failed(const verbs::WorkCompletion& completion,
                                   const std::string& what) const;

    const verbs::Library& library_;
    OpenedDevice context_;
    RdmaHandle<verbs::ProtectionDomain> domain_;
    RdmaHandle<verbs::CompletionChannel> channel_;
    RdmaHandle<verbs::CompletionQueue> queue_;
    RdmaHandle<verbs::QueuePair> queue_pair_;
    Depth depth_;
    std::uint32_t first_psn_;
    std::optional<RdmaSource> source_;
    std::optional<RdmaTarget> target_;
    std::string port_news_;  ///< the last thing that was told of the port, if it is bad
};

}  // namespace megatron_ext
