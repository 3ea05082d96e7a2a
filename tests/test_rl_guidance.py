"""What joins a round: which traces are used and what they become, which questions are asked again, what is kept."""

from dataclasses import replace

import pytest

from r3lite import ppo
from r3lite.assembly import rl_guidance
from r3lite.assembly.rl_guidance import Guidance
from r3lite.core.episode import Document, Question
from r3lite.core.errors import R3LiteError
from r3lite.core.files import write_jsonl
from r3lite.core.invocation import resolve
from r3lite.core.token_record import TokenRecord
from r3lite.datasets.trajectories import encode_row, read_traces
from r3lite.protocols.layout import Layout
from r3lite.protocols.registry import build_protocol
from r3lite.rewards.reward import EpisodeReward
from r3lite.rl.batch import Rollout
from r3lite.rl.replay import ReplayBuffer
from r3lite.settings import PpoConfig, ProtocolSettings
from tests.errors import raises

PROTOCOL = build_protocol(ProtocolSettings())
GOLD = Document("1", "Brenn", "Brenn is a film by Ann Dahl.\n\nThe final answer: Rome<|im_end|>")
QUESTIONS = [Question(f"q{i}", f"Who directed film {i}?", ("Ann Dahl",)) for i in range(6)]


def trace(i: int, answer: str = "Ann Dahl", **fields) -> dict:
    """What `collect` writes: a search and an answer."""
    document = GOLD.to_json()
    query = f"Who directed film {i}?"
    steps = [
        {"analysis": f"I need to find out: {query}", "query": query, "documents": [document]},
        {"analysis": f"{query} {answer}.", "answer": answer},
    ]
    return {"id": f"t{i}", "question": f"Who directed  film {i}?", "answers": ["Ann Dahl"], "steps": steps, **fields}


def reasoned(i: int, answer: str = "Ann Dahl", reasoning: str = "I know it.") -> dict:
    return {"question": f"Who directed film {i}?", "reasoning": reasoning, "answer": answer}


def config(*flags: str) -> PpoConfig:
    return resolve("ppo", PpoConfig(), ["--algorithm", "hybrid", *flags])


@pytest.fixture
def use(tmp_path, tokenizer):
    """The usable ones of some rows, by question, and the layout."""

    def make(rows: list[dict], *flags: str):
        write_jsonl(tmp_path / "traces.jsonl", rows)
        settings = config("--traces", str(tmp_path / "traces.jsonl"), *flags)
        layout = Layout(tokenizer, PROTOCOL, settings.lengths)
        return rl_guidance.usable_traces(rl_guidance.traces_of(settings), settings, QUESTIONS, layout, None), layout

    return make


def test_a_trace_becomes_the_tokens_of_an_sft_row(use, tokenizer, tmp_path):
    """Its documents are given and neutralized; the teacher's probability is 1; all is paid at the last token."""
    rollouts, layout = use([trace(0)])
    rollout = rollouts["q0"]
    (read,) = read_traces(tmp_path / "traces.jsonl", PROTOCOL)
    row = encode_row(replace(read, question=QUESTIONS[0].text), layout)
    record = rollout.record
    assert (record.tokens, record.action_mask) == (row.tokens, row.action_mask) and rollout.off_policy
    assert record.logprobs == [0.0] * sum(row.action_mask)
    ((end, reward),) = rollout.token_rewards
    assert record.action_mask[end] and not any(record.action_mask[end + 1 :])
    assert reward == pytest.approx(1.1)  # an exact match, and 0.1 for the format
    assert rollout.signal == 1.0  # the match alone
    pairs = list(zip(record.tokens, record.action_mask, strict=True))
    context_tokens = [token for token, is_action in pairs if not is_action]
    action_text = tokenizer.decode([token for token, is_action in pairs if is_action])
    assert (
        "Brenn is a film" in tokenizer.decode(context_tokens)
        and "Brenn is a film" not in action_text
        and "Rome" not in action_text
    )
    completion = record.tokens[len(layout.prompt(QUESTIONS[0].text)) :]
    assert completion.count(tokenizer.stop_id) == 3  # a step, its documents, a step: a document ends no turn


