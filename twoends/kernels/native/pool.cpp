#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(TWOENDS_X86)
#include <immintrin.h>
#endif

namespace twoends {
namespace {

// How long an idle worker watches for the next job before it sleeps: the gap between two operations of one
// token is some tens of microseconds, and a wake-up costs about fifty, more in a virtual machine.
constexpr auto kSpin = std::chrono::microseconds(200);

void relax() {
#if defined(TWOENDS_X86)
  _mm_pause();
#elif defined(TWOENDS_ARM64)
  asm volatile("yield");
#endif
}

// Signals belong to Python's main thread.
struct NoSignals {
  sigset_t old;
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &old, nullptr); }
};

}  // namespace

struct Pool::State {
  std::mutex one_job;
  Function function = nullptr;
  void* context = nullptr;
  size_t count = 0, grain = 1;
  std::atomic<size_t> next{0};
  // A worker may touch the job only between ++inside with `open` seen true, and --inside.
  std::atomic<bool> open{false};
  std::atomic<size_t> inside{0};
  std::atomic<size_t> round{0};
  std::atomic<bool> stop{false};

  std::mutex sleep;
  std::condition_variable wake;
  std::atomic<size_t> asleep{0};
  pid_t owner = getpid();
  std::vector<std::thread> workers;
};

Pool::Pool(size_t threads) : state_(new State) {
  const NoSignals no_signals;
  State& state = *state_;
  for (size_t worker = 1; worker < threads; ++worker)
    state.workers.emplace_back([&state, worker] { work(state, worker); });
}

Pool::~Pool() {
  if (getpid() != state_->owner) return;
  {
    const std::lock_guard<std::mutex> lock(state_->sleep);
    state_->stop = true;
  }
  state_->wake.notify_all();
  for (std::thread& thread : state_->workers) thread.join();
  delete state_;
}

size_t Pool::threads() const { return state_->workers.size() + 1; }

void Pool::run(Function function, void* context, size_t count, size_t grain) {
  if (count == 0) return;
  State& state = *state_;
  // A forked child has the record of the workers but not the workers.
  if (state.workers.empty() || count <= grain || getpid() != state.owner) {
    function(context, 0, count, 0);
    return;
  }
  const std::lock_guard<std::mutex> one_job(state.one_job);
  state.function = function, state.context = context, state.count = count, state.grain = grain;
  state.next = 0;
  state.open = true;
  ++state.round;
  if (state.asleep != 0) {
    const std::lock_guard<std::mutex> lock(state.sleep);
    state.wake.notify_all();
  }
  take_pieces(state, 0);
  state.open = false;
  for (size_t spins = 0; state.inside != 0; ++spins) {
    if (spins < 1000)
      relax();
    else
      std::this_thread::yield();
  }
}

// Runs grow shorter towards the end: long ones stream well, and nobody waits long for the last.
void Pool::take_pieces(State& state, size_t worker) {
  const size_t shares = 4 * (state.workers.size() + 1);
  size_t begin = state.next;
  while (begin < state.count) {
    const size_t left = state.count - begin, share = left / shares / state.grain * state.grain;
    const size_t run = share > state.grain ? share : state.grain;
    const size_t end = run < left ? begin + run : state.count;
    if (!state.next.compare_exchange_weak(begin, end)) continue;
    state.function(state.context, begin, end, worker);
    begin = state.next;
  }
}

void Pool::wait_for(State& state, size_t seen_round) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (state.round != seen_round || state.stop) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  std::unique_lock<std::mutex> lock(state.sleep);
  ++state.asleep;
  state.wake.wait(lock, [&] { return state.round != seen_round || state.stop; });
  --state.asleep;
}

void Pool::work(State& state, size_t worker) {
  const PlainFloats floats;
  size_t seen_round = 0;
  while (!state.stop) {
    wait_for(state, seen_round);
    seen_round = state.round;
    ++state.inside;
    if (state.open) take_pieces(state, worker);
    --state.inside;
  }
}

#if defined(TWOENDS_X86)
PlainFloats::PlainFloats() : saved_(_mm_getcsr()) {
  // Flush to zero, denormals are zero, the rounding mode, and the exception masks.
  constexpr unsigned control = 0x8000u | 0x0040u | 0x6000u | 0x1f80u;
  changed_ = (saved_ & control) != 0x1f80u;
  if (changed_) _mm_setcsr(0x1f80u);
}
PlainFloats::~PlainFloats() {
  if (changed_) _mm_setcsr((unsigned)saved_);
}
#elif defined(TWOENDS_ARM64)
PlainFloats::PlainFloats() {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  changed_ = saved_ != 0;
  if (changed_) asm volatile("msr fpcr, %0" ::"r"(0ull));
}
PlainFloats::~PlainFloats() {
  if (changed_) asm volatile("msr fpcr, %0" ::"r"(saved_));
}
#else
PlainFloats::PlainFloats() : saved_(0), changed_(false) {}
PlainFloats::~PlainFloats() {}
#endif

}  // namespace twoends
