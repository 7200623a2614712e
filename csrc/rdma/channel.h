#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "core/wait.h"
#include "rdma/choice.h"
#include "rdma/queue_pair.h"
#include "rdma/settings.h"

namespace megatron_ext {

/// Extends an arena over RDMA: both ends use it as if they shared memory.
///
/// The sender has a mirror of the receiver's arena, to which its Outbox publishes pieces. send()
/// writes each piece to the same slot of the real arena: first the bytes, then the descriptor, with
/// the slot number as immediate data. When the last write completes at the receiver, the receiver's
/// receive() publishes the piece to its Inbox. Released slots return as credits: empty writes with
/// the slot number as immediate data. A slot of the mirror is free once its credit has arrived and
/// its write is complete. One queue pair serves both directions.
///
/// Flow control: each slot has at most one piece and one credit in flight. So a receive request is
/// always posted for each of them, and the completion queue never overflows. Only connect() waits.
/// There is no thread: all work is done in calls.
///
/// Ownership: the channel maps both arenas itself. Not synchronised. Every call may throw
/// RdmaError, after which the object can only be destroyed.
class RdmaChannel {
  public:
    /// Sends a text to the peer and returns the peer's text for the same step.
    using Exchange = std::function<std::string(const std::string&)>;

    /// `inbox_fd` is the arena for messages from the peer. Both ends' arenas have the same `size`.
    RdmaChannel(const std::string& peer, ArenaSize size, int inbox_fd,
                std::vector<RdmaSource> sources, const RdmaSettings& settings);

    /// Connects to the peer, which must call this too; `is_first` must be true at exactly one of
    /// the two ends. Tries one source of each end, best first, until each end has written a
    /// full-size packet to the other: devices accept a connection even without a route. Throws
    /// RdmaError if none works.
    void connect(const Exchange& exchange, bool is_first, Deadline deadline, InterruptCheck check);

    /// The arena for messages to the peer, for an Outbox.
    Arena outbox_arena() const;

    /// Processes all completions: publishes arrivals to the inbox and frees slots of the mirror,
    /// even if it throws.
    void receive();

    /// Writes the pieces that the Outbox has published, and a credit for each slot that the Inbox
    /// has released. Call it after either of these, and whenever the Inbox rings its bell, which it
    /// does at the next release.
    void send();

    /// Posts an empty write if no other is in flight. If the peer's device does not acknowledge it,
    /// receive() throws. Meant for senders that have waited for credits for a long time.
    void probe();

    /// Number of pieces that are posted but not complete.
    std::uint32_t num_in_flight() const noexcept { return num_in_flight_; }

    /// To sleep: arm(), then receive() and send(), then wait until a descriptor is readable.
    void arm() { queue_pair_.arm(); }
    int fd() const noexcept { return queue_pair_.fd(); }
    int async_fd() const noexcept { return queue_pair_.async_fd(); }

    /// Both ends, for logs.
    std::string text() const { return queue_pair_.text(); }

  private:
    struct Offer;

    QueuePair::Depth depth() const noexcept;
    Offer make_offer() const;
    void accept_offer(const Offer& offer);
    std::vector<std::pair<std::size_t, std::size_t>> candidates(const Offer& peer_offer,
                                                                bool is_first) const;
    void write_packet(Deadline deadline, InterruptCheck check);
    void write_piece(std::uint32_t slot);
    void return_credits();
    void take(const verbs::WorkCompletion& completion);
    void arrived(std::uint32_t immediate);
    void free_slot_if_done(std::uint32_t slot);

    std::string peer_;
    ArenaSize size_;
    std::vector<RdmaSource> sources_;
    RdmaSettings settings_;
    std::uint32_t max_write_bytes_;
    Arena inbox_;
    Arena mirror_;
    QueuePair queue_pair_;
    RegisteredMemory inbox_memory_;
    RegisteredMemory mirror_memory_;

    std::uint64_t remote_base_ = 0;
    std::uint32_t remote_key_ = 0;
    std::uint64_t next_to_write_ = 0;    ///< sequence number in the mirror
    std::uint64_t next_to_publish_ = 0;  ///< sequence number in the inbox
    std::uint32_t num_in_flight_ = 0;
    std::uint32_t num_credits_in_flight_ = 0;
    bool probe_in_flight_ = false;
    std::vector<bool> written_;           ///< by slot of the mirror: its write is in flight
    std::vector<bool> released_;          ///< by slot of the mirror: its credit has arrived
    std::vector<std::uint32_t> credits_;  ///< released slots of the inbox without a credit yet
};

}  // namespace megatron_ext
