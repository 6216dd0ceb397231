"""The proximal operator of ProxSparse's 2:4 regulariser, solved exactly for many groups at once.

For a group z of four weights and a strength λ it is

    argmin_w  ½|w - z|² + λ (|w₁w₂w₃| + |w₂w₃w₄| + |w₃w₄w₁| + |w₄w₁w₂|).

With x = λ|w| and y = λ|z|, sorted so that y₁ ≥ y₂ ≥ y₃ ≥ y₄, no parameter is left: minimise
F(x) = ½|x - y|² + e₃(x) over x ≥ 0, e₃ the sum of the products of three elements. F is not convex. But its
Hessian, the identity plus xₖ + xₗ off the diagonal (k, l the other two), is affine in x, so the points where it is
positive semidefinite form a convex set, and on each support there is at most one local minimum. The supports that
matter are the largest two, three or four elements. Hence three cases:

* y₁ + y₂ ≤ ¾: F is convex wherever x ≤ y, and coordinate descent finds its only minimum.
* y₁ > 5/4: the largest two stay as they are and the rest is zero. (A local minimum on three elements is better
  than that only if x₁² + x₂² ≤ 1, so y₁ ≤ (1 + √2) / 2; one on four elements has x₁ + x₂ ≤ 1, so y₁ ≤ 5/4.)
* Between them: the local minima of the three supports, each from Newton's method in one unknown, compared.

Groups are columns, [4, G], throughout.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from roi_lightning.masks.pattern import top_members

ELEMENTS: Final = 4
# Bounds on the scaled magnitudes; see above.
_CONVEX: Final = 0.75
_TWO_STAY: Final = 1.25
_SWEEPS_PER_CHECK: Final = 4
_MAX_CHECKS: Final = 30
_FEW: Final = 8  # groups are few when they are one in so many
_MAX_NEWTON: Final = 60
_SETTLED: Final = 1e-10  # the last step of the Newton methods, in float64 on numbers around 1
# Groups at once. A block is solved together, so that its few slow groups are worth a tensor; the passes over all of
# it go slice by slice, as the cache of a CPU core holds them. Elsewhere they only bound the temporaries.
_BLOCK_CPU: Final = 2**18
_SLICE_CPU: Final = 2**15
_BLOCK_ELSEWHERE: Final = 2**22


@torch.no_grad()
def prox_2of4(z: Tensor, strength: float) -> Tensor:
    """The proximal operator of `strength` times the 2:4 regulariser, for every group of four.

    The minimum is global and accurate to a few units of rounding of the group's largest element: coordinate
    descent ends when no element moves by more than two of them, or after 240 sweeps (the slowest groups met needed
    26 in float32 and 68 in float64). Among equal elements the ones with the lower index stay.

    Args:
        z: [4, ...], the elements of each group along the first axis, float32 or float64.
        strength: λ, finite and not negative; zero is the identity.

    Returns:
        The minimisers, of z's shape and dtype. An element that keeps its value keeps it bit by bit. A group with a
        NaN comes back as it is, one with infinite elements keeps its largest two.
    """
    parts = z.reshape(ELEMENTS, -1).split(_block(z), dim=1)
    return torch.cat([_prox(part, strength) for part in parts], dim=1).view(z.shape)


@torch.no_grad()
def apply_prox_(weight: Tensor, strength: float) -> None:
    """Replace a weight by its proximal point, in place and without a copy of it.

    Args:
        weight: [out, in], float32 or float64, `in` a multiple of 4.
        strength: As in `prox_2of4`.
    """
    elements = weight.unflatten(1, (-1, ELEMENTS)).movedim(2, 0)
    rows = max(1, _block(weight) // elements.shape[2])
    for part in elements.split(rows, dim=1):
        part.copy_(prox_2of4(part, strength))


def _block(z: Tensor) -> int:
    return _BLOCK_CPU if z.device.type == "cpu" else _BLOCK_ELSEWHERE


def _slices(z: Tensor) -> tuple[Tensor, ...]:
    slices: tuple[Tensor, ...] = z.split(_SLICE_CPU if z.device.type == "cpu" else z.shape[1], dim=1)
    return slices


def _prox(z: Tensor, strength: float) -> Tensor:
    """Most groups in one pass over slices, then those that take longer together."""
    done, slow = [], []
    for part in _slices(z):
        part = part.contiguous()  # elements of a group may be adjacent in memory
        y = _scaled(part, strength)
        x, left = _quick(y, part)
        done.append(_unscaled(x, y, part, strength))
        slow.append(left)
    w, columns = torch.cat(done, dim=1), torch.cat(slow).nonzero().squeeze(1)
    if len(columns):
        part = z[:, columns].contiguous()
        y = _scaled(part, strength)
        w[:, columns] = _unscaled(_thorough(y), y, part, strength)
    return w


def _scaled(z: Tensor, strength: float) -> Tensor:
    # Below this an element is nothing beside its group, and products of two would be denormal, which is slow.
    return F.threshold(z.abs().mul_(strength), torch.finfo(z.dtype).eps ** 2 / 8, 0)


def _unscaled(x: Tensor, y: Tensor, z: Tensor, strength: float) -> Tensor:
    # A group this small is its own proximal point; and what did not move must not be rounded on its way back.
    small = y.amax(0) < torch.finfo(z.dtype).eps / 4
    unmoved = (x == y) & ((x > 0) | small)
    return torch.where(unmoved, z, torch.copysign(x / strength, z))


def _quick(y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The minimisers as far as a few sweeps give them, and which groups need more, [G]."""
    first = y.amax(0)
    if bool(first.amax() <= _CONVEX / 2):
        return _descend_most(y)
    both, far = _largest_two(y), first > _TWO_STAY
    convex = both <= _CONVEX
    x, moving = _descend_most(y.masked_fill(~convex, 0))
    # By z, because the scaled elements may have overflowed. Groups with a NaN are in no case.
    x = torch.where(convex, x, y.masked_fill(far & ~top_members(z.abs(), 2), 0))
    return x, moving | ((both > _CONVEX) & ~far)


