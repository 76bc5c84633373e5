"""Scores to probabilities: softcap, the running softmax and its last step."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """tanh in float32 to within 3 units in the last place, from exp2 alone.

    Near 0, 1 - 2 / (exp(2x) + 1) cancels, so a Padé quotient (error < 1e-8 below 0.75) stands in there.
    """
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    y = x * x
    near = (
        x
        * (135135.0 + y * (17325.0 + y * (378.0 + y)))
        / (135135.0 + y * (62370.0 + y * (3150.0 + y * 28.0)))
    )
    return tl.where(tl.abs(x) < 0.75, near, far)


@triton.jit
def running_softmax(s, scale_log2, m_i, l_i):
    """One step over a tile of scores: (p, m_i, l_i, alpha), all in base 2.

    p = 2^(s * scale_log2 - m_i); alpha is what earlier sums are worth under the new maximum. Where all of a
    row is -inf so far, the maximum is taken as 0 so that no -inf - -inf arises.
    """
    m_new = tl.maximum(m_i, tl.max(s, 1) * scale_log2)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale_log2 - base[:, None])
    alpha = tl.exp2(m_i - base)
    return p, m_new, l_i * alpha + tl.sum(p, 1), alpha


@triton.jit
def finish(m_i, l_i, w_i, sink, exists, HAS_SINKS: tl.constexpr):
    """The factor that normalises a row's accumulator, and its lse (natural log): 0 and -inf for no key.

    lse comes from l_i, the sum of the probabilities, the factor from w_i, the sum of the rounded ones.
    A sink joins the denominator here, in base 2 like m_i.
    """
    alpha = tl.full(m_i.shape, 1.0, tl.float32)
    if HAS_SINKS:
        m_new = tl.maximum(m_i, sink * LOG2E)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - base)
        w_i = w_i * alpha + tl.exp2(sink * LOG2E - base)
        l_i = l_i * alpha + tl.exp2(sink * LOG2E - base)
        m_i = m_new
    empty = (l_i == 0.0) | (exists == 0)
    factor = tl.where(empty, 0.0, alpha / tl.where(w_i == 0.0, 1.0, w_i))
    lse = tl.where(empty, float("-inf"), (m_i + tl.log2(tl.where(empty, 1.0, l_i))) * LN2)
    return factor, lse
