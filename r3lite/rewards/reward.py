"""The reward of each step of an episode, and its parts: format, process, outcome, search and the rewards by name.

Takes an episode, the weights of the settings and, if there is a judge, its `Verdict`.
"""

from dataclasses import dataclass, field

from r3lite.core.answer_match import answer_scores
from r3lite.core.episode import SEARCHING, Episode
from r3lite.core.errors import R3LiteError
from r3lite.protocols.base import IDLE, new_queries
from r3lite.rewards.judge import Judge
from r3lite.rewards.registry import MOST, named_rewards, needs_verdict
from r3lite.rewards.verdict import StepVerdict, Verdict
from r3lite.settings import RewardSettings

MANY = 8  # questions: a reward that is missing for all episodes of this many is not missing by chance


@dataclass(frozen=True)
class Scored:
    """The rewards of an episode.

    `steps[k]` is the reward at the end of step k. `parts` has the weighted parts, which add up to the total: `format`,
    `process`, `outcome`, `search` if searches are rewarded, and each named reward. And, for the log, `em`, `f1`,
    `recall` (None if the question has no gold paragraphs) and, with a judge, `judge` (1 if it says that the answer is
    right). `answer` is what the answer alone is paid: `outcome` and the named rewards that pay for answers; None if the
    run pays for none. Raises R3LiteError if a reward is not finite or too large for fp32.
    """

    steps: list[float]
    parts: dict[str, float | None] = field(default_factory=dict)
    answer: float | None = None

    def __post_init__(self):
        for reward in self.steps:
            if not abs(reward) <= MOST:
                remedy = "Lower the weights of the rewards, such as --outcome-em."
                raise R3LiteError(f"the reward of a step is {reward}; it must be finite and at most {MOST:.0e}", remedy)

    @property
    def total(self) -> float:
        return sum(self.steps)

    @property
    def signal(self) -> float:
        """By what the episodes of a group are told apart: the reward of the answer, or the total if none is paid.

        Otherwise wrong answers that differ in recall only would count as something to learn from.
        """
        return self.total if self.answer is None else self.answer

    @property
    def right(self) -> bool:
        """Whether the answer is right: by the judge if there is one, else by exact match."""
        return self.parts.get("judge", self.parts["em"]) == 1.0

    def failed(self, below: float | None = None) -> bool:
        """Whether the answer is wrong or, with a threshold, whether the outcome reward is below it."""
        return not self.right if below is None else self.parts["outcome"] < below


def most_for_answer(settings: RewardSettings) -> float:
    """The highest reward of an answer."""
    return settings.outcome_em + settings.outcome_f1 + settings.outcome_judge


def outcome_share(scored: Scored, settings: RewardSettings) -> float:
    """The outcome reward as a share of the highest possible one, from 0 to 1.

    It shows how right an answer is; the total does not, because format and recall are rewarded for wrong answers, too.
    """
    return scored.parts["outcome"] / most_for_answer(settings)


def score(episode: Episode, settings: RewardSettings, verdict: Verdict | None = None) -> Scored | None:
    """The rewards of an episode; None, a missing reward, if the retriever failed, if it is an end that searches instead
    of answering, if there is no verdict although a reward needs one, or if a named reward is missing.

    - format, at each step without a fault: `format_reward` / number of steps. With the whole of it at each step, more
      steps would be rewarded more;
    - process, at each step that searches: `process_recall` times the share of the gold paragraphs that it is the first
      to find, plus `process_judge` times the mean of relevance and coherence; multiplied by R3-RAG's trajectory factor
      (arXiv 2505.23794), 1 + gamma_correct, gamma_incorrect or gamma_fail (no answer);
    - outcome, at the last step: weighted EM, F1 and the judge's verdict; 0 after fewer than `least_searches` different
      searches;
    - search, at each step: `search_bonus` for each new query; -`idle_query_penalty` if a query is blank or repeated;
    - each of `rewards`, at the steps that its function rewards (registry.py).
    """
    if episode.failure or episode.finish == SEARCHING or (verdict is None and needs_verdict(settings)):
        return None
    assert verdict is None or len(verdict.steps) == len(episode.steps), "a verdict has one opinion per step"
    functions = named_rewards(settings)
    named = {reward.name: reward.rewards(episode, verdict) for reward in functions}
    if None in named.values():
        return None
    em, best_f1 = answer_scores(episode)
    correct = bool(verdict and verdict.correct and episode.prediction)
    well_formed = [0.0 if s.faults else settings.format_reward / len(episode.steps) for s in episode.steps]
    gamma = settings.gamma_fail
    if episode.prediction:
        right = correct if settings.outcome_judge else em == 1.0
        gamma = settings.gamma_correct if right else settings.gamma_incorrect
    process = []
    opinions = verdict.steps if verdict else [StepVerdict(0.0, 0.0)] * len(episode.steps)
    for step, news, opinion in zip(episode.steps, episode.new_gold(), opinions, strict=True):
        found = settings.process_recall * len(news) / (len(episode.question.gold) or 1)
        found += settings.process_judge * (opinion.relevance + opinion.coherence) / 2
        process.append((1 + gamma) * (found if step.searches else 0.0))
    outcome = settings.outcome_em * em + settings.outcome_f1 * best_f1 + settings.outcome_judge * correct
    bonus, penalty = settings.search_bonus, settings.idle_query_penalty
    new = new_queries(episode.steps)
    search = [bonus * n - penalty * (not IDLE.isdisjoint(s.faults)) for n, s in zip(new, episode.steps, strict=True)]
    if sum(new) < settings.least_searches:
        outcome = 0.0
    steps = [f + p + s for f, p, s in zip(well_formed, process, search, strict=True)]
    for rewards in named.values():
        steps = [step + more for step, more in zip(steps, rewards, strict=True)]
    if steps:
        steps[-1] += outcome
    parts = {"format": sum(well_formed), "process": sum(process), "outcome": outcome if steps else 0.0}
    if bonus or penalty:
        parts["search"] = sum(search)
    parts |= {name: sum(rewards) for name, rewards in named.items()}
    answer = None
    paid = [reward.name for reward in functions if reward.pays_answer]
    if most_for_answer(settings) or paid:
        answer = parts["outcome"] + sum(parts[name] for name in paid)
    parts |= {"em": em, "f1": best_f1, "recall": episode.recall}
    return Scored(steps, parts | ({"judge": float(correct)} if verdict else {}), answer)


def score_all(episodes: list[Episode], settings: RewardSettings, judge: Judge | None) -> list[Scored | None]:
    """The rewards of each episode, by the judge's verdicts if there is a judge; None: a missing one, see `score`."""
    verdicts = judge.verdicts(episodes) if judge else [None] * len(episodes)
    scored = [score(e, settings, v) for e, v in zip(episodes, verdicts, strict=True)]
    if not any(scored) and len({e.question.id for e in episodes}) >= MANY:
        _refuse_always_missing(episodes, verdicts, settings)
    return scored


def _refuse_always_missing(episodes: list[Episode], verdicts: list[Verdict | None], settings: RewardSettings) -> None:
    """Raises R3LiteError if a named reward is missing for all episodes: a run would go on without learning anything."""
    judged = needs_verdict(settings)
    pairs = [(e, v) for e, v in zip(episodes, verdicts, strict=True) if not e.failure and (v or not judged)]
    for reward in named_rewards(settings):
        if pairs and all(reward.rewards(e, v) is None for e, v in pairs):
            remedy = "The questions lack what it needs, such as gold paragraphs: remove it, or pass other --data."
            raise R3LiteError(f"the reward {reward.name} is missing for all {len(pairs)} episodes", remedy)
