#include "check.h"
#include "core/match_table.h"

using namespace megatron_ext;

namespace {

Message message(std::uint64_t tag, std::uint8_t number) {
    MessageInfo info;
    info.tag = tag;
    info.dtype_bits = number;
    return {info, nullptr};
}

}  // namespace

TEST(messages_are_taken_in_any_order) {
    MatchTable table;
    table.add(1, message(10, 1));
    table.add(1, message(20, 2));
    table.add(2, message(10, 3));
    CHECK(!table.take(2, 20));
    CHECK_EQ(int{table.take(2, 10)->info.dtype_bits}, 3);
    CHECK_EQ(int{table.take(1, 20)->info.dtype_bits}, 2);
    CHECK_EQ(int{table.take(1, 10)->info.dtype_bits}, 1);
    CHECK(!table.take(1, 10));
}

TEST(equal_tags_keep_their_order) {
    MatchTable table;
    for (std::uint8_t number = 0; number < 5; ++number) {
        table.add(0, message(7, number));
    }
    CHECK_EQ(table.count(0), 5U);
    CHECK_EQ(table.count(1), 0U);
    for (int number = 0; number < 5; ++number) {
        CHECK_EQ(int{table.take(0, 7)->info.dtype_bits}, number);
    }
}

TEST(taking_does_not_look_through_what_is_new) {
    MatchTable table;
    constexpr std::uint64_t kMessages = 200000;  // a linear search would take minutes
    for (std::uint64_t tag = 0; tag < kMessages; ++tag) {
        table.add(0, message(tag, 0));
    }
    for (std::uint64_t tag = kMessages; tag-- > 1;) {
        CHECK(table.take(0, tag));
    }
    CHECK((table.take_news() == std::vector<Arrival>{{0, 0}}));
}

TEST(news_are_told_once_and_only_while_they_are_here) {
    MatchTable table;
    CHECK(!table.has_news());
    table.add(0, message(1, 0));
    table.add(0, message(2, 0));
    table.add(3, message(1, 0));
    CHECK(table.take(0, 2));
    CHECK((table.take_news() == std::vector<Arrival>{{0, 1}, {3, 1}}));
    CHECK(!table.has_news());
    CHECK(table.take(0, 1));
    table.add(0, message(5, 0));
    CHECK((table.take_news() == std::vector<Arrival>{{0, 5}}));
}
