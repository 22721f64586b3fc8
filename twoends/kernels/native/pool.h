// A small thread pool: one job at a time, its pieces taken from a counter by the caller and the workers.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

namespace twoends {

class Pool {
 public:
  // `threads` counts the caller too, so one thread means no workers.
  explicit Pool(size_t threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  size_t threads() const { return workers_.size() + 1; }

  // function(context, begin, end, worker) over all of 0 .. count - 1 in runs of `grain`; returns when all is done.
  // Calls from several threads wait for one another.
  using Function = void (*)(void* context, size_t begin, size_t end, size_t worker);
  void run(Function function, void* context, size_t count, size_t grain);

 private:
  void work(size_t worker);
  void take_pieces(size_t worker);
  void wait_for(size_t seen_round);

  std::mutex one_job_;
  Function function_ = nullptr;
  void* context_ = nullptr;
  size_t count_ = 0, grain_ = 1;
  std::atomic<size_t> next_{0};
  // A worker may touch the job only between ++inside_ with open_ seen true, and --inside_.
  std::atomic<bool> open_{false};
  std::atomic<size_t> inside_{0};
  std::atomic<size_t> round_{0};
  std::atomic<bool> stop_{false};

  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<size_t> asleep_{0};
  long owner_pid_;
  std::vector<std::thread> workers_;
};

// Subnormals kept and rounding to nearest for the life of the object: another library may have changed both.
class PlainFloats {
 public:
  PlainFloats();
  ~PlainFloats();

 private:
  unsigned long long saved_;
  bool changed_;
};

}  // namespace twoends