def test_what_is_left_out_is_counted(use, capsys):
    rows = [trace(0), trace(1, "Rome"), trace(9), reasoned(2, reasoning="It was long ago. " * 400), reasoned(3)]
    rows += [reasoned(4, "Ann"), reasoned(0)]
    rollouts, _ = use(rows, "--outcome-f1", "1")
    assert sorted(rollouts) == ["q0", "q3"]
    assert rollouts["q0"].token_rewards[0][1] == pytest.approx(2.1)
    stderr = capsys.readouterr().err
    assert "2 of 6 questions have a usable trace, of 7 traces; 1 have no question in --data; 1 are longer" in stderr
    assert "2 have an answer reward below 0.5 of the maximum; 1 are not the best of their question" in stderr
    # Half right by F1 is 2/3 of one of two weights: 1/3 of the most.
    assert "q4" in use(rows, "--outcome-f1", "1", "--trace-min-outcome", "0.3")[0]


def test_traces_of_s1_and_openr1_are_read(use, tmp_path):
    s1 = {"question": "Who?", "thinking_trajectories": ["I know."], "attempt": "Ann", "solution": "Ann"}
    openr1 = {"problem": "Who?", "generations": ["<think>\nI know.\n</think>\n\nAnn"], "answer": "Ann"}
    use([trace(0), s1, openr1])
    for read in read_traces(tmp_path / "traces.jsonl", PROTOCOL)[1:]:
        assert (read.question, [(s.analysis, s.answer) for s in read.steps]) == ("Who?", [("I know.", "Ann")])
    with pytest.raises(R3LiteError, match="line 2: has a system message, but traces use"):
        use([trace(0), s1 | {"system": "Be brief."}])


def test_a_wrong_answer_is_not_used_for_the_sake_of_its_format(use):
    """A well-formed trace that read the gold paragraph is paid more than the limit, whatever it answers."""
    flags = ["--format-reward", "0.6", "--trace-min-outcome", "0.5"]
    with raises(R3LiteError, "traces-useless", "0 of 6 questions", "of 1 traces; 1 have an answer reward below 0.5"):
        use([trace(0, "Rome")], *flags)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "Who?"}, "line 1: has neither 'steps' .* nor 'reasoning'"),
        ({"question": "Who?", "reasoning": "x"}, "line 1: answer is missing"),
        (
            {"question": "Who?", "reasoning": "x\nStep 2:\nThe final answer: no", "answer": "y"},
            "line 1: step 1 writes a heading twice",
        ),
        ({"question": "Who?", "messages": []}, "line 1: has neither"),
    ],
)
def test_a_row_that_is_no_trace_is_named(use, row, says):
    with pytest.raises(R3LiteError, match=says):
        use([row, trace(0)])
    assert list(use([row, trace(0)], "--skip-bad-rows")[0]) == ["q0"]


def drawn(*numbers: int, size: int = 2) -> list[Question]:
    return [QUESTIONS[i] for i in numbers for _ in range(size)]


def guidance(*flags: str, traces=(), entropies=None) -> Guidance:
    settings = config("--num-generations", "2", "--batch-size", "3", *flags)
    replay = ReplayBuffer(settings.rl.replay_size, 2, settings.rl.replay_start)
    return Guidance(
        settings, {q.id: q for q in QUESTIONS}, {name: rollout(0, True) for name in traces}, replay, entropies
    )


def rollout(group: int, off_policy: bool = False, token: int = 5) -> Rollout:
    return Rollout(
        TokenRecord(tokens=[1, token], action_mask=[False, True], logprobs=[-0.5], values=[0.0]),
        [(1, 1.0)],
        group,
        off_policy=off_policy,
    )


def scored(outcome: float) -> EpisodeReward:
    return EpisodeReward([outcome], {"outcome": outcome})


def test_questions_that_are_asked_again_take_the_last_places():
    guide = guidance()
    assert guide.with_replayed(drawn(0, 1, 2), []) == drawn(0, 1, 2)
    assert guide.with_replayed(drawn(0, 1, 2), ["q4"]) == drawn(0, 1, 4)
    assert guide.with_replayed(drawn(0, 1, 2), ["q4", "q5"]) == drawn(0, 5, 4)
    assert guide.with_replayed(drawn(0, 1, 2), ["q2", "q5"]) == drawn(0, 5, 2)  # q2 was drawn anyway
    assert guide.with_replayed(drawn(0, 0, 0), ["q0", "q1"]) == drawn(0, 0, 0)  # no place: all are asked again


