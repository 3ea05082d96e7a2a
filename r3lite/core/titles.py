"""What the metrics of answers are called in tables and on pages, in the order in which they stand there."""

# sp: supporting facts, which are paragraphs here. `sp_recall` is left out, as it equals the retrieval recall.
TITLES = {
    "em": "exact match",
    "f1": "F1",
    "judge_accuracy": "judged correct",
    "reasoning_accuracy": "reasoning acc.",
    "query_rationality": "query rationality",
    "format_adherence": "format adherence",
    "retrieval_recall": "retrieval recall",
    "em_full_recall": "EM, full recall",
    "combined": "combined",
    "mean_searches": "searches",
    "reasoning_tokens": "reasoning tokens",
    "sp_em": "supporting EM",
    "sp_f1": "supporting F1",
    "sp_precision": "supporting prec.",
    "joint_em": "joint EM",
    "joint_f1": "joint F1",
    "rouge_l": "ROUGE-L",
    "bleu": "BLEU",
    "bert_score": "BERTScore",
}
