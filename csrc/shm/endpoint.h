#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/buffer_pool.h"
#include "core/doorbell.h"
#include "core/inbox.h"
#include "core/match_table.h"
#include "core/outbox.h"
#include "core/wait.h"
#include "shm/control.h"

namespace megatron_ext {

/// A peer and what became of it.
struct PeerReport {
    int rank;
    PeerState state;
    std::string reason;       ///< of a peer that gave up
    std::size_t num_arrived;  ///< messages from it that were not taken
    std::uint32_t num_held;   ///< slots of its arena that hold messages, taken or not
    std::size_t num_queued;   ///< messages to it that wait for room
};

/// One process of a job, and its links by shared memory to others on the same host.
///
/// It owns one doorbell, which all peers ring, and for each peer the arena through which that peer
/// sends to it; both are given to the peer over a connected socket. Nothing happens between calls:
/// there is no thread, and what is queued goes on with the next call of any kind.
///
/// Concurrency: calls come from one thread; messages may be let go by any thread, also during a
/// call and after the end of the endpoint. A forked child must not use it: its calls throw, and its
/// destructor does not speak to the peers.
class Endpoint {
  public:
    Endpoint(int rank, ArenaSize size, bool checksums);
    Endpoint(const Endpoint&) = delete;
    Endpoint& operator=(const Endpoint&) = delete;
    ~Endpoint();

    /// First half of meeting a peer: gives it what it needs to send to this process. `socket` is
    /// connected to it (AF_UNIX, SOCK_SEQPACKET). Does not wait.
    void offer(int peer, UniqueFd socket);

    /// Second half: waits until the peer has offered as well. All offers first, then all accepts,
    /// or processes wait for each other in a circle. Throws TransportError after the deadline.
    void accept(int peer, Deadline deadline, InterruptCheck check);

    /// Sends to a peer, or to itself; never waits. `owner` keeps `bytes` alive until they are
    /// copied, which may be before this returns. Throws TransportError if the peer is gone, and
    /// std::invalid_argument if there is none of that rank.
    void send(int peer, const MessageInfo& info, const void* bytes, std::shared_ptr<void> owner);

    /// Waits for a message and takes it. Nothing if the deadline came first, if `source` closed
    /// before it sent the message, or if any peer died or gave up.
    std::optional<Message> take(int source, std::uint64_t tag, Deadline deadline,
                                InterruptCheck check);

    /// Waits until messages have arrived that were not told by this function before, and names
    /// them. Empty at the deadline, or if any peer died or gave up, or all closed.
    std::vector<Arrival> arrivals(Deadline deadline, InterruptCheck check);

    /// Waits until all that was sent is where its receiver can take it: true. False if the deadline
    /// came first or a peer that still has to get something is gone.
    bool flush(Deadline deadline, InterruptCheck check);

    /// Tells all peers that this process gives up, which ends their waits; drops what is queued.
    void abort(const std::string& reason);

    /// Says farewell and lets go of everything. Messages that were taken stay valid.
    void close();

    /// How the peers are now.
    std::vector<PeerReport> peers();

  private:
    struct BellPage;
    struct Peer;

    BellPage& page() const noexcept;
    void check_process() const;
    Peer& peer_at(int rank);
    void progress();
    void update_peers();
    bool failed() const noexcept;
    template <typename Condition>
    bool wait_until(Condition condition, Deadline deadline, InterruptCheck check);

    int rank_;
    ArenaSize size_;
    bool checksums_;
    pid_t process_;
    BufferPool pool_;
    Segment bell_memory_;
    Doorbell bell_;
    std::map<int, std::unique_ptr<Peer>> peers_;
    MatchTable table_;
    Deadline next_update_;
};

}  // namespace megatron_ext
