"""Measures what episodes of the same question save by sharing equal tokens: prefilled tokens, decoded rows and time.

    python -m bench.sharing --adapter runs/quickstart/sft     # a round of GRPO on the sample world: 4 questions x 8
    ... --preset hotpotqa --model DIR --adapter runs/sft --data dev.json --retriever lexical    # on real questions

Each round runs twice. In the shared run, episodes whose tokens are equal so far share a row of the KV cache, as they
always do in r3lite. In the own-rows run, each episode has a row of its own: prefixes are copied from row to row, but
tokens that several episodes sample alike are decoded once for each of these episodes. Times are CPU seconds of prefill
and decode. The shared run and the own-rows run alternate on the same questions.

In the results, `prompts_alone` is the number of tokens that would be prefilled if episodes shared only their prompt.
`decoded` and `decoded_own_rows` are the decoded rows of the two runs.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from unittest import mock

from bench import episodes, options, records
from r3lite.assembly.answering import build_engine
from r3lite.core.episode import Question, Retrieve
from r3lite.models.kv_cache import Prefill
from r3lite.rollout.decoder import Decoder
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.scheduler import Scheduler
from r3lite.rollout.sequence import Sequence

SHARING = records.Bench(
    name="sharing",
    title="What episodes of a question share",
    keys=("model", "questions", "episodes"),
    figures=("prefilled", "prompts_alone", "prefilled_share", "decoded_share", "time_ratio"),
)


@dataclass
class Counted(Engine):
    """An engine that counts the tokens and rows that its model runs, and the CPU seconds of prefill and decode.

    The seconds are those of all threads of the process. So CPU time that the retriever's thread uses during a prefill
    or decode is included.
    """

    prefilled: int = 0  # tokens of all prefills
    decoded: int = 0  # rows of all decoding passes, added up
    seconds: float = 0.0

    def _prefill(self, scheduler: Scheduler) -> None:
        start = time.process_time()
        passes: list[Prefill] = []
        handle = self.model.register_forward_pre_hook(lambda module, inputs: passes.append(inputs[1]))
        super()._prefill(scheduler)
        handle.remove()
        self.prefilled += sum(context.tokens.shape[1] for context in passes)
        self.seconds += time.process_time() - start

    def _decode(self, scheduler: Scheduler, decoder: Decoder) -> list[Sequence]:
        self.decoded += scheduler.running_count
        start = time.process_time()
        sampled = super()._decode(scheduler, decoder)
        self.seconds += time.process_time() - start
        return sampled


def prompts_alone(sequences: list[Sequence], group: int) -> int:
    """Returns the number of tokens that are prefilled if the episodes of a group share their prompt and nothing else.

    `group` is the number of episodes of a question; the episodes of a question follow each other.

    The last token before a sampled one is not prefilled: the decoder runs it to get the first logits. So of a prompt of
    k tokens k - 1 are prefilled. Of an observation (documents) of k tokens also k are prefilled: k - 1 of its own, and
    the last token of the turn before, which was sampled but not run yet.
    """
    count = 0
    for index, sequence in enumerate(sequences):
        prompt_length = sequence.action_mask.index(True)
        observation_length = sequence.action_mask[prompt_length:].count(False)  # of all observations together
        count += observation_length
        if index % group == 0:  # the first episode of a question
            count += prompt_length - 1
    return count


def measure(engine: Counted, questions: list[Question], retrieve: Retrieve, flags: argparse.Namespace) -> dict:
    """Runs --pairs pairs of a shared and an own-rows round, and returns the record of the results.

    One more pair is run first, to warm up, and not counted.
    """
    episode_questions = [question for question in questions for _ in range(flags.group)]
    engine.grant.memory = replace(engine.grant.memory, rollout_batch_size=len(episode_questions))
    shared_seconds = []
    ratios = []
    for pair in range(flags.pairs + 1):
        seeds = [f"{pair}/{episode}" for episode in range(len(episode_questions))]
        shared = replace(engine, prefilled=0, decoded=0, seconds=0.0)
        shared_sequences = shared.run(episode_questions, seeds, retrieve)
        separate = replace(engine, prefilled=0, decoded=0, seconds=0.0)
        # The scheduler never finds a row with equal tokens, so each episode gets a row of its own.
        with mock.patch.object(Scheduler, "_equal_row", lambda scheduler, sequence: []):
            separate_sequences = separate.run(episode_questions, seeds, retrieve)
        if pair > 0:  # not the warm-up
            shared_seconds.append(shared.seconds)
            ratios.append(shared.seconds / separate.seconds)
    prefilled_with_prompts_shared = prompts_alone(shared_sequences, flags.group)
    equal_episodes = 0
    for shared_sequence, separate_sequence in zip(shared_sequences, separate_sequences, strict=True):
        equal_episodes += shared_sequence.tokens == separate_sequence.tokens
    return {
        "model": flags.model_name,
        "questions": len(questions),
        "episodes": len(episode_questions),
        "equal_episodes": equal_episodes,
        "prefilled": shared.prefilled,
        "prompts_alone": prefilled_with_prompts_shared,
        "prefilled_share": round(shared.prefilled / prefilled_with_prompts_shared, 3),
        "decoded": shared.decoded,
        "decoded_own_rows": separate.decoded,
        "decoded_share": round(shared.decoded / separate.decoded, 3),
        "seconds": round(statistics.median(shared_seconds), 2),
        "time_ratio": round(statistics.median(ratios), 3),
        "time_ratios": " ".join(f"{ratio:.3f}" for ratio in ratios),
    }


def main(argv: list[str] | None = None) -> None:
    parser = episodes.parser(__doc__)
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--group", type=int, default=8, help="episodes of each question")
    parser.add_argument("--temperature", type=float, default=1.0)
    flags, config = episodes.parse(parser, "train.jsonl", argv)
    questions, retrieve = episodes.questions_and_retriever(config, flags.questions)
    engine = Counted(**vars(build_engine(config, len(questions) * flags.group)))
    engine.sampler = Sampler(flags.temperature)
    record = measure(engine, questions, retrieve, flags=flags)
    print(records.table([record]), flush=True)
    note = f"{flags.pairs} pairs; processor time. {flags.note}".strip()
    conditions = records.provenance(options.precision(config.model))
    run = {"section": "rounds of GRPO", **conditions, "note": note, "records": [record]}
    records.keep(folder=flags.results, device="cpu", bench=SHARING, run=run)


if __name__ == "__main__":
    main()
