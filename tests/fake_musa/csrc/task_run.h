// How the thread of a queue carries out the first task: what the task waits for, when it reads and
// when it writes.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "mode.h"
#include "processor.h"
#include "tasks.h"

namespace fake_musa {

struct Queue {
    std::deque<Task> tasks;  // the first one runs or waits
    double clock_s = 0;      // when the last task ended, had this thread never been late
    bool computes = false;
    Processor* processor = nullptr;
    std::condition_variable filled;
    std::mt19937_64 random;
};

// The first error of a device, which stops all its tasks.
class Failure {
  public:
    void set(const std::string& text) {
        if (text_.empty()) {
            text_ = text;
        }
    }

    bool is_set() const { return !text_.empty(); }

    // Raises the error, if there is one.
    void check() const { TORCH_CHECK(text_.empty(), "MUSA error: ", text_); }

  private:
    std::string text_;
};

// One task of a queue, which runs under the lock of the device except while it computes or sleeps.
class TaskRun {
  public:
    TaskRun(Queue& queue, Task& task, std::unique_lock<std::mutex>& lock, Failure& failure)
        : queue_(queue), task_(task), lock_(lock), failure_(failure) {}

    void carry_out() {
        const auto step = std::chrono::milliseconds(200);
        advance(task_.given_s);
        switch (task_.kind) {
            case Kind::kRecord:
                return;
            case Kind::kWait:
                queue_.processor->begin_wait(task_.mark->stream, queue_.clock_s);
                while (!task_.mark->done && !failure_.is_set()) {
                    task_.mark->passed.wait_for(lock_, step);
                }
                queue_.processor->end_wait(task_.mark->stream);
                advance(task_.mark->time_s);
                return;
            case Kind::kPoll:
                guarded([&] { advance(poll()); });
                return;
            case Kind::kMessage:
                pass(time_us());
                task_.message->turn_s = queue_.clock_s;
                task_.message->turn = true;
                task_.message->changed.notify_all();
                while (!task_.message->done && !failure_.is_set()) {
                    task_.message->changed.wait_for(lock_, step);
                }
                advance(task_.message->end_s);
                return;
            default:
                if (!failure_.is_set()) {
                    compute();
                }
        }
    }

  private:
    // Calls a function without the lock; its exception becomes the device's failure.
    template <typename Function>
    void guarded(Function&& function) {
        std::string error;
        lock_.unlock();
        try {
            function();
        } catch (const std::exception& raised) {
            error = task_.name + ": " + raised.what();
        }
        lock_.lock();
        if (!error.empty()) {
            failure_.set(error.substr(0, error.find("\nException raised from")));
        }
    }

    // Reads in the middle of the task's duration and writes at its end. So a missing wait shows in
    // both directions: a reader finds its input unwritten, or its input overwritten too early.
    void compute() {
        const double lasts_us = time_us();
        // What takes no time needs no multiprocessors, such as a small copy between two exchanges.
        const bool competes = Costs::instance().shared > 0 && task_.kind == Kind::kKernel &&
                              task_.share >= 1 && lasts_us > 0;
        if (competes) {
            start_on_processor(lasts_us);
        } else if (task_.share < 1) {
            const double end_s = queue_.clock_s + 1e-6 * lasts_us;
            queue_.processor->exchange(queue_.clock_s, end_s, task_.share);
        }
        const double begin_s = queue_.clock_s;
        queue_.computes = true;
        pass(lasts_us / 2);
        guarded(task_.run);
        pass(lasts_us / 2);
        if (competes) {
            end_on_processor(begin_s);
        }
        if (task_.publish && !failure_.is_set()) {
            guarded(task_.publish);
        }
        queue_.computes = false;
    }

    void start_on_processor(double lasts_us) {
        advance(0);
        const Contender kernel{queue_.clock_s, 1e-6 * lasts_us, task_.priority, task_.stream,
                               now_s()};
        advance(queue_.processor->acquire(lock_, kernel, [&] { return failure_.is_set(); }));
    }

    // Lets the time pass that exchanges have taken from a kernel.
    void end_on_processor(double begin_s) {
        double added_s = 0;
        for (;;) {
            const double left_s = queue_.processor->taken_s(begin_s, queue_.clock_s) - added_s;
            if (left_s < 1e-7 || failure_.is_set()) {
                break;
            }
            added_s += left_s;
            pass(1e6 * left_s);
        }
        queue_.processor->release(queue_.clock_s);
    }

    double time_us() {
        const double jitter_us = Costs::instance().jitter_us;
        if (jitter_us <= 0 || task_.kind == Kind::kPoison) {
            return task_.lasts_us;
        }
        // One task in eight is late, by a mean of eight times the jitter.
        const bool late = queue_.random() % 8 == 0;
        std::exponential_distribution<double> draw(1 / (8 * jitter_us));
        return task_.lasts_us + (late ? draw(queue_.random) : 0);
    }

    // Returns when the event came.
    double poll() {
        for (;;) {
            if (const double came_s = task_.came_s()) {
                return came_s;
            }
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
    }

    // Moves the clock of the queue on to a time, and up to now but for what it may lag behind.
    void advance(double time_s) {
        const double lag_s = 1e-6 * Costs::instance().lag_us;
        queue_.clock_s = std::max({queue_.clock_s, time_s, now_s() - lag_s});
    }

    // Lets a time pass on the clock of the queue, and sleeps until then.
    void pass(double us) {
        if (us <= 0) {
            return;
        }
        advance(0);
        queue_.clock_s += 1e-6 * us;
        lock_.unlock();
        const double left_s = std::max(0.0, queue_.clock_s - now_s());
        std::this_thread::sleep_for(std::chrono::duration<double>(left_s));
        lock_.lock();
    }

    Queue& queue_;
    Task& task_;
    std::unique_lock<std::mutex>& lock_;
    Failure& failure_;
};

}  // namespace fake_musa
