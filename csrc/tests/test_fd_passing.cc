#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>

#include <cstring>
#include <stdexcept>

#include "check.h"
#include "core/errors.h"
#include "core/fd_passing.h"
#include "core/segment.h"

using namespace megatron_ext;
using megatron_ext::testing::fork_child;
using megatron_ext::testing::join_child;

namespace {

constexpr double kLongS = 30.0;

struct SocketPair {
    SocketPair() {
        int fds[2];
        CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
        left.reset(fds[0]);
        right.reset(fds[1]);
    }
    UniqueFd left;
    UniqueFd right;
};

int num_open_descriptors() {
    DIR* directory = ::opendir("/proc/self/fd");
    CHECK(directory != nullptr);
    int count = 0;
    while (::readdir(directory) != nullptr) {
        ++count;
    }
    ::closedir(directory);
    return count;
}

/// Sends one byte with `count` descriptors, which may violate the protocol.
void send_raw(int socket, char byte, const int* fds, std::size_t count) {
    iovec payload{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(32 * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &payload;
    message.msg_iovlen = 1;
    if (count > 0) {
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(count * sizeof(int));
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(count * sizeof(int));
        std::memcpy(CMSG_DATA(header), fds, count * sizeof(int));
    }
    CHECK(::sendmsg(socket, &message, 0) == 1);
}

void stop_waiting() { throw std::runtime_error("stopped by the interrupt check"); }

}  // namespace

TEST(a_segment_reaches_another_process) {
    SocketPair sockets;
    const pid_t child = fork_child([&] {
        sockets.left.reset();
        const Segment segment = Segment::create(100);
        std::memcpy(segment.data(), "from the child", 15);
        send_fd(sockets.right.get(), segment.fd());
    });
    sockets.right.reset();
    UniqueFd received = receive_fd(sockets.left.get(), deadline_after(kLongS));
    CHECK((::fcntl(received.get(), F_GETFD) & FD_CLOEXEC) != 0);
    const Segment segment = Segment::attach(std::move(received));
    CHECK_EQ(join_child(child), 0);  // the memory outlives the process that created it
    CHECK_EQ(segment.size_bytes(), 100U);
    CHECK(std::strcmp(static_cast<char*>(segment.data()), "from the child") == 0);
}

TEST(several_descriptors_arrive_in_order) {
    SocketPair sockets;
    for (const std::size_t size_bytes : {11U, 22U, 33U}) {
        send_fd(sockets.left.get(), Segment::create(size_bytes).fd());
    }
    for (const std::size_t size_bytes : {11U, 22U, 33U}) {
        CHECK_EQ(Segment::attach(receive_fd(sockets.right.get())).size_bytes(), size_bytes);
    }
}

TEST(a_silent_peer_is_a_time_out) {
    SocketPair sockets;
    const Deadline deadline = deadline_after(0.05);
    CHECK_THROWS(receive_fd(sockets.left.get(), deadline), TransportError, "did not answer within");
    CHECK(Clock::now() >= deadline);
    CHECK_THROWS(receive_fd(sockets.left.get(), kNever, &stop_waiting), std::runtime_error,
                 "stopped by");
}

TEST(a_peer_that_takes_nothing_is_a_time_out) {
    SocketPair sockets;
    const Segment segment = Segment::create(1);
    const auto fill_the_socket = [&] {
        for (;;) {
            send_fd(sockets.left.get(), segment.fd(), deadline_after(0.02));
        }
    };
    CHECK_THROWS(fill_the_socket(), TransportError, "did not answer within");
}

TEST(a_dead_peer_is_an_error_on_both_sides) {
    SocketPair sockets;
    const pid_t child = fork_child([&] { ::raise(SIGKILL); });
    sockets.right.reset();
    const int status = join_child(child);
    CHECK(WIFSIGNALED(status));
    CHECK_THROWS(receive_fd(sockets.left.get(), deadline_after(kLongS)), TransportError,
                 "closed the connection");
    const Segment segment = Segment::create(1);
    CHECK_THROWS(send_fd(sockets.left.get(), segment.fd()), TransportError, "Broken pipe");
}

TEST(foreign_messages_are_refused_and_leak_no_descriptor) {
    SocketPair sockets;
    int many[20];
    for (int& fd : many) {
        fd = sockets.left.get();
    }
    const int before = num_open_descriptors();
    send_raw(sockets.left.get(), 'F', many, 0);
    CHECK_THROWS(receive_fd(sockets.right.get()), TransportError, "with 0 descriptors");
    send_raw(sockets.left.get(), 'x', many, 1);
    CHECK_THROWS(receive_fd(sockets.right.get()), TransportError, "byte 120 with 1 descriptors");
    send_raw(sockets.left.get(), 'F', many, 3);
    CHECK_THROWS(receive_fd(sockets.right.get()), TransportError, "with 3 descriptors");
    send_raw(sockets.left.get(), 'F', many, 20);
    CHECK_THROWS(receive_fd(sockets.right.get()), TransportError, "with 16 descriptors");
    CHECK_EQ(num_open_descriptors(), before);
}

TEST(things_that_are_no_socket_are_errors) {
    const Segment segment = Segment::create(1);
    CHECK_THROWS(send_fd(segment.fd(), segment.fd()), TransportError, "cannot send");
    CHECK_THROWS(receive_fd(-1), TransportError, "Bad file descriptor");
}
