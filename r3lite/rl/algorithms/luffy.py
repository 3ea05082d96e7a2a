"""LUFFY, learning to reason under off-policy guidance (arXiv 2504.14945): a teacher's trace joins the group.

groups      the episodes that the policy sampled for a question, and a trace of a teacher's that answers it
advantages  (R_i - mean R) / (std R + eps) over both
loss        on-policy tokens: -min(ratio A, clip(ratio, 1 - low, 1 + high) A) + beta k3(pi, pi_ref)
            tokens of the trace: -f(r) A, f(r) = r / (r + gamma) with gamma 0.1, r = pi / pi_teacher, without a clip
            (policy shaping). pi_teacher is taken to be 1, as the teacher may have another tokenizer: so r = pi
normalizer  mean over each episode's action tokens, then mean over the episodes of the mini-batch

The paper's runs divide neither by the std nor by lengths (Dr. GRPO's changes), have no KL, and let the trace take the
place of one of 8 episodes. Here the groups and their loss are GRPO's, and the trace comes on top.
"""

from r3lite.rl.algorithms.mixed import Mixed


class Luffy(Mixed):
    has_traces = True
    own_settings = Mixed.own_settings | {"traces", "trace_share", "trace_min_outcome"}
