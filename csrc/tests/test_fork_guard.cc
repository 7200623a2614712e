#include <fcntl.h>
#include <sys/socket.h>

#include <memory>

#include "check.h"
#include "core/fork_guard.h"
#include "core/unique_fd.h"

using namespace megatron_ext;
using megatron_ext::testing::fork_child;
using megatron_ext::testing::join_child;

namespace {

struct Sockets {
    Sockets() {
        int fds[2];
        CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
        left.reset(fds[0]);
        right.reset(fds[1]);
    }
    UniqueFd left;
    UniqueFd right;
};

/// Whether a child that outlives its parent would keep the connection open.
bool child_holds(Sockets& sockets) {
    int fds[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    UniqueFd mine(fds[0]);
    UniqueFd theirs(fds[1]);
    char byte = 0;
    const pid_t child = fork_child([&] {
        mine.reset();
        sockets.right.reset();
        CHECK(::write(theirs.get(), "r", 1) == 1);
        CHECK(::read(theirs.get(), &byte, 1) == 0);
        CHECK(::fcntl(sockets.left.get(), F_GETFD) == FD_CLOEXEC);  // the number can be closed
    });
    CHECK(::read(mine.get(), &byte, 1) == 1);
    sockets.left.reset();
    const bool ended = ::recv(sockets.right.get(), &byte, 1, MSG_DONTWAIT) == 0;
    mine.reset();
    CHECK_EQ(join_child(child), 0);
    return !ended;
}

}  // namespace

TEST(a_child_keeps_a_connection_open_unless_it_is_guarded) {
    Sockets plain;
    CHECK(child_holds(plain));
    Sockets guarded;
    const auto guard = std::make_unique<ForkGuard>(guarded.left.get());
    CHECK(!child_holds(guarded));
}

TEST(a_guard_that_is_gone_has_no_effect) {
    Sockets sockets;
    {
        const ForkGuard guard(sockets.left.get());
    }
    CHECK(child_holds(sockets));
}
