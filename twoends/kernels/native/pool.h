// A small thread pool: one job at a time, its pieces taken from a counter by the caller and the workers.
#pragma once
#include <cstddef>

namespace twoends {

class Pool {
 public:
  // `threads` counts the caller too, so one thread means no workers.
  explicit Pool(size_t threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  size_t threads() const;

  // function(context, begin, end, worker) over all of 0 .. count - 1 in runs of at least
  // `grain`, and multiples of it; returns when all is done.
  // Calls from several threads wait for one another.
  using Function = void (*)(void* context, size_t begin, size_t end, size_t worker);
  void run(Function function, void* context, size_t count, size_t grain);

 private:
  struct State;
  static void work(State& state, size_t worker);
  static void take_pieces(State& state, size_t worker);
  static void wait_for(State& state, size_t seen_round);

  State* state_;  // left behind in a forked child, which has no workers that could ever let go of it
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
