"""The equations of ε-BMC and its neighbours as pure functions of tensors.

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
    "PageHinkley",
    "beta_interval",
    "beta_moment_match",
    "beta_of_strength",
    "beta_quantile",
    "bootstrapped_return",
    "categorical_mean",
    "epsilon_greedy_action",
    "exploratory_win",
    "forgotten",
    "gaussian_log_evidence_ratio",
    "geometric_decay",
    "greedy_return",
    "greedy_value",
    "legal_action_at",
    "linear_decay",
    "mixture_return",
    "normalised_value",
    "page_hinkley_update",
    "positive_error",
    "power_decay",
    "precision_posterior",
    "prior_rate",
    "student_t_log_evidence_ratio",
    "uniform_action",
    "uniform_return",
    "uniform_value",
    "values_left",
    "vdbe_epsilon",
    "welford_update",
    "zeta_cdf",
]


def bootstrapped_return(
    reward: Tensor, next_value: Tensor, gamma: float | Tensor, terminated: Tensor | None = None
) -> Tensor:
    r"""One-step return :math:`r' + \gamma v(s')`, without the bootstrap where `terminated`.

    Args:
        reward (Tensor): ``[*batch]``.
        next_value (Tensor): value of :math:`s'`, ``[*batch]``.
        gamma (float or Tensor): discount factor.
        terminated (Tensor, optional): ``[*batch]``, True where the episode ended in :math:`s'`.

    Returns:
        ``[*batch]``.

    Examples:
        >>> reward, ended = torch.ones(2), torch.tensor([False, True])
        >>> bootstrapped_return(reward, torch.full([2], 4.0), 0.5, ended)
        tensor([3., 1.])
    """
    if terminated is not None:
        next_value = torch.where(terminated, 0.0, next_value)
    return reward + gamma * next_value


def greedy_value(action_value: Tensor, action_mask: Tensor | None = None) -> Tensor:
    r"""The value of acting greedily, :math:`\max_a Q(s, a)`.

    Args:
        action_value (Tensor): ``[*batch, actions]``.
        action_mask (Tensor, optional): ``[*batch, actions]``, True for legal actions.

    Returns:
        ``[*batch]``.

    Examples:
        >>> greedy_value(torch.tensor([2.0, 4.0]))
        tensor(4.)
    """
    if action_mask is not None:
        action_value = action_value.masked_fill(~action_mask, -torch.inf)
    return action_value.amax(-1)


def uniform_value(action_value: Tensor, action_mask: Tensor | None = None) -> Tensor:
    r"""The value of acting uniformly, the mean of :math:`Q(s, \cdot)` over legal actions.

    Args:
        action_value (Tensor): ``[*batch, actions]``.
        action_mask (Tensor, optional): ``[*batch, actions]``, True for legal actions.

    Returns:
        ``[*batch]``.

    Examples:
        >>> uniform_value(torch.tensor([2.0, 4.0]), torch.tensor([True, False]))
        tensor(2.)
    """
    if action_mask is None:
        return action_value.mean(-1)
    legal = torch.where(action_mask, action_value, torch.zeros_like(action_value))
    return legal.sum(-1) / action_mask.sum(-1)


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
        reward (Tensor): ``[*batch]``.
        next_action_value (Tensor): ``[*batch, actions]``.
        gamma (float or Tensor): discount factor.
        terminated (Tensor, optional): ``[*batch]``, True where the episode ended in :math:`s'`.
        action_mask (Tensor, optional): ``[*batch, actions]``, True for the legal actions of
            :math:`s'`.

    Returns:
        ``[*batch]``.

    Examples:
        >>> greedy_return(torch.tensor(1.0), torch.tensor([2.0, 4.0]), 0.5)
        tensor(3.)
    """
    value = greedy_value(next_action_value, action_mask)
    return bootstrapped_return(reward, value, gamma, terminated)


