#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>

#if defined(TWOENDS_X86)
#include <immintrin.h>
#endif

namespace twoends {
namespace {

// How long an idle worker watches for the next job before it sleeps: the gap between two operations of one
// token is a few microseconds, a wake-up costs about fifty.
constexpr auto kSpin = std::chrono::microseconds(50);

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

Pool::Pool(size_t threads) : owner_pid_((long)getpid()) {
  const NoSignals no_signals;
  for (size_t worker = 1; worker < threads; ++worker) workers_.emplace_back([this, worker] { work(worker); });
}

Pool::~Pool() {
  // After a fork the child has no workers to wait for.
  if ((long)getpid() != owner_pid_) {
    for (std::thread& thread : workers_) thread.detach();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(sleep_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : workers_) thread.join();
}

void Pool::run(Function function, void* context, size_t count, size_t grain) {
  if (count == 0) return;
  if (workers_.empty() || count <= grain) {
    function(context, 0, count, 0);
    return;
  }
  const std::lock_guard<std::mutex> one_job(one_job_);
  function_ = function, context_ = context, count_ = count, grain_ = grain;
  next_ = 0;
  open_ = true;
  ++round_;
  if (asleep_ != 0) {
    const std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  take_pieces(0);
  open_ = false;
  for (size_t spins = 0; inside_ != 0; ++spins) {
    if (spins < 1000)
      relax();
    else
      std::this_thread::yield();
  }
}

void Pool::take_pieces(size_t worker) {
  for (;;) {
    const size_t begin = next_.fetch_add(grain_);
    if (begin >= count_) return;
    const size_t end = begin + grain_ < count_ ? begin + grain_ : count_;
    function_(context_, begin, end, worker);
  }
}

void Pool::wait_for(size_t seen_round) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (round_ != seen_round || stop_) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  std::unique_lock<std::mutex> lock(sleep_);
  ++asleep_;
  wake_.wait(lock, [&] { return round_ != seen_round || stop_; });
  --asleep_;
}

void Pool::work(size_t worker) {
  const PlainFloats floats;
  size_t seen_round = 0;
  while (!stop_) {
    wait_for(seen_round);
    seen_round = round_;
    ++inside_;
    if (open_) take_pieces(worker);
    --inside_;
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
