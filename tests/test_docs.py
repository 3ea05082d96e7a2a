"""What the documents say of the code is there."""

import dataclasses
import inspect
import itertools
import re
import sys
import tomllib
import typing
from pathlib import Path

import pytest

from r3lite.core.config import flat, sections
from r3lite.core.episode import ANSWERED, Document, Episode, Question, Search, Step
from r3lite.core.files import shipped
from r3lite.core.invocation import resolve
from r3lite.datasets.conversations import LAYOUTS
from r3lite.evaluation.scores import FULL_RECALL_EM, MEANS, METRICS
from r3lite.evaluation.tables import TITLES
from r3lite.protocols import dag
from r3lite.protocols.layout import Layout
from r3lite.protocols.registry import PROTOCOLS, build_protocol
from r3lite.protocols.tags import FAULTS, FORGIVEN, GRAPH_FAULTS
from r3lite.retrieval.documents import READERS
from r3lite.retrieval.retriever import RETRIEVERS
from r3lite.rewards.registry import REWARDS, VERDICT, named_rewards
from r3lite.rl.algorithms import ALGORITHMS, check
from r3lite.settings import GuardSettings, LengthSettings, PpoConfig, ProtocolSettings
from r3lite.settings.rl import PAPERS

ROOT = Path(__file__).parent.parent
MAP, FORMATS, COLLAPSE, RETRIEVAL = (
    ROOT / "docs" / f"{name}.md" for name in ("architecture", "formats", "collapse", "retrieval")
)
ALGORITHMS_PAGE = ROOT / "docs" / "algorithms.md"
OWN_DOCUMENTS = ROOT / "docs" / "documents.md"
SERVING = ROOT / "docs" / "serving.md"
EVALUATION, CONVERSATIONS = ROOT / "docs" / "evaluation.md", ROOT / "docs" / "conversations.md"
REWARDS_PAGE = ROOT / "docs" / "rewards.md"
LIMITS = {f.name for f in dataclasses.fields(GuardSettings) if type(None) in typing.get_args(f.type)}
DOCUMENTS = [
    Document("1", "Brenn", "Brenn is a film by Ann Dahl."),
    Document("2", "Dahl", "</information> is no tag here."),
]
STEPS = (
    Step.asking("I need to find out: Who directed Brenn?", "Who directed Brenn?").with_documents([DOCUMENTS]),
    Step("Who directed Brenn? Ann Dahl. This gives the answer.", answer="Ann Dahl"),
)


def test_every_file_on_the_map_is_there():
    """A name is looked for in the repository, in the package, or in the room that its paragraph has named before."""
    missing = []
    places = [ROOT, ROOT / "r3lite"]
    names = re.findall(r"[\w./]+(?:\.py|/)(?=[`\s,;:])", MAP.read_text(encoding="utf-8"))
    assert len(names) > 100
    for name in names:
        path = next((place / name for place in places if (place / name).exists()), None)
        if path is None:
            missing.append(name)
        else:
            places[2:] = [path if path.is_dir() else path.parent]
    assert missing == []


def test_every_room_is_on_the_map():
    text = MAP.read_text(encoding="utf-8")
    rooms = [path.parent.name for path in (ROOT / "r3lite").glob("*/__init__.py")]
    assert [room for room in rooms if f"  {room}/ " not in text] == []


@pytest.mark.parametrize(
    "path",
    [
        *(ROOT / "README.md", MAP, FORMATS, COLLAPSE, RETRIEVAL, ALGORITHMS_PAGE, EVALUATION, CONVERSATIONS),
        *(OWN_DOCUMENTS, REWARDS_PAGE, SERVING),
        ROOT / "docs" / "recipe.md",
        ROOT / "docs" / "tune_prompt.md",
        ROOT / "docs" / "tutorial.md",
    ],
    ids=lambda path: path.name,
)
def test_links_to_files_lead_somewhere(path):
    links = re.findall(r"\]\((?!http)([^)#]+)", path.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (path.parent / link).exists()] == []


PLANNED = (
    Step(
        "Nodes:\nA: Who directed Brenn? (General)\nB: Where was {A} born? (General)\nEdges: A -> B",
        (Search("Who directed Brenn?", DOCUMENTS[:1], "General"),),
    ),
    Step("A: Ann Dahl", (Search("Where was Ann Dahl born?", DOCUMENTS[1:], "General"),)),
    Step("B: Oslo", answer="Oslo"),
)


