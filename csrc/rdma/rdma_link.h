#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/inbox.h"
#include "core/link.h"
#include "core/outbox.h"
#include "core/unique_fd.h"
#include "core/wait.h"
#include "rdma/channel.h"
#include "rdma/choice.h"
#include "rdma/settings.h"
#include "tcp/tcp_link.h"

namespace megatron_ext {

/// The link to a peer over RDMA, with an additional TCP connection.
///
/// Messages use the same arenas as within a host, synchronised by an RdmaChannel. The device
/// reports failed writes to their sender, but reports nothing to a receiver whose sender is gone,
/// or to a sender that has no writes in flight. So the TCP connection carries close and abort
/// notices, and if it ends without a notice, the peer has died. A sender that waits for a slot
/// writes an empty probe each second.
class RdmaLink final : public Link {
  public:
    /// First half of connecting: allocates this host's resources. `socket` is a TCP connection to
    /// the authenticated peer; `sources` come from choose_sources(). Does not wait. Throws
    /// RdmaError if the device lacks a resource.
    RdmaLink(const LinkContext& context, UniqueFd socket, std::vector<RdmaSource> sources,
             const RdmaSettings& settings, double silence_s);

    /// Second half: connects to the peer, which must call this too. A process with several peers
    /// calls this in ascending order of their ranks; otherwise processes deadlock. Throws
    /// TransportError if there is no connection before the deadline.
    void connect(Deadline deadline, InterruptCheck check);

    /// This process's memory that receives the peer's messages, and the memory that the device
    /// writes to the peer.
    const Arena& arena() const noexcept { return inbox_.arena(); }
    const Arena& mirror() const noexcept { return outbox_.arena(); }

    /// Both ends of the connection, for logs.
    std::string text() const { return channel_.text(); }

    const char* wire() const noexcept override { return "rdma"; }
    void send(const MessageInfo& info, const void* bytes, std::shared_ptr<void> owner,
              LinkEvents& events) override;
    std::shared_ptr<std::byte> reserve(std::uint64_t num_bytes) override;
    void publish(Message message, LinkEvents& events) override;
    bool progress(LinkEvents& events) override;
    PeerState state() const noexcept override { return state_; }
    std::string reason() const override { return reason_; }
    LinkCounts counts() const override;
    void say_aborted(const std::string& reason, LinkEvents& events) override;
    void say_closed(LinkEvents& events) override;
    bool parted() const noexcept override;
    std::vector<int> descriptors() const override;
    Deadline next_progress() const noexcept override;

  private:
    void write(LinkEvents& events);
    bool move_messages(LinkEvents& events);
    bool take_arrived(LinkEvents& events);
    void look_at_control(LinkEvents& events);
    void fail(const std::string& reason, LinkEvents& events);
    void probe_if_due();

    const LinkContext context_;
    const double silence_s_;
    UniqueFd socket_;  // until connect()
    Inbox inbox_;
    std::shared_ptr<ProcessBell> release_bell_;  // rung by the thread that releases a message
    RdmaChannel channel_;
    Outbox outbox_;
    std::optional<TcpLink> control_;
    PeerState state_ = PeerState::kOpen;
    std::string reason_;
    bool closing_ = false;
    bool said_closed_ = false;
    Deadline next_probe_ = kNever;
};

}  // namespace megatron_ext
