"""What a run of training or of `collect` reads beside its data and its base, as fingerprints of the content: a run that
is resumed with other content under the same names is another run.

A file or folder that is not here, such as a model of the hub or a server's passages, has no fingerprint.
"""

import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from r3lite.core.episode import Question
from r3lite.core.files import content_fingerprint, folder_fingerprint
from r3lite.models.lora import CONFIG, adapter_folder
from r3lite.protocols.base import Protocol
from r3lite.rewards.registry import named_rewards
from r3lite.settings import CollectConfig, ModelSettings, PpoConfig, ProtocolSettings, RetrievalSettings, RewardSettings


def of_adapter(model: ModelSettings) -> dict[str, str]:
    """The adapter that the run starts from, which is also the reference of a KL divergence."""
    if not model.adapter:
        return {}
    folder = adapter_folder(model.adapter)
    return {"the adapter of --adapter": content_fingerprint(folder / CONFIG, *sorted(folder.glob("*.safetensors")))}


def of_rl(
    config: PpoConfig, questions: Sequence[Question], held_out: Sequence[Question], protocols: Mapping[str, Protocol]
) -> dict[str, str]:
    """All inputs of a run of RL."""
    found = of_adapter(config.model) | of_prompts(config.protocol, protocols) | of_rewards(config.reward)
    found["the paragraphs of the questions"] = of_paragraphs([*questions, *held_out])
    found |= of_retrieval(config.retrieval)
    if config.judge.judge == "local":
        found |= of_model("the model of --judge-model", config.judge.judge_model)
    return found


def of_collecting(config: CollectConfig, protocol: Protocol) -> dict[str, str]:
    """All inputs of a run of `collect` that may be gone on with, but for the questions, of which there may be more."""
    found = of_prompts(config.protocol, {"": protocol}) | of_retrieval(config.retrieval)
    if config.collect.source == "self":
        found |= of_model("the model of --model", config.model.model) | of_adapter(config.model)
    return found


def of_prompts(settings: ProtocolSettings, protocols: Mapping[str, Protocol]) -> dict[str, str]:
    """The prompt files of all formats, and the file of a user's own format."""
    texts = [(name, p.system, p.init_prompt, getattr(p, "step_prompt", None)) for name, p in sorted(protocols.items())]
    found = {"the prompts": f"{zlib.crc32(repr(texts).encode()):08x}"}
    if settings.is_own:
        found["the format of --format"] = content_fingerprint(Path(settings.format))
    return found


def of_rewards(settings: RewardSettings) -> dict[str, str]:
    """The modules of a user's own rewards."""
    modules = {reward.function.__module__ for reward in named_rewards(settings) if ":" in reward.name}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in modules}
    return {f"the rewards of {name}": content_fingerprint(Path(file)) for name, file in sorted(files.items()) if file}


def of_paragraphs(questions: Iterable[Question]) -> str:
    """Of the paragraphs that come with questions, and of which of them are gold."""
    value = 0
    for question in questions:
        documents = [(d.id, d.title, d.text, d.metadata) for d in question.documents]
        gold = [(d.title, d.text) for d in question.gold]
        value = zlib.crc32(repr((documents, gold, question.gold_by, question.hop_count)).encode(), value)
    return f"{value:08x}"


def of_retrieval(settings: RetrievalSettings) -> dict[str, str]:
    """The corpus and the indexes that are searched here, and the models of encoder and reranker."""
    found = {}
    if settings.retriever != "none":
        for flag, place in (("--corpus", settings.corpus), ("--index", settings.index)):
            found |= _of_place(f"the passages of {flag}", place)
        for name, own in settings.of_sources.items():
            found |= _of_place(f"the passages of --source-index {name}", own.index)
        found |= of_model("the model of --encoder", settings.encoder)
        found |= of_model("the model of --rerank", settings.rerank)
    return found


def _of_place(name: str, place: str | None) -> dict[str, str]:
    return {name: content_fingerprint(Path(place))} if place and Path(place).exists() else {}


def of_model(name: str, model: str | None) -> dict[str, str]:
    """The weights of a model's folder."""
    return {name: folder_fingerprint(Path(model))} if model and Path(model).is_dir() else {}