def sample(tokenizer, name: str) -> str:
    """An episode after its prompt, as docs/formats.md shows it: what the model writes is between guillemets."""
    protocol = build_protocol(ProtocolSettings(format=name))
    layout = Layout(tokenizer, protocol, LengthSettings())
    steps = PLANNED if protocol.plans else STEPS if protocol.can_search else STEPS[1:]
    transcript = layout.lay_out(Question("q", "Who directed Brenn?", ()), steps, 64)
    prompt = len(layout.prompt(transcript.question.text))
    text = ""
    parts = itertools.groupby(
        zip(transcript.tokens[prompt:], transcript.action_mask[prompt:]), key=lambda pair: pair[1]
    )
    for is_action, pairs in parts:
        # The last token of a turn is marked, as special tokens are not decoded.
        tokens = [token for token, _ in pairs]
        decoded = tokenizer.decode(tokens) + "[end]" * (is_action and tokens[-1] == tokenizer.stop_id)
        text += f"\u00ab{decoded}\u00bb" if is_action else decoded
    return text


def test_every_fault_of_a_plan_and_its_answers_is_in_their_table():
    text = FORMATS.read_text(encoding="utf-8")
    faults = dag.FAULTS | GRAPH_FAULTS
    assert [f for f, description in faults.items() if f"| `{f}` | {description} |" not in text] == []


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_sample_episode_of_a_format_is_what_the_code_writes(tokenizer, name):
    assert f"```text\n{sample(tokenizer, name)}\n```" in FORMATS.read_text(encoding="utf-8")


def test_every_fault_of_the_tags_is_in_their_table():
    text = FORMATS.read_text(encoding="utf-8")
    for fault, description in FAULTS.items():
        assert f"| `{fault}` | {description} | {'forgiven' if fault in FORGIVEN else 'a fault'} |" in text


def test_every_retriever_has_its_row():
    text = RETRIEVAL.read_text(encoding="utf-8").partition("## Encoders")[0]
    assert re.findall(r"^\| `(\w+)` \|", text, re.M) == list(RETRIEVERS)


def test_every_algorithm_has_its_row_and_its_settings_are_those_of_the_code():
    text = ALGORITHMS_PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^\| `([^`]+)` \| arXiv", text, re.M) == list(ALGORITHMS)
    section = text.partition("| algorithm | defaults of its own |\n")[2].partition("\n\n")[0]
    defaults = {}
    for names, values in re.findall(r"^\| (`.*`) \| (`.*) \|$", section, re.M):
        for name in re.findall(r"`([^`]+)`", names):
            defaults[name] = dict(re.findall(r"`(\w+)` ([\w.]+)", values))
    papers = {name: {setting: str(value) for setting, value in paper.items()} for name, paper in PAPERS.items()}
    assert defaults == papers
    ppo = flat(resolve("ppo", PpoConfig(), ["--algorithm", "ppo"]))
    assert "`clip_low` and `clip_high` are 0.2, `kl_beta` is 0.001" in text
    assert (ppo["clip_low"], ppo["clip_high"], ppo["kl_beta"], ppo["kl_estimator"]) == (0.2, 0.2, 0.001, None)
    for name, values in defaults.items():
        config = flat(resolve("ppo", PpoConfig(), ["--algorithm", name]))
        assert {setting: str(config[setting]) for setting in values} == values


def test_the_example_of_every_algorithm_is_taken(tmp_path):
    examples = re.findall(r"```toml\n(.*?)```", ALGORITHMS_PAGE.read_text(encoding="utf-8"), re.S)
    algorithms = []
    for text in examples:
        (tmp_path / "my.toml").write_text(text, encoding="utf-8")
        config = resolve("ppo", PpoConfig(), ["--config", str(tmp_path / "my.toml")])
        check(config.rl, config.set_by_user, config.lengths)
        for section in sections(config).values():
            section.check()
        algorithms.append(config.rl.algorithm)
    assert sorted(algorithms) == sorted(ALGORITHMS)


