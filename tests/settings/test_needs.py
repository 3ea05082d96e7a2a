"""An option that the chosen parts cannot use is refused by its name: found by setting every option beside every choice,
and by watching which settings a retriever or a format reads."""

import dataclasses
import functools

import pytest

import r3lite.settings as settings
from r3lite.core import command
from r3lite.core.config import Origin, Section, UsageError, flag, flat, kinds_of, sections
from r3lite.core.episode import Document, Question
from r3lite.core.invocation import resolve, with_values
from r3lite.core.needs import CommandSettings, NeedsOthers, check_used
from r3lite.protocols.registry import PROTOCOLS, build_protocol
from r3lite.retrieval.retriever import RETRIEVERS, build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.rl import algorithms
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.settings import ProtocolSettings, RetrievalSettings, RLSettings
from tests.commands import CONFIGS
from tests.errors import raises, shows

# Texts that must be of a certain form; any other text is some file or name.
TEXTS = {"judge_base_url": "http://host", "filter": "lang=en", "source_index": "News=x", "sources": "a.jsonl=1",
         "retriever": "lexical", "lora_targets": "q_proj", "format": "tags", "rewards": "rouge_l=0.5"}  # fmt: skip


def another(config, name: str):
    """A value of a setting that it does not have, as a command line or a file could give it."""
    (section,) = (s for s in sections(config).values() if name in kinds_of(type(s)))
    kind = kinds_of(type(section))[name]
    old = getattr(section, name)
    one = next((c for c in kind.choices if c not in (old, "auto", *(old if isinstance(old, tuple) else ()))), None)
    if one is None and kind.scalar is bool:
        return not old
    if one is None and kind.scalar in (int, float):
        low = kind.bounds.low if kind.bounds and kind.bounds.low is not None else 0
        one = next(x for x in (low + 1, 1, 0.5, 0.25, 2) if x != old and fits(kind, name, kind.scalar(x)))
    return [one or TEXTS.get(name, "some")] * (kind.count or 1) if kind.count != 1 else one or TEXTS.get(name, "some")


def fits(kind, name, value) -> bool:
    try:
        return bool(value) and kind.convert(name, value) == value
    except UsageError:
        return False


def resolved(name: str, *argv: str):
    default, table = CONFIGS[name]
    return table, resolve(table, default, list(argv))


def outcome(table: str, config, name: str) -> str:
    """What becomes of an option beside the others: "taken", or "refused" by its name."""
    changed = with_values(config, {name: another(config, name)})
    assert flat(changed)[name] != flat(config)[name]
    changed = dataclasses.replace(changed, set_by_user={**config.set_by_user, name: Origin.FLAG})
    try:
        check_used(table, changed)
        if "algorithm" in flat(changed) and table == "ppo":
            algorithms.check(changed.rl, changed.set_by_user, changed.lengths)
    except UsageError as error:
        return "refused" if flag(name) in str(error) else str(error)
    return "taken"


def test_every_need_of_a_command_is_about_settings_that_it_has():
    for default, _ in CONFIGS.values():
        for needs in default.needs:
            assert {*needs.names.split()} <= flat(default).keys()


SECTIONS = [cls for cls in vars(settings).values() if isinstance(cls, type) and issubclass(cls, Section)]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda cls: cls.__name__)
def test_every_need_is_about_settings_of_its_section(section):
    for needs in section.needs:
        assert {*needs.names.split(), *needs.but.split()} <= kinds_of(section).keys()
        # The first raises AttributeError for another section's setting, the second returns None for it.
        view = CommandSettings() if isinstance(needs, NeedsOthers) else section()
        needs.met(view)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_option_of_every_command_is_taken_or_refused_by_its_name(name):
    table, config = resolved(name)
    for option in flat(config).keys() - {"preset", "config", "algorithm"}:
        assert outcome(table, config, option) in ("taken", "refused"), option


class Watched:
    """Which fields of a settings object are read."""

    def __init__(self, settings):
        fields, read = {f.name for f in dataclasses.fields(settings)}, set()

        def get(self, name):
            if name in fields:
                read.add(name)
            return object.__getattribute__(self, name)

        kind = type(settings)
        self.settings = type(kind.__name__, (kind,), {"__getattribute__": get})(**vars(settings))
        self.read, self.fields = read, fields


DOCUMENTS = (Document("1", "Oslo", "Oslo is in Norway."), Document("2", "Rome", "Rome is in Italy."))
QUESTION = Question("q", "Where is Oslo?", ("Norway",), DOCUMENTS, DOCUMENTS[:1])


