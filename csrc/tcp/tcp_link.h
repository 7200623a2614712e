#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/fork_guard.h"
#include "core/link.h"
#include "core/unique_fd.h"
#include "tcp/receiver.h"
#include "tcp/sender.h"

namespace megatron_ext {

/// The link to a peer over a TCP connection, for hosts that share no memory and no RDMA network.
///
/// The receiver tells the sender how much it may send, so that what was not asked for takes bounded
/// memory: it allows as much as its room beyond what was let go again, and a message that has begun
/// to its end, because there is memory for all of it from its first piece on. While the receiver
/// waits it allows more as soon as half of that has come, because what it waits for may be behind
/// what it does not; so no order of taking messages stops a sender. Everything else of the peer is
/// read at once, whatever this process does, by the service thread: farewell, end of connection,
/// death.
class TcpLink final : public Link {
  public:
    /// `socket` is connected to the peer, which has proved who it is. A peer that is silent, and
    /// answers no probe, for `silence_s` seconds is taken for dead.
    TcpLink(const LinkContext& context, UniqueFd socket, double silence_s);

    const char* wire() const noexcept override { return "tcp"; }
    void send(const MessageInfo& info, const void* bytes, std::shared_ptr<void> owner,
              LinkEvents& events) override;
    bool progress(LinkEvents& events) override;
    void demand(bool wanted, LinkEvents& events) override;
    PeerState state() const noexcept override { return state_; }
    std::string reason() const override { return reason_; }
    LinkCounts counts() const override;
    void say_aborted(const std::string& reason, LinkEvents& events) override;
    void say_closed(LinkEvents& events) override;
    bool parted() const noexcept override { return ended_; }
    std::vector<int> descriptors() const override { return {socket_.get()}; }
    Deadline next_progress() const noexcept override { return next_progress_; }

  private:
    class Held;

    bool receive(LinkEvents& events);
    void take_control();
    Message hold(Message message);
    void allow(std::uint64_t cost);
    void allow_what_is_due();
    int write(LinkEvents& events);
    void leave_open(PeerState state, const std::string& reason);
    void say(std::uint32_t magic, std::string text, LinkEvents& events);

    UniqueFd socket_;
    const ForkGuard guard_;  // after the socket, so that it goes first
    const std::uint64_t room_;
    TcpSender sender_;
    TcpReceiver receiver_;
    const std::shared_ptr<Held> held_;    // with messages that outlive the link
    std::uint64_t allowed_ = kFirstRoom;  // cost that the peer may send, from the beginning
    PeerState state_ = PeerState::kOpen;
    std::string reason_;
    bool demanded_ = false;  // the caller waits
    bool ended_ = false;     // nothing more can come
    bool mute_ = false;      // nothing more can be said
    Deadline next_progress_ = kNever;
};

}  // namespace megatron_ext
