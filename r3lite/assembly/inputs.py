"""Fingerprints of what a run of training or of `collect` reads besides its data and its base model.

They are checksums of the content, by the names under which errors mention what is read. With them a resumed run refuses
other content under the same file names. A file or folder that is not on this machine, such as a model of the hub or the
passages of a server, has no fingerprint.
"""

import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from r3lite.core.episode import Question
from r3lite.core.files import content_fingerprint, folder_fingerprint
from r3lite.core.inherited import ADAPTER_CONFIG, adapter_folder
from r3lite.protocols.base import Protocol
from r3lite.rewards.registry import named_rewards
from r3lite.settings import CollectConfig, ModelSettings, PpoConfig, ProtocolSettings, RetrievalSettings, RewardSettings


def fingerprint_of_adapter(model: ModelSettings) -> dict[str, str]:
    """Returns the fingerprint of the adapter that the run starts from; an empty dictionary without --adapter.

    If the run has a KL divergence from a reference, the same adapter is the reference.
    """
    if not model.adapter:
        return {}
    folder = adapter_folder(model.adapter)
    files = sorted(folder.glob("*.safetensors"))
    return {"the adapter of --adapter": content_fingerprint(folder / ADAPTER_CONFIG, *files)}


def fingerprints_of_rl(
    config: PpoConfig, questions: Sequence[Question], held_out: Sequence[Question], protocols: Mapping[str, Protocol]
) -> dict[str, str]:
    """Returns the fingerprints of all inputs of a run of RL."""
    fingerprints = (
        fingerprint_of_adapter(config.model) | of_prompts(config.protocol, protocols) | of_rewards(config.reward)
    )
    fingerprints["the paragraphs of the questions"] = of_paragraphs([*questions, *held_out])
    fingerprints |= of_retrieval(config.retrieval)
    if config.judge.judge == "local":
        fingerprints |= of_model("the model of --judge-model", config.judge.judge_model)
    if config.rl.contexts:
        fingerprints["the demonstrations of --contexts"] = content_fingerprint(*map(Path, config.rl.contexts))
    return fingerprints


def fingerprints_of_collecting(config: CollectConfig, protocol: Protocol) -> dict[str, str]:
    """Returns the fingerprints of all inputs of a run of `collect` except the questions: a later run that continues it
    may have more questions."""
    fingerprints = of_prompts(config.protocol, {"": protocol}) | of_retrieval(config.retrieval)
    if config.collect.source == "self":
        fingerprints |= of_model("the model of --model", config.model.model) | fingerprint_of_adapter(config.model)
    return fingerprints


def of_prompts(settings: ProtocolSettings, protocols: Mapping[str, Protocol]) -> dict[str, str]:
    """Returns the fingerprint of the prompts of all formats, and of the file of a user's own format, if any."""
    texts = []
    for name, protocol in sorted(protocols.items()):
        step_prompt = getattr(protocol, "step_prompt", None)  # not all protocols have one
        texts.append((name, protocol.system, protocol.init_prompt, step_prompt))
    fingerprints = {"the prompts": f"{zlib.crc32(repr(texts).encode()):08x}"}
    if settings.is_own:
        fingerprints["the format of --format"] = content_fingerprint(Path(settings.format))
    return fingerprints


def of_rewards(settings: RewardSettings) -> dict[str, str]:
    """Returns the fingerprints of the modules of the user's own rewards, which --rewards names as MODULE:FUNCTION."""
    modules = {reward.function.__module__ for reward in named_rewards(settings) if ":" in reward.name}
    fingerprints = {}
    for name in sorted(modules):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            fingerprints[f"the rewards of {name}"] = content_fingerprint(Path(file))
    return fingerprints


def of_paragraphs(questions: Iterable[Question]) -> str:
    """Returns one fingerprint of the paragraphs that come with the questions, with their gold marks and hop counts."""
    checksum = 0
    for question in questions:
        documents = []
        for document in question.documents:
            documents.append((document.id, document.title, document.text, document.metadata))
        gold = [(document.title, document.text) for document in question.gold]
        record = (documents, gold, question.gold_by, question.hop_count)
        checksum = zlib.crc32(repr(record).encode(), checksum)
    return f"{checksum:08x}"


def of_retrieval(settings: RetrievalSettings) -> dict[str, str]:
    """Returns the fingerprints of corpus and indexes, and of the models of encoder and reranker, as far as they are on
    this machine."""
    fingerprints = {}
    if settings.retriever != "none":
        fingerprints |= _of_place("the passages of --corpus", settings.corpus)
        fingerprints |= _of_place("the passages of --index", settings.index)
        for name, source_settings in settings.by_kind.items():
            fingerprints |= _of_place(f"the passages of --source-index {name}", source_settings.index)
        fingerprints |= of_model("the model of --encoder", settings.encoder)
        fingerprints |= of_model("the model of --rerank", settings.rerank)
    return fingerprints


def _of_place(name: str, place: str | None) -> dict[str, str]:
    """Returns the fingerprint of a file or folder, if it is on this machine."""
    if not place or not Path(place).exists():
        return {}
    return {name: content_fingerprint(Path(place))}


def of_model(name: str, model: str | None) -> dict[str, str]:
    """Returns the fingerprint of a model's folder, if it is on this machine."""
    if not model or not Path(model).is_dir():
        return {}
    return {name: folder_fingerprint(Path(model))}
