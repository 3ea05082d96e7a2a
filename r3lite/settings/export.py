"""Settings of an export."""

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from r3lite.core.config import ANY, Required, Section, UsageError, Whole
from r3lite.settings.common import budget_bytes


@dataclass(frozen=True)
class ExportSettings(Section):
    """Export."""

    implied: ClassVar = {"adapter": {ANY: {"worked_example": False}}}

    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """the base: folder, GGUF file, hub id, or tiny"""
    adapter: Annotated[str | None, Required("a run folder or its adapter/; it is merged into --model")] = None
    """LoRA adapter that is merged into the base: a run folder or its adapter/"""
    form: Literal["folder", "gguf", "adapter", "gguf-adapter"] = "folder"
    """folder: as transformers and vLLM read it; gguf: as llama.cpp and Ollama read it (extra gguf); adapter: the
    adapter alone, as PEFT reads it; gguf-adapter: the same for llama.cpp's --lora (extra gguf)"""
    weights: Literal["fp32", "bf16", "fp16", "q8_0", "nf4"] = "bf16"
    """numbers of the weights; q8_0 in a gguf file only, nf4 in a folder for r3lite only"""
    max_shard_size: str = "5GB"
    """most of one file of a folder, such as 5GB or 900MiB; beyond it there are several and an index (not in nf4)"""
    questions: str | None = None
    """question file whose prompts are compared before and after; default: the sample world's test questions"""
    prompts: Whole = 200
    """prompts of the comparison, which takes two passes over each; 0: none"""
    evaluation: str | None = None
    """folder of an evaluation, whose scores go into the model card"""
    license: str | None = None
    """licence of the result for the model card; the base's holds, too"""

    push: str | None = None
    """repository of the Hugging Face hub, OWNER/NAME, that --output is uploaded to, with the token in HF_TOKEN; a
    folder that was exported before is uploaded as it is"""
    push_as: Literal["private", "pull-request"] = "private"
    """private: a private repository, made if there is none; pull-request: one to a repository that is there"""
    yes: bool = False
    """upload; without it, --push prints what would be uploaded"""

    def check(self) -> None:
        if self.form == "folder" and self.weights == "q8_0":
            raise UsageError("--weights q8_0 is for --form gguf; a folder has fp32, bf16, fp16 or nf4")
        if self.form.endswith("adapter") and self.weights == "q8_0":
            raise UsageError("--weights q8_0 is for --form gguf; the ranks of an adapter are too small for its blocks")
        if self.form != "folder" and self.weights == "nf4":
            raise UsageError("--weights nf4 is for --form folder; others have fp32, bf16, fp16, and gguf q8_0")
        if self.push is not None and not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", self.push):
            raise UsageError(f"--push {self.push} is not the name of a repository: write it as OWNER/NAME")
        if self.yes and self.push is None:
            raise UsageError("--yes uploads, and --push is missing: the repository")
        budget_bytes(self.max_shard_size, "--max-shard-size")