def uniform_return(
    reward: Tensor,
    next_action_value: Tensor,
    gamma: float | Tensor,
    *,
    terminated: Tensor | None = None,
    action_mask: Tensor | None = None,
) -> Tensor:
    r"""The uniform model's return :math:`G^U`: the mean of Q(s′, ·) instead of its maximum.

    [GSL19], Eq. (6).

    Args:
        reward (Tensor): ``[*batch]``.
        next_action_value (Tensor): ``[*batch, actions]``.
        gamma (float or Tensor): discount factor.
        terminated (Tensor, optional): ``[*batch]``, True where the episode ended in :math:`s'`.
        action_mask (Tensor, optional): ``[*batch, actions]``, True for the legal actions of
            :math:`s'`; the mean is over these.

    Returns:
        ``[*batch]``.

    Examples:
        >>> uniform_return(torch.tensor(1.0), torch.tensor([2.0, 4.0]), 0.5)
        tensor(2.5000)
    """
    value = uniform_value(next_action_value, action_mask)
    return bootstrapped_return(reward, value, gamma, terminated)


def mixture_return(greedy_return: Tensor, uniform_return: Tensor, epsilon: Tensor) -> Tensor:
    r"""Expected SARSA's return :math:`G = (1-\varepsilon)G^Q + \varepsilon G^U`.

    [GSL19], Eqs. (3) and (5).

    Args:
        greedy_return (Tensor): ``[*batch]``.
        uniform_return (Tensor): ``[*batch]``.
        epsilon (Tensor): ``[*batch]``.

    Returns:
        ``[*batch]``.

    Examples:
        >>> mixture_return(torch.tensor(3.0), torch.tensor(1.0), torch.tensor(0.25))
        tensor(2.5000)
    """
    return greedy_return + epsilon * (uniform_return - greedy_return)


def categorical_mean(log_probabilities: Tensor, support: Tensor) -> Tensor:
    """Action values of C51: the mean of a categorical distribution over the values of its atoms.

    Args:
        log_probabilities (Tensor): ``[*batch, atoms, actions]``.
        support (Tensor): the values of the atoms, ``[atoms]``.

    Returns:
        ``[*batch, actions]``.

    Examples:
        >>> log_probabilities = torch.tensor([[0.5, 0.25], [0.5, 0.75]]).log()
        >>> categorical_mean(log_probabilities, torch.tensor([0.0, 4.0]))
        tensor([2., 3.])
    """
    return (log_probabilities.exp() * support.unsqueeze(-1)).sum(-2)


def legal_action_at(uniform: Tensor, action_mask: Tensor) -> Tensor:
    """The legal action at quantile `uniform` ∈ [0, 1) of the uniform law over legal actions.

    Args:
        uniform (Tensor): ``[*batch]``.
        action_mask (Tensor): ``[*batch, actions]``; a row without a legal action gives index 0.

    Returns:
        int64 ``[*batch]``.

    Examples:
        >>> legal_action_at(torch.tensor([0.1, 0.9]), torch.tensor([True, False, True]))
        tensor([0, 2])
    """
    rank = (uniform * action_mask.sum(-1)).long()
    before = action_mask.cumsum(-1) <= rank.unsqueeze(-1)
    return before.sum(-1) * action_mask.any(-1)


def epsilon_greedy_action(
    greedy_action: Tensor, epsilon: Tensor, coin: Tensor, random_action: Tensor
) -> Tensor:
    """The ε-greedy action ([GSL19], Eq. (4)), from a coin and a random action.

    Args:
        greedy_action (Tensor): ``[*batch]``.
        epsilon (Tensor): ``[*batch]``.
        coin (Tensor): uniform on [0, 1), ``[*batch]``.
        random_action (Tensor): ``[*batch]``.

    Returns:
        ``[*batch]``.

    Examples:
        >>> coin, epsilon = torch.tensor([0.2, 0.6]), torch.tensor(0.5)
        >>> epsilon_greedy_action(torch.tensor([1, 1]), epsilon, coin, torch.tensor([3, 3]))
        tensor([3, 1])
    """
    return torch.where(coin < epsilon, random_action, greedy_action)


def uniform_action(draw: Tensor, num_actions: int | Tensor) -> Tensor:
    """Any action, each as likely as the others, from a uniform draw.

    Args:
        draw (Tensor): uniform on [0, 1), ``[*batch]``.
        num_actions (int or Tensor): how many actions there are.

    Returns:
        int64 ``[*batch]``.

    Examples:
        >>> uniform_action(torch.tensor([0.1, 0.9]), 4)
        tensor([0, 3])
    """
    return (draw * num_actions).long()


