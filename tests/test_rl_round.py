"""Which episodes of a round get another end, and what the round then holds."""

from types import SimpleNamespace

import pytest

from r3lite.assembly.answer_round import AnswerRound
from r3lite.assembly.rl_round import Round, RoundSampler
from r3lite.core.episode import ANSWERED, Document, Question, Step
from r3lite.core.grant import Grant, Memory
from r3lite.core.invocation import with_values
from r3lite.core.spans import Stopwatch
from r3lite.rewards.reward import EpisodeReward
from r3lite.rewards.verdict import StepVerdict, Verdict
from r3lite.rl.expansion import Expansion, choose_expansions
from r3lite.rl.refill import groups_with_variance
from r3lite.rollout.sequence import Sequence
from r3lite.rollout.uniforms import Uniforms
from r3lite.settings import PpoConfig
from r3lite.training.watches import watched

GOLD = tuple(Document(str(i), f"Title {i}", f"Text {i}.") for i in range(3))
QUESTIONS = [Question(str(i), f"q{i}?", ("yes",), gold=GOLD) for i in range(4)]


def sequence(question: Question, searches: str, says: str = "no") -> Sequence:
    """An episode with a step for each letter: a digit finds that gold paragraph, `-` none; then the answer.

    A turn has two sampled tokens, and one that is given stands before each.
    """
    seq = Sequence(question, stream=Uniforms(0), finish=ANSWERED)
    for letter in searches + "!":
        seq.observe([0])
        seq.write([1, 2])
        brought = (GOLD[int(letter)],) if letter.isdigit() else ()
        step = Step("x", answer=says) if letter == "!" else Step.asking("x", letter, brought)
        seq.add_step(step)
    seq.logprobs, seq.values = ([float(i) for i in range(sum(seq.action_mask))] for _ in range(2))
    return seq


def scored(seq: Sequence, total: float = 0.0) -> EpisodeReward:
    right = float(seq.episode().prediction == "yes")
    return EpisodeReward([0.0] * (len(seq.steps) - 1) + [total or right], {"em": right, "format": 0.1, "recall": None})


def round_of(*groups: list[Sequence]) -> Round:
    sequences = [s for group in groups for s in group]
    return Round(sequences, [scored(s) for s in sequences], [i for i, group in enumerate(groups) for _ in group])


def expansions_of(this_round: Round) -> list[Expansion]:
    return choose_expansions(this_round.near_misses(), groups_with_variance(this_round.signals()))


def test_which_episodes_get_another_end_and_from_where():
    a, b, c, d = QUESTIONS
    expansions = expansions_of(
        round_of(
            [sequence(a, "0-", "yes"), sequence(a, "01"), sequence(a, "--")],  # differ: after the others
            [sequence(b, "1"), sequence(b, "0-12"), sequence(b, "00")],  # all failed
            [sequence(c, "0", "yes"), sequence(c, "1", "yes"), sequence(c, "2", "yes")],  # all right
            [sequence(d, "-2--"), sequence(d, "-"), sequence(d, "")],  # all failed
        )
    )
    # Of groups 1 and 3 the episode that found most; then what is left of group 1, where 00 finds the same one twice;
    # then group 0. Each goes on from the step that brought the last new paragraph.
    assert expansions == [Expansion(p, steps) for p, steps in ((4, 4), (9, 2), (3, 1), (5, 1), (1, 2))]


def test_an_episode_without_a_reward_gets_no_other_end():
    this_round = round_of([sequence(QUESTIONS[0], "0"), sequence(QUESTIONS[0], "0")])
    this_round.rewards[0] = None
    assert expansions_of(this_round) == [Expansion(1, 1)]


def test_right_is_what_the_judge_says_if_there_is_one():
    parts = {"em": 0.0, "f1": 0.0}
    assert not EpisodeReward([0.0], parts).right and EpisodeReward([0.0], parts | {"em": 1.0}).right
    assert (
        EpisodeReward([0.0], parts | {"judge": 1.0}).right and not EpisodeReward([0.0], {"em": 1.0, "judge": 0.0}).right
    )


