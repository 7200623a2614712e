#include "core/wait.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace megatron_ext {

Deadline deadline_after(double seconds) {
    constexpr double kThirtyYears = 30.0 * 365 * 24 * 3600;
    if (!(seconds >= 0.0)) {  // written so that NaN fails as well
        throw std::invalid_argument("a time-out must be >= 0 seconds, got " +
                                    std::to_string(seconds));
    }
    if (seconds > kThirtyYears) {
        return kNever;
    }
    const std::chrono::duration<double> wait(seconds);
    return Clock::now() + std::chrono::ceil<Clock::duration>(wait);
}

Deadline end_of_sleep(Deadline deadline, InterruptCheck check) {
    return check == nullptr ? deadline : std::min(deadline, Clock::now() + kInterruptPeriod);
}

}  // namespace megatron_ext
