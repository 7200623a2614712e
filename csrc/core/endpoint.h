#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "core/buffer_pool.h"
#include "core/link.h"
#include "core/match_table.h"
#include "core/process.h"
#include "core/process_bell.h"
#include "core/service.h"
#include "core/wait.h"

namespace megatron_ext {

/// A peer and its state.
struct PeerReport {
    int rank;
    std::string wire;
    PeerState state;
    std::string reason;       ///< why the peer aborted, or how its death was detected
    std::size_t num_arrived;  ///< messages from the peer that have arrived and were not taken
    LinkCounts counts;
};

/// Totals of an endpoint.
struct EndpointCounts {
    std::uint64_t num_messages = 0;  ///< messages sent
    std::uint64_t num_bytes = 0;     ///< bytes sent
    double waited_s = 0.0;           ///< total time of waits
    double last_wait_s = 0.0;        ///< wait of the last call that may wait
};

/// A process in a job, with a link to each of its peers over any wire. Messages from all links go
/// into one table and are taken from it by source and tag, in any order.
///
/// The calling thread moves messages in shared memory itself and sleeps on the futex of the bell. A
/// service thread, which sleeps in epoll, does the work that must continue while the caller
/// computes: all traffic on links with descriptors, and messages that there was no room for in
/// shared memory, whose receiver rings when there is room. The thread exists only if there is such
/// work. The next call throws its errors.
///
/// Concurrency: one thread makes all calls; a second thread may call send(), publish() and abort()
/// at any time before close(). Any thread may release messages, even during a call and after the
/// end of the endpoint. A forked child must not use the endpoint: its calls throw, and its
/// destructor does not notify the peers.
class Endpoint {
  public:
    /// `room` is the size of each link's arena.
    Endpoint(int rank, ArenaSize room, bool checksums);
    Endpoint(const Endpoint&) = delete;
    Endpoint& operator=(const Endpoint&) = delete;
    ~Endpoint();

    /// The context for a new link to a peer. Throws std::invalid_argument if there already is a
    /// link, or if the peer is this process.
    LinkContext context(int peer) const;

    /// Adds a connected link.
    void add(int peer, std::shared_ptr<Link> link);

    /// Sends to a peer, or to itself; never waits. `owner` keeps `bytes` alive until they are
    /// copied, possibly before this call returns. Throws TransportError if the peer is gone, and
    /// std::invalid_argument if no peer has that rank.
    void send(int peer, const MessageInfo& info, const void* bytes, std::shared_ptr<void> owner);

    /// Returns a message, to be filled and then published, in the peer's memory or in memory that a
    /// device writes to the peer. This saves one copy. Returns std::nullopt if the wire has no such
    /// memory, or has none for this message now; in that case, use send(). The memory stays mapped
    /// as long as the message lives, even after the peer's death and after close(); if the message
    /// is never published, the memory is never reused. Throws like send().
    std::optional<Message> reserve(int peer, const MessageInfo& info);

    /// Sends a message from reserve() whose bytes are complete. Throws like send(), and
    /// std::invalid_argument if the message was published before or was not reserved for this peer.
    void publish(int peer, const Message& message);

    /// Provides memory at a fixed address for messages that do not stay where they arrived:
    /// `num_slots` times the size of a slot. Returns its address and its size in bytes. Call it at
    /// most once. Longer messages, and messages beyond that number, are stored elsewhere. Throws
    /// TransportError if there is not enough memory.
    std::pair<std::byte*, std::size_t> add_buffers(std::size_t num_slots);

    /// Waits for a message and takes it. Returns std::nullopt at the deadline, if `source` closed
    /// before it sent the message, if any peer died or aborted, or if this process aborted.
    std::optional<Message> take(int source, std::uint64_t tag, Deadline deadline,
                                InterruptCheck check);

    /// Waits for messages that no earlier call returned, and returns their sources and tags. The
    /// result is empty at the deadline, if any peer died or aborted, if all peers closed, or if
    /// this process aborted.
    std::vector<Arrival> arrivals(Deadline deadline, InterruptCheck check);

    /// Waits until all messages have left and their memory is free. Returns false at the deadline,
    /// if a peer with queued messages is gone, or if this process aborted.
    bool flush(Deadline deadline, InterruptCheck check);

    /// Notifies all peers that this process is aborting and drops queued messages. This unblocks
    /// the waiting peers, and this process as well, because peers that are computing do not answer.
    void abort(const std::string& reason);

    /// Closes all links and releases everything. Messages that were taken stay valid.
    void close();

    /// Sets the time for which a wait spins before it sleeps; see ProcessBell::spin(). Initially
    /// zero, because only hosts with one CPU per process benefit.
    void set_spin(Clock::duration longest) noexcept { spin_ = longest; }

    EndpointCounts counts();

    /// The current states of the peers.
    std::vector<PeerReport> peers();

  private:
    class Events;
    class Demand;
    /// A link, and whether the service thread moves its messages; otherwise the caller moves them.
    struct Entry {
        std::shared_ptr<Link> link;
        bool served;
    };
    using Lock = std::unique_lock<std::mutex>;
    using Owners = std::vector<std::shared_ptr<void>>;

    void check_usable() const;
    Link& link_to(int peer) const;
    Link& open_link(int peer);
    void count_sent(int peer, std::uint64_t num_bytes);
    void progress();
    bool progress_of(int peer, Link& link);
    void start_service();
    Deadline serve(const Service::News& news) noexcept;
    Deadline serve_links(const Service::News& news);
    bool failed() const noexcept;
    void part() noexcept;
    std::optional<double> sleep(std::uint32_t seen, Deadline deadline);
    template <typename Condition>
    bool wait_until(Condition condition, Deadline deadline, InterruptCheck check);

    const int rank_;
    const ArenaSize room_;
    const bool checksums_;
    const Process process_;
    const BufferPool pool_;
    const std::shared_ptr<ProcessBell> bell_;
    Clock::duration spin_ = Clock::duration::zero();

    std::mutex mutex_;  // guards all members below, except the service itself
    std::map<int, Entry> links_;
    MatchTable table_;
    EndpointCounts counts_;
    Owners done_;               // owners of sent bytes; the calling thread releases them
    std::exception_ptr error_;  // the error that ended the service thread
    bool aborted_ = false;
    Service service_;
};

}  // namespace megatron_ext