@pytest.mark.parametrize("retriever", RETRIEVERS)
def test_what_a_retriever_does_not_read_is_refused(retriever):
    """--noise-rate was taken beside retrievers that did not read it."""
    if retriever in ("lexical", "hybrid"):
        pytest.importorskip("bm25s", reason="needs the extra retrieval")
    encoder = {"encoder": "hashing"} if retriever in ("semantic", "hybrid") else {}
    table, config = resolved(
        "evaluate", "--retriever", retriever, *(x for k, v in encoder.items() for x in (flag(k), v))
    )
    watched = Watched(RetrievalSettings(retriever=retriever, **encoder))
    build_retriever(Setup(watched.settings, [QUESTION]))([(QUESTION, "Oslo")])
    # The two others may stay while retrievers are compared.
    idle = watched.fields - watched.read - {"retriever", "encoder", "top_k"}
    assert len(idle) >= 7
    assert {option: outcome(table, config, option) for option in idle} == dict.fromkeys(idle, "refused")


@pytest.mark.parametrize("format", PROTOCOLS)
def test_what_a_format_does_not_read_is_refused(format):
    retriever_flags = ["--retriever", "none"] if format == "solution" else []
    table, config = resolved("evaluate", "--format", format, *retriever_flags)
    watched = Watched(ProtocolSettings(format=format))
    build_protocol(watched.settings)
    idle = watched.fields - watched.read
    assert len(idle) >= 4
    assert {option: outcome(table, config, option) for option in idle} == dict.fromkeys(idle, "refused")


NEEDS = {"dgpo": ["--teacher", "tiny"]}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_option_of_rl_beside_every_algorithm_is_read_by_it_or_refused(algorithm):
    table, config = resolved("ppo", "--algorithm", algorithm, *NEEDS.get(algorithm, []))
    some_read = frozenset().union(*(cls.own_settings for cls in ALGORITHMS.values()))
    for option in kinds_of(RLSettings).keys() - {"algorithm"}:
        verdict = outcome(table, config, option)
        if option in some_read - ALGORITHMS[algorithm].own_settings:
            assert verdict == "refused", option
        elif verdict != "refused":
            # Or a contradiction with another flag, which names both.
            assert verdict == "taken" or flag(option) in verdict, (option, verdict)


@pytest.mark.parametrize(
    ("name", "argv", "option"),
    [
        ("evaluate", "--noise-rate 0.3 --index x", "--noise-rate"),
        ("evaluate", "--fusion weighted --retriever lexical", "--fusion"),
        ("evaluate", "--top-p 0.9", "--top-p"),
        ("evaluate", "--recompute-layers 2", "--recompute-layers"),
        ("evaluate", "--baseline closed-book --index x", "--index"),
        ("evaluate", "--retriever exa --corpus x", "--corpus"),
        ("evaluate", "--retriever http://h/retrieve --index x", "--index"),
        ("evaluate", "--retriever qdrant://h/x --context question", "--context"),
        ("evaluate", "--corpus x --context question", "--corpus"),
        ("evaluate", "--format dag --source-index News=x --retriever golden", "--source-index"),
        ("evaluate", "--format dag --source-index News=x --context question", "--source-index"),
        ("evaluate", "--source-index News=x", "--source-index"),
        ("evaluate", "--format tags --queries-per-step 2", "--queries-per-step"),
        *(("evaluate", f"--format {kind} --search-graph", "--search-graph") for kind in ("r3", "solution", "dag")),
        *(("evaluate", f"--retriever {name} --rerank auto", "--rerank") for name in ("golden", "none")),
        ("evaluate", "--context question --index i", "--index"),
        ("evaluate", "--compare a b --data x", "--data"),
        ("retrieve", "--serve --query x", "--query"),
        ("retrieve", "--query x --gap-report y", "--gap-report"),
        ("ask", "--corpus x --format solution --retriever none", "--corpus"),
        ("ask", "--output x", "--output"),
        ("ppo", "--lora-dropout 0.1", "--lora-dropout"),
        ("ppo", "--epochs 2 --max-steps 5", "--epochs"),
        ("ppo", "--eval-every 3", "--eval-every"),
        ("ppo", "--guard off --guard-length 2", "--guard-length"),
        ("ppo", "--judge local --judge-rpm 3", "--judge-rpm"),
        ("ppo", "--gamma-correct 0.1", "--gamma-correct"),
        ("ppo", "--format solution --retriever none --search-bonus 1", "--search-bonus"),
        ("ppo", "--kl-beta 0 --kl-estimator k2", "--kl-estimator"),
        ("ppo", "--algorithm dapo --kl-estimator k2", "--kl-estimator"),
        ("ppo", "--algorithm dapo --overlong-penalty 0 --overlong-cache 0.5", "--overlong-cache"),
        ("ppo", "--algorithm dgpo --teacher-logprobs b --teacher-top 7", "--teacher-top"),
        ("sft", "--track-name x", "--track-name"),
        ("collect", "--keep 3", "--keep"),
        ("collect", "--source self --baseline rag", "--baseline"),
        ("collect", "--teacher-logprobs x --baseline rag", "--baseline"),
        ("collect", "--baseline rag --demonstrations sub-questions", "--demonstrations"),
        ("collect", "--baseline rag --format tags", "--format"),
        ("collect", "--baseline rag --max-hops 3", "--max-hops"),
        ("collect", "--max-new-tokens 3", "--max-new-tokens"),
        ("collect", "--thinking on", "--thinking"),
        ("collect", "--source self --attempts 3", "--attempts"),
        ("collect", "--source self --judge-rpm 3", "--judge-rpm"),
        ("collect", "--vram-budget 2GiB", "--vram-budget"),
        ("index", "--encoder hashing --batch-size 3", "--batch-size"),
        ("serve", "--memory-turns 0 --memory-kib 3", "--memory-kib"),
        ("retrieve", "--port 3", "--port"),
        ("plan of RL", "--guard off --guard-kl 2", "--guard-kl"),
    ],
)
def test_what_would_do_nothing_is_refused_with_what_it_is_for(name, argv, option):
    table, config = resolved(name, *argv.split())
    with raises(UsageError, "setting-unused", option):
        check_used(table, config)


