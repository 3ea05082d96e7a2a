"""ExGRPO, learning to reason from experience (arXiv 2510.02245): successes of earlier rounds are replayed.

buffer      the successes of each question, and its success rate k / K: in its newest group, k of K episodes succeeded.
            A question with k = K is solved: it leaves the buffer for good                    (`rl/replay.py`)
questions   a share rho of a round's questions is drawn from the buffer: first a rate k / K, with the weight
            exp(-(k/K - 1/2)^2 / 2), then a question with this rate
groups      of a question from the buffer: newly sampled episodes, as for every question, and the success on whose
            tokens the current policy's mean entropy is lowest                                (eq. 4)
advantages  (R_i - mean R) / (std R + eps) over all episodes of a group
loss        on-policy tokens: GRPO's
            replayed tokens: -f(r) A - c_H entropy, f(r) = r / (r + gamma) with gamma 0.1, without a clip. r is
            pi / pi_past; pi_past was recorded when the token was sampled                     (section 4.2)
normalizer  mean over each episode's action tokens, then mean over the episodes of the mini-batch

Replay begins once a round's share of successes has reached --replay-start: a poor policy often succeeds by luck. The
paper has rho 0.5 and --replay-start 0.35, does not limit the buffer, and lets the replayed success take the place of
one of the K episodes. Its runs divide neither by the std nor by lengths.
"""

from r3lite.rl.algorithms.mixed import Mixed


class ExGrpo(Mixed):
    has_replay = True
    own_settings = Mixed.own_settings | {"replay_size", "replay_share", "replay_min_outcome", "replay_start"}