class Scripted:
    """An engine whose episodes are those that a test says: `ends` are those of `continue_from`."""

    def __init__(self, drawn: dict[str, list[str]], ends: list[str]):
        self.drawn = drawn
        self.ends = ends
        self.requests = []
        self.grant = Grant(Memory())

    def begin_round(self, number, retrieve):
        pass

    def end_round(self, number, retrieve):
        return {}

    def run(self, questions, seeds, retrieve):
        answers = {q.id: iter(self.drawn[q.id]) for q in questions}
        return [sequence(q, "0", next(answers[q.id])) for q in questions]

    def continue_from(self, starts, seeds, retrieve):
        self.requests.append(([steps for _, steps in starts], seeds))
        return [sequence(s.question, "01", says) for (s, _), says in zip(starts, self.ends, strict=True)]


def sampled(engine: Scripted, judge=None, number: int = 5, cache=None, **settings) -> Round:
    config = with_values(
        PpoConfig(), {"batch_size": 2, "num_generations": 2, "algorithm": "grpo", "seed": 7, **settings}
    )
    return RoundSampler(config, QUESTIONS[:2], engine, None, judge, cache=cache).sample(number, Stopwatch())


def test_how_many_queries_were_in_the_cache_is_a_metric_of_the_round():
    metrics = {"queries/cached_ratio": 0.25}
    this_round = sampled(
        Scripted({"0": ["no", "no"], "1": ["yes", "no"]}, []), cache=SimpleNamespace(metrics=lambda: metrics)
    )
    assert this_round.metrics()["queries/cached_ratio"] == 0.25


def test_contexts_that_are_not_learned_from_are_counted_as_without_variance():
    """The metrics of the update see the others alone: the guard found variance in every group."""
    a, b = QUESTIONS[:2]
    this_round = round_of([sequence(a, "0", "yes"), sequence(a, "0")], [sequence(b, "0"), sequence(b, "0")])
    learned = groups_with_variance(this_round.signals())
    ends = AnswerRound(
        this_round.sequences, this_round.rewards, this_round.groups, learned_groups=learned, drawn=this_round.sequences
    )
    metrics = ends.metrics()
    assert metrics["contexts/zero_std"] == 0.5
    assert watched(metrics | {"frac_reward_zero_std": 0.0})["variance"] == 0.5


def test_an_expanded_episode_joins_the_group_of_the_one_it_goes_on_from():
    engine = Scripted({"0": ["no", "no"], "1": ["yes", "no"]}, ["yes", "no"])
    this_round = sampled(engine, expand_limit=2)
    first = this_round.sequences[0].question.id  # the order of the questions is shuffled
    groups = [0, 0, 1, 1]
    poor = 0 if first == "0" else 1  # the group without variance: both of its episodes
    assert this_round.groups == [*groups, poor, poor]
    assert this_round.expansions == {4: Expansion(2 * poor, 1), 5: Expansion(2 * poor + 1, 1)}
    assert engine.requests == [([1, 1], [f"7/expand 5/{2 * poor}", f"7/expand 5/{2 * poor + 1}"])]
    metrics = this_round.extra_metrics
    assert (metrics["expand/zero_std_before"], metrics["expand/zero_std_after"]) == (0.5, 0.0)
    assert (metrics["expand/episodes"], metrics["expand/solved"]) == (2, 1)
    # Two tokens of the step that is shared, each; four are new: another query, and the answer.
    assert (metrics["expand/shared_tokens"], metrics["expand/new_tokens"]) == (4, 8)
    assert [r.group for r in this_round.rollouts()] == this_round.groups and len(this_round.signals()[poor]) == 4
    records = this_round.records(5)
    assert [r.get("expanded") for r in records] == [None] * 4 + [{"from": 2 * poor + i, "steps": 1} for i in (0, 1)]
    assert all("learned" not in r for r in records)


def test_a_teacher_is_told_what_failed_and_of_which_question():
    """Ends of an expansion too, in the groups that they join, and groups of a refill."""
    drawn = {"0": ["no", "no"], "1": ["yes", "no"]}
    expanded = sampled(Scripted(drawn, ["yes", "no"]), algorithm="dgpo", teacher="tiny", expand_limit=2)
    assert [r.failed for r in expanded.rollouts()] == [s.episode().prediction == "no" for s in expanded.sequences]
    assert [expanded.question_ids[r.group] for r in expanded.rollouts()] == [s.question.id for s in expanded.sequences]
    assert [r.failed for r in expanded.rollouts()[4:]] == [False, True]
    replaced = sampled(Scripted(drawn, ["no"]), expand_limit=1, refill_limit=1)
    learned_ids = [
        s.question.id for s, group in zip(replaced.sequences, replaced.groups) if group in replaced.learned_groups
    ]
    assert 2 in replaced.groups and [replaced.question_ids[r.group] for r in replaced.rollouts()] == learned_ids


