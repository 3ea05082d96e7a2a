"""Which rows and questions a step takes: every one once an epoch, with no memory of the steps before."""

from collections import Counter
from dataclasses import replace

from r3lite.core.answer_match import question_key
from r3lite.core.episode import Question
from r3lite.datasets.conversations import Conversation
from r3lite.datasets.order import QuestionOrder, hold_out, ids_by_question, rows_of_step
from r3lite.datasets.trajectories import Trajectory


def test_every_epoch_reads_every_row_once_and_the_last_step_may_be_smaller():
    steps = [rows_of_step(step, 7, 4, seed=0, row_limit=14) for step in range(1, 5)]
    assert [len(s) for s in steps] == [4, 4, 4, 2]
    flat = [i for step in steps for i in step]
    assert sorted(flat[:7]) == sorted(flat[7:]) == list(range(7))
    assert flat[:7] != flat[7:]
    assert flat[:7] != rows_of_step(1, 7, 7, seed=1, row_limit=None)
    assert Counter(rows_of_step(1, 3, 9, seed=0, row_limit=None)) == {0: 3, 1: 3, 2: 3}  # a step of several epochs


def test_rounds_draw_every_question_once_an_epoch_and_need_no_memory():
    order = QuestionOrder([Question(str(i), "?", ("a",)) for i in range(5)], generations=2, seed=0)
    drawn = [order.of_round(n, 2) for n in range(1, 6)]
    ids = [q.id for qs, _ in drawn for q in qs[::2]]
    assert sorted(ids[:5]) == sorted(ids[5:]) == list("01234") and ids[:5] != ids[5:]
    seeds = [s for _, ss in drawn for s in ss]
    assert len(set(seeds)) == len(seeds) == 20
    assert order.of_round(3, 2) == drawn[2] and replace(order, seed=1).of_round(3, 2) != drawn[2]


def test_a_refill_takes_other_questions_if_there_are_and_needs_no_memory():
    order = QuestionOrder([Question(str(i), "?", ("a",)) for i in range(5)], generations=2, seed=0)
    drawn = [order.of_refill(3, attempt, 2, {"0", "1", "4"}) for attempt in (1, 2, 3)]
    assert all([q.id for q in qs] in (list("2233"), list("3322")) for qs, _ in drawn)
    seeds = [s for _, ss in drawn for s in ss] + order.of_round(3, 2)[1]
    assert len(set(seeds)) == len(seeds) == 16
    assert order.of_refill(3, 2, 2, {"0", "1", "4"}) == drawn[1]
    assert order.of_refill(4, 2, 2, {"0", "1", "4"})[1] != drawn[1][1]
    # All have been drawn, or more are needed than there are: some come again.
    refill, _ = replace(order, generations=1).of_refill(3, 1, 6, set("01234"))
    assert Counter(q.id for q in refill).most_common()[0][1] == 2 and {q.id for q in refill} == set("01234")


def chat(id, *turns):
    roles = ("user", "assistant") * len(turns)
    return Conversation(id, tuple({"role": role, "content": text} for role, text in zip(roles, turns)))


def test_a_question_is_held_out_from_every_source_that_asks_it():
    """Rows without an id are called by their file and line: of 8 held-out questions all were trained on."""
    texts = [f"Who keeps lighthouse {i}?" for i in range(20)]
    short = [chat(f"short-{i}", text, f"Keeper {i}.") for i, text in enumerate(texts)]
    long = [
        chat(f"long-{i}", f"  the {text.upper()}", "The keeper is ...", "Thanks!", "!") for i, text in enumerate(texts)
    ]
    steps = [Trajectory(f"steps-{i}", text, ("x",), ()) for i, text in enumerate(texts[:10])]
    trained, held_out = hold_out({"a": short, "b": long, "c": steps}, 0.2, 100, seed=0)

    def questions(rows):
        return {question_key(row.question) for source_rows in rows.values() for row in source_rows}

    assert len(questions(held_out)) + len(questions(trained)) == 20 and not questions(held_out) & questions(trained)
    assert 8 <= sum(map(len, held_out.values())) <= 10  # at most a fifth of 50 rows


def test_rows_of_one_id_and_rows_that_ask_the_same_are_one_question_together():
    rows = [Trajectory("1", "Who?", (), ()), Trajectory("1", "Which?", (), ()), Trajectory("2", "which", (), ())]
    rows += [chat("3", "And?", "x"), chat("4", "?!", "x"), chat("5", "!", "x"), chat("6"), chat("7")]
    assert ids_by_question({"": rows}) == {
        "1": {"1", "2"}, "2": {"1", "2"}, **{str(i): {str(i)} for i in range(3, 8)}
    }  # fmt: skip
    trained, held_out = hold_out({"": rows[:3]}, 0.9, 3, seed=0)
    assert len(trained[""]) == 3 and not held_out[""]  # at least one question is trained on


def test_a_conversation_asks_what_its_first_trained_reply_answers():
    untrained_reply = {"role": "assistant", "content": "b", "train": False}
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, untrained_reply]
    turns += [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    assert Conversation("1", tuple(turns)).question == "a\nc"
    assert chat("1", "a", "b", "c", "d").question == "a"
