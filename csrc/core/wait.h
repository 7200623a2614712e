#pragma once

#include <chrono>

namespace megatron_ext {

/// Every wait in the core ends at a fixed point on the monotonic clock, so neither wall-clock
/// changes nor repeated interruptions by signals move its end.
using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;
inline constexpr Deadline kNever = Deadline::max();

/// Called on the waiting thread between two sleeps, at least every kInterruptPeriod. The check may
/// throw, which ends the wait with that exception; the Python module checks for Ctrl-C here. A null
/// pointer means no check: the wait then sleeps until its event or its deadline.
using InterruptCheck = void (*)();
inline constexpr std::chrono::milliseconds kInterruptPeriod{100};

/// The deadline `seconds` from now. Infinity and anything beyond 30 years is kNever.
/// Throws std::invalid_argument if `seconds` is negative or not a number.
Deadline deadline_after(double seconds);

/// When one sleep of a longer wait must end: at `deadline`, or earlier if `check` must be called.
Deadline end_of_sleep(Deadline deadline, InterruptCheck check);

}  // namespace megatron_ext
