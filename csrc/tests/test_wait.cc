#include <limits>
#include <stdexcept>

#include "check.h"
#include "core/wait.h"

using namespace megatron_ext;

static void check_nothing() {}

TEST(deadlines_are_in_the_future) {
    const Deadline before = Clock::now();
    CHECK(deadline_after(1.5) >= before + std::chrono::milliseconds(1500));
    CHECK(deadline_after(0.0) >= before);
    CHECK(deadline_after(1e-12) > before);
}

TEST(long_time_outs_are_never_instead_of_overflowing) {
    CHECK(deadline_after(1e300) == kNever);
    CHECK(deadline_after(std::numeric_limits<double>::infinity()) == kNever);
}

TEST(time_outs_that_are_no_time_are_refused) {
    CHECK_THROWS(deadline_after(-0.5), std::invalid_argument, "got -0.5");
    CHECK_THROWS(deadline_after(std::numeric_limits<double>::quiet_NaN()), std::invalid_argument,
                 "nan");
}

TEST(only_a_check_shortens_a_sleep) {
    const Deadline far = deadline_after(1000.0);
    CHECK(end_of_sleep(far, nullptr) == far);
    CHECK(end_of_sleep(kNever, nullptr) == kNever);
    const Deadline shortened = end_of_sleep(kNever, &check_nothing);
    CHECK(shortened <= Clock::now() + kInterruptPeriod);
    const Deadline past = Clock::now();
    CHECK(end_of_sleep(past, &check_nothing) == past);
}
