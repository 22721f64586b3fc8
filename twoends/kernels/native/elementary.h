// exp, sigmoid, tanh, softplus, silu: the operations of docs/contracts.md, "Elementary functions".
#pragma once
#include "simd.h"

namespace twoends {
namespace TWOENDS_ISA {

template <int N>
TWOENDS_INLINE f32x16 horner(const float (&c)[N], f32x16 x) {
  f32x16 total = set1(c[N - 1]);
  TWOENDS_UNROLL
  for (int i = N - 2; i >= 0; --i) total = fma(total, x, set1(c[i]));
  return total;
}

TWOENDS_INLINE f32x16 exp(f32x16 x) {
  constexpr float poly[] = {0x1p-1f, 0x1.555554p-3f, 0x1.555486p-5f, 0x1.11128p-7f, 0x1.6d945cp-10f, 0x1.9f02cap-13f};
  const f32x16 top = set1(89.f), bottom = set1(-104.f);
  x = select_lt(top, x, top, x);
  x = select_lt(x, bottom, bottom, x);
  const f32x16 n = rint(x * set1(0x1.715476p+0f));
  const f32x16 minus_n = negate(n);
  f32x16 r = fma(minus_n, set1(0x1.63p-1f), x);
  r = fma(minus_n, set1(-0x1.bd0106p-13f), r);
  const f32x16 y = set1(1.f) + fma(horner(poly, r), r * r, r);
  return scale_by_power(y, n);
}

TWOENDS_INLINE f32x16 sigmoid(f32x16 x) {
  const f32x16 one = set1(1.f);
  const f32x16 e = exp(negate(abs(x)));
  return select_le(zero(), x, one, e) / (one + e);
}

TWOENDS_INLINE f32x16 tanh(f32x16 x) {
  constexpr float poly[] = {-0x1.555532p-2f, 0x1.11071p-3f, -0x1.b837f2p-5f, 0x1.520236p-6f, -0x1.752162p-8f};
  const f32x16 one = set1(1.f);
  const f32x16 a = abs(x);
  const f32x16 z = a * a;
  const f32x16 low = fma(a * z, horner(poly, z), a);
  const f32x16 high = one - set1(2.f) / (exp(a + a) + one);
  return copy_sign(select_lt(a, set1(0.625f), low, high), x);
}

TWOENDS_INLINE f32x16 softplus(f32x16 x) {
  constexpr float poly[] = {0x1.555558p-2f, 0x1.999688p-3f, 0x1.250d6ep-3f, 0x1.b67758p-4f, 0x1.f332e2p-4f};
  const f32x16 e = exp(negate(abs(x)));
  const f32x16 s = e / (set1(2.f) + e);
  const f32x16 z = s * s;
  const f32x16 twice = s + s;
  const f32x16 log1p = fma(twice * z, horner(poly, z), twice);
  return select_lt(zero(), x, x, select_le(x, zero(), zero(), x)) + log1p;
}

TWOENDS_INLINE f32x16 silu(f32x16 x) { return x * sigmoid(x); }

}  // namespace TWOENDS_ISA
}  // namespace twoends