def test_the_rounds_means_are_those_of_the_policy():
    """An expanded episode is no draw of the policy: it begins where the policy came by luck."""
    drawn = {"0": ["no", "no"], "1": ["yes", "no"]}
    plain = sampled(Scripted(drawn, []))
    expanded = sampled(Scripted(drawn, ["yes", "yes"]), expand_limit=2)
    assert len(expanded.sequences) == len(plain.sequences) + 2
    assert {k: v for k, v in expanded.metrics().items() if not k.startswith("expand/")} == plain.metrics()


def test_groups_that_an_expansion_has_mended_are_not_replaced():
    drawn = {"0": ["no", "no"], "1": ["yes", "no"]}
    mended = sampled(Scripted(drawn, ["yes"]), expand_limit=1, refill_limit=1)
    assert (
        mended.learned_groups == {0, 1} and mended.extra_metrics["refill/attempts"] == 0 and len(mended.rollouts()) == 5
    )
    replaced = sampled(Scripted(drawn, ["no"]), expand_limit=1, refill_limit=1)
    assert replaced.extra_metrics["refill/attempts"] == 1 and len(replaced.sequences) == 4 + 1 + 2
    assert replaced.groups[5:] == [2, 2] and {r.group for r in replaced.rollouts()} == replaced.learned_groups
    assert [r["learned"] for r in replaced.records(5)] == [g in replaced.learned_groups for g in replaced.groups]


class Refilling(Scripted):
    """An engine that hands out groups of two answers one after the other; notes attempt and size of each refill."""

    def __init__(self, *groups: str):
        super().__init__({}, [])
        self.groups, self.refills = list(groups), []

    def run(self, questions, seeds, retrieve):
        size = len(questions) // 2
        if "/refill " in seeds[0]:
            self.refills.append((int(seeds[0].split("/")[2]), size))
        answers = " ".join(self.groups[:size]).split()
        self.groups = self.groups[size:]
        return [sequence(q, "0", says) for q, says in zip(questions, answers, strict=True)]


def refills(first: list[str], refill: list[str], limit: int) -> tuple[list[tuple[int, int]], set[int], list[float]]:
    engine = Refilling(*first, *refill)
    this_round = sampled(engine, batch_size=len(first), refill_limit=limit)
    return (
        engine.refills,
        this_round.learned_groups,
        [this_round.extra_metrics[f"refill/{k}"] for k in ("attempts", "groups", "kept")],
    )


def test_groups_without_variance_are_replaced_until_there_are_as_many():
    """Two of three groups teach nothing; of the two that replace them one does not either; the next one does."""
    summary = refills(["yes yes", "no yes", "no no"], ["yes yes", "no yes", "yes no"], limit=5)
    assert summary == ([(1, 2), (2, 1)], {1, 4, 5}, [2, 6, 3])


def test_the_limit_of_a_refill_holds_and_what_there_is_is_learned_from():
    summary = refills(["no no", "no yes"], ["yes yes"] * 4, limit=3)
    assert summary == ([(1, 1), (2, 1), (3, 1)], {1}, [3, 5, 1])


def test_where_all_groups_differ_nothing_more_is_sampled():
    assert refills(["no yes", "yes no"], [], limit=3) == ([], {0, 1}, [0, 2, 2])


def test_where_nothing_can_be_expanded_the_round_is_as_it_was():
    engine = Scripted({"0": ["yes", "yes"], "1": ["yes", "yes"]}, [])
    this_round = sampled(engine, expand_limit=8)
    assert engine.requests == [] and len(this_round.sequences) == 4 and this_round.extra_metrics["expand/episodes"] == 0


def test_a_judge_is_asked_about_what_was_expanded_too():
    episode_counts = []

    class Judge:
        def verdicts(self, episodes):
            episode_counts.append(len(episodes))
            return [Verdict(False, (StepVerdict(0.0, 0.0),) * len(e.steps)) for e in episodes]

    sampled(Scripted({"0": ["yes", "no"], "1": ["no", "no"]}, ["yes"] * 3), Judge(), expand_limit=3)
    assert episode_counts == [4, 3]


