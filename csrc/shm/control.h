#pragma once

#include <memory>
#include <string>

#include "core/fork_guard.h"
#include "core/link.h"
#include "core/unique_fd.h"

namespace megatron_ext {

/// The connection of two processes over a unix socket (SOCK_SEQPACKET), on which they say that they
/// close or give up, and whose end without either is the peer's death. Death is also noticed by the
/// end of the process itself, where the kernel tells it (pidfd): children of the peer may hold the
/// socket open. Not synchronised.
class Control {
  public:
    explicit Control(UniqueFd socket);

    int socket() const noexcept { return socket_.get(); }

    /// Reads what the peer said, without waiting, and returns how it is. Never goes back to kOpen.
    PeerState update();

    PeerState state() const noexcept { return state_; }

    /// Why the peer gave up; empty otherwise.
    const std::string& reason() const noexcept { return reason_; }

    /// Tells the peer, if it still is there and takes it.
    void say_closed() noexcept { say('C', ""); }
    void say_aborted(const std::string& reason) noexcept { say('A', reason); }

  private:
    void say(char kind, const std::string& text) noexcept;
    bool process_ended() const noexcept;

    UniqueFd socket_;
    std::unique_ptr<ForkGuard> guard_;  // after the socket, so that it goes first
    UniqueFd process_;
    PeerState state_ = PeerState::kOpen;
    std::string reason_;
};

}  // namespace megatron_ext