def normalised_value(action_value: Tensor, action_mask: Tensor | None = None) -> Tensor:
    r"""Q(s, ·) scaled to [−1, 1] in every state, as VDBE-Softmax has it (Tokic & Palm 2011).

    Args:
        action_value (Tensor): ``[*batch, actions]``.
        action_mask (Tensor, optional): ``[*batch, actions]``, True for legal actions, whose range
            it is.

    Returns:
        ``[*batch, actions]``; zero where all values are equal.

    Examples:
        >>> normalised_value(torch.tensor([[10.0, 20.0, 30.0], [5.0, 5.0, 5.0]]))
        tensor([[-1.,  0.,  1.],
                [ 0.,  0.,  0.]])
    """
    lowest = highest = action_value
    if action_mask is not None:
        lowest = action_value.masked_fill(~action_mask, torch.inf)
        highest = action_value.masked_fill(~action_mask, -torch.inf)
    low, high = lowest.amin(-1, keepdim=True), highest.amax(-1, keepdim=True)
    differ = high > low
    span = torch.where(differ, high - low, torch.ones_like(low))
    return torch.where(differ, (action_value - low) / span * 2 - 1, torch.zeros_like(action_value))


def zeta_cdf(mu: float, longest: int) -> Tensor:
    r"""Distribution function of :math:`P(n) \propto n^{-\mu}`, :math:`n = 1, …,` `longest`.

    Args:
        mu (float): exponent, above 1.
        longest (int): where the zeta distribution is cut.

    Returns:
        float64 ``[longest]``, increasing to 1.

    Examples:
        >>> zeta_cdf(2.0, 3)
        tensor([0.7347, 0.9184, 1.0000], dtype=torch.float64)
    """
    weights = torch.arange(1, longest + 1, dtype=torch.float64) ** -mu
    sums = weights.cumsum(0)
    return sums / sums[-1]


class Moments(NamedTuple):
    """Running number, mean and sum of squared deviations of a stream.

    Args:
        num (Tensor): how many observations, ``[*batch]``.
        mean (Tensor): their mean, ``[*batch]``.
        m2 (Tensor): sum of their squared deviations from it, ``[*batch]``.

    Examples:
        >>> Moments(torch.tensor(3.0), torch.tensor(2.0), torch.tensor(8.0)).variance
        tensor(4.)
    """

    num: Tensor
    mean: Tensor
    m2: Tensor

    @property
    def variance(self) -> Tensor:
        """Sample variance (n − 1), zero for fewer than two observations."""
        return self.m2 / (self.num - 1).clamp(min=1)


def welford_update(moments: Moments, observation: Tensor, taken: Tensor | None = None) -> Moments:
    """Moments after one more observation (Welford 1962).

    Args:
        moments (Moments): those so far, ``[*batch]``.
        observation (Tensor): ``[*batch]``.
        taken (Tensor, optional): ``[*batch]``, False where there is no observation.

    Returns:
        The new moments, unchanged where not `taken`.

    Examples:
        >>> moments = Moments(*torch.zeros(3))
        >>> for observation in torch.tensor([1.0, 3.0]):
        ...     moments = welford_update(moments, observation)
        >>> moments.mean, moments.variance
        (tensor(2.), tensor(2.))
    """
    if taken is None:
        taken = torch.ones_like(moments.num, dtype=torch.bool)
    count = moments.num + taken
    deviation = torch.where(taken, observation, moments.mean) - moments.mean
    step = deviation / count.clamp(min=1)
    return Moments(
        count, moments.mean + step, torch.addcmul(moments.m2, deviation, deviation - step)
    )


def prior_rate(a0: Tensor, b0: Tensor, moments: Moments) -> Tensor:
    r"""Prior rate of the precision: :math:`b_0`, or :math:`a_0 \hat\sigma^2` where that is 0.

    The latter puts the prior variance :math:`b_0 / a_0` at the returns' running one, so that the
    evidence depends on no unit of reward: rewards times :math:`2^k` change no bit of it.

    Args:
        a0 (Tensor): prior shape of the precision, ``[*batch]``.
        b0 (Tensor): prior rate of the precision, ``[*batch]``, or 0 to follow the returns.
        moments (Moments): of the returns, ``[*batch]``.

    Returns:
        ``[*batch]``; 0 where it follows returns of which no two have differed.

    Examples:
        >>> seen = Moments(torch.tensor(3.0), torch.tensor(2.0), torch.tensor(8.0))
        >>> prior_rate(torch.tensor(500.0), torch.tensor([500.0, 0.0]), seen)
        tensor([ 500., 2000.])
    """
    return torch.where(b0 > 0, b0, a0 * moments.variance)