def test_what_collects_plain_rag_takes_what_its_evaluation_takes():
    """Otherwise the prompts of its rows could not be those of the evaluation."""
    limits = "--top-k 5 --max-length 600 --max-new-tokens 50 --max-document-tokens 40 --thinking on --system-prompt Hi"
    for name in ("collect", "evaluate"):
        check_used(*resolved(name, "--baseline", "rag", *limits.split()))


def test_what_a_preset_or_a_file_for_all_commands_brings_is_not_asked_of_each(tmp_path):
    check_used(*resolved("evaluate", "--preset", "tiny", "--retriever", "golden"))
    path = tmp_path / "all.toml"
    path.write_text("guard = 'off'\nfusion = 'weighted'\n", encoding="utf-8")
    check_used(*resolved("evaluate", "--config", str(path)))
    path.write_text("[evaluate]\nfusion = 'weighted'\n", encoding="utf-8")
    with raises(UsageError, "setting-unused", "--fusion"):
        check_used(*resolved("evaluate", "--config", str(path)))


HARMFUL = {
    "gradient_accumulation": ("sft", ["--no-lora"], 4),  # took an optimizer step for each pass
    "micro_batch_tokens": ("sft", ["--no-lora"], 64),
    "lora_dropout": ("ppo", [], 0.1),  # another policy was trained than had sampled
    "least_searches": ("ppo", ["--format", "solution", "--retriever", "none"], 1),  # no answer was rewarded
    "cuda_graphs": ("sft", ["--no-lora"], True),  # a graph cannot update weights
}


@pytest.mark.parametrize("name", HARMFUL)
def test_what_would_do_harm_is_refused_wherever_it_stands(tmp_path, name):
    """A flag was refused, and the same setting at the top of a file, or in a table, was taken."""
    table, argv, value = HARMFUL[name]
    path = tmp_path / "all.toml"
    in_toml = str(value).lower()
    path.write_text(f"{name} = {in_toml}\n", encoding="utf-8")
    in_table = tmp_path / "table.toml"
    in_table.write_text(f"[{table}]\n{name} = {in_toml}\n", encoding="utf-8")
    by_flag = [flag(name)] if value is True else [flag(name), str(value)]
    for arguments in (by_flag, ["--config", str(path)], ["--config", str(in_table)]):
        with raises(UsageError, "setting-unused", flag(name), value):
            check_used(*resolved(table, *argv, *arguments))
    check_used(*resolved(table, *argv, "--config", str(in_table), "--resume", "auto"))  # an earlier version's
    harmful = [needs for section in SECTIONS for needs in section.needs if needs.harmful]
    assert {name for needs in harmful for name in needs.names.split()} == HARMFUL.keys()


def test_a_command_refuses_before_its_work(capsys):
    work = functools.partial(pytest.fail, "it began")
    argv = ["--data", "x", "--fusion", "weighted"]
    assert command.Command("evaluate", CONFIGS["evaluate"][0], work)(argv) == 2
    assert shows(capsys.readouterr().err, "setting-unused", "--fusion", "weighted", "--retriever hybrid")
