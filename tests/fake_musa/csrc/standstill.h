// Detects a deadlock of all ranks, and reports what the first task of each queue waits for.
//
// Ten times a second a thread of each process writes its device's progress and the first tasks of
// its queues to memory shared by all ranks. The first rank to see no progress in any rank for
// FAKE_MUSA_STUCK_S raises the alarm, and all ranks fail.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "queues.h"

namespace fake_musa {

class Standstill {
  public:
    static constexpr size_t kMaxRanks = 64;

    static Standstill& instance() {
        static Standstill* const standstill = new Standstill;
        return *standstill;
    }

    // Starts the thread once: at the first queue, or when this rank joins the board.
    void begin() {
        if (!begun_.exchange(true)) {
            std::thread([this] { watch(); }).detach();
        }
    }

    // Creates the board of all ranks of a job, an anonymous file; returns its descriptor.
    int make_board() {
        const int file = memfd_create("fake_musa_board", MFD_CLOEXEC);
        TORCH_CHECK(file >= 0 && ftruncate(file, sizeof(Board)) == 0, "no memory for a board");
        return file;
    }

    void join(int file, int64_t rank) {
        TORCH_CHECK(rank >= 0 && rank < static_cast<int64_t>(kMaxRanks), "too many ranks");
        void* const data =
            mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        TORCH_CHECK(data != MAP_FAILED, "the board cannot be mapped");
        auto* const board = static_cast<Board*>(data);
        board->slots[rank].pid = getpid();
        rank_ = rank;
        board_ = board;
        begin();
    }

    // Whether a process is still alive.
    static bool lives(int64_t pid) {
        std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
        std::string text;
        std::getline(file, text);
        const size_t end = text.rfind(')');
        return end != std::string::npos && end + 2 < text.size() && text[end + 2] != 'Z' &&
               text[end + 2] != 'X';
    }

  private:
    struct Slot {
        std::atomic<int64_t> pid, progress, host_cpu_ns;
        std::atomic<bool> runs, waits;
        char text[4000];
    };
    struct Board {
        std::atomic<bool> stopped;
        Slot slots[kMaxRanks];
    };
    struct Look {
        int64_t progress = 0, host_cpu_ns = 0;
    };

    Standstill() {
        own_.slots[0].pid = getpid();
        board_ = &own_;
    }

    void watch() {
        std::vector<Look> since(kMaxRanks);
        double moved_s = now_s(), looked_s = moved_s;
        for (;;) {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            Board& board = *board_.load();
            note(board.slots[rank_]);
            const double now = now_s();
            // A late check means a busy machine, on which other ranks may have been stalled too.
            if (now - looked_s > 1 || has_moved(board, since, now - moved_s)) {
                moved_s = now;
                remember(board, since);
            }
            looked_s = now;
            if (now - moved_s > stuck_s() && !board.stopped.exchange(true)) {
                std::fprintf(stderr, "MUSA: nothing has moved in any rank for %.0f s\n", stuck_s());
            }
            if (board.stopped) {
                end(board);
                return;
            }
        }
    }

    void note(Slot& slot) {
        Device& device = Device::instance();
        slot.progress = device.progress();
        slot.runs = device.runs();
        slot.waits = device.has_work();
        slot.host_cpu_ns = host_cpu_ns();
        const std::string text = device.heads();
        std::snprintf(slot.text, sizeof slot.text, "%s", text.c_str());
    }

    bool has_moved(const Board& board, const std::vector<Look>& since, double seconds) const {
        bool anybody_waits = false;
        for (size_t rank = 0; rank < kMaxRanks; ++rank) {
            const Slot& slot = board.slots[rank];
            if (slot.pid == 0) {
                continue;
            }
            anybody_waits = anybody_waits || slot.waits;
            if (!lives(slot.pid)) {
                continue;
            }
            const double host_s =
                static_cast<double>(slot.host_cpu_ns - since[rank].host_cpu_ns) * 1e-9;
            if (slot.runs || slot.progress != since[rank].progress ||
                (seconds > 1 && host_s > 0.03 * seconds)) {
                return true;
            }
        }
        return !anybody_waits;
    }

    void remember(const Board& board, std::vector<Look>& since) const {
        for (size_t rank = 0; rank < kMaxRanks; ++rank) {
            const Slot& slot = board.slots[rank];
            since[rank] = {slot.progress, slot.host_cpu_ns};
        }
    }

    void end(const Board& board) {
        std::string text = "nothing can move any more:\n";
        for (size_t rank = 0; rank < kMaxRanks; ++rank) {
            const Slot& slot = board.slots[rank];
            if (slot.pid != 0) {
                text += "rank " + std::to_string(rank);
                text += lives(slot.pid) ? ":\n" : " has ended; it had:\n";
                text += slot.text;
            }
        }
        std::fprintf(stderr, "MUSA: %s", text.c_str());
        std::fflush(stderr);
        Device::instance().give_up(text);
        std::this_thread::sleep_for(std::chrono::seconds(3));
        _exit(70);  // the host waits for something other than its device
    }

    // CPU time of the main thread, in nanoseconds.
    static int64_t host_cpu_ns() {
        std::ifstream file("/proc/self/schedstat");
        int64_t ran = 0;
        file >> ran;
        return ran;
    }

    Board own_{};
    std::atomic<Board*> board_{nullptr};
    std::atomic<int64_t> rank_{0};
    std::atomic<bool> begun_{false};
};

}  // namespace fake_musa