class Wandering(Scripted):
    """The same with what each episode found, before its answer: `01 no`."""

    def run(self, questions, seeds, retrieve):
        scripts = {q.id: iter(self.drawn[q.id]) for q in questions}
        return [sequence(q, *next(scripts[q.id]).split()) for q in questions]


# All answers to question 0 are wrong, and one of the episodes found a paragraph more; to question 1 one is right.
DIFFERENT_RECALL = {"0": ["01 no", "0 no"], "1": ["0 yes", "0 no"]}


@pytest.mark.parametrize(("paid", "attempts"), [({}, 1), ({"outcome_em": 0.0}, 0)])
def test_a_difference_in_recall_is_no_variance_unless_no_answer_is_paid(paid, attempts):
    """A group of wrong answers with different recall was kept as one to learn from, and --refill-limit never saw it."""
    settings = {"process_recall": 0.3, "format_reward": 0.0, "refill_limit": 1} | paid
    engine = Wandering(DIFFERENT_RECALL | {"0": ["01 no", "0 no"]}, [])
    this_round = sampled(engine, **settings)
    poor = [s.question.id for s in this_round.sequences].index("0") // 2
    # A wrong answer has 0.8 of the recall: 2 of 3 paragraphs and 1 of 3; with the right one it is 1.6.
    totals = [0.16, 0.08] if paid else [0.0, 0.0]
    assert this_round.signals()[poor] == pytest.approx(totals)
    assert this_round.extra_metrics["refill/attempts"] == attempts
    assert (poor in this_round.learned_groups) == (not attempts) and 1 - poor in this_round.learned_groups


def test_near_misses_of_groups_whose_answers_are_alike_come_first():
    a, b = QUESTIONS[:2]
    this_round = round_of([sequence(a, "01"), sequence(a, "0", "yes")], [sequence(b, "01"), sequence(b, "0")])
    for i, total in enumerate((0.16, 1.08, 0.16, 0.08)):
        parts = this_round.rewards[i].parts
        this_round.rewards[i] = EpisodeReward(
            [0.0] * (len(this_round.rewards[i].by_step) - 1) + [total], parts, answer_reward=parts["em"]
        )
    assert [expansion.origin for expansion in expansions_of(this_round)] == [2, 3, 0]


def test_the_signal_of_an_episode_goes_with_its_rollout():
    this_round = sampled(Wandering(DIFFERENT_RECALL, []), process_recall=0.3)
    signals = {s.question.id: [] for s in this_round.sequences}
    for s, rollout in zip(this_round.sequences, this_round.rollouts(), strict=True):
        signals[s.question.id].append(rollout.signal)
    assert signals == {"0": [0.0, 0.0], "1": [1.0, 0.0]}


def test_the_share_of_mixed_groups_is_a_metric_of_the_round():
    """That of the policy's own draws: an expanded episode begins where the policy came by luck."""
    assert sampled(Scripted({"0": ["no", "no"], "1": ["yes", "no"]}, [])).metrics()["groups/mixed"] == 0.5
    expanded = sampled(Scripted({"0": ["no", "no"], "1": ["yes", "no"]}, ["yes"]), expand_limit=1)
    assert len(expanded.sequences) == 5 and expanded.metrics()["groups/mixed"] == 0.5


@pytest.mark.parametrize("number", [5, 6])
def test_the_streams_follow_from_seed_round_and_episode(number):
    engine = Scripted({"0": ["no", "no"], "1": ["no", "no"]}, ["no"] * 4)
    sampled(engine, number=number, expand_limit=4)
    assert sorted(engine.requests[0][1]) == [f"7/expand {number}/{i}" for i in range(4)]


def test_each_round_is_paid_by_its_own_weights_its_expanded_episodes_too():
    entry = {"name": "approximate_format", "weight": 1.0, "first_weight": 3.0}
    curriculum = {"rewards": [entry], "curriculum_rounds": 5, "outcome_em": 0.0, "format_reward": 0.0}
    for number, weight in ((5, 3.0), (6, 1.0)):
        engine = Scripted({"0": ["yes", "no"], "1": ["no", "no"]}, ["yes"] * 3)
        this_round = sampled(engine, number=number, expand_limit=3, **curriculum)
        assert len(this_round.rewards) == 7 and {paid.total for paid in this_round.rewards} == {weight}
        assert this_round.metrics()["rewards/approximate_format/weight"] == weight
