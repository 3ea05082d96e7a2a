"""LUFFY, learning to reason under off-policy guidance (arXiv 2504.14945): a teacher's trace joins the group.

groups      the episodes that the policy sampled for a question, and a teacher's trace that answers the question
advantages  (R_i - mean R) / (std R + eps) over all of them
loss        on-policy tokens, GRPO's: -min(ratio A, clip(ratio, 1 - low, 1 + high) A) - c_H entropy
            + beta KL(pi, pi_ref)
            tokens of the trace: -f(r) A - c_H entropy, f(r) = r / (r + gamma) with gamma 0.1, without a clip (policy
            shaping). r is pi / pi_teacher, where pi_teacher counts as 1: the teacher may have another tokenizer
normalizer  mean over each episode's action tokens, then mean over the episodes of the mini-batch

The paper's runs divide neither by the std nor by lengths (Dr. GRPO's changes), have no KL, and let the trace take the
place of one of 8 episodes. Here the loss of sampled episodes is GRPO's, and the trace is added to the whole group.
"""

from r3lite.rl.algorithms.mixed import Mixed


class Luffy(Mixed):
    has_traces = True
    own_settings = Mixed.own_settings | {"traces", "trace_share", "trace_min_outcome"}