def _descend_most(y: Tensor) -> tuple[Tensor, Tensor]:
    """Minimise F by coordinate descent until most groups have arrived; the points, and who has not, [G]."""
    x = y.clone()
    moving = _sweeps(x, y)
    for _ in range(_MAX_CHECKS - 1):
        if _FEW * int(moving.count_nonzero()) <= len(moving):
            break
        moving = _sweeps(x, y)
    return x, moving


def _largest_two(y: Tensor) -> Tensor:
    """The sum of each group's largest two."""
    high, low = torch.maximum(y[:2], y[2:]), torch.minimum(y[:2], y[2:])
    return torch.maximum(high.sum(0), high.amax(0) + low.amax(0))


def _thorough(y: Tensor) -> Tensor:
    """The minimisers of groups none of which is in the second case."""
    x = y.clone()
    convex = _largest_two(y) <= _CONVEX
    for case, solve in ((convex, _descend), (~convex, _compare_supports)):
        columns = case.nonzero().squeeze(1)
        if len(columns):
            x[:, columns] = torch.cat([solve(part) for part in _slices(y[:, columns])], dim=1)
    return x


def _descend(y: Tensor) -> Tensor:
    """Minimise F by coordinate descent, dropping the groups that have arrived."""
    x, moving = _descend_most(y)
    columns = moving.nonzero().squeeze(1)
    for _ in range(_MAX_CHECKS):
        if not len(columns):
            break
        part = x[:, columns]
        still = _sweeps(part, y[:, columns])
        x[:, columns] = part
        columns = columns[still]
    return x


def _sweeps(x: Tensor, y: Tensor) -> Tensor:
    """A few sweeps of coordinate descent in place; whether a group still moved in the last of them, [G]."""
    for _ in range(_SWEEPS_PER_CHECK - 1):
        _sweep(x, y)
    before = x.clone()
    _sweep(x, y)
    return before.sub_(x).abs_().amax(0) > 2 * torch.finfo(y.dtype).eps * y.amax(0)


def _sweep(x: Tensor, y: Tensor) -> None:
    """Minimise F over each coordinate in turn: xᵢ = max(0, yᵢ - the sum of the products of two others)."""
    for i, j, k, m in ((0, 1, 2, 3), (2, 3, 0, 1)):
        total, product = x[k] + x[m], x[k] * x[m]
        for a, b in ((i, j), (j, i)):
            torch.addcmul(y[a], x[b], total, value=-1, out=x[a]).sub_(product).clamp_(min=0)


def _compare_supports(y: Tensor) -> Tensor:
    """The best of the local minima on the two, three and four largest elements."""
    ordered, order = y.sort(dim=0, descending=True, stable=True)
    ordered = ordered.double()
    two = ordered.clone()
    two[2:] = 0
    best, lowest = two, _objective(two, ordered)
    for x in (_on_three(ordered), _on_four(ordered)):
        value = _objective(x, ordered)
        # False for NaN, which marks that the support has no local minimum.
        better = (value < lowest) & (x >= 0).all(0)
        best, lowest = torch.where(better, x, best), torch.where(better, value, lowest)
    return torch.empty_like(y).scatter_(0, order, best.to(y.dtype))