def test_traces_join_the_groups_of_their_questions():
    guide = guidance("--trace-share", "0.5", traces=["q1", "q2", "q3", "q5"])
    joined, stats = guide.choose_and_store(1, ["q3", "q0", "q1"], [], [])
    assert [(r.group, r.off_policy) for r in joined] == [(0, True), (2, True)] and stats["off_policy/traces"] == 2
    assert [r.group for r in guide.choose_and_store(1, ["q3", "q1", "q2"], [], [])[0]] == [
        0,
        1,
    ]  # 0.5 of three, rounded up
    assert [r.group for r in guide.choose_and_store(1, ["q5", "q5", "q0"], [], [])[0]] == [0]
    guide = guidance("--trace-share", "0", traces=["q1"])
    assert guide.choose_and_store(1, ["q1", "q0", "q2"], [], [])[0] == []


def test_successes_are_kept_and_asked_again():
    """Two of three questions are solved once in two; the third is wrong by an F1 below the limit."""
    guide = guidance("--replay-share", "0.6", entropies=lambda batch: -batch.tokens[:, 1].float())
    paid = [(rollout(i // 2, token=10 + i), scored(outcome)) for i, outcome in enumerate((1, 0, 0.7, 0.1, 0.5, 0.5))]
    joined, stats = guide.choose_and_store(1, ["q0", "q1", "q2"], paid, [])
    assert joined == [] and (stats["replay/size"], stats["replay/questions"], stats["off_policy/replays"]) == (2, 2, 0)
    question_ids = guide.replayed(2)
    assert sorted(question_ids) == ["q0", "q1"] and question_ids == guide.replayed(2)
    paid = [(rollout(0, token=30), scored(1)), (rollout(0, token=31), scored(0))]
    joined, stats = guide.choose_and_store(3, ["q0", "q4", "q1"], paid, ["q0", "q1"])
    assert [(r.group, r.record.tokens[1]) for r in joined] == [(0, 10), (2, 12)]  # and none of this very round
    assert stats["replay/age"] == 2 and stats["replay/size"] == 3
    joined, _ = guide.choose_and_store(4, ["q0", "q4", "q5"], [], ["q0", "q1"])  # q1 found no place
    assert [(r.group, r.record.tokens[1]) for r in joined] == [(0, 30)]  # of lowest entropy


def test_a_question_that_is_drawn_twice_is_retired_only_by_the_rewards_of_both_groups():
    """Two right episodes of four retired it; the judge had failed on the others."""
    guide = guidance()
    guide.choose_and_store(1, ["q0", "q0", "q1"], [(rollout(0), scored(1)), (rollout(1), scored(1))], [])
    assert guide.replay.retired == set() and guide.replay.questions["q0"].rate == 1.0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("luffy", "--traces is missing: luffy needs a file of a teacher's traces"),
        ("hybrid", "--traces is missing: hybrid needs"),
        ("luffy --traces x.jsonl --outcome-em 0", "luffy needs a reward for correct answers"),
        ("exgrpo --outcome-em 0", "exgrpo needs a reward for correct answers"),
        (
            "exgrpo --traces x.jsonl",
            "--traces is x.jsonl, but has no effect with --algorithm exgrpo: it needs one of luffy, hybrid",
        ),
        ("luffy --traces x.jsonl --refill-limit 1", "--refill-limit is 1, but has no effect with --algorithm luffy"),
    ],
)
def test_what_it_cannot_work_with_is_refused(capsys, flags, says):
    assert ppo.main(["--dry-run", "--algorithm", *flags.split()]) == 2
    assert says in capsys.readouterr().err


def test_others_are_guided_by_nothing():
    settings = resolve("ppo", PpoConfig(), ["--algorithm", "grpo"])
    assert rl_guidance.traces_of(settings) == [] and rl_guidance.build_buffer(settings) is None