def precision_posterior(
    moments: Moments,
    mu0: float | Tensor,
    tau0: float | Tensor,
    a0: float | Tensor,
    b0: float | Tensor,
) -> tuple[Tensor, Tensor]:
    r"""Gamma posterior :math:`(a, b)` of the returns' precision ([GSL19], Eq. (9)).

    Args:
        moments (Moments): of the returns, ``[*batch]``.
        mu0 (float or Tensor): prior mean of their mean.
        tau0 (float or Tensor): how many returns the prior mean is worth.
        a0 (float or Tensor): prior shape of their precision.
        b0 (float or Tensor): prior rate of their precision.

    Returns:
        Shape and rate, ``[*batch]`` each.

    Examples:
        >>> first = Moments(torch.tensor(1.0), torch.tensor(4.0), torch.tensor(0.0))
        >>> precision_posterior(first, mu0=0.0, tau0=1.0, a0=500.0, b0=500.0)
        (tensor(500.5000), tensor(504.))
    """
    half = moments.num / 2
    shift = (moments.mean - mu0).square()
    scatter = torch.addcdiv(moments.variance, tau0 * shift, moments.num + tau0)
    return half + a0, half * scatter + b0


def student_t_log_evidence_ratio(
    gap: Tensor, alpha: Tensor, beta: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    r"""How much better "uniform" explains the mixture return: :math:`\log e^U - \log e^Q`.

    Both evidences are Student-t densities ([GSL19], Eq. (10)) at
    :math:`G = (1-\varepsilon)G^Q + \varepsilon G^U`. Only the gap :math:`\Delta = G^Q - G^U` and
    :math:`\tau = 1 - 2\varepsilon = (\beta - \alpha) / (\alpha + \beta)` remain:
    :math:`-(a + \tfrac12)\log\bigl(1 + \tau\Delta^2 / (2b + \varepsilon^2\Delta^2)\bigr)`. Where
    :math:`\varepsilon > \tfrac12` the two models change places, so that the logarithm does not
    cancel.

    Args:
        gap (Tensor): greedy minus uniform return, ``[*batch]``.
        alpha (Tensor): posterior parameter of ε, ``[*batch]``.
        beta (Tensor): posterior parameter of ε, ``[*batch]``.
        a (Tensor): shape of the precision's posterior, ``[*batch]``.
        b (Tensor): rate of the precision's posterior, ``[*batch]``.

    Returns:
        ``[*batch]``.

    Examples:
        >>> one, many = torch.tensor(1.0), torch.tensor(500.0)
        >>> student_t_log_evidence_ratio(torch.tensor(2.0), one, 3 * one, many, many)
        tensor(-0.9998)
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

    [GSL19], Eq. (7), in the notation of :func:`student_t_log_evidence_ratio`.

    Args:
        gap (Tensor): greedy minus uniform return, ``[*batch]``.
        alpha (Tensor): posterior parameter of ε, ``[*batch]``.
        beta (Tensor): posterior parameter of ε, ``[*batch]``.
        variance (Tensor): of the returns, ``[*batch]``.

    Returns:
        ``[*batch]``.

    Examples:
        >>> one = torch.tensor(1.0)
        >>> gaussian_log_evidence_ratio(2 * one, one, 3 * one, one)
        tensor(-1.)
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
        alpha (Tensor): ``[*batch]``.
        beta (Tensor): ``[*batch]``.
        log_evidence_ratio (Tensor): :math:`\log e^U - \log e^Q`, ``[*batch]``.

    Returns:
        The new :math:`\alpha` and :math:`\beta`, ``[*batch]`` each.

    Examples:
        >>> one = torch.tensor(1.0)
        >>> beta_moment_match(one, one, torch.tensor(-torch.inf))
        (tensor(1.), tensor(2.))
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


def beta_of_strength(
    alpha: Tensor, beta: Tensor, strength: float | Tensor
) -> tuple[Tensor, Tensor]:
    r"""The Beta of the same mean whose strength :math:`\alpha + \beta` is another.

    Args:
        alpha (Tensor): ``[*batch]``.
        beta (Tensor): ``[*batch]``.
        strength (float or Tensor): the new :math:`\alpha + \beta`, ``[*batch]``.

    Returns:
        :math:`\alpha` and :math:`\beta`, ``[*batch]`` each.

    Examples:
        >>> beta_of_strength(torch.tensor(1.0), torch.tensor(3.0), 100.0)
        (tensor(25.), tensor(75.))
    """
    total = alpha + beta
    return strength * (alpha / total), strength * (beta / total)


def forgotten(learned: Tensor, prior: Tensor, rate: Tensor) -> Tensor:
    r"""What is left of evidence after a share `rate` of it is forgotten.

    Of a posterior :math:`p(\varepsilon \mid D) \propto \pi(\varepsilon) L(\varepsilon)` the power
    prior :math:`\pi L^{1-r}` (Ibrahim & Chen 2000) is left. A Beta stays a Beta, whose parameters
    are :math:`\alpha' = (1-r)\alpha + r\alpha_0` and likewise :math:`\beta'`; counts and sums,
    whose prior is 0, are thinned to :math:`1-r` of themselves. Forgetting :math:`r` and then
    :math:`r'` is forgetting :math:`1 - (1-r)(1-r')`.

    Args:
        learned (Tensor): a natural parameter of the posterior, or a sum over the data,
            ``[*batch]``.
        prior (Tensor): what it was before any data, ``[*batch]``.
        rate (Tensor): :math:`r` between 0, nothing, and 1, everything, both exact; ``[*batch]``.

    Returns:
        ``[*batch]``.

    Examples:
        >>> forgotten(torch.tensor(9.0), torch.tensor(1.0), torch.tensor([0.0, 0.5, 1.0]))
        tensor([9., 5., 1.])
    """
    return torch.lerp(learned, prior.expand_as(learned), rate.to(learned))


def values_left(
    action_value: Tensor, action: Tensor, action_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    r"""What Q says of the state being left: :math:`Q(s, a)`, :math:`\max Q(s, \cdot)`, if equal.

    Args:
        action_value (Tensor): :math:`Q(s, \cdot)`, ``[*batch, actions]``.
        action (Tensor): index of the action taken, ``[*batch]``.
        action_mask (Tensor, optional): ``[*batch, actions]``, True for legal actions.

    Returns:
        The value of the action, what acting greedily promises, and whether the action is the
        greedy one, bool, ``[*batch]`` each. Of several with the largest value one is greedy.

    Examples:
        >>> values_left(torch.tensor([[1.0, 3.0], [2.0, 2.0]]), torch.tensor([0, 1]))
        (tensor([1., 2.]), tensor([3., 2.]), tensor([False, False]))
    """
    chosen = action_value.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    if action_mask is not None:
        action_value = action_value.masked_fill(~action_mask, -torch.inf)
    promised, greedy = action_value.max(-1)
    return chosen, promised, action == greedy


def positive_error(observed: Tensor, chosen: Tensor) -> Tensor:
    """By how much a return exceeds the value of its action, at least 0.

    Of greedy steps it is the drift that :func:`exploratory_win` is corrected by.

    Args:
        observed (Tensor): the return, ``[*batch]``.
        chosen (Tensor): :math:`Q(s, a)` before learning, ``[*batch]``.

    Returns:
        ``[*batch]``.

    Examples:
        >>> positive_error(torch.tensor([3.0, 1.0]), torch.tensor(2.0))
        tensor([1., 0.])
    """
    return (observed - chosen).clamp(min=0)


def exploratory_win(
    observed: Tensor, chosen: Tensor, promised: Tensor, drift: Tensor
) -> tuple[Tensor, Tensor]:
    r"""How much a non-greedy action counts as won or lost against what greedy promised.

    With :math:`q = Q(s, a) < m = \max Q(s, \cdot)` and :math:`G' = G - d`, the action won if
    :math:`G' > m`, and counts by its surprise,

    .. math:: w = \frac{(G' - q)^2}{(G' - q)^2 + (m - q)^2}:

    repeating a known loss is no evidence. The drift :math:`d` removes wins that come only from all
    values rising. Nothing here has a unit: values times :math:`2^k` change no bit.

    Args:
        observed (Tensor): the return :math:`G`, ``[*batch]``.
        chosen (Tensor): :math:`q`, ``[*batch]``.
        promised (Tensor): :math:`m`, ``[*batch]``.
        drift (Tensor): :math:`d`, ``[*batch]``.

    Returns:
        The weight of a win and that of a loss, one of which is 0, ``[*batch]`` each; both are where
        the action promised as much as the greedy one.

    Examples:
        >>> returns, nothing = torch.tensor([3.0, 0.0, 1.0]), torch.tensor(0.0)
        >>> exploratory_win(returns, torch.tensor(1.0), torch.tensor(2.0), nothing)
        (tensor([0.8000, 0.0000, 0.0000]), tensor([0.0000, 0.5000, 0.0000]))
    """
    corrected = observed - drift
    surprise, lead = corrected - chosen, promised - chosen
    judged = lead > 0
    # The larger of the two becomes 1, so that no square is lost or infinite.
    scale = torch.where(judged, torch.maximum(surprise.abs(), lead), 1.0)
    squared = (surprise / scale).square()
    weight = torch.where(judged, squared / (squared + (lead / scale).square()), 0.0)
    won = corrected > promised
    return torch.where(won, weight, 0.0), torch.where(won, 0.0, weight)


class PageHinkley(NamedTuple):
    """What Page's test for a fall of the mean remembers of a stream.

    Args:
        num (Tensor): how many observations, ``[*batch]``.
        mean (Tensor): their mean, ``[*batch]``.
        m2 (Tensor): sum of their squared deviations from it, ``[*batch]``.
        total (Tensor): sum of standardised deviations and tolerances, ``[*batch]``.
        peak (Tensor): the largest that sum has been, ``[*batch]``.

    Examples:
        >>> PageHinkley(*torch.tensor([9.0, 0.0, 8.0, -4.0, 1.5])).fall
        tensor(5.5000)
    """

    num: Tensor
    mean: Tensor
    m2: Tensor
    total: Tensor
    peak: Tensor

    @property
    def fall(self) -> Tensor:
        """How far the sum is below its peak, in standard deviations."""
        return self.peak - self.total


def page_hinkley_update(
    state: PageHinkley,
    observation: Tensor,
    tolerance: float | Tensor,
    taken: Tensor | None = None,
) -> PageHinkley:
    r"""Page's test (1954), in Hinkley's form (1971) with a running mean, after one observation.

    :math:`S_n = \sum_i ((x_i - \bar x_i) / s_i + \delta)` rises by :math:`\delta` on average while
    the mean stays, and falls once it falls by more than :math:`\delta` standard deviations;
    :math:`\max_k S_k - S_n` is then the evidence. :math:`\bar x_i` and :math:`s_i` are those of
    the first :math:`i`, so that no unit matters.

    Args:
        state (PageHinkley): what is known so far, ``[*batch]``.
        observation (Tensor): ``[*batch]``.
        tolerance (float or Tensor): :math:`\delta`, in standard deviations.
        taken (Tensor, optional): ``[*batch]``, False where there is no observation.

    Returns:
        The new state, unchanged where not `taken`.

    Examples:
        >>> state = PageHinkley(*torch.zeros(5))
        >>> for observation in torch.tensor([1.0, 3.0, 2.0, -9.0]):
        ...     state = page_hinkley_update(state, observation, 0.25)
        >>> state.fall
        tensor(1.2337)
    """
    if taken is None:
        taken = torch.ones_like(state.num, dtype=torch.bool)
    moments = welford_update(Moments(*state[:3]), observation, taken)
    spread = moments.variance.sqrt()
    known = taken & (spread > 0)
    moved = (torch.where(known, observation, 0.0) - moments.mean) / torch.where(known, spread, 1.0)
    total = torch.where(known, state.total + moved + tolerance, state.total)
    return PageHinkley(*moments, total, torch.maximum(state.peak, total))


def beta_quantile(alpha: Tensor, beta: Tensor, probability: float) -> Tensor:
    r"""Quantile of :math:`\mathrm{Beta}(\alpha, \beta)`, its probability right to five decimals.

    In :math:`x = \log w/(1-w)` the density is smooth with one mode, so the trapezoidal rule on a
    grid that widens away from the mode serves every :math:`\alpha, \beta > 0`.

    Args:
        alpha (Tensor): ``[*batch]``.
        beta (Tensor): ``[*batch]``.
        probability (float): of a smaller value.

    Returns:
        float64 ``[*batch]``.

    Examples:
        >>> beta_quantile(torch.tensor(2.0), torch.tensor(2.0), 0.5)
        tensor(0.5000, dtype=torch.float64)
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


def beta_interval(alpha: Tensor, beta: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    r"""Bounds between which :math:`\mathrm{Beta}(\alpha, \beta)` lies, with equal tails.

    Args:
        alpha (Tensor): ``[*batch]``.
        beta (Tensor): ``[*batch]``.
        probability (float): with which it does.

    Returns:
        float64 ``[*batch]`` each.

    Examples:
        >>> beta_interval(torch.tensor(1.0), torch.tensor(1.0), 0.5)
        (tensor(0.2500, dtype=torch.float64), tensor(0.7500, dtype=torch.float64))
    """
    if not 0 < probability < 1:
        raise ValueError(f"probability must be in (0, 1), got {probability}.")
    tail = (1 - probability) / 2
    return beta_quantile(alpha, beta, tail), beta_quantile(alpha, beta, 1 - tail)


def vdbe_epsilon(
    epsilon: Tensor, value_change: Tensor, sigma: float | Tensor, delta: float | Tensor
) -> Tensor:
    r"""VDBE's ε of the state just left (Tokic 2010).

    :math:`\varepsilon \leftarrow \delta f + (1-\delta)\varepsilon` with
    :math:`f = (1 - e^{-|\Delta Q|/\sigma}) / (1 + e^{-|\Delta Q|/\sigma})`.

    Args:
        epsilon (Tensor): ε of that state so far, ``[*batch]``.
        value_change (Tensor): :math:`\Delta Q`, ``[*batch]``.
        sigma (float or Tensor): inverse sensitivity.
        delta (float or Tensor): step size.

    Returns:
        ``[*batch]``.

    Examples:
        >>> vdbe_epsilon(torch.tensor(0.5), torch.tensor(0.0), sigma=1.0, delta=0.25)
        tensor(0.3750)
    """
    return delta * torch.tanh(value_change.abs() / (2 * sigma)) + (1 - delta) * epsilon


def geometric_decay(initial: Tensor, rate: Tensor, episodes: Tensor) -> Tensor:
    r""":math:`\varepsilon_k = \varepsilon_0 \rho^k` after :math:`k` finished episodes.

    Args:
        initial (Tensor): :math:`\varepsilon_0`, ``[*batch]``.
        rate (Tensor): :math:`\rho`, ``[*batch]``.
        episodes (Tensor): :math:`k`, ``[*batch]``.

    Returns:
        ``[*batch]``.

    Examples:
        >>> geometric_decay(torch.tensor(0.5), torch.tensor(0.5), torch.arange(3))
        tensor([0.5000, 0.2500, 0.1250])
    """
    return initial * rate**episodes


def power_decay(initial: Tensor, power: Tensor, episodes: Tensor, first_index: int = 1) -> Tensor:
    r""":math:`\varepsilon_k = \varepsilon_0 (k + 1)^{-p}` after :math:`k` finished episodes.

    Args:
        initial (Tensor): :math:`\varepsilon_0`, ``[*batch]``.
        power (Tensor): :math:`p`, ``[*batch]``.
        episodes (Tensor): :math:`k`, ``[*batch]``.
        first_index (int, optional): what is added to :math:`k`; with 0 the base is
            :math:`\max(k, 1)`, as in the published data. Default: 1.

    Returns:
        ``[*batch]``.

    Examples:
        >>> power_decay(torch.tensor(0.5), torch.tensor(1.0), torch.arange(3))
        tensor([0.5000, 0.2500, 0.1667])
    """
    return initial * (episodes + first_index).clamp(min=1) ** -power


def linear_decay(initial: Tensor, final: Tensor, frames: Tensor, num_frames: int) -> Tensor:
    """TorchRL's annealing from `initial` to `final` over `num_frames` frames.

    Args:
        initial (Tensor): ε at first, ``[*batch]``.
        final (Tensor): ε in the end, ``[*batch]``.
        frames (Tensor): frames so far, ``[*batch]``.
        num_frames (int): frames after which ε stays at `final`.

    Returns:
        ``[*batch]``.

    Examples:
        >>> linear_decay(torch.tensor(1.0), torch.tensor(0.5), torch.tensor([0, 5, 20]), 10)
        tensor([1.0000, 0.7500, 0.5000])
    """
    return torch.maximum(final, initial - frames * (initial - final) / num_frames)
