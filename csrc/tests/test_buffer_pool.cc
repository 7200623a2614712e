#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "core/buffer_pool.h"

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
    CHECK(pool.take(1000).get() != address);  // it would be mostly waste
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

TEST(buffers_outlive_their_pool) {
    std::shared_ptr<std::byte> buffer;
    {
        BufferPool pool;
        buffer = pool.take(5000);
    }
    std::memset(buffer.get(), 1, 5000);
}

TEST(threads_give_back_while_others_take) {
    BufferPool pool;
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