def test_every_limit_of_the_guard_is_in_its_table_with_its_default():
    rows = re.findall(
        r"^\| `(guard_\w+)` \| ([\d.]+) \|.*\| (\d) (?:rounds|validations) \|$", COLLAPSE.read_text("utf-8"), re.M
    )
    defaults = GuardSettings()
    limits = {name: value for name, value in vars(defaults).items() if name in LIMITS}
    assert {name: float(value) for name, value, _ in rows} == limits
    for name, _, in_a_row in rows:
        assert int(in_a_row) == (defaults.guard_validations if name == "guard_f1_drop" else defaults.guard_patience)


def test_every_metric_is_explained_and_has_a_title():
    text = EVALUATION.read_text(encoding="utf-8")
    rows = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    names = (*METRICS, *MEANS, FULL_RECALL_EM, "judge_accuracy")
    assert [name for name in names if f"`{name}`" not in rows] == []
    assert set(names) - TITLES.keys() == {"sp_recall"}


def test_the_joint_score_of_the_example_is_what_the_code_gives():
    (code,) = re.findall(r"```python\n(.*?)```", EVALUATION.read_text(encoding="utf-8"), re.S)
    names: dict = {}
    exec(code, names)
    assert names["em"] == 0.0 and f"both.f1 is {names['both'].f1:.3f}" in code


def test_every_layout_of_conversations_has_its_row():
    text = CONVERSATIONS.read_text(encoding="utf-8")
    rows = [tuple(re.findall("`(.*?)`", line.split("|")[1])) for line in text.splitlines() if line.startswith("| `")]
    assert rows == list(LAYOUTS)


def test_every_layout_of_documents_has_its_row():
    text = OWN_DOCUMENTS.read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `.")]
    assert sorted(re.findall(r"`(\.\w+)`", " ".join(cells))) == sorted(READERS)


def test_every_reward_has_its_row_with_its_parameters():
    text = REWARDS_PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]*)\| -?\d", text, re.M)
    assert [name for name, _ in rows] == list(REWARDS)
    for name, cell in rows:
        taken = list(inspect.signature(REWARDS[name]).parameters.values())[1:]
        defaults = [p.default if p.name != "words" else f"({', '.join(p.default)})" for p in taken if p.name != VERDICT]
        names = [p.name for p in taken if p.name != VERDICT]
        assert cell.strip() == ", ".join(f"`{key}` {value}" for key, value in zip(names, defaults)), name


def test_a_users_own_rewards_work_as_the_page_says(tmp_path, monkeypatch):
    """From a folder that has nothing to do with the package."""
    text = REWARDS_PAGE.read_text(encoding="utf-8")
    (module,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (tmp_path / "my_rewards.py").write_text(module, encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    paid = {}
    for number, example in enumerate(re.findall(r"```toml\n(.*?)```", text, re.S)):
        (tmp_path / f"{number}.toml").write_text(example, encoding="utf-8")
        config = resolve("ppo", PpoConfig(), ["--config", f"{number}.toml"])
        question = Question("q", "Who directed Brenn?", ("Ann Dahl",), gold=tuple(DOCUMENTS[:1]))
        episode = Episode(question, [*STEPS, Step(" ".join(["word"] * 18), answer="Ann Dahl")], ANSWERED)
        paid |= {reward.name: reward.step_rewards(episode, None) for reward in named_rewards(config.reward)}
    # 8 + 9 + 18 words in the analyses, 5 beyond 30; the first query names Brenn.
    assert paid["my_rewards:brevity"] == [0, 0, pytest.approx(0.2 * (1 - 5 / 30))]
    assert paid["my_rewards:names_a_gold_title"] == [0.1, 0, 0]
    assert paid["rouge_l_levels"] == [0, 0, 2.5] and paid["search_excess"] == [0, 0, 0]
    sys.modules.pop("my_rewards")


def test_every_preset_that_names_rewards_has_its_row_with_their_weights():
    text = REWARDS_PAGE.read_text(encoding="utf-8").partition("| preset |")[2]
    rows = {row.split("`")[1]: row for row in text.splitlines() if row.startswith("| `")}
    for path in shipped("presets").glob("*.toml"):
        for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("ppo", {}).get("rewards", ()):
            assert f"`{entry['name']}` {entry['weight']:g}" in rows[path.stem]
