"""LUFFY (arXiv 2504.14945) and ExGRPO (arXiv 2510.02245) at once.

groups      the sampled episodes of a question; with them a teacher's trace (see luffy.py), a success of the policy from
            an earlier round (see exgrpo.py), both or neither
advantages  (R_i - mean R) / (std R + eps) over all episodes of a group
loss        on-policy tokens: GRPO's
            off-policy tokens: -f(r) A - c_H entropy, f(r) = r / (r + gamma). r is pi at tokens of a trace, and
            pi / pi_past at replayed tokens
normalizer  mean over each episode's action tokens, then mean over the episodes of the mini-batch
"""

from r3lite.rl.algorithms.exgrpo import ExGrpo
from r3lite.rl.algorithms.luffy import Luffy
from r3lite.rl.algorithms.mixed import Mixed


class Hybrid(Mixed):
    has_traces = True
    has_replay = True
    own_settings = Luffy.own_settings | ExGrpo.own_settings
