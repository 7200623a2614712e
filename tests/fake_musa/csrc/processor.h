// The multiprocessors of a device, for which the kernels of its streams compete.
//
// With the cost `shared=1` they run one kernel at a time: among those that are ready, the first in
// a stream of the highest priority. A kernel that has started is not interrupted. An exchange runs
// beside kernels; it takes a share of the multiprocessors, which makes kernels last longer.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <list>
#include <map>
#include <mutex>

#include "mode.h"
#include "tasks.h"

namespace fake_musa {

// A kernel at the head of its queue; times are by the clocks of the queues.
struct Contender {
    double ready_s = 0;
    double lasts_s = 0;
    int priority = 0;  // the lower, the earlier
    StreamKey stream = 0;
    double came_s = 0;  // when its thread came, by the clock of the host
};

// All functions are called under the lock of the device.
class Processor {
  public:
    // Waits until a kernel may start; returns when it does.
    template <typename HasFailed>
    double acquire(std::unique_lock<std::mutex>& lock, const Contender& kernel,
                   HasFailed&& has_failed) {
        const auto place = contenders_.insert(contenders_.end(), &kernel);
        changed_.notify_all();
        while (!has_failed()) {
            const double left_s = start_s(kernel) - now_s();
            if (left_s <= 0) {
                break;
            }
            changed_.wait_for(lock, std::chrono::duration<double>(std::min(left_s, 0.2)));
        }
        const double begin_s = std::max(ready_s(kernel), free_s_);
        contenders_.erase(place);
        is_busy_ = true;
        return begin_s;
    }

    void release(double end_s) {
        is_busy_ = false;
        free_s_ = end_s;
        freed_s_ = now_s();
        changed_.notify_all();
    }

    // Records an exchange, which takes a share of the multiprocessors.
    void exchange(double begin_s, double end_s, double share) {
        const double oldest_s = free_s_ - 1;
        exchanges_.remove_if([&](const Exchange& old) { return old.end_s < oldest_s; });
        exchanges_.push_back({begin_s, end_s, share});
    }

    // How much longer a kernel takes because of exchanges.
    double taken_s(double begin_s, double end_s) const {
        double sum_s = 0;
        for (const Exchange& exchange : exchanges_) {
            const double both_s =
                std::min(end_s, exchange.end_s) - std::max(begin_s, exchange.begin_s);
            sum_s += exchange.share * std::max(0.0, both_s);
        }
        return sum_s;
    }

    void add_stream(int priority) { highest_ = std::min(highest_, priority); }

    // Something waits for a stream from now on, or no longer.
    void begin_wait(StreamKey stream, double now_s) {
        Awaited& awaited = awaited_[stream];
        if (awaited.count++ == 0) {
            awaited.since_s = now_s;
        }
        changed_.notify_all();
    }
    void end_wait(StreamKey stream) { --awaited_[stream].count; }

  private:
    struct Exchange {
        double begin_s, end_s, share;
    };
    struct Awaited {
        int count = 0;
        double since_s = 0;
    };
    static constexpr double kNever = std::numeric_limits<double>::infinity();

    // When a kernel could start if it were alone.
    double ready_s(const Contender& kernel) const {
        if (Costs::instance().fills > 0 || kernel.priority == highest_) {
            return kernel.ready_s;
        }
        const auto found = awaited_.find(kernel.stream);
        if (found == awaited_.end() || found->second.count == 0) {
            return kNever;
        }
        return std::max(kernel.ready_s, found->second.since_s);
    }

    // When a kernel may start, by the clock of the host; never: not before something changes.
    double start_s(const Contender& kernel) const {
        double next_s = kNever;
        for (const Contender* const contender : contenders_) {
            next_s = std::min(next_s, ready_s(*contender));
        }
        next_s = std::max(next_s, free_s_);
        if (is_busy_ || ready_s(kernel) > next_s) {
            return kNever;
        }
        for (const Contender* const contender : contenders_) {
            if (ready_s(*contender) <= next_s && goes_before(*contender, kernel)) {
                return kNever;
            }
        }
        if (kernel.priority == highest_) {
            return 0;
        }
        // The thread of a kernel that goes first may be late, and all clocks of the device with it.
        // So wait by the host's clock, at most as long as the kernel lasts: its thread catches up.
        const double grace_s = std::min(1e-6 * Costs::instance().lag_us / 8, kernel.lasts_s);
        return std::max({next_s, freed_s_, kernel.came_s}) + grace_s;
    }

    static bool goes_before(const Contender& one, const Contender& other) {
        return one.priority != other.priority ? one.priority < other.priority
                                              : one.ready_s < other.ready_s;
    }

    std::list<const Contender*> contenders_;
    std::list<Exchange> exchanges_;
    std::map<StreamKey, Awaited> awaited_;
    std::condition_variable changed_;
    int highest_ = 0;
    bool is_busy_ = false;
    double free_s_ = 0;   // when the last kernel ended
    double freed_s_ = 0;  // the same by the clock of the host
};

}  // namespace fake_musa
