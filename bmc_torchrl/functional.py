"""The equations of ε-BMC as pure functions of tensors.

Every function broadcasts over leading dimensions and keeps no state. Equation numbers are those of
[GSL19]: Gimelfarb, Sanner, Lee, "ε-BMC: A Bayesian Ensemble Approach to Epsilon-Greedy Exploration
in Model-Free Reinforcement Learning", UAI 2019 (arXiv:2007.00869).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

__all__ = [
    "Moments",
    "beta_moment_match",
    "beta_quantile",
    "bootstrapped_return",
    "epsilon_greedy_action",
    "epsilon_greedy_probabilities",
    "gaussian_log_evidence_ratio",
    "geometric_decay",
    "greedy_return",
    "legal_action_at",
    "linear_decay",
    "mixture_return",
    "power_decay",
    "precision_posterior",
    "sarsa_return",
    "student_t_log_evidence_ratio",
    "uniform_return",
    "vdbe_epsilon",
    "welford_merge",
    "welford_update",
]


def bootstrapped_return(
    reward: Tensor, next_value: Tensor, gamma: float | Tensor, terminated: Tensor | None = None
) -> Tensor:
    r"""One-step return :math:`r' + \gamma v(s')`, without the bootstrap where `terminated`.

    All arguments have shape ``[*batch]``.
    """
    if terminated is not None:
        next_value = torch.where(terminated, torch.zeros_like(next_value), next_value)
    return reward + gamma * next_value


def greedy_return(
    reward: Tensor,
    next_action_value: Tensor,
    gamma: float | Tensor,
    *,
    terminated: Tensor | None = None,
    action_mask: Tensor | None = None,
) -> Tensor:
    r"""Q-learning's return :math:`G^Q = r' + \gamma \max_{a'} Q(s', a')` ([GSL19], Eq. (1)).

    Args:
        reward: ``[*batch]``.
        next_action_value: ``[*batch, actions]``.
        gamma: discount factor.
        terminated: ``[*batch]``, True where the episode ended in :math:`s'`.
        action_mask: ``[*batch, actions]``, True for the legal actions of :math:`s'`.
    """
    if action_mask is not None:
        next_action_value = next_action_value.masked_fill(~action_mask, -torch.inf)
    return bootstrapped_return(reward, next_action_value.amax(-1), gamma, terminated)


def uniform_return(
    reward: Tensor,
    next_action_value: Tensor,
    gamma: float | Tensor,
    *,
    terminated: Tensor | None = None,
    action_mask: Tensor | None = None,
) -> Tensor:
    r"""The uniform model's return :math:`G^U`: the mean of Q(s′, ·) instead of its maximum.

    [GSL19], Eq. (6). Arguments as in :func:`greedy_return`; the mean is over the legal actions.
    """
    if action_mask is None:
        mean = next_action_value.mean(-1)
    else:
        legal = torch.where(action_mask, next_action_value, torch.zeros_like(next_action_value))
        mean = legal.sum(-1) / action_mask.sum(-1)
    return bootstrapped_return(reward, mean, gamma, terminated)


def sarsa_return(
    reward: Tensor,
    next_action_value: Tensor,
    next_action: Tensor,
    gamma: float | Tensor,
    *,
    terminated: Tensor | None = None,
) -> Tensor:
    r"""SARSA's return :math:`r' + \gamma Q(s', a')` ([GSL19], Eq. (2)), `next_action` an index."""
    chosen = next_action_value.gather(-1, next_action.unsqueeze(-1)).squeeze(-1)
    return bootstrapped_return(reward, chosen, gamma, terminated)


def mixture_return(greedy_return: Tensor, uniform_return: Tensor, epsilon: Tensor) -> Tensor:
    r"""Expected SARSA's return :math:`G = (1-\varepsilon)G^Q + \varepsilon G^U`.

    [GSL19], Eqs. (3) and (5).
    """
    return greedy_return + epsilon * (uniform_return - greedy_return)


def epsilon_greedy_probabilities(
    action_value: Tensor, epsilon: Tensor, action_mask: Tensor | None = None
) -> Tensor:
    r"""The ε-greedy policy :math:`\pi^\varepsilon(a \mid s)` ([GSL19], Eq. (4)).

    Args:
        action_value: ``[*batch, actions]``; ties go to the first index.
        epsilon: ``[*batch]``.
        action_mask: ``[*batch, actions]``, True for legal actions.
    """
    legal = torch.ones_like(action_value, dtype=torch.bool) if action_mask is None else action_mask
    greedy = action_value.masked_fill(~legal, -torch.inf).argmax(-1, keepdim=True)
    epsilon = epsilon.unsqueeze(-1)
    uniform = epsilon * legal / legal.sum(-1, keepdim=True)
    return uniform.scatter_add(-1, greedy, (1 - epsilon).expand(greedy.shape).to(uniform.dtype))


def legal_action_at(uniform: Tensor, action_mask: Tensor) -> Tensor:
    """The legal action at quantile `uniform` ∈ [0, 1) of the uniform law over legal actions.

    Args:
        uniform: ``[*batch]``.
        action_mask: ``[*batch, actions]``; a row without a legal action gives index 0.
    """
    rank = (uniform * action_mask.sum(-1)).long()
    before = action_mask.cumsum(-1) <= rank.unsqueeze(-1)
    return before.sum(-1) * action_mask.any(-1)


def epsilon_greedy_action(
    greedy_action: Tensor, epsilon: Tensor, draws: Tensor, num_actions: int | Tensor
) -> Tensor:
    """The ε-greedy action, from two uniform draws.

    Args:
        greedy_action: ``[*batch]`` index of the greedy action.
        epsilon: ``[*batch]``.
        draws: ``[2, *batch]`` uniform on [0, 1): the coin, and which action.
        num_actions: how many actions there are.
    """
    coin, which = draws.unbind(0)
    return torch.where(coin < epsilon, (which * num_actions).long(), greedy_action)


class Moments(NamedTuple):
    """Running number, mean and sum of squared deviations of a stream, each ``[*batch]``."""

    num: Tensor
    mean: Tensor
    m2: Tensor

    @property
    def variance(self) -> Tensor:
        """Sample variance (n − 1), zero for fewer than two observations."""
        return self.m2 / (self.num - 1).clamp(min=1)


def welford_update(moments: Moments, observation: Tensor, taken: Tensor | None = None) -> Moments:
    """`moments` after one more observation (Welford 1962), unchanged where not `taken`."""
    if taken is None:
        taken = torch.ones_like(moments.num, dtype=torch.bool)
    count = moments.num + taken
    deviation = torch.where(taken, observation, moments.mean) - moments.mean
    step = deviation / count.clamp(min=1)
    return Moments(
        count, moments.mean + step, torch.addcmul(moments.m2, deviation, deviation - step)
    )


def welford_merge(first: Moments, second: Moments) -> Moments:
    """`Moments` of two streams together, exactly as if they had been one (Chan et al. 1979)."""
    count = first.num + second.num
    share = second.num / count.clamp(min=1)
    gap = second.mean - first.mean
    return Moments(
        count, first.mean + gap * share, first.m2 + second.m2 + gap**2 * first.num * share
    )


def precision_posterior(
    moments: Moments, mu0: float, tau0: float, a0: float, b0: float
) -> tuple[Tensor, Tensor]:
    r"""Gamma posterior :math:`(a, b)` of the returns' precision ([GSL19], Eq. (9))."""
    half = moments.num / 2
    shift = (moments.mean - mu0).square()
    scatter = torch.addcdiv(moments.variance, shift, moments.num + tau0, value=tau0)
    return half + a0, half * scatter + b0


def student_t_log_evidence_ratio(
    gap: Tensor, alpha: Tensor, beta: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    r"""How much better "uniform" explains the mixture return: :math:`\log e^U - \log e^Q`.

    Both evidences are Student-t densities ([GSL19], Eq. (10)) at
    :math:`G = (1-\varepsilon)G^Q + \varepsilon G^U`. Only the gap :math:`\Delta = G^Q - G^U` and
    :math:`\tau = 1 - 2\varepsilon = (\beta - \alpha) / (\alpha + \beta)` remain:
    :math:`-(a + \tfrac12)\log\bigl(1 + \tau\Delta^2 / (2b + \varepsilon^2\Delta^2)\bigr)`. Where
    :math:`\varepsilon > \tfrac12` the two models change places, lest the logarithm cancel.

    Args:
        gap: greedy minus uniform return, ``[*batch]``.
        alpha: posterior parameter of ε, ``[*batch]``.
        beta: posterior parameter of ε, ``[*batch]``.
        a: shape of the precision's posterior, ``[*batch]``.
        b: rate of the precision's posterior, ``[*batch]``.
    """
    total = alpha + beta
    smaller, lead = torch.minimum(alpha, beta) / total, (alpha - beta) / total
    squared = gap.square()
    width = torch.add(smaller.square() * squared, b, alpha=2)
    ratio = torch.log1p(lead.abs() * squared / width)
    return (a + 0.5) * torch.copysign(ratio, lead)


def gaussian_log_evidence_ratio(
    gap: Tensor, alpha: Tensor, beta: Tensor, variance: Tensor
) -> Tensor:
    r""":math:`\log e^U - \log e^Q = -\tau\Delta^2 / (2\sigma^2)` for Gaussian returns.

    [GSL19], Eq. (7); arguments as in :func:`student_t_log_evidence_ratio`.
    """
    return -(beta - alpha) / (alpha + beta) * gap**2 / (2 * variance)


def beta_moment_match(
    alpha: Tensor, beta: Tensor, log_evidence_ratio: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Project the posterior over ε back onto a Beta distribution.

    One observation turns :math:`\mathrm{Beta}(\alpha, \beta)` into a mixture of
    :math:`\mathrm{Beta}(\alpha + 1, \beta)`, "uniform was right" with probability :math:`p`, and
    :math:`\mathrm{Beta}(\alpha, \beta + 1)`, "greedy was right" with :math:`q = 1 - p`. The Beta
    returned has the mixture's mean and variance ([GSL19], Eqs. (12)–(16)). Solved for the change,
    with :math:`u = \alpha e^U` and :math:`g = \beta e^Q`, they read

    .. math:: \alpha' = \alpha - u\,(\alpha + 1)\,c, \quad \beta' = \beta + g\,(\beta + 1)\,c, \quad
              c = \frac{\alpha\beta\,(e^Q - e^U)}
                       {(\alpha(u+g) + u)(\beta(u+g) + g) + u g\,(\alpha + \beta + 1)}.

    Equal evidence changes nothing, and evidence for "greedy" never raises :math:`\alpha` nor lowers
    :math:`\beta`, to the last bit. Neither weight ever halves, so the subtraction is safe.

    Args:
        alpha: ``[*batch]``.
        beta: ``[*batch]``.
        log_evidence_ratio: :math:`\log e^U - \log e^Q`, ``[*batch]``.
    """
    e_u, e_q = log_evidence_ratio.clamp(max=0).exp(), (-log_evidence_ratio).clamp(max=0).exp()
    u, g = alpha * e_u, beta * e_q
    evidence, both = u + g, u * g
    spread = torch.addcmul(u, alpha, evidence) * torch.addcmul(g, beta, evidence)
    spread = spread + torch.addcmul(both, both, alpha + beta)
    c = alpha * beta * (e_q - e_u) / spread
    return (
        torch.addcmul(alpha, torch.addcmul(u, u, alpha), c, value=-1),
        torch.addcmul(beta, torch.addcmul(g, g, beta), c),
    )


def beta_quantile(alpha: Tensor, beta: Tensor, probability: float) -> Tensor:
    r"""Quantile of :math:`\mathrm{Beta}(\alpha, \beta)`, its probability right to five decimals.

    In :math:`x = \log w/(1-w)` the density is smooth with one mode, so the trapezoidal rule on a
    grid that widens away from the mode serves every :math:`\alpha, \beta > 0`.
    """
    alpha, beta = alpha.double().unsqueeze(-1), beta.double().unsqueeze(-1)
    width = ((alpha + beta) / (alpha * beta)).sqrt()
    grid = torch.linspace(-12, 12, 4001, dtype=torch.float64, device=alpha.device)
    x = (alpha / beta).log() + width * torch.sinh(grid)
    log_density = alpha * F.logsigmoid(x) + beta * F.logsigmoid(-x)
    density = (log_density - log_density.amax(-1, keepdim=True)).exp() * torch.cosh(grid)
    area = torch.cumulative_trapezoid(density, grid, dim=-1)
    area = torch.cat([torch.zeros_like(area[..., :1]), area], -1)
    target = probability * area[..., -1:]
    right = torch.searchsorted(area, target).clamp(1, grid.numel() - 1)
    low, high = area.gather(-1, right - 1), area.gather(-1, right)
    left_x, right_x = x.gather(-1, right - 1), x.gather(-1, right)
    return torch.sigmoid(torch.lerp(left_x, right_x, (target - low) / (high - low))).squeeze(-1)


def vdbe_epsilon(
    epsilon: Tensor, value_change: Tensor, sigma: float | Tensor, delta: float | Tensor
) -> Tensor:
    r"""VDBE's ε of the state just left (Tokic 2010).

    :math:`\varepsilon \leftarrow \delta f + (1-\delta)\varepsilon` with
    :math:`f = (1 - e^{-|\Delta Q|/\sigma}) / (1 + e^{-|\Delta Q|/\sigma})`.
    """
    return delta * torch.tanh(value_change.abs() / (2 * sigma)) + (1 - delta) * epsilon


def geometric_decay(initial: Tensor, rate: Tensor, episodes: Tensor) -> Tensor:
    r""":math:`\varepsilon_k = \varepsilon_0 \rho^k` after `episodes` finished episodes."""
    return initial * rate**episodes


def power_decay(initial: Tensor, power: Tensor, episodes: Tensor, first_index: int = 1) -> Tensor:
    r""":math:`\varepsilon_k = \varepsilon_0 (k + 1)^{-p}` after :math:`k` finished `episodes`.

    With ``first_index=0`` the base is :math:`\max(k, 1)`, as in the published data.
    """
    return initial * (episodes + first_index).clamp(min=1) ** -power


def linear_decay(initial: Tensor, final: Tensor, frames: Tensor, num_frames: int) -> Tensor:
    """TorchRL's annealing from `initial` to `final` over `num_frames` frames."""
    return torch.maximum(final, initial - frames * (initial - final) / num_frames)
