#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/fork_guard.h"
#include "core/link.h"
#include "core/process_bell.h"
#include "core/unique_fd.h"
#include "tcp/receiver.h"
#include "tcp/sender.h"

namespace megatron_ext {

/// The link to a peer over a TCP connection, for hosts that share neither memory nor an RDMA
/// network.
///
/// The receiver grants the sender a cost that it may send, which bounds the memory used by
/// unclaimed messages. The grant is the receiver's room plus the cost of the messages released so
/// far. A message in progress may always be completed, because all of its memory is allocated with
/// its first piece. While the receiver waits, it extends the grant as soon as half of it has
/// arrived, because the awaited message may be queued behind others. So no order of receives blocks
/// a sender. The service thread reads everything else from the peer immediately, regardless of what
/// this process is computing: close and abort notices, and the end of the connection.
class TcpLink final : public Link {
  public:
    /// `socket` is connected to the authenticated peer. A peer is considered dead if its host
    /// answers neither data nor probes for `silence_s` seconds.
    TcpLink(const LinkContext& context, UniqueFd socket, double silence_s);

    const char* wire() const noexcept override { return "tcp"; }
    void send(const MessageInfo& info, const void* bytes, std::shared_ptr<void> owner,
              LinkEvents& events) override;
    bool progress(LinkEvents& events) override;
    void demand(bool is_waiting, LinkEvents& events) override;
    PeerState state() const noexcept override { return state_; }
    std::string reason() const override { return reason_; }
    LinkCounts counts() const override;
    void say_aborted(const std::string& reason, LinkEvents& events) override;
    void say_closed(LinkEvents& events) override;
    bool parted() const noexcept override { return ended_; }
    std::vector<int> descriptors() const override { return {socket_.get()}; }
    Deadline next_progress() const noexcept override;

  private:
    class Held;

    bool receive(LinkEvents& events);
    void take_control();
    Message hold(Message message);
    void allow(std::uint64_t cost);
    void allow_what_is_due();
    int write(LinkEvents& events);
    void look_at_window() noexcept;
    Clock::duration look_period() const noexcept {
        return std::chrono::milliseconds(silence_ms_ / 4);
    }
    void leave_open(PeerState state, const std::string& reason);
    void say(std::uint32_t magic, std::string text, LinkEvents& events);

    UniqueFd socket_;
    const ForkGuard guard_;  // after the socket, so that it is destroyed first
    const std::shared_ptr<ProcessBell> bell_;
    const int silence_ms_;
    const std::uint64_t room_;
    TcpSender sender_;
    TcpReceiver receiver_;
    const std::shared_ptr<Held> held_;    // shared with messages that outlive the link
    std::uint64_t allowed_ = kFirstRoom;  // cost that the peer may send, from the beginning
    PeerState state_ = PeerState::kOpen;
    std::string reason_;
    bool demanded_ = false;  // the caller is waiting
    bool ended_ = false;     // no further frame can arrive
    bool mute_ = false;      // no further frame can be sent
    bool window_is_full_ = false;
    Deadline next_look_ = kNever;  // at the window
    Deadline next_progress_ = kNever;
};

}  // namespace megatron_ext
