// Two ends of a link over the fake library, in one process.

#include "rdma/channel.h"

#include <poll.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "check.h"
#include "core/inbox.h"
#include "core/link.h"
#include "core/outbox.h"
#include "fake_rdma.h"
#include "rdma/devices.h"
#include "rdma/errors.h"
#include "rdma/verbs_abi.h"

using namespace megatron_ext;           // NOLINT
using namespace megatron_ext::testing;  // NOLINT

namespace {

constexpr ArenaSize kSize{4, 100000};  // larger than the 64 KB that the fake accepts in one write

/// Exchanges texts between two threads, like a socket.
class Exchanger {
  public:
    std::string swap(bool is_first, const std::string& mine) {
        std::unique_lock<std::mutex> lock(mutex_);
        texts_[is_first ? 0 : 1].push_back(mine);
        changed_.notify_all();
        auto& theirs = texts_[is_first ? 1 : 0];
        changed_.wait(lock, [&] { return !theirs.empty(); });
        std::string text = theirs.front();
        theirs.pop_front();
        return text;
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::string> texts_[2];
};

/// One end of a link.
struct End final : LinkEvents {
    explicit End(const std::string& peer, ArenaSize size = kSize)
        : inbox(1, size, pool),
          channel(peer, size, inbox.fd(),
                  choose_sources(list_devices(sysfs.path()), {}, "", 0, sysfs.path()), {}),
          outbox(channel.outbox_arena(),
                 std::make_shared<ProcessBell>(ProcessBell::create()), true) {}

    void arrived(Message message) override { messages.push_back(std::move(message)); }
    void sent(std::shared_ptr<void>) override {}

    void progress() {
        channel.receive();
        outbox.push(*this);
        while (auto message = inbox.next()) {
            arrived(std::move(*message));
        }
        channel.send();
    }

    void send(std::uint64_t tag, std::size_t num_bytes) {
        auto bytes = std::make_shared<std::vector<unsigned char>>(content(tag, num_bytes));
        MessageInfo info;
        info.tag = tag;
        info.num_bytes = num_bytes;
        outbox.send(info, bytes->data(), bytes, *this);
    }

    static std::vector<unsigned char> content(std::uint64_t tag, std::size_t num_bytes) {
        std::vector<unsigned char> bytes(num_bytes);
        std::mt19937_64 random(tag);
        for (unsigned char& byte : bytes) {
            byte = static_cast<unsigned char>(random());
        }
        return bytes;
    }

    FakeSysfs sysfs;
    BufferPool pool;
    Inbox inbox;
    RdmaChannel channel;
    Outbox outbox;
    std::deque<Message> messages;
};

/// Connects both ends, each on its own thread. Returns the texts of their errors, if any.
std::pair<std::string, std::string> connect(End& left, End& right) {
    Exchanger exchanger;
    std::string errors[2];
    const auto run = [&](End& end, bool is_first) {
        try {
            end.channel.connect(
                [&](const std::string& text) { return exchanger.swap(is_first, text); }, is_first,
                kNever, nullptr);
        } catch (const RdmaError& error) {
            errors[is_first ? 0 : 1] = error.what();
        }
    };
    std::thread other(run, std::ref(right), false);
    run(left, true);
    other.join();
    return {errors[0], errors[1]};
}

struct Ends {
    Ends() : left("rank 1"), right("rank 0") {
        const auto errors = connect(left, right);
        CHECK(errors.first.empty() && errors.second.empty());
    }
    End left;
    End right;
};

void check_content(const Message& message) {
    const auto num_bytes = static_cast<std::size_t>(message.info.num_bytes);
    const auto expected = End::content(message.info.tag, num_bytes);
    CHECK(num_bytes == 0 || std::memcmp(message.bytes.get(), expected.data(), num_bytes) == 0);
}

bool is_readable(int fd) {
    pollfd entry{fd, POLLIN, 0};
    return ::poll(&entry, 1, 0) > 0;
}

}  // namespace

TEST(messages_of_any_size_cross_in_both_directions) {
    use_fake_verbs();
    Ends ends;
    std::mt19937 random(1);
    std::deque<Message> kept;
    std::size_t num_checked = 0;
    constexpr std::uint64_t kMessages = 300;
    for (std::uint64_t tag = 0; tag < kMessages; ++tag) {
        const std::size_t num_bytes = random() % 4 == 0 ? random() % 350000 : random() % 3000;
        ends.left.send(tag, num_bytes);
        ends.right.send(tag + 1000, num_bytes / 2);
    }
    while (num_checked < 2 * kMessages) {
        for (End* end : {&ends.left, &ends.right}) {
            end->progress();
            while (!end->messages.empty()) {
                check_content(end->messages.front());
                ++num_checked;
                kept.push_back(std::move(end->messages.front()));
                end->messages.pop_front();
            }
        }
        while (kept.size() > 3) {  // release a random one, so that slots return in any order
            kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(random() % kept.size()));
        }
    }
    CHECK_EQ(ends.left.outbox.num_queued(), std::size_t{0});
    ends.left.progress();
    CHECK_EQ(ends.left.channel.num_in_flight(), 0U);
}

