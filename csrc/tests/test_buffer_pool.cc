#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "core/buffer_pool.h"
#include "core/errors.h"

using namespace megatron_ext;

TEST(buffers_are_used_again) {
    BufferPool pool;
    auto first = pool.take(100000);
    const std::byte* const address = first.get();
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(address) % 4096, 0U);
    CHECK_EQ(pool.idle_bytes(), 0U);
    first.reset();
    CHECK(pool.idle_bytes() >= 100000);
    CHECK(pool.take(90000).get() == address);
    CHECK(pool.take(1000).get() != address);  // the block would be mostly waste
}

TEST(memory_stays_below_what_was_used_at_once) {
    BufferPool pool;
    {
        const auto both = std::vector{pool.take(8192), pool.take(4096)};
    }
    CHECK_EQ(pool.idle_bytes(), 12288U);
    const auto other = pool.take(10 * 4096);
    CHECK_EQ(pool.idle_bytes(), 0U);  // 10 pages in use, which is more than 3 ever were
}

TEST(slots_have_one_address_and_come_first) {
    BufferPool pool;
    const auto [first, num_bytes] = pool.add_slots(3, 5000);
    CHECK_EQ(num_bytes, 3U * 8192U);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(first) % 4096, 0U);
    const auto is_slot = [first = first, end = first + num_bytes](const std::byte* buffer) {
        return buffer >= first && buffer < end;
    };
    CHECK(!is_slot(pool.take(8193).get()));
    std::vector<std::shared_ptr<std::byte>> taken;
    for (std::size_t i = 0; i < 3; ++i) {
        taken.push_back(pool.take(i == 0 ? 1 : 8192));
        CHECK(is_slot(taken.back().get()));
        std::memset(taken.back().get(), 1, 8192);
    }
    const std::byte* const second = taken[1].get();
    CHECK(taken[0].get() != second && taken[2].get() != second);
    CHECK(!is_slot(pool.take(8192).get()));
    taken.erase(taken.begin() + 1);
    CHECK(pool.take(100).get() == second);
    CHECK_THROWS(pool.add_slots(1, 1), std::logic_error, "once");
    BufferPool other;
    CHECK_THROWS(other.add_slots(1024, std::size_t{1} << 40), TransportError, "bytes");
    CHECK(other.take(10));
}

TEST(buffers_outlive_their_pool) {
    std::shared_ptr<std::byte> buffer;
    {
        BufferPool pool;
        buffer = pool.take(5000);
    }
    std::memset(buffer.get(), 1, 5000);
    {
        BufferPool pool;
        pool.add_slots(2, 5000);
        buffer = pool.take(5000);
    }
    std::memset(buffer.get(), 1, 5000);
}

TEST(threads_give_back_while_others_take) {
    BufferPool pool;
    pool.add_slots(1, 16384);
    const auto use = [pool] {
        for (std::size_t i = 1; i < 500; ++i) {
            const auto buffer = pool.take(i * 64);
            std::memset(buffer.get(), 1, i * 64);
        }
    };
    std::thread other(use);
    use();
    other.join();
}
