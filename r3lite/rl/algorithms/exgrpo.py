"""ExGRPO, learning to reason from experience (arXiv 2510.02245): successes of earlier rounds are replayed.

buffer      the successes of each question and how often its newest group succeeded, k of K. A question with k = K is
            retired: it is solved, and never replayed                                         (`rl/replay.py`)
questions   a share rho of a round's are drawn from the buffer: first a k / K, with weights exp(-(k/K - 1/2)^2 / 2),
            then one of its questions. They are asked again like the others
groups      of such a question: the episodes that the policy samples now, and the success under which the policy's mean
            entropy is lowest now                                                             (eq. 4)
advantages  (R_i - mean R) / (std R + eps) over both
loss        on-policy tokens: GRPO's
            replayed tokens: -f(w) A, f(w) = w / (w + gamma) with gamma 0.1, w = pi / pi_past, pi_past as it was
            recorded when the token was sampled, without a clip                               (section 4.2)
normalizer  mean over each episode's action tokens, then mean over the episodes of the mini-batch

Replay begins once a round's share of successes has reached a threshold: what a poor policy does well is often luck.
The paper has rho 0.5, the threshold 0.35, no limit to the buffer, and lets the replayed success take the place of one
of K episodes; its runs divide neither by the std nor by lengths.
"""

from r3lite.rl.algorithms.mixed import Mixed


class ExGrpo(Mixed):
    has_replay = True
    own_settings = Mixed.own_settings | {"replay_size", "replay_share", "replay_min_outcome", "replay_start"}
