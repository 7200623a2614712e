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

/// The remote end of a queue pair.
struct RdmaTarget {
    std::uint32_t qp_number;
    std::uint32_t first_psn;
    Gid gid;
    std::uint16_t lid;
    int mtu;
};

/// Memory registered for DMA by a device, for the lifetime of this object.
using RegisteredMemory = RdmaHandle<verbs::MemoryRegion>;

/// A reliable connection (RC) from one device to another process, with its own completion queue and
/// completion channel. Independent of messages. Not synchronised.
///
/// Life cycle: constructor, begin(), connect(), writes; begin() again after a failed connect().
class QueuePair {
  public:
    /// Maximum number of outstanding requests. The caller must count them.
    struct Depth {
        std::uint32_t sends;
        std::uint32_t receives;
    };

    /// Throws RdmaError if the device cannot create such a queue pair.
    QueuePair(const std::string& device, Depth depth);

    /// Throws RdmaError; if there is too little lockable memory, the text contains the bytes and
    /// the limit.
    RegisteredMemory register_memory(void* address, std::size_t num_bytes);

    /// Resets the queue pair and posts `depth.receives` receive requests. Call it before the peer
    /// learns about this queue pair; otherwise the peer may write too early.
    void begin(const RdmaSource& source);

    /// Connects to the peer. Throws RdmaError, naming both ends, if the device rejects the
    /// connection.
    void connect(const RdmaTarget& target, const RdmaSettings& settings);

    /// Posts a write into the peer's memory. If `signaled`, its completion has this `id`. With
    /// `immediate`, the peer gets a completion too, which consumes one of its receive requests.
    void post_write(std::uint64_t id, const verbs::MemoryPiece& from, std::uint64_t remote_address,
                    std::uint32_t rkey, std::optional<std::uint32_t> immediate, bool signaled);

    void post_receive();

    /// Returns the next completion, if any. Throws RdmaError for a failed completion, or if the
    /// device or the port has failed; the text contains the operation, `what`.
    std::optional<verbs::WorkCompletion> poll(const std::string& what);

    /// Makes fd() readable at the next completion. Then call poll() until it returns nothing: a
    /// completion may have arrived before this call.
    void arm();

    /// Readable when poll() has work: fd() after a completion since arm(), async_fd() after a port
    /// event.
    int fd() const noexcept { return channel_->fd; }
    int async_fd() const noexcept { return context_->async_fd; }

    std::uint32_t number() const noexcept { return queue_pair_->number; }
    std::uint32_t first_psn() const noexcept { return first_psn_; }

    /// Both ends of the connection, for logs and errors.
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
    std::string port_news_;  ///< the last port event, if it is a failure
};

}  // namespace megatron_ext
