"""LUFFY (arXiv 2504.14945) and ExGRPO (arXiv 2510.02245) at once.

A group may have a teacher's trace, a replayed success of the policy's own, both or neither.

groups      the sampled episodes of a question, with what LUFFY and with what ExGRPO adds to them
advantages  (R_i - mean R) / (std R + eps) over all of them
loss        on-policy tokens: GRPO's
            off-policy tokens: -f(r) A, f(r) = r / (r + gamma), r = pi for a trace's, r = pi / pi_past for replayed ones
normalizer  mean over each episode's action tokens, then mean over the episodes of the mini-batch
"""

from r3lite.rl.algorithms.exgrpo import ExGrpo
from r3lite.rl.algorithms.luffy import Luffy
from r3lite.rl.algorithms.mixed import Mixed


class Hybrid(Mixed):
    has_traces = True
    has_replay = True
    own_settings = Luffy.own_settings | ExGrpo.own_settings
