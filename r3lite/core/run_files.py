"""The files in the folders of runs and evaluations: what one command writes under a name, others read under it."""

CONFIG = "config.toml"  # the resolved settings
METRICS = "metrics.jsonl"  # a line for each step of a training
EPISODES = "episodes.jsonl"  # the sampled episodes of RL, with their rewards
SUMMARY = "summary.json"  # written last, when a training is complete
PREDICTIONS = "predictions.jsonl"  # the answers of an evaluation
SCORES = "scores.json"  # written last, when an evaluation is complete
