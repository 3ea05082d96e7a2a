"""The names of the commands, each of which is a file in the package."""

COMMANDS = (
    "sft", "ppo", "evaluate", "ask", "serve", "collect", "index", "retrieve", "plan", "doctor", "report", "export",
    "tune_prompt", "check_format", "prepare", "procedures", "rollout_worker",
    "quickstart",
)  # fmt: skip
ALIASES = {"rl": "ppo"}  # other names of commands in `r3lite NAME`
DISTRIBUTED = ("sft", "ppo")  # commands that torchrun may start in several processes
