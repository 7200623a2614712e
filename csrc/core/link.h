#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/buffer_pool.h"
#include "core/message.h"
#include "core/process_bell.h"
#include "core/wait.h"

namespace megatron_ext {

enum class PeerState { kOpen, kClosed, kDied, kAborted };

/// The context that an endpoint gives to each of its links.
struct LinkContext {
    int rank;  ///< of this process
    int peer;
    /// Room for messages that the peer has sent and that this process has not released: slots of an
    /// arena, or their total bytes if a wire has no slots.
    ArenaSize room;
    bool checksums;                     ///< whether outgoing messages carry one
    BufferPool pool;                    ///< for messages that do not stay where they arrived
    std::shared_ptr<ProcessBell> bell;  ///< of this process
};

/// Callbacks that a link calls.
class LinkEvents {
  public:
    /// A message is complete.
    virtual void arrived(Message message) = 0;

    /// The bytes of a send are no longer needed. The thread that calls the endpoint releases
    /// `owner` later, without the endpoint's lock: the release may need the GIL, or run code that
    /// calls the endpoint, and no callback may wait for either.
    virtual void sent(std::shared_ptr<void> owner) = 0;

  protected:
    ~LinkEvents() = default;
};

/// Numbers for error reports.
struct LinkCounts {
    std::uint64_t num_held = 0;  ///< slots, or messages, that the receiver holds
    std::size_t num_queued = 0;  ///< messages to the peer that wait for room
};

/// The connection to one peer, over one wire. Endpoint has a link for each peer, and is otherwise
/// independent of the wires.
///
/// A wire implements this class and a function that creates a connected link from a LinkContext;
/// each wire decides how peers find each other. The parts of a link:
///
/// - Sending: send() accepts a message at once, regardless of what the peer does. Bytes that there
///   is no room for wait in the link, with their owner, and are sent by progress().
/// - Reserving: a wire on which a sender writes into slots may lend a slot's memory before the
///   message exists, so that a device writes into it: reserve(), then publish(). The memory stays
///   mapped as long as its pointer lives, even after the end of the link, because a device that is
///   writing cannot be stopped.
/// - Receiving: progress() passes every complete message to LinkEvents::arrived(), even if no call
///   waits for it. The last owner of a message's bytes releases them on any thread and without the
///   lock, even after the end of the link. If that gives room back to the sender, note it in an
///   atomic that the message shares with the link, call bell->wake_service(), and tell the peer in
///   progress().
/// - Waking: a link that has descriptors() makes the endpoint run a service thread. The thread
///   sleeps in epoll, edge-triggered, on the descriptors of all links. It calls a link's progress()
///   when one of the link's descriptors has an event, or when the time next_progress() has come.
///   After bell->wake_service(), it calls every link's progress(). So progress() must continue
///   until every descriptor returns EAGAIN, or return with next_progress() in the past. A link
///   without descriptors (shared memory) is checked by each call of the endpoint; its peer rings
///   `bell`.
/// - Ends: progress() detects that the peer has ended. state() leaves kOpen once and never returns
///   to it. A peer that exits without calling say_closed() or say_aborted() has died.
///
/// Concurrency: every member is called under the endpoint's lock, by the calling or the service
/// thread. No member may wait, take the GIL or call the endpoint. An exception that progress()
/// throws (TransportError: damaged data) ends the endpoint: every later call throws it. An error
/// that ends only one peer is reported as a state.
class Link {
  public:
    Link() = default;
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;
    virtual ~Link() = default;

    /// Name of the wire, for logs and errors: "shm", "tcp" or "rdma".
    virtual const char* wire() const noexcept = 0;

    /// Sends a message; call it only while the state is kOpen. `owner` keeps `bytes` alive until
    /// they are copied: send() may release it, or passes it to LinkEvents::sent(). Never waits.
    virtual void send(const MessageInfo& info, const void* bytes, std::shared_ptr<void> owner,
                      LinkEvents& events) = 0;

    /// Returns memory of a slot for a message of this size, or null if no slot is free now or the
    /// wire has no slots; in that case, use send(). Never waits.
    virtual std::shared_ptr<std::byte> reserve(std::uint64_t /*num_bytes*/) { return nullptr; }

    /// Sends a message whose bytes are in memory from reserve(); call it only while the state is
    /// kOpen. Throws std::invalid_argument if the bytes are elsewhere. Never waits.
    virtual void publish(Message, LinkEvents&) {
        throw std::invalid_argument("nothing is reserved on this wire");
    }

    /// Does all work that can be done without waiting. Returns whether a waiting caller should
    /// check again: a message arrived, the last queued send was completed, or the state changed.
    virtual bool progress(LinkEvents& events) = 0;

    /// Tells the link whether the caller is waiting, possibly for a message on this link. A link
    /// that bounds unclaimed messages must receive more during the wait, here and in progress(),
    /// because the awaited message may be queued behind them.
    virtual void demand(bool /*wanted*/, LinkEvents&) {}

    virtual PeerState state() const noexcept = 0;

    /// Returns why the peer aborted, or how its exit was detected; may be empty.
    virtual std::string reason() const = 0;

    virtual LinkCounts counts() const = 0;

    /// Notifies the peer that this process is aborting and drops queued messages; `events` gets
    /// their owners.
    virtual void say_aborted(const std::string& reason, LinkEvents& events) = 0;

    /// Notifies the peer that no more messages follow. Afterwards, the endpoint calls progress()
    /// for a short time, until parted() reports that the peer has received all messages, and then
    /// destroys the link.
    virtual void say_closed(LinkEvents& events) = 0;
    virtual bool parted() const noexcept { return true; }

    /// The descriptors that the service thread sleeps on; constant for the lifetime of the link.
    virtual std::vector<int> descriptors() const { return {}; }

    /// The latest time at which to call progress() if there is no event on a descriptor.
    virtual Deadline next_progress() const noexcept { return kNever; }
};

}  // namespace megatron_ext
