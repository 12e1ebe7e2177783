// The threads that share a step's work.
//
// Invariant: when `run` returns, every task is done and no thread is inside its body.
//
// Tasks are claimed, not dealt out: a thread that another process keeps off its core holds up no
// more than the task it is at. A wait spins for a few microseconds, as long as most within a step
// last, then sleeps. (OpenMP's threads sleep at once as soon as a process has more of them than
// cores, which one pool for loading and one for serving is: a wake-up costs more than most tasks.)

#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "common.h"

namespace shoal {

// What one thread takes of tasks that several share. The next task is taken before the present one is
// done, so that its memory can be asked for meanwhile.
class Claims {
 public:
  Claims(std::atomic<int64_t>& next, int64_t tasks)
      : next_(next), tasks_(tasks), upcoming_(next++) {}

  // Goes on to the next task; false when all are taken.
  bool take() {
    task_ = upcoming_;
    if (task_ >= tasks_) return false;
    upcoming_ = next_++;
    return true;
  }

  int64_t task() const { return task_; }
  bool has_upcoming() const { return upcoming_ < tasks_; }
  int64_t upcoming() const { return upcoming_; }

 private:
  std::atomic<int64_t>& next_;
  const int64_t tasks_;
  int64_t task_ = 0, upcoming_;
};

class Team {
 public:
  explicit Team(int threads) : count_(std::max(1, threads)) {
    for (int index = 1; index < count_; ++index) {
      workers_.emplace_back([this, index] {
        index_ = index;
        work();
      });
    }
  }

  ~Team() {
    stopping_ = true;
    wake();
    for (std::thread& worker : workers_) worker.join();
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int count() const { return count_; }

  // Which of its team's threads this one is; 0 is the caller of `run`.
  static int index() { return index_; }

  // Tasks in a claim, so that each thread comes back a few times.
  int64_t grain(int64_t tasks) const { return std::max<int64_t>(1, tasks / (count_ * 16)); }

  // Calls body(begin, end) on any thread for parts of [0, tasks), `grain` tasks each.
  template <typename Body>
  void run(int64_t tasks, int64_t grain, const Body& body) {
    if (count_ == 1 || tasks <= grain) {
      if (tasks > 0) body(int64_t{0}, tasks);
      return;
    }
    body_ = &body;
    call_ = [](const void* erased, int64_t begin, int64_t end) {
      (*static_cast<const Body*>(erased))(begin, end);
    };
    tasks_ = tasks;
    grain_ = grain;
    next_ = 0;
    open_ = true;
    wake();
    drain();
    open_ = false;
    // Either a late worker sees that it is closed, or this sees that worker.
    for (int spins = 0; inside_ != 0; ++spins) {
      if (spins < kSpins) {
        pause();
      } else if (const int inside = inside_; inside != 0) {
        inside_.wait(inside);
      }
    }
  }

  // Calls body(i) for i in [0, tasks).
  template <typename Body>
  void each(int64_t tasks, int64_t grain, const Body& body) {
    run(tasks, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  }

  // Calls body(claims) on each thread there is a task for.
  template <typename Body>
  void share(int64_t tasks, const Body& body) {
    std::atomic<int64_t> next{0};
    run(std::min<int64_t>(count_, tasks), 1, [&](int64_t, int64_t) {
      Claims claims(next, tasks);
      body(claims);
    });
  }

 private:
  static constexpr int kSpins = 1000;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  void wake() {
    round_.fetch_add(1);
    round_.notify_all();
  }

  void drain() {
    for (int64_t begin = next_.fetch_add(grain_); begin < tasks_;
         begin = next_.fetch_add(grain_)) {
      call_(body_, begin, std::min(begin + grain_, tasks_));
    }
  }

  void work() {
    uint32_t seen = 0;
    while (!stopping_) {
      for (int spins = 0; round_ == seen && spins < kSpins; ++spins) pause();
      round_.wait(seen);
      seen = round_;
      inside_.fetch_add(1);
      if (open_) drain();
      if (inside_.fetch_sub(1) == 1) inside_.notify_all();
    }
  }

  static inline thread_local int index_ = 0;
  const int count_;
  std::vector<std::thread> workers_;
  std::atomic<uint32_t> round_{0};
  std::atomic<int> inside_{0};
  std::atomic<bool> open_{false}, stopping_{false};
  alignas(64) std::atomic<int64_t> next_{0};
  int64_t tasks_ = 0, grain_ = 1;
  const void* body_ = nullptr;
  void (*call_)(const void*, int64_t, int64_t) = nullptr;
};

}  // namespace shoal