TEST(a_sender_without_credit_goes_on_when_it_comes) {
    Ends ends;
    for (std::uint64_t tag = 0; tag < 6; ++tag) {
        ends.left.send(tag, 10);
    }
    ends.left.progress();
    ends.left.progress();
    CHECK_EQ(ends.left.outbox.num_queued(), std::size_t{2});  // the first four were not received
    ends.right.progress();
    ends.left.progress();
    ends.right.progress();
    CHECK_EQ(ends.left.outbox.num_queued(), std::size_t{0});
    CHECK_EQ(ends.right.messages.size(), std::size_t{6});
}

TEST(a_slot_is_not_used_again_before_its_write_is_complete) {
    Ends ends;
    {
        const Faults faults("hold");
        ends.left.send(1, 10);
        ends.left.progress();
        CHECK_EQ(ends.left.channel.num_in_flight(), 1U);
        ends.right.progress();
        CHECK(ends.right.messages.empty());
    }
    ends.right.progress();
    CHECK_EQ(ends.right.messages.size(), std::size_t{1});
    ends.left.progress();
    CHECK_EQ(ends.left.channel.num_in_flight(), 0U);
}

TEST(an_armed_end_is_woken_by_a_message) {
    Ends ends;
    ends.right.channel.arm();
    ends.right.progress();
    CHECK(!is_readable(ends.right.channel.fd()));
    ends.left.send(1, 10);
    ends.left.progress();
    CHECK(is_readable(ends.right.channel.fd()));
    ends.right.channel.arm();
    CHECK(!is_readable(ends.right.channel.fd()));
    ends.right.progress();
    CHECK_EQ(ends.right.messages.size(), std::size_t{1});
}

TEST(a_peer_that_is_gone_is_an_error_of_the_next_write) {
    auto left = std::make_unique<End>("rank 1");
    auto right = std::make_unique<End>("rank 0");
    CHECK(connect(*left, *right).first.empty());
    right.reset();
    left->channel.probe();
    CHECK_THROWS(left->channel.receive(), RdmaError, "an RDMA write to rank 1 failed");
    left->send(1, 10);
    left->outbox.push(*left);
    left->channel.send();
    CHECK_THROWS(left->channel.receive(), RdmaError, "(status 5, vendor error 0x81)");
}

TEST(the_first_of_several_failures_is_told) {
    Ends ends;
    const Faults faults("wc=12");
    for (std::uint64_t tag = 0; tag < 3; ++tag) {
        ends.left.send(tag, 10);
    }
    ends.left.outbox.push(ends.left);
    ends.left.channel.send();
    CHECK_THROWS(ends.left.channel.receive(), RdmaError,
                 "transport retry counter exceeded (status 12");
    ends.left.channel.receive();  // the other requests were flushed
}

TEST(a_receiver_that_is_not_ready_is_our_mistake) {
    Ends ends;
    const Faults faults("wc=13");
    ends.left.send(1, 10);
    ends.left.outbox.push(ends.left);
    ends.left.channel.send();
    CHECK_THROWS(ends.left.channel.receive(), RdmaError, "this is a bug in megatron_ext");
}

