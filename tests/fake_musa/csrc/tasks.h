// What streams are given: tasks, and points between them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace fake_musa {

using StreamKey = int64_t;  // the number of a stream; the default one of a device is negative

inline StreamKey stream_key(int device, int64_t id) { return id == 0 ? -(device + 1) : id; }

inline double now_s() {
    using Seconds = std::chrono::duration<double>;
    return Seconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A point in a stream.
struct Mark {
    std::string where;
    bool done = false;
    double time_s = 0;
    std::condition_variable passed;
};
using MarkPtr = std::shared_ptr<Mark>;

// An operation of a communicator, which a thread of Python carries out when its turn has come.
struct Message {
    std::string name;
    bool turn = false, done = false;
    std::condition_variable changed;
};

enum class Kind { kKernel, kCopy, kMessage, kRecord, kWait, kPoll, kPoison };

struct Task {
    Kind kind = Kind::kKernel;
    std::string name;
    double lasts_us = 0;
    std::function<void()> run;      // after half of its time: reads, and computes
    std::function<void()> publish;  // at its end: writes; may be missing
    MarkPtr mark;                   // kRecord: to be passed; kWait: to be waited for
    std::shared_ptr<Message> message;
    std::function<bool()> has_come;  // kPoll; raises if it never will
    StreamKey stream = 0;
};

}  // namespace fake_musa
