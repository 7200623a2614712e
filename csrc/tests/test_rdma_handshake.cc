// The handshake of two processes that connect over RDMA, undamaged and damaged.

#include "rdma/handshake.h"

#include <sys/socket.h>

#include <cstddef>
#include <string>
#include <thread>

#include "check.h"
#include "core/errors.h"
#include "linked_processes.h"

using namespace megatron_ext;           // NOLINT
using namespace megatron_ext::testing;  // NOLINT

namespace {

const std::string kText = "12 7 fe80::1";

std::string exchange(int socket, const std::string& text) {
    return exchange_texts(socket, "rank 1", text, kForEver, nullptr);
}

/// The bytes that a process sends for a text.
std::string sent_for(const std::string& text) {
    auto [left, right] = connected_sockets(Wire::kTcp);
    std::thread other([&socket = left, &text] { exchange(socket.get(), text); });
    std::string sent(1 << 10, '\0');
    sent.resize(static_cast<std::size_t>(::recv(right.get(), sent.data(), sent.size(), 0)));
    CHECK(::send(right.get(), sent.data(), sent.size(), 0) > 0);
    other.join();
    return sent;
}

/// The result of an exchange whose peer sends these bytes and keeps the connection open.
std::string answer_to(const std::string& bytes) {
    auto [left, right] = connected_sockets(Wire::kTcp);
    CHECK(::send(right.get(), bytes.data(), bytes.size(), 0) > 0);
    try {
        return exchange(left.get(), "mine");
    } catch (const TransportError& error) {
        return error.what();
    }
}

}  // namespace

TEST(texts_are_exchanged) {
    for (const std::string& text : {kText, std::string(), std::string(1000, 'x')}) {
        CHECK(answer_to(sent_for(text)) == text);
    }
}

TEST(each_flipped_bit_is_told_at_once) {
    const std::string sent = sent_for(kText);
    for (std::size_t bit = 0; bit < 8 * sent.size(); ++bit) {
        std::string damaged = sent;
        damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
        CHECK(answer_to(damaged).find("is damaged") != std::string::npos);
    }
}
