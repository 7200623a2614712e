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

/// Makes an arena of a process on another host look like one of this host.
///
/// The sender has a mirror of the receiver's arena, to which its Outbox publishes pieces as if the
/// receiver shared that memory. send() writes each of them over RDMA to the same slot of the real
/// arena, bytes first, then the descriptor with the slot's number as immediate, upon which the
/// receiver's receive() publishes the piece to the Inbox there. The other way go the slots that
/// were released, each by an empty write with its number. A slot of the mirror is free again when
/// it was released and its own write is complete. One queue pair serves both directions.
///
/// Flow control: for each slot at most one message to the receiver and one credit back can be under
/// way, so there is always a posted receive request for either, and the completion queue never
/// overflows. Nothing here waits, and nothing happens between calls.
///
/// Ownership: it maps both arenas by itself. Not synchronised. Every call may throw RdmaError,
/// after which only the end of the object is left.
class RdmaChannel {
  public:
    /// Sends a text to the peer and returns what the peer sends at the same place.
    using Exchange = std::function<std::string(const std::string&)>;

    /// `inbox_fd` is the arena of the messages from the peer, of `size` like that of the peer.
    RdmaChannel(const std::string& peer, ArenaSize size, int inbox_fd,
                std::vector<RdmaSource> sources, const RdmaSettings& settings);

    /// Connects to the peer, which has to do the same; `is_first` on exactly one of the two. Tries
    /// pairs of sources of both, best first, until with one both ends have written a packet of full
    /// size to each other: that their devices accept a connection does not say that there is a way.
    void connect(const Exchange& exchange, bool is_first, Deadline deadline, InterruptCheck check);

    /// The arena for messages to the peer, for an Outbox.
    Arena outbox_arena() const;

    /// Takes note of what is complete: arrivals are in the inbox, slots are free, when it returns,
    /// and also when it throws.
    void receive();

    /// Writes to the peer what the Outbox published, and which slots the Inbox released. Call it
    /// after both, and again when the Inbox rings its bell, which it does for the next release.
    void send();

    /// A sign of life from the peer's device, in an error of receive() if there is none: for a
    /// sender that has long had nothing to wait for but the peer.
    void probe();

    /// Pieces that are written and not yet known to be at the peer.
    std::uint32_t num_in_flight() const noexcept { return num_in_flight_; }

    /// What to sleep on: arm(), then receive() and send(), then wait until one is readable.
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
    std::vector<std::pair<std::size_t, std::size_t>> pairs_with(const Offer& theirs,
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
    std::vector<bool> written_;   ///< by slot of the mirror: its write is under way
    std::vector<bool> released_;  ///< by slot of the mirror: the peer gave it back
    std::vector<std::uint32_t> credits_;  ///< slots of the inbox to give back
};

}  // namespace megatron_ext
