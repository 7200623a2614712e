#pragma once

#include <memory>
#include <string>

#include "core/fork_guard.h"
#include "core/link.h"
#include "core/unique_fd.h"

namespace megatron_ext {

/// The control connection between two processes: a unix socket (SOCK_SEQPACKET) for close and abort
/// notices. If it ends without a notice, the peer has died. A pidfd, where available, also detects
/// that the process has exited, because children of the peer may hold the socket open. Not
/// synchronised.
class Control {
  public:
    explicit Control(UniqueFd socket);

    int socket() const noexcept { return socket_.get(); }

    /// Reads notices without waiting and returns the peer's state, which never changes back to
    /// kOpen.
    PeerState update();

    PeerState state() const noexcept { return state_; }

    /// Returns why the peer aborted; empty if it did not abort.
    const std::string& reason() const noexcept { return reason_; }

    /// Notifies the peer, if it is still there and its socket has room.
    void say_closed() noexcept { say('C', ""); }
    void say_aborted(const std::string& reason) noexcept { say('A', reason); }

  private:
    void say(char kind, const std::string& text) noexcept;
    bool process_ended() const noexcept;

    UniqueFd socket_;
    std::unique_ptr<ForkGuard> guard_;  // after the socket, so that it is destroyed first
    UniqueFd process_;
    PeerState state_ = PeerState::kOpen;
    std::string reason_;
};

}  // namespace megatron_ext
