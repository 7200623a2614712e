// The tasks of streams, and the marks between them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace fake_musa {

using StreamKey = int64_t;  // number of a stream; negative for the default stream of a device

inline StreamKey stream_key(int device, int64_t id) { return id == 0 ? -(device + 1) : id; }

inline double now_s() {
    using Seconds = std::chrono::duration<double>;
    return Seconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A point in a stream.
struct Mark {
    std::string where;
    StreamKey stream = 0;
    bool done = false;
    double time_s = 0;  // by the clock of its queue
    std::condition_variable passed;
};
using MarkPtr = std::shared_ptr<Mark>;

// An operation of a communicator, which a Python thread runs when the operation is due.
struct Message {
    std::string name;
    bool turn = false, done = false;
    double turn_s = 0, end_s = 0;  // by the clock of the queue
    std::condition_variable changed;
};

enum class Kind { kKernel, kCopy, kMessage, kRecord, kWait, kPoll, kPoison };

struct Task {
    Kind kind = Kind::kKernel;
    std::string name;
    double given_s = 0;  // when the host submitted it
    double lasts_us = 0;
    double share = 1;  // part of the device's multiprocessors; below 1: an exchange, beside kernels
    std::function<void()> run;      // in the middle of its duration: reads and computes
    std::function<void()> publish;  // at its end: writes; may be empty
    MarkPtr mark;                   // kRecord: the mark to pass; kWait: the mark to wait for
    std::shared_ptr<Message> message;
    std::function<double()> came_s;  // kPoll: when the event came, 0 if it has yet to come; raises
                                     // if it never will
    StreamKey stream = 0;
    int priority = 0;  // of the stream; the lower, the earlier
};

}  // namespace fake_musa