TEST(a_write_that_is_not_taken_is_told) {
    Ends ends;
    const Faults faults("post=" + std::to_string(EIO));
    ends.left.send(1, 10);
    ends.left.outbox.push(ends.left);
    CHECK_THROWS(ends.left.channel.send(), RdmaError, "refused a write: Input/output error");
}

TEST(a_port_that_fails_is_named_by_the_failure_that_follows) {
    Ends ends;
    send_async_event(verbs::kEventPortError);
    CHECK(is_readable(ends.left.channel.async_fd()));
    ends.left.progress();  // the port may recover
    const Faults faults("wc=12");
    ends.left.send(1, 10);
    ends.left.outbox.push(ends.left);
    ends.left.channel.send();
    CHECK_THROWS(ends.left.channel.receive(), RdmaError, "the device reported: port error");
}

TEST(a_port_that_comes_back_is_forgotten) {
    Ends ends;
    send_async_event(verbs::kEventPortError);
    send_async_event(verbs::kEventPortActive);
    ends.left.progress();
    const Faults faults("wc=12");
    ends.left.send(1, 10);
    ends.left.outbox.push(ends.left);
    ends.left.channel.send();
    std::string text;
    try {
        ends.left.channel.receive();
    } catch (const RdmaError& error) {
        text = error.what();
    }
    CHECK(text.find("status 12") != std::string::npos);
    CHECK(text.find("the device reported") == std::string::npos);
}

TEST(a_device_that_fails_ends_the_link) {
    Ends ends;
    send_async_event(verbs::kEventDeviceFatal);
    CHECK_THROWS(ends.left.channel.receive(), RdmaError, "local catastrophic error");
}

TEST(a_gid_that_does_not_connect_is_followed_by_the_next) {
    const Faults faults("rtr_gid=1");
    Ends ends;
    CHECK(ends.left.channel.text().find("GID 3 (2001:db8::1)") != std::string::npos);
    ends.left.send(1, 10);
    ends.left.progress();
    ends.right.progress();
    CHECK_EQ(ends.right.messages.size(), std::size_t{1});
}

TEST(a_gid_without_a_way_to_the_peer_is_followed_by_the_next) {
    const Faults faults("no_way=1");
    Ends ends;
    CHECK(ends.left.channel.text().find("GID 3 (2001:db8::1)") != std::string::npos);
    ends.left.send(1, 10);
    ends.left.progress();
    ends.right.progress();
    CHECK_EQ(ends.right.messages.size(), std::size_t{1});
}

TEST(ends_that_connect_and_have_no_way_to_each_other_both_say_so) {
    const Faults faults("wc=12");
    End left("rank 1");
    End right("rank 0");
    const auto errors = connect(left, right);
    for (const std::string& error : {errors.first, errors.second}) {
        CHECK(error.find("no RDMA connection to rank") != std::string::npos);
        CHECK(error.find("transport retry counter exceeded") != std::string::npos);
    }
}

TEST(ends_that_do_not_connect_both_say_why) {
    const Faults faults("rtr=" + std::to_string(EINVAL));
    End left("rank 1");
    End right("rank 0");
    const auto errors = connect(left, right);
    for (const std::string& error : {errors.first, errors.second}) {
        CHECK(error.find("no RDMA connection to rank") != std::string::npos);
        CHECK(error.find("GID 1 (::ffff:10.77.0.1)") != std::string::npos);
        CHECK(error.find("GID 3 (2001:db8::1)") != std::string::npos);
        CHECK(error.find("--node-ips") != std::string::npos);
    }
}

TEST(ends_of_different_sizes_refuse_each_other) {
    End left("rank 1");
    End right("rank 0", {2, 100});
    const auto errors = connect(left, right);
    CHECK(errors.first.find("rank 1 has 2 slots of 100 bytes, but this process has 4") == 0);
    CHECK(errors.second.find("give all ranks the same flags") != std::string::npos);
}

TEST(memory_that_cannot_be_registered_is_told) {
    const Faults faults("reg_mr=" + std::to_string(ENOMEM));
    CHECK_THROWS(End("rank 1"), RdmaError, "ulimit -l unlimited");
}

TEST(nothing_is_left_open) { CHECK_EQ(num_fake_objects(), 0); }