def _objective(x: Tensor, y: Tensor) -> Tensor:
    products = x[0] * x[1] * (x[2] + x[3]) + x[2] * x[3] * (x[0] + x[1])
    return (x - y).square().sum(0) / 2 + products


def _on_three(y: Tensor) -> Tensor:
    """The local minimum on the three largest elements, NaN where there is none.

    For a given a = x₃ < 1 the best x₁ and x₂ follow from two linear equations; what is left is the derivative
    g(a) = a - y₃ + ¼ (P² / (1+a)² - M² / (1-a)²), P = y₁ + y₂, M = y₁ - y₂. A local minimum is a root where g
    rises. g is convex up to the a that is tried first and concave beyond, so that Newton's method from there goes
    straight to the only such root, or to where g falls, and then there is none.

    Args:
        y: [4, G] float64, in descending order, y₁ > 0.
    """
    plus, minus = y[0] + y[1], y[0] - y[1]
    ratio = (minus / plus).sqrt()
    a = (1 - ratio) / (1 + ratio)
    _newton(_step_on_three, a, torch.stack([plus, minus, y[2]]))
    rest = 1 - a.square()
    return torch.stack([(y[0] - a * y[1]) / rest, (y[1] - a * y[0]) / rest, a, torch.zeros_like(a)])


def _step_on_three(a: Tensor, given: Tensor) -> Tensor:
    plus, minus, third = given
    # Where a = 1, minus = 0.
    above, below = 1 / (1 + a), 1 / (1 - a).clamp(min=_SETTLED)
    up, down = (plus * above).square(), (minus * below).square()
    value = a - third + (up - down) / 4
    slope = 1 - (up * above + down * below) / 2
    return torch.where((slope > 0) & (a > 0), -value / slope, torch.nan)


def _on_four(y: Tensor) -> Tensor:
    """The local minimum on all four elements, NaN where there is none.

    All xᵢ solve one quadratic equation, xᵢ = √(yᵢ + q) - b with b = (R - 1) / 2 and R the sum of the roots; only
    the root of the smallest element may be negative. With t for that root, the others are √(yᵢ - y₄ + t²), and what
    is left is a function of t, G = (R - 2)² + 1 - 2Σy + 4y₄ - 4t², four times the derivative of the smallest F for
    a given sum of x. A local minimum is a root where G falls. If G(0) ≥ 0, the only one is at 0 ≤ t ≤ ½.
    Otherwise it can only be at t < 0, where G is concave, and Newton's method from 0 goes straight to it.

    Args:
        y: [4, G] float64, in descending order, y₁ > 0.
    """
    gaps, constant = y[:3] - y[3], 1 - 2 * y.sum(0) + 4 * y[3]
    right = (gaps.sqrt().sum(0) - 2).square() + constant >= 0
    bounds = torch.stack([right.double() / 2 - 0.5, right.double() / 2])
    t = bounds[1] / 2
    _newton(_step_on_four, t, torch.cat([gaps, constant.unsqueeze(0), bounds]))
    roots = torch.cat([(gaps + t.square()).sqrt(), t.unsqueeze(0)])
    return roots - (roots.sum(0) - 1) / 2


def _step_on_four(t: Tensor, given: Tensor) -> Tensor:
    gaps, constant, bounds = given[:3], given[3], given[4:]
    square = t.square()
    roots = (gaps + square).sqrt()
    past = t + roots.sum(0) - 2
    value = past.square() + constant - 4 * square
    rate = 2 * past * (1 + (t / roots.clamp(min=_SETTLED)).sum(0)) - 8 * t
    # The root is between the bounds; at a negative sum of x (past > 0) G means nothing.
    left = (value > 0) & (past < 0)
    bounds[0], bounds[1] = torch.where(left, t, bounds[0]), torch.where(left, bounds[1], t)
    to = t - value / rate
    to = torch.where((to >= bounds[0]) & (to <= bounds[1]), to, bounds.mean(0))
    return torch.where((t > 0) | (rate < 0), to - t, torch.nan)


def _newton(step: Callable[[Tensor, Tensor], Tensor], t: Tensor, given: Tensor) -> None:
    """Add steps to t, in place, until they are small or not a number; arrived columns drop out.

    Args:
        step: What to add to t; it may keep notes in the second argument.
        t: [G].
        given: [K, G], what `step` has to know of each column.
    """
    columns = torch.arange(len(t), device=t.device)
    moving = t
    for _ in range(_MAX_NEWTON):
        change = step(moving, given)
        t[columns] = moving = moving + change
        busy = (change.abs() > _SETTLED).nonzero().squeeze(1)
        if not len(busy):
            break
        if 2 * len(busy) <= len(moving):
            columns, moving, given = columns[busy], moving[busy], given[:, busy]
